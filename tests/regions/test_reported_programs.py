"""Programs of bug reports that no other test has in their own form; docs/measured/trust.md has the table."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import checkpoint_policy, remat, save_matmuls, save_nothing, scan_remat
from tests.helpers import LiveBytes, Watched, rand, same

X, W = rand(4, 4), rand(4, 4, seed=1)
ODD = checkpoint_policy(lambda info: info.index % 2 == 0)
POLICIES = pytest.mark.parametrize(
    "policy", [save_nothing, save_matmuls, ODD], ids=["nothing", "matmuls", "odd"]
)


def plain(fn: Any, **_: Any) -> Any:
    return fn


def gradients(fn: Any, calls: int = 2) -> list[Tensor]:
    found = []
    for _ in range(calls):
        x = X.clone().requires_grad_()
        found += torch.autograd.grad(fn(x).sum(), x)
    return found


class Product(torch.autograd.Function):
    """Reads a weight past torch functions, and keeps what is no result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ w
        return product.sin(), product

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, w, product = ctx.saved_tensors
        inner = cotangents[0] * product.cos()
        return inner @ w.mT, x.mT @ inner


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.w)[0].sin()  # type: ignore[index]


@POLICIES
def test_a_function_that_reads_a_captured_weight_under_torch_func(policy: Any) -> None:
    """By a closure, by `functional_call`, for each example, and in a region inside."""
    layer, found = Layer(), []
    own = {"w": W}
    for wrap in (plain, remat):
        through = lambda w, wrap=wrap: wrap(lambda x: Product.apply(x, w)[0].sin(), policy=policy)  # noqa: E731
        put_in = lambda p, wrap=wrap: wrap(lambda x: functional_call(layer, p, (x,)), policy=policy)  # noqa: E731
        nested = lambda w, wrap=wrap: wrap(lambda x: through(w)(x.exp()).tanh(), policy=policy)  # noqa: E731, B023
        found.append(
            [
                grad(lambda w: through(w)(X).sum())(W),  # noqa: B023
                grad(lambda p: put_in(p)(X).sum())(own)["w"],  # noqa: B023
                vmap(grad(lambda w, x: through(w)(x).sum()), (None, 0))(W, torch.stack([X, X.cos()])),  # noqa: B023
                grad(lambda w: nested(w)(X).sum())(W),  # noqa: B023
            ]
        )
    assert all(g.abs().max() > 0 for g in found[0])
    same(found[1], found[0], 1e-12)


def test_a_gradient_inside_that_make_fx_traces_is_computed_and_not_baked_in() -> None:
    region = remat(lambda x: (x.sin() @ W).exp().tanh())
    step = lambda x: torch.autograd.grad(region(x).sum(), x)[0]  # noqa: E731
    graph = make_fx(step)(X.clone().requires_grad_())
    other = (X * 2).requires_grad_()
    same(graph(other), step(other), 1e-12)


@POLICIES
def test_parts_of_conjugates(policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        c = torch.complex(x, x.cos())
        return c.exp().imag.sin() * c.conj().real.cos()

    same(gradients(remat(fn, policy=policy)), gradients(fn), 1e-12)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
def test_rows_written_one_by_one_cost_what_they_cost_without(policy: Any) -> None:
    """Not as many times the buffer as there are rows: four times the rows move four times the numbers."""

    def moved(rows: int, wrap: Any) -> int:
        def fn(x: Tensor) -> Tensor:
            out, row = torch.empty(rows, 4, dtype=x.dtype), x[0]
            for at in range(rows):
                row = torch.tanh(row * 1.01)
                out[at] = row
            return out.sin()

        region, made = wrap(fn), []
        gradients(region, 1)
        with Watched(lambda op, args, kwargs, out: made.append(0 if op.is_view else out.numel())):
            gradients(region, 1)
        return sum(made)

    few, many = (moved(n, lambda fn: remat(fn, policy=policy)) for n in (20, 80))
    assert many / few < 1.5 * moved(80, plain) / moved(20, plain)


def test_deep_nests_under_torch_func_run_the_innermost_once() -> None:
    """The calls of Python grow with the depth, not by a factor with each level."""

    def calls(depth: int) -> int:
        runs = [0]

        def fn(x: Tensor) -> Tensor:
            runs[0] += 1
            return x.sin().cos()

        for _ in range(depth):
            fn = remat(lambda x, inner=fn: inner(x).sin())
        loss = lambda x: fn(x).sum()  # noqa: E731
        grad(loss)(X)
        runs[0] = 0
        profile = cProfile.Profile()
        profile.runcall(grad(loss), X)
        assert runs[0] == 1
        return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]

    assert calls(6) < 3 * calls(3)


# -- not mended: what they keep ------------------------------------------------------------------------------


def held(region: Any, *args: Any) -> int:
    """Bytes of results of ops that live between the forward and the backward of a third call."""
    for _ in range(2):
        region(*args).sum().backward()
    with LiveBytes() as live:
        out = region(*args)
        return live.bytes - out.untyped_storage().nbytes()


def test_a_policy_on_steps_that_differentiate_keeps_no_more_than_the_loop() -> None:
    start, data = (rand(16, 64) / 4).requires_grad_(), rand(32, 16, seed=1)

    def step(w: Tensor, _: Any = None) -> tuple[Tensor, None]:
        loss = lambda w: torch.tanh(torch.tanh(data @ w) @ w.T).square().mean()  # noqa: E731
        return w - 0.1 * grad(loss)(w), None

    def looped(w: Tensor) -> Tensor:
        for _ in range(6):
            w = step(w)[0]
        return w

    def scanned(w: Tensor) -> Tensor:
        return scan_remat(step, w, None, length=6, checkpoints="all", policy=save_matmuls)[0]

    assert held(scanned, start) <= held(looped, start)
