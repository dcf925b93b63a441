"""What a region keeps goes as the backward reads it, like autograd's own saved values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import RematError, remat, save_matmuls, scan_remat
from tests.helpers import LiveBytes, loop, rand


class Peak(LiveBytes):
    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.bytes)
        return out


def network(x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    for _ in range(2):
        h = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), up))
        x = x + F.linear(h, down, bias)
    return x


def arguments() -> tuple[Tensor, ...]:
    shapes = [(64, 16), (64, 16), (16, 64), (16,)]
    return tuple([rand(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)])


def peak(wrapped: Callable[..., Tensor], calls: int) -> int:
    x, up, down, bias = arguments()
    for _ in range(calls):
        with Peak() as live:
            wrapped(x.cos(), up, down, bias).square().sum().backward()
    return live.peak


@pytest.mark.parametrize("calls", [1, 3], ids=["traced", "followed"])
def test_one_region_peaks_no_higher_than_no_remat(calls: int) -> None:
    assert peak(remat(network, policy=save_matmuls), calls) <= peak(network, calls)


@pytest.mark.parametrize("calls", [1, 3], ids=["traced", "followed"])
def test_an_argument_that_nothing_reads_holds_nothing(calls: int) -> None:
    """Such as positions, which a model hands to all of its blocks."""
    positions = torch.arange(64)
    region = remat(lambda positions, *args: network(*args), policy=save_matmuls)
    assert peak(lambda *args: region(positions, *args), calls) <= peak(network, calls)


class Asked:
    def __init__(self, w: Tensor) -> None:
        self.w = w


class Sums(Asked):
    def __call__(self, x: Tensor, n: int) -> Tensor:
        return x.cumsum(0).sin() + 0 * n * self.w.detach().sum()


def itself(h: Tensor, big: Tensor) -> Callable[[Tensor], Tensor]:
    def again(x: Tensor, n: int = 2) -> Tensor:
        return (again(x, n - 1) if n else x.cumsum(0)).sin() + 0 * big.detach().sum()

    return again


# A local function that captures `h`, or is given it, and of which no op that runs again reads it.
DEAD: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "cell": lambda h: lambda x: (x.cumsum(0).sin(), h.sin())[0],
    "partial": lambda h: functools.partial(lambda x, h: x.cumsum(0).sin(), h=h),
    "partial of an object": lambda h: functools.partial(Sums(h), n=2),
    "container": lambda h: (lambda them: lambda x: (x.cumsum(0).sin(), them[0].sin())[0])([h]),
    "object": lambda h: (lambda one: lambda x: (x.cumsum(0).sin(), one.w.sin())[0])(Asked(h)),
    "function": lambda h: (lambda inner: lambda x: inner(x))(lambda x: (x.cumsum(0).sin(), h.sin())[0]),
    "itself": lambda h: itself(h, h),
    "default": lambda h: lambda x, h=h: (x.cumsum(0).sin(), h.sin())[0],
}


@pytest.mark.parametrize("func", [False, True], ids=["backward", "func"])
@pytest.mark.parametrize("name", DEAD)
def test_what_a_local_function_captures_and_nothing_runs_again_is_let_go_of(name: str, func: bool) -> None:
    x = rand(64, 64).requires_grad_(not func)

    def kept(wrap: Callable[..., Any]) -> tuple[int, Tensor]:
        def call(x: Tensor) -> Tensor:
            return wrap(DEAD[name](x.sin().cos()))(x).sum()

        with LiveBytes() as live:
            out, *pull = torch.func.vjp(call, x) if func else (call(x),)
            held = live.bytes
        return held, pull[0](torch.ones_like(out))[0] if func else torch.autograd.grad(out, x)[0]

    for _ in range(2):  # traced, and followed
        (ours, grad), (plain, expected) = kept(remat), kept(lambda fn: fn)
        assert ours < plain
        torch.testing.assert_close(grad, expected)


def test_values_that_cannot_be_had_again_are_an_error() -> None:
    def fn(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, x).cos().sin() + torch.addmm(bias, y, y).cos().sin()

    x, y, bias = [rand(3, 3, seed=i).requires_grad_() for i in range(3)]
    out = remat(fn, policy=save_matmuls)(x, y, bias)
    torch.autograd.grad(out.sum(), x)
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RematError, match="`bias`.* written in place"):
        torch.autograd.grad(out.sum(), y)


@pytest.mark.parametrize("calls", [1, 3], ids=["traced", "followed"])
def test_what_cannot_be_made_again_stays_for_passes_through_other_nodes(calls: int) -> None:
    """Autograd holds no sum of biases, and neither does the region."""

    def fn(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, x).cos().sin() + torch.addmm(bias, y, y).cos().sin()

    found = []
    for wrapped in (fn, remat(fn, policy=save_matmuls)):
        for _ in range(calls):
            x, y, bias = [rand(3, 3, seed=i).requires_grad_() for i in range(3)]
            out = wrapped(x, y, bias + 1)
            found.append([*torch.autograd.grad(out.sum(), x), *torch.autograd.grad(out.sum(), y)])
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=0, atol=0)


def test_what_a_pass_left_of_a_retained_graph_goes_with_the_graph() -> None:
    w = rand(4, 4, seed=1).requires_grad_()

    def nested(x: Tensor) -> Tensor:
        h = (x @ w).tanh()
        scale = h @ w
        return remat(lambda h: (h * scale).sin() @ w)(h)

    fn, x = remat(nested), rand(3, 4).requires_grad_()
    fn(x)  # the first call is recorded, the second follows it
    # Second derivatives teach a region what a later pass reads again.
    out = fn(x).sum()
    first = torch.autograd.grad(out, (x, w), create_graph=True)
    torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (x, w))
    del first
    with LiveBytes() as live:
        out = fn(x).sum()
        found = torch.autograd.grad(out, (x, w), retain_graph=True)
        del out, found
    assert live.bytes == 0


@pytest.mark.parametrize("graph", [False, True], ids=["first order", "second order"])
def test_a_scan_holds_nothing_after_its_backward_even_if_its_result_is_held(graph: bool) -> None:
    def left(scan: Callable[..., Any]) -> int:
        def scanned(x: Tensor) -> Tensor:
            captured = x.cos()  # a step reads it
            return scan(lambda h, _: ((h * captured).sin(), h.sum()), x, torch.ones(3))[0].sum()

        x = rand(4, 4).requires_grad_()
        with LiveBytes() as live:
            out = scanned(x)
            found = torch.autograd.grad(out, x, create_graph=graph)[0]
            if graph:
                out = found.square().sum()
                found = torch.autograd.grad(out, x)[0]
        return live.bytes

    assert left(scan_remat) <= left(loop)
