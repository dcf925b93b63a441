"""Compiled regions whose results lie in each other's memory, in an argument's, or in a captured tensor's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import (
    checkpoint_name,
    remat,
    save_all_but_names,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
)
from tests.compiled import compiled
from tests.helpers import crossed

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def hidden(x: Tensor) -> Tensor:
    return (x @ W).sin()


def row(x: Tensor, r: Any) -> Any:
    return r(lambda x: (lambda h: (h, h[0]))(hidden(x)))(x)


def twice(x: Tensor, r: Any) -> Any:
    return r(lambda x: (lambda h: (h, h, h[1], h))(hidden(x)))(x)


def views_of_views(x: Tensor, r: Any) -> Any:
    return r(lambda x: (lambda t: (t[1:3], t, t[0, 1:]))(hidden(x).t()))(x)


def no_whole(x: Tensor, r: Any) -> Any:
    return r(lambda x: (lambda h: (h[:3], h[1:], h[:, 1], h[::2, ::2]))(hidden(x)))(x)


def spread(x: Tensor, r: Any) -> Any:
    return r(lambda x: (lambda h: (h[0].expand(4, 4), h, h.diagonal(), h[:, None]))(hidden(x)))(x)


def parts(x: Tensor, r: Any) -> Any:
    return r(lambda x: (lambda z: (z.real, z.imag, torch.view_as_real(z)))(torch.complex(hidden(x), x)))(x)


def of_argument(x: Tensor, r: Any) -> Any:
    return r(lambda x, y: (x[0], x, x.t()[1:], hidden(x), y.view(-1)))(x, x * 2)


def of_captured(x: Tensor, r: Any) -> Any:
    c = x * 3
    return r(lambda x: (c[0], c, (x * c).sin(), c.t()[1]))(x)


def nested(x: Tensor, r: Any) -> Any:
    inner = r(lambda x: (lambda h: (h[0], h[1], x, h))(hidden(x)))

    def outer(x: Tensor) -> Any:
        a, b, same, h = inner(x)
        return h, a, a[1:], b.cos(), same, same[0], h[2]

    return r(outer)(x)


def outside(x: Tensor, r: Any) -> Any:
    h = r(hidden)(x)
    return h, h[0], h.t()


CASES = (row, twice, views_of_views, no_whole, spread, parts, of_argument, of_captured, nested, outside)


def weighted(results: Any) -> Tensor:
    return sum(((i + 1) * (t * torch.arange(1.0, t.shape[-1] + 1)).sum() for i, t in enumerate(results)))  # type: ignore[return-value]


@pytest.mark.parametrize(("policy", "case"), crossed([None, save_matmuls], CASES))
def test_no_gradient_is_lost(case: Any, policy: Any) -> None:
    def run(step: Any) -> Any:
        x = X.clone().requires_grad_()
        results = step(x)
        return [t.detach() for t in results], torch.autograd.grad(weighted(results), x)[0]

    region = remat if policy is None else remat(policy=policy)
    values, gradient = run(lambda x: case(x, lambda fn: fn))
    got, made = run(compiled(lambda x: case(x, region)))
    torch.testing.assert_close(got, values, rtol=0, atol=0)
    torch.testing.assert_close(made, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES[::3])
def test_nor_under_func_grad(case: Any) -> None:
    def gradient(region: Any) -> Any:
        return torch.func.grad(lambda x: weighted(case(x, region)))

    expected = gradient(lambda fn: fn)(X)
    torch.testing.assert_close(compiled(gradient(remat))(X), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(remat)(X), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "at", "way"),
    crossed([row, no_whole, of_captured, outside], [0, -1], ["compiled", "func", "compiled func"]),
)
def test_what_is_written_to_a_result_later_is_seen_in_the_others(case: Any, at: int, way: str) -> None:
    if case is of_captured:
        pytest.skip("the region reads it: refused, without remat too")
    if case is no_whole and at == -1 and way != "func":
        pytest.skip("torch refuses to compile a write through as_strided")

    def step(x: Tensor, region: Any) -> Tensor:
        results = case(x * 1.5, region)
        results[at].mul_(2.0)
        return weighted([t.sin() for t in results])

    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(step(x, lambda fn: fn), x)
    if way == "compiled":
        (made,) = torch.autograd.grad(compiled(lambda x: step(x, remat))(x), x)
    else:
        fn = torch.func.grad(lambda x: step(x, remat))
        made = (compiled(fn) if way == "compiled func" else fn)(X)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


def test_an_argument_that_is_returned_is_the_argument() -> None:
    x = X.clone().requires_grad_()
    out, _ = compiled(lambda x: remat(lambda x: (x, x.sin()))(x))(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, x) and torch.equal(gradient, torch.ones_like(x))


VIEWS = save_ops(torch.ops.aten.slice, torch.ops.aten.select, torch.ops.aten.t)
KEEPING = {"all": save_everything, "views": VIEWS, "matmuls": save_matmuls}


def in_halves(x: Tensor) -> Any:
    h = hidden(x)
    return h[:, :2], h[:, 2:]


def argument_in_halves(x: Tensor) -> Any:
    return x[:, :2], x[:, 2:]


def turned(x: Tensor) -> Any:
    h = x.sin()
    return h.t()[:2], h.t()[2:], h[0]


@pytest.mark.parametrize(
    ("inner", "kept", "around", "transformed"),
    crossed(
        [in_halves, argument_in_halves, turned],
        KEEPING,
        ["nothing", "matmuls", "all"],
        [False, True],
        every=8,
    ),
)
def test_a_region_inside_keeps_views_that_one_around_does_not(
    inner: Any, kept: str, around: str, transformed: bool
) -> None:
    """The recomputation around is handed the views apart, so it sees no memory that they share."""
    outer = {"nothing": save_nothing, "matmuls": save_matmuls, "all": save_everything}[around]

    def loss(x: Tensor, wrap: Any) -> Tensor:
        part = wrap(inner, KEEPING[kept])
        region = wrap(lambda x: sum((t * t.sigmoid()).sum() for t in part(x)) * x.cos().sum(), outer)
        return region(x * 1.5)

    def gradient(wrap: Any) -> Any:
        if transformed:
            return torch.func.grad(lambda x: loss(x, wrap))
        return lambda x: torch.autograd.grad(loss(x, wrap), x)[0]

    x = X.clone().requires_grad_(not transformed)
    wrap = lambda fn, policy: remat(fn, policy=policy)  # noqa: E731
    expected = gradient(lambda fn, policy: fn)(x)
    if transformed:
        made = compiled(gradient(wrap))(x)
    else:
        (made,) = torch.autograd.grad(compiled(lambda x: loss(x, wrap))(x), x)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


PASSED_ON = {
    "both": lambda a, b, r: r(lambda a, b: (a, b))(a, b),
    "one of two": lambda a, b, r: (r(lambda a, b: {"new": a.sin(), "mask": (b, 1.5)})(a, b)["mask"][0], a),
    "captured": lambda a, b, r: (r(lambda: a)(), b),
    "twice": lambda a, b, r: r(lambda a, b: (a, a))(a, b),
    "through two": lambda a, b, r: r(lambda a, b: r(lambda a, b: (a, b))(a, b))(a, b),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PASSED_ON)
def test_a_region_inside_returns_what_it_is_given(case: str) -> None:
    """Dynamo alone takes the operand for a value of the inner graph, and fails; so it does with torch's
    checkpoint."""

    def loss(x: Tensor, r: Any) -> Tensor:
        def block(a: Tensor, b: Tensor) -> Tensor:
            first, second = PASSED_ON[case](a, b, r)
            return first * second.cos() + a * b

        return (r(block)(x * 2, x.sin()) * x).sum()

    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x, lambda fn: fn), x)
    (made,) = torch.autograd.grad(compiled(lambda x: loss(x, remat))(x), x)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)
    made = compiled(torch.func.grad(lambda x: loss(x, remat)))(X)
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*asks for 'other'")
@pytest.mark.parametrize("policy", [save_names("h"), save_all_but_names("h"), save_all_but_names("other")])
def test_kept_conjugates_stay_lazy(policy: Any) -> None:
    """An op of a lazy conjugate is another op for a compiler than that of an ordinary tensor."""

    def fn(x: Tensor) -> Tensor:
        z = checkpoint_name(torch.complex(hidden(x), x).conj(), "h")
        return (z * z.sin()).real * z.imag.cos()

    x = X.clone().requires_grad_()
    out = compiled(lambda x: remat(fn, policy=policy)(x))(x)
    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (out, fn(x)))
    torch.testing.assert_close(found, expected)
