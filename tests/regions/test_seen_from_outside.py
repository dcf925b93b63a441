"""What user code sees, stores or does behind torch's back comes out as without remat, call after call."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from remat import RematError, remat, save_everything, save_matmuls, save_nothing
from tests.helpers import rand, same

POLICIES = pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_everything])
X, W = rand(4, 4), rand(4, 4, seed=1)


def grads(fn, calls=3):
    found = []
    for _ in range(calls):
        x = X.clone().requires_grad_()
        fn(x).sum().backward()
        found.append(x.grad)
    return found


def check(make, policy):
    """`make(wrap)` -> what is seen; the same with regions and without, and with regions in regions."""

    def read(f, wrap):
        """A function that reads the results of a region inside."""
        inner = wrap(f)

        def outer(*args, **kwargs):
            return tree_map(lambda t: t * t.sin() if _is_float(t) else t, inner(*args, **kwargs))

        return wrap(outer)

    regions = lambda f: remat(f, policy=policy)  # noqa: E731
    for plain, region in (
        (lambda f: f, regions),
        (lambda f: read(f, lambda f: f), lambda f: read(f, regions)),
    ):
        results = []
        for wrap in (plain, region):
            torch.manual_seed(0)
            random.seed(0)
            results.append(make(wrap))
        same(results[1], results[0], 1e-9)


def _is_float(value):
    return isinstance(value, Tensor) and value.is_floating_point()


class RawInPlace(torch.autograd.Function):
    """A raw kernel writes over what a visible op made, as Liger's cross entropy does over the logits."""

    @staticmethod
    def forward(ctx, x, w):
        h = x @ w
        h.numpy()[...] = h.numpy() * 2 + 1
        g = h.sin()
        ctx.save_for_backward(g, h)
        return g.cos()

    @staticmethod
    def backward(ctx, out):
        g, h = ctx.saved_tensors
        return (out * -g.sin() * h.cos() * 2) @ W.t(), None


@POLICIES
def test_a_raw_kernel_that_writes_over_a_visible_value(policy):
    check(lambda wrap: grads(wrap(lambda x: (RawInPlace.apply(x.sin(), W) * 2).sin().exp())), policy)


def test_numpy_of_a_number_that_nothing_else_reads_under_torch_func():
    def fn(x):
        return (x.exp() * float((x @ W).detach().numpy().sum())).sin().sum()

    want = grads(fn, 1)[0]
    for _ in range(2):
        assert_close(torch.func.grad(remat(fn))(X), want)


@POLICIES
def test_arguments_that_are_one_tensor(policy):
    def attend(q, kv):
        return q.sin() @ kv[0] if q is kv[0] and kv[1] is q else q.cos() * kv[0] + kv[1]

    def loss(wrap, x, copies):
        return wrap(attend)(x, (x, x + 0 if copies else x)).sum()

    for of in (torch.func.grad, torch.func.hessian, lambda f: torch.func.vmap(torch.func.grad(f))):
        for copies in (False, True):
            x = torch.stack([X, X.cos()]) if "lambda" in of.__name__ else X
            check(lambda wrap, c=copies, x=x, of=of: of(lambda x: loss(wrap, x, c))(x), policy)


@POLICIES
@pytest.mark.parametrize("closure", [False, True])
def test_statistics_that_are_unfrozen_later(policy, closure):
    def make(wrap):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
        fn = wrap((lambda x: model(x).sin()) if closure else model)
        model[1].eval()
        found = []
        for step in range(5):
            model[1].train(step >= 2)
            found += grads(fn, 1)
        return [*found, *model.buffers()]

    check(make, policy)


@POLICIES
def test_a_buffer_that_is_written_from_the_third_step_on(policy):
    class Counts(nn.Module):
        steps: torch.Tensor
        lin: nn.Linear

        def __init__(self):
            super().__init__()
            self.lin, self.on = nn.Linear(4, 4).double(), False
            self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            if self.on:
                self.steps.add_(1)
            return torch.sin(self.lin(x) * (1 + self.steps))

    def make(wrap):
        module, found = Counts(), []
        fn = wrap(module)
        for step in range(5):
            module.on = step >= 2
            found += [*grads(fn, 1), module.steps.clone()]
        return found

    check(make, policy)


def in_turn(fn, held, values):
    """The gradients of one call for each value that `held` has in turn."""
    found = []
    for held[0] in values:
        found += grads(fn, 1)
    return found


@POLICIES
def test_constants_that_change_between_calls(policy):
    def make(wrap):
        factor = [0.0]
        fn = wrap(lambda x: (torch.copysign(x.exp(), factor[0]) * 3).sin().exp())
        return in_turn(fn, factor, (0.0, 0.0, -0.0, 0.0, 2.0))

    check(make, policy)


@POLICIES
def test_what_changes_between_forward_and_backward(policy):
    def make(wrap):
        held, found = {"w": W, "factor": 2.0}, []
        fn = wrap(lambda x: (x * held["w"]).sin().exp() * held["factor"])
        for _ in range(3):
            held.update(w=W, factor=2.0)
            x = X.clone().requires_grad_()
            y = fn(x)
            held.update(w=W * 0 + 7, factor=5.0)
            y.sum().backward()
            found.append(x.grad)
        return found

    check(make, policy)


@POLICIES
def test_draws_of_python_and_numpy_and_state_of_cells(policy):
    layers = [nn.Linear(4, 4).double() for _ in range(4)]

    def drop(x):
        for layer in layers:
            if random.random() < 0.5:
                x = layer(x).sin().exp()
        return x * float(np.sin(random.random()))

    check(lambda wrap: grads(wrap(drop)), policy)

    def recurrent(wrap):
        state = {"h": torch.zeros(4, 4, dtype=torch.float64)}

        def cell(x):
            state["h"] = torch.tanh(x + state["h"]).sin()
            return state["h"] * 2

        fn = wrap(cell)
        return grads(lambda x: sum(fn(x * t) for t in (1, 2, 3)), 1)

    check(recurrent, policy)


@POLICIES
def test_an_explicit_generator_that_is_drawn_from_later(policy):
    def make(wrap):
        generator, on = torch.Generator().manual_seed(1), [False]

        def fn(x):
            noise = torch.rand(4, 4, dtype=x.dtype, generator=generator) if on[0] else 1.0
            return (x * noise).sin().exp()

        return in_turn(wrap(fn), on, (False, False, True, True))

    check(make, policy)


@pytest.mark.parametrize("policy", [None, save_matmuls])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_kernels_that_return_more_where_gradients_are_on(cell: str, policy: Any) -> None:
    """The workspace of the LSTM's kernel on CPUs is there in grad mode only."""
    module, x = getattr(nn, cell)(4, 5, 2), torch.randn(3, 2, 4)

    def loss(run: Any) -> list[Tensor]:
        return list(torch.autograd.grad(run(x)[0].square().sum(), list(module.parameters())))

    region = remat(module) if policy is None else remat(module, policy=policy)
    for _ in range(2):
        assert_close(loss(region), loss(module), rtol=0, atol=0)


def test_a_lazy_module_is_to_be_run_once_before() -> None:
    module, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU()), torch.randn(2, 3)
    with pytest.raises(RematError, match="Run the module once before"):
        remat(module)(x)
    with torch.no_grad():
        module(x)
    remat(module)(x).sum().backward()
    assert module[0].weight.grad is not None
