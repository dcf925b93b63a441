"""A region's second and third call: what the first taught saves time and changes nothing else.

The table of functions runs as first and second call in every file of tests/composition.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import grad

from remat import RematError, checkpoint_policy, remat, save_matmuls, save_nothing, save_ops
from tests.helpers import OpCounter, gradients, leaves_of, rand, same, scalar, unseen

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
def test_a_call_that_takes_another_path(policy):
    """Hidden state steers the function: within one call both passes agree, and that is all that counts."""
    state = {"deep": False}

    def fn(x, w):
        x = torch.tanh(x @ w)
        return torch.exp((x * 2) @ w) if state["deep"] else torch.sin(x @ w)

    region = remat(fn, policy=policy)
    for deep in (False, False, True, False, True, True, False):
        state["deep"] = deep
        args = leaves_of((rand(3, 3), rand(3, 3, seed=1)))
        same(gradients(region(*args), args), gradients(fn(*args), args))


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
def test_another_tensor_in_the_same_closure(policy):
    """Functions made by one `def` share their code, and so what was learnt; here also shapes differ."""

    def make(w):
        return lambda x: torch.tanh(x @ w).exp()

    for i, columns in enumerate((3, 3, 5, 4, 3)):
        w, x = rand(3, columns, seed=i), rand(2, 3).requires_grad_()
        fn = make(w)
        same(gradients(remat(fn, policy=policy)(x), [x]), gradients(fn(x), [x]))


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


def _by_turns(make: Any, turns: Any, *args: Any) -> None:
    """Gradients of `remat(make(turn))` for each turn, where all turns share one code, against no remat."""
    for turn in turns:
        leaves = leaves_of(args)
        fn = make(turn)
        same(gradients(remat(fn, policy=save_matmuls)(*leaves), leaves), gradients(fn(*leaves), leaves))  # pyright: ignore


def test_another_constant_in_the_same_op():
    _by_turns(
        lambda c: lambda x, w: ((x @ w) * c).exp().sin(),
        (2.0, 2.0, 3.0, 2.0, 3.0, 3.0),
        rand(3, 3),
        rand(3, 3),
    )


def test_a_constant_of_another_type():
    """In integers the product wraps around."""
    args = torch.arange(1, 4, dtype=torch.int32), rand(3).requires_grad_()
    for one in (1, 1, 1.0, 1.0):
        fn = lambda i, x, one=one: ((i * (2**30 * one) * (4 * one)) * 2.0**-32 * x).sin().exp()  # noqa: E731
        region = remat(lambda i, x, fn=fn: fn(i, x), policy=save_matmuls)
        same(gradients(region(*args), [args[1]]), gradients(fn(*args), [args[1]]))


@pytest.mark.parametrize("look", [lambda t: t, lambda t: t.view(9), lambda t: t.T, lambda t: t.chunk(3)[1]])
def test_another_value_in_the_same_op(look):
    """The same ops, called with other results: also where the expected one's memory was reused meanwhile."""

    def make(first):
        def fn(x, w):
            a = (x @ w).sin()
            b, _ = look(a.cos()), look(a.sin())
            a = None if first else a
            c = look(b.reshape(-1)[:3].exp().repeat(3, 3)[:3, :3].contiguous())
            return ((b if first else c) * 2).exp().sum()

        return fn

    _by_turns(make, (True, True, False, False, False, True, True), rand(3, 3), rand(3, 3, seed=1))


def test_a_value_made_out_of_sight():
    """It may be the very object, by its address, of a result that is gone."""
    ones = np.ones((3, 3))

    def make(first):
        def fn(x, w):
            a = (x @ w).sin()
            with torch.no_grad():
                b = a.cos()
            if not first:
                del b
                b = torch.from_numpy(ones)
            return (a * b).exp()

        return fn

    _by_turns(make, (True, True, False, True, False), rand(3, 3), rand(3, 3, seed=1))


def test_another_argument_in_the_same_op():
    _by_turns(
        lambda first: lambda x, y, w: ((x if first else y) @ w).exp().sin(),
        (True, True, False, False, True),
        rand(3, 3),
        rand(3, 3, seed=1),
        rand(3, 3, seed=2),
    )


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
@pytest.mark.parametrize("read", [0, 1, 2, 3])
def test_results_that_have_a_history_in_later_calls_alone(policy, read):
    """What an argument passes through as is a leaf in a model's first block, and a result in the next."""

    def block(x, w, skip):
        h = (x @ w).sin()
        return skip, h, (h * 2).cos(), skip * h

    run = remat(block, policy=policy)
    leaves = [rand(3, 3).requires_grad_() for _ in range(3)]
    for passed in (lambda t: t, lambda t: t * 1, lambda t: t, lambda t: t * 1):
        ends = [fn(*map(passed, leaves))[read].square().sum() for fn in (run, block)]
        got, expected = (torch.autograd.grad(end, leaves, allow_unused=True) for end in ends)
        same(got, expected)


def test_arguments_that_are_views_of_one_tensor():
    """Where in it they lie is no part of a call's signature."""
    fn = lambda q, k, w: ((q.T @ w).exp() * k.T.exp()).sin()  # noqa: E731
    region, w = remat(fn, policy=save_matmuls), rand(3, 3)
    for at in (0, 0, 3, 3, 6):
        both = rand(12, 3).requires_grad_()
        for f in (region, fn):
            q, k = both[at : at + 3], both[9 - at : 12 - at]
            out = gradients(f(q, k, w), [both])
            expected = out if f is region else expected  # noqa: F821
        same(expected, out)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_no_call_runs_the_function_again(policy):
    """The ops that ran are run, whatever has become of the function's surroundings since."""
    calls = []
    scale = [2.0]

    def fn(x, w):
        calls.append(1)
        return ((x @ w) * scale[0]).exp().sin()

    region = remat(fn, policy=policy)
    args = leaves_of((rand(3, 3), rand(3, 3, seed=1)))
    for _ in range(3):
        calls.clear()
        scale[0] = 2.0
        expected = gradients(((args[0] @ args[1]) * 2.0).exp().sin(), args)
        out = region(*args)
        scale[0] = 5.0
        same(gradients(out, args), expected)
        assert len(calls) == 1


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


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
@pytest.mark.parametrize("calls", [1, 2])
def test_a_second_run_knows_what_its_forward_knew(policy, calls):
    """That a region inside uses torch.func is seen in its first call. A recomputation of that call goes the
    same way, and those of later calls the new one."""

    def found(region):
        x, y = rand(3, 4).requires_grad_(), rand(3, 4, seed=1).requires_grad_()

        def outer(a):
            v = a.sin() * (a + unseen(a, 0.5)).tanh()

            def inner(b):
                force = grad(lambda t: (t.exp() * y).sum())(b) * b
                replaced = v * 2
                replaced.data = replaced.data.sin()
                return replaced * b * force

            return sum(region(inner)(a) for _ in range(calls))

        return [torch.autograd.grad(region(outer)(x).sum(), (x, y)) for _ in range(2)]

    same(found(lambda fn: remat(fn, policy=policy)), found(lambda fn: fn))
