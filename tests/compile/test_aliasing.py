"""Compiled regions whose results lie in each other's memory, in an argument's, or in a captured tensor's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import remat, save_matmuls
from tests.compiled import compiled
from tests.helpers import crossed, sparse

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def afresh() -> None:
    # Dynamo counts recompilations by code, and the code of a test is that of all its cases.
    torch.compiler.reset()


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


@pytest.mark.parametrize("case", sparse(CASES))
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
