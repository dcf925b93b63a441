"""A region's second and third call: what the first taught saves time and changes nothing else.

The table of functions runs as first and second call in every file of tests/composition.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import grad

from remat import RematError, checkpoint_policy, remat, save_matmuls, save_nothing, save_ops
from tests.helpers import OpCounter, gradients, leaves_of, rand, same, scalar

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def step(fn, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(scalar(fn(x)), x)[0]


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_ops(aten.gelu)])
def test_only_the_first_call_is_recorded(forwards, policy):
    block, x = Block(), torch.randn(2, 4)
    fn = remat(block, policy=policy)
    expected = step(block, x)
    counts = []
    for _ in range(3):
        with OpCounter() as ops:
            same(step(fn, x), expected, 1e-6)
        counts.append((ops["addmm"], ops["gelu"], ops["native_layer_norm"]))
    assert [became for became, _ in forwards] == ["recorded", "followed", "followed"]
    assert counts[0] == counts[1] == counts[2]


def test_other_shapes_are_recorded_anew(forwards):
    fn = remat(Block(), policy=save_matmuls)
    for rows in (2, 3, 2, 3):
        step(fn, torch.randn(rows, 4))
    assert [became for became, _ in forwards] == ["recorded", "recorded", "followed", "followed"]


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_captured_tensor_that_autograd_does_not_check(policy, calls):
    """Nothing saves a bias, so that only remat can notice that it was written."""
    w, b, x = rand(3, 3), rand(3), rand(2, 3)
    fn = remat(lambda x: torch.exp(torch.exp(x @ w) + b), policy=policy, name="my_block")
    for _ in range(calls):
        leaf = x.clone().requires_grad_()
        out = fn(leaf)
        b.add_(0.0) if _ == calls - 1 else None
        if _ == calls - 1:
            with pytest.raises(RematError, match="(?s)my_block.*`b`"):
                out.sum().backward()
        else:
            out.sum().backward()


@pytest.mark.parametrize(("stateful", "times"), [(False, 1), (True, 3)])
def test_policies_that_may_answer_otherwise_are_asked_again(stateful, times):
    asked = []

    def rule(info):
        asked.append(info.op)
        return False

    fn = remat(lambda x: x.sin().exp(), policy=checkpoint_policy(rule, stateful=stateful))
    for _ in range(3):
        step(fn, rand(3))
    assert asked == [aten.sin.default, aten.exp.default] * times


class Chooses(torch.autograd.Function):
    """Runs the same ops whichever of two values it saves."""

    @staticmethod
    def forward(ctx, x, first):
        a, b = x.sin(), x.cos()
        ctx.save_for_backward(a if first else b)
        return a + b

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g * ctx.saved_tensors[0], None


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_what_is_saved_is_compared_not_the_ops_alone(policy):
    """Closures of one code share what was learnt of it."""

    def gradient(fn):
        x = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(fn(x).sum(), x)[0]

    for first in (True, True, False, True, False, False):
        f = lambda x, first=first: Chooses.apply(x * 2, first)  # noqa: E731
        torch.testing.assert_close(gradient(remat(lambda x, f=f: f(x), policy=policy)), gradient(f))


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_calls_without_data(policy):
    """As for an estimate of memory."""
    region = remat(lambda x, w: torch.tanh(x @ w).exp(), policy=policy)
    for mode in (nullcontext(), FakeTensorMode(), FakeTensorMode(), nullcontext()):
        with mode:
            for _ in range(2):
                args = leaves_of((torch.randn(3, 3), torch.randn(3, 3)))
                assert all(g is not None and g.shape == (3, 3) for g in gradients(region(*args), args))


class Net(nn.Module):
    """One method looks at numbers, so that it runs again as a whole; another cannot run under hooks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(rand(3))

    def looks(self, x):
        scaled = x * self.weight
        return scaled * float(scaled.detach().numpy().mean())

    def forces(self, x):
        return torch.func.grad(lambda t: (t.sin() * x).sum())(x)

    def block(self, x):
        return x.sin() * remat(self.looks)(x)


def test_methods_of_a_module_do_not_teach_each_other():
    net, x = Net(), rand(3).requires_grad_()
    for _ in range(2):
        out = remat(net.block)(x)
        remat(net.forces)(x)  # between the forward and the backward of the other
        got = torch.autograd.grad(out.sum(), (x, net.weight))
        same(got, torch.autograd.grad((x.sin() * net.looks(x)).sum(), (x, net.weight)))


def test_whether_arguments_share_memory_is_asked_in_every_call_under_two_levels():
    """Torch refuses to write to `a` there; a region is given it as an argument."""

    def step(x, a, b):
        a.mul_(2)
        return x.sin() * b.clone()

    region, x = remat(step), rand(3)
    for shared in (True, False, True):
        a = torch.full((3,), 1.5, dtype=x.dtype)
        b = a[:] if shared else a.clone()
        found = grad(lambda x, a=a, b=b: grad(lambda x: region(x, a, b).sum())(x).sum())(x)
        same(found, -x.sin() * (3.0 if shared else 1.5))
