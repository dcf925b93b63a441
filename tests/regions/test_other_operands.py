"""Functions that take another tensor in their recomputation than in their forward, by the same ops.

Under nested levels of `torch.func`, and where the tape is open, Python runs again. The derivative would be
that of another function, so it raises.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from remat import RematError, remat, save_all_but_names, save_everything, save_matmuls, save_nothing
from tests.helpers import crossed, unseen

POLICIES = pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SPARSE = torch.eye(3).to_sparse() * 2
MATRICES = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(1, 4)]


def still(on: bool) -> None:
    pass


def vjp(fn: Callable[..., Any], x: Any) -> Any:
    return torch.func.vjp(fn, x)


def listed(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    return (x @ weights[0 if state["on"] else 2]).sin().exp()


def operand(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    one, other = x.sin(), x.cos()
    return (one if state["on"] else other).exp() * one * other


def look(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    one, other = x.sin().split(2, dim=1)
    return (one if state["on"] else other).exp() * one * other


def constant(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    masks = state["masks"]
    return (x.sin() * masks[0 if state["on"] else 1]).exp()


def argument(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    # Of two operands that have the same shape.
    return (x if state["on"] else state["also"]).sin().exp() * x * state["also"]


def behind_a_sparse_one(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    # Of two operands the first has no memory that could be compared.
    one, other = x.sin(), x.cos()
    return torch.sparse.mm(SPARSE, one if state["on"] else other).exp() * one * other


WAYS = [listed, operand, look, constant, argument]


def changed(way: Callable[..., torch.Tensor], pull: Callable[..., Any], **options: Any) -> Any:
    """What a recomputation gives in which the function takes other tensors."""
    state = {"on": True, "masks": [X.sigmoid(), X.tanh()], "also": X.flip(0)}
    region = remat(lambda x: way(MATRICES, state, x), **options)
    return pull(region, lambda on: state.update(on=on))


def pulled(region: Callable[..., Any], flip: Callable[[bool], None]) -> Callable[..., Any]:
    def one(x: torch.Tensor) -> torch.Tensor:
        out, back = vjp(region, x)
        flip(False)
        found = back(torch.ones_like(out))[0]
        flip(True)
        return found

    return one


def by_vjp(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
    return pulled(region, flip)(X)


def by_vmap(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
    return vmap(pulled(region, flip))(X.expand(2, 3, 4))


def by_nested(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
    return grad(lambda x: pulled(region, flip)(x).sum())(X)


def by_vmap_of_nested(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
    return vmap(grad(lambda x: pulled(region, flip)(x).sum()))(X.expand(2, 3, 4))


def by_second_order(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
    def first(x: torch.Tensor) -> torch.Tensor:
        out, back = vjp(region, x)
        return back(torch.ones_like(out))[0]

    out, back = vjp(first, X)
    flip(False)
    return back(torch.ones_like(out))[0]


PULLS = [by_nested, by_vmap_of_nested, by_second_order]


@pytest.mark.parametrize(("way", "pull", "policy"), crossed(WAYS, PULLS, [save_nothing, save_matmuls]))
def test_another_tensor_raises(way: Any, pull: Any, policy: Any) -> None:
    for _ in "12":
        with pytest.raises(RematError, match=r"at op \d+, aten\.\w+\.\w+ reads a"):
            changed(way, pull, policy=policy)
    stays = changed(way, lambda region, flip: pull(region, still), policy=policy)
    plain = changed(way, lambda region, flip: pull(region.__wrapped__, lambda on: None))
    torch.testing.assert_close(stays, plain)


@pytest.mark.parametrize("way", [*WAYS, behind_a_sparse_one])
def test_another_tensor_raises_in_plain_autograd_where_the_function_runs_again(way: Any) -> None:
    def raw(*given: Any) -> torch.Tensor:
        made = unseen(torch.empty(1), 2.0)  # by no op: the recorded ops do not tell what is computed
        return way(*given) * made

    def pull(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
        x = X.clone().requires_grad_()
        out = region(x)
        flip(False)
        return torch.autograd.grad(out.sum(), x)[0]

    for _ in "12":
        with pytest.raises(RematError, match=r"at op \d+, aten\.\w+\.\w+ reads a"):
            changed(raw, pull)
    changed(raw, lambda region, flip: pull(region, still))


def kept_in(place: str, weight: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Callable[[Any], Any]]:
    """How a weight is read there, where no search finds it, and how another one is put in its place."""
    if place == "context":
        variable = contextvars.ContextVar("weight", default=weight)
        return variable.get, variable.set
    if place == "set":
        found = {weight}
        return lambda: next(iter(found)), lambda other: (found.clear(), found.add(other))

    def yields(last: Any) -> Any:
        while True:
            last = (yield last) or last

    made = yields([weight])
    next(made)
    return lambda: next(made)[0], lambda other: made.send([other])


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda x, w: x @ w,
    "addmm": lambda x, w: nn.functional.linear(x, w, w[0].detach().clone()),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
}


@pytest.mark.parametrize(
    ("place", "product", "change"), crossed(["context", "set", "generator"], PRODUCTS, ["other", "written"])
)
def test_the_operand_of_a_kept_product_beside_a_transform(place: str, product: str, change: str) -> None:
    """A transform inside refuses hooks; what it saves is known all the same."""
    read, put = kept_in(place, MATRICES[0].clone())

    def fn(x: torch.Tensor) -> torch.Tensor:
        return PRODUCTS[product](x, read()).exp() * grad(lambda y: y.sin().sum())(x)

    def run(fn: Any, changes: bool) -> torch.Tensor:
        x = X.clone().requires_grad_()
        out, weight = fn(x), read()
        if changes:
            put(MATRICES[1]) if change == "other" else weight.mul_(2)
        try:
            return torch.autograd.grad(out.sum(), x)[0]
        finally:
            put(MATRICES[0].clone())

    region, expected = remat(fn, policy=save_matmuls), run(fn, False)
    for _ in "123":
        if change == "other":
            torch.testing.assert_close(run(region, True), expected)
        else:
            with pytest.raises(RematError, match="in place"):
                run(region, True)
        torch.testing.assert_close(run(region, False), expected)


@pytest.mark.parametrize("around", [0, 1, 2])
def test_a_tensor_that_is_replaced_while_the_forward_runs(around: int) -> None:
    """A region that runs again inside of others compares what it captures, too, though these hold it."""
    state = {"last": X[0].sigmoid()}

    def fn(x: torch.Tensor) -> torch.Tensor:
        last, state["last"] = state["last"], x.detach().mean(0)
        made = unseen(torch.empty(1), 2.0)
        return remat(lambda h: (h.sin() * made).exp())(x * last)

    region: Callable[..., Any] = remat(fn)
    for _ in range(around):
        region = remat(lambda x, inner=region: inner(x))
    x = X.clone().requires_grad_()
    with pytest.raises(RematError, match="put in the place of the forward's"):
        torch.autograd.grad(region(x).sum(), x)


def result(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    one, other = x.sin(), x.cos()
    return one if state["on"] else other


def part(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    one, other = x.sin().split(2, dim=1)
    return one if state["on"] else other


def whole(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    made = x.sin()
    return made if state["on"] else x


def among_others(weights: list[torch.Tensor], state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Also where what is returned instead is kept."""
    one, other = x @ weights[0], x @ weights[1]
    return (one if state["on"] else other) if one.numel() else one * other


RESULTS = [result, part, whole, among_others]


@pytest.mark.parametrize(("way", "pull", "policy"), crossed(RESULTS, PULLS, [save_nothing, save_matmuls]))
def test_another_result_raises(way: Any, pull: Any, policy: Any) -> None:
    """The same ops, and then another of their results is returned."""
    for _ in "12":
        with pytest.raises(RematError, match="it returned another tensor"):
            changed(way, pull, policy=policy)
    stays = changed(way, lambda region, flip: pull(region, still), policy=policy)
    plain = changed(way, lambda region, flip: pull(region.__wrapped__, lambda on: None))
    torch.testing.assert_close(stays, plain)


@pytest.mark.parametrize(("way", "policy"), crossed(WAYS + RESULTS, [save_nothing, save_matmuls], every=4))
def test_another_tensor_in_plain_autograd_and_under_one_level(way: Any, policy: Any) -> None:
    """The tape is what runs again: whatever was turned since makes no difference, to a function that calls
    torch.func neither."""

    def pull(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
        x = X.clone().requires_grad_()
        out = region(x)
        flip(False)
        return torch.autograd.grad(out.sum(), x)[0]

    def inside(weights: Any, state: Any, x: torch.Tensor) -> torch.Tensor:
        torch.func.grad(lambda t: t.exp().sum())(x)
        return way(weights, state, x)

    def again(region: Callable[..., Any], flip: Callable[[bool], None]) -> torch.Tensor:
        pull(region, lambda on: None)
        return pull(region, flip)

    for function, by in [*product((way, inside), (pull, by_vjp, by_vmap)), (inside, again)] * 2:
        same = changed(function, lambda region, flip, by=by: by(region.__wrapped__, flip))
        torch.testing.assert_close(changed(function, by, policy=policy), same)


@pytest.mark.parametrize("policy", [save_nothing, save_everything, save_all_but_names("none")], ids=repr)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.filterwarnings("ignore:Policy")
def test_results_that_are_views(on: bool, policy: Any) -> None:
    """Of one that none of them is; kept views lie apart from it."""
    state = {"on": True}

    def fn(x: torch.Tensor) -> Any:
        one = x.sin().mul_(2).add_(x)
        other = x.cos().mul_(2).add_(x)
        parts = one.split([1, 3], 1), other.split([1, 3], 1)
        return parts[0 if state["on"] else 1]

    def gradient(pull: Callable[..., Any], region: Callable[..., Any]) -> Any:
        state["on"] = True
        return pull(lambda x: torch.cat(region(x), 1), lambda back: state.update(on=back or on))

    region = remat(fn, policy=policy)
    torch.testing.assert_close(gradient(by_vjp, region), gradient(by_vjp, fn))
    try:  # what is kept needs no second run
        torch.testing.assert_close(gradient(by_nested, region), gradient(by_nested, fn))
    except RematError as error:
        assert not on and "it returned another tensor" in str(error)


def test_a_constant_that_is_made_anew_is_the_same() -> None:
    """It is another tensor in each run, with the same numbers; and it may be there still."""
    made: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.from_numpy(np.arange(4, dtype=np.float32)))
        return (x.sin() * made[-1]).exp()

    for _ in "12":
        for pull in (by_vjp, by_nested):
            torch.testing.assert_close(pull(remat(fn), still), pull(fn, still), rtol=0, atol=0)


def by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x[torch.from_numpy(np.random.permutation(3))] * x


def by_list(x: torch.Tensor) -> torch.Tensor:
    return x[random.sample(range(3), 3)] * x


def by_mask(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * torch.tensor([random.random() for _ in range(4)])


@POLICIES
@pytest.mark.parametrize("fn", [by_numpy, by_list, by_mask])
def test_a_tensor_that_python_draws_and_nobody_holds(fn: Any, policy: Any) -> None:
    """The forward's is gone by the backward: its numbers are held, to be compared."""
    random.seed(0)
    np.random.seed(0)
    raised = 0
    for _ in range(6):
        try:
            by_nested(remat(fn, policy=policy), still)
        except RematError as error:
            raised += "put in the place of the forward's" in str(error)
    assert raised >= 4  # the others drew the same twice

    def same_again(x: torch.Tensor) -> torch.Tensor:
        random.seed(1)
        np.random.seed(1)
        return fn(x)

    for _ in "12":
        for pull in (by_vjp, by_nested):
            torch.testing.assert_close(pull(remat(same_again, policy=policy), still), pull(same_again, still))


def test_the_users_word_is_taken() -> None:
    assert torch.is_tensor(changed(operand, by_nested, determinism_check="none"))
