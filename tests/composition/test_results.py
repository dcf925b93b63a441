"""Results of a region under torch.func that are no tensors and no pytrees: callables, objects, nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from remat import RematError, remat, save_matmuls

FUNC = torch.func
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@dataclass
class State:
    hidden: Tensor
    more: list[Tensor]
    step: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Tensor
    pair: tuple[Tensor, Tensor]


class Named(NamedTuple):
    first: State
    second: Tensor


class Transform:
    """Computes later."""

    def __init__(self, scale: Tensor, w: Tensor) -> None:
        self.scale, self.w = scale, w

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale + x @ self.w


def state(x: Tensor, w: Tensor) -> Any:
    hidden = (x @ w).sin()
    return State(hidden, [hidden.exp(), x])


def of_state(out: State) -> Tensor:
    return (out.hidden * out.more[0]).sum() + out.more[1].square().sum()


def frozen(x: Tensor, w: Tensor) -> Any:
    hidden = (x @ w).sin()
    return Frozen(hidden, (hidden.cos(), w))


def of_frozen(out: Frozen) -> Tensor:
    return (out.hidden * out.pair[0]).sum() + out.pair[1].exp().sum()


def named(x: Tensor, w: Tensor) -> Any:
    return Named(state(x, w), x.exp()), "text"


def of_named(out: Any) -> Tensor:
    return of_state(out[0].first) * out[0].second.mean()


def partial(x: Tensor, w: Tensor) -> Any:
    return functools.partial(torch.mul, x.sin() @ w)


def later(x: Tensor, w: Tensor) -> Any:
    """Computes nothing."""
    return functools.partial(torch.matmul, x)


def closure(x: Tensor, w: Tensor) -> Any:
    h = x.exp()
    return lambda y: (y @ w) * h


def transform(x: Tensor, w: Tensor) -> Any:
    return Transform(x.sin().sum(), w)


def nothing(x: Tensor, w: Tensor) -> Any:
    return None


def number(x: Tensor, w: Tensor) -> Any:
    return {"rows": len(x)}


def given(x: Tensor, w: Tensor) -> Any:
    return [w, x]


def keywords(x: Tensor, w: Tensor) -> Any:
    return functools.partial(torch.clamp, min=x.sin())


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "state": (state, of_state),
    "frozen": (frozen, of_frozen),
    "named": (named, of_named),
    "partial": (partial, lambda f: f(X.cos()).sum()),
    "later": (later, lambda f: f(W).exp().sum()),
    "closure": (closure, lambda f: f(X).sum()),
    "transform": (transform, lambda f: f(X).square().sum()),
    "nothing": (nothing, lambda out: X.sum() * 2),
    "number": (number, lambda out: X.sum() * out["rows"]),
    "given": (given, lambda out: (out[0].sin().sum() * out[1].exp()).sum()),
    "keywords": (keywords, lambda f: f(X).sum()),
}


def loss(program: str, wrap: Any) -> Any:
    block, use = PROGRAMS[program]
    return lambda x, w: use(wrap(block)(x, w)) + (x * w.sum()).mean()


WAYS: dict[str, Any] = {
    "grad": lambda f: [FUNC.grad(f, argnums=(0, 1))(X, W) for _ in range(2)],
    "jvp": lambda f: FUNC.jvp(f, (X, W), (X, W)),
    "hessian": lambda f: FUNC.hessian(f)(X, W),
    "vmap(grad)": lambda f: FUNC.vmap(FUNC.grad(lambda x: f(x * torch.ones_like(X), W)))(X),
}


@pytest.mark.parametrize("wrap", ["plain", pytest.param("matmuls", marks=pytest.mark.slow), "nested"])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way == "hessian" else ()) for way in WAYS]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_is_as_without_remat(program: str, way: str, wrap: str) -> None:
    wraps: dict[str, Any] = {
        "plain": remat,
        "matmuls": lambda f: remat(f, policy=save_matmuls),
        "nested": lambda f: remat(lambda x, w: remat(f)(x * 1, w)),
    }
    want = WAYS[way](loss(program, lambda f: f))
    torch.testing.assert_close(WAYS[way](loss(program, wraps[wrap])), want, rtol=1e-12, atol=1e-12)


def test_a_captured_tensor_in_a_result() -> None:
    """A layer that returns what is to be evaluated later, with its weights."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4).double()

        def forward(self, c: Tensor) -> Any:
            return Transform(c.sum(), self.lin.weight), functools.partial(self.lin)

    class Step(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.layer = Layer()
            self.layer.forward = wrap(self.layer.forward)  # type: ignore[method-assign]

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.layer(x)
            return (first(x) * second(x)).sum()

    plain, ours = Step(lambda f: f), Step(remat)
    params = {name: p.detach() for name, p in plain.named_parameters()}
    want, got = [
        FUNC.grad(lambda p, x, step=step: FUNC.functional_call(step, p, (x,)), argnums=(0, 1))(params, X)
        for step in (plain, ours)
    ]
    torch.testing.assert_close(got, want)


def test_what_cannot_be_followed_is_refused_where_levels_nest() -> None:
    def generator(x: Tensor) -> Any:
        return (row.sin() for row in x)

    for fn, told in (
        (lambda x: torch.stack(list(remat(generator)(x))).sum(), "returns a generator"),
        (lambda x: remat(lambda x: {x.sin()})(x).pop().sum(), "where nothing can take its place"),
    ):
        torch.testing.assert_close(FUNC.grad(fn)(X), X.cos())
        with pytest.raises(RematError, match=told):
            FUNC.grad(lambda x, fn=fn: FUNC.grad(fn)(x).sum())(X)
