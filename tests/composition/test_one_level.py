"""One level of torch.func that differentiates in reverse, vmaps and forward mode inside of it and around: a
region's function runs once, as under plain autograd, and what it gives is bit for bit what torch gives
without regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import (
    RematError,
    checkpoint_name,
    checkpoint_policy,
    offload,
    remat,
    save_matmuls,
    save_names,
    save_nothing,
)
from tests.helpers import LiveBytes, crossed, rand, unseen

W, X, XS, WS = rand(6, 6), rand(4, 6, seed=1), rand(3, 4, 6, seed=2), rand(3, 6, 6, seed=3)
ONES = torch.ones(4, 6, dtype=torch.float64)


def block(w: Tensor, x: Tensor) -> Tensor:
    h = checkpoint_name(torch.tanh(F.layer_norm(x, (6,)) @ w), "h")
    return torch.sin(h @ w) * x


def summed(f: Any) -> Callable[..., Tensor]:
    return lambda *args: f(*args).square().sum()


def pulled_twice(f: Any, w: Tensor, x: Tensor) -> Any:
    pull: Any = vjp(f, w, x)[1]
    return pull(ONES), pull(2 * ONES)


WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: grad(summed(f), (0, 1))(W, X),
    "vjp": lambda f: pulled_twice(f, W, X),
    "jacrev": lambda f: jacrev(f, (0, 1))(W, X),
    "vmap(grad)": lambda f: vmap(grad(summed(f), (0, 1)), (None, 0))(W, XS),
    "vmap(grad) of one": lambda f: vmap(grad(summed(f)), (None, 0))(W, XS),
    "grad(vmap)": lambda f: grad(lambda w, x: vmap(f, (None, 0))(w, x).square().sum(), (0, 1))(W, XS),
    "vmap(grad(vmap))": lambda f: vmap(grad(lambda w, x: vmap(f, (None, 0))(w, x).sin().sum()), (0, None))(
        WS, XS
    ),
    "vmap(vjp)": lambda f: vmap(lambda w, x: vjp(f, w, x)[1](ONES), (None, 0))(W, XS),
    "vmap(jacrev)": lambda f: vmap(jacrev(f), (0, None))(WS, X),
    "jacrev(vmap)": lambda f: jacrev(vmap(f, (0, None)))(WS, X),
    "jvp(grad)": lambda f: jvp(lambda w: grad(summed(f), (0, 1))(w, X), (W,), (WS[0],)),
    "jvp(grad) of both": lambda f: jvp(grad(summed(f), (0, 1)), (W, X), (WS[0], XS[0])),
    "jvp(grad) of what it captures": lambda f: jvp(
        lambda w: grad(lambda x: f(w, x).sin().sum())(X), (W,), (WS[0],)
    ),
    "jvp(vjp)": lambda f: jvp(lambda w: vjp(f, w, X)[1](ONES), (W,), (WS[0],)),
    "hessian": lambda f: hessian(summed(f))(W, X),
    "vmap(hessian)": lambda f: vmap(hessian(summed(f)), (0, None))(WS, X),
    "laplacian": lambda f: vmap(lambda t: jvp(grad(summed(f)), (W, X), (t, ONES))[1])(WS),
    "vmap(jvp(grad))": lambda f: vmap(lambda w, x: jvp(grad(summed(f)), (w, x), (w, ONES)))(WS, XS),
    "jvp(vmap(grad))": lambda f: jvp(lambda w: vmap(grad(summed(f)), (None, 0))(w, XS), (W,), (WS[0],)),
    "grad(jvp)": lambda f: grad(lambda w, x: jvp(f, (w, x), (WS[0], XS[0]))[1].sin().sum(), (0, 1))(W, X),
    "grad(vmap(jvp))": lambda f: grad(lambda w: vmap(lambda x: jvp(f, (w, x), (w, ONES))[1])(XS).sin().sum())(
        W
    ),
    "jacrev(jacfwd)": lambda f: jacrev(jacfwd(summed(f)))(W, X),
    "jvp(jvp(grad))": lambda f: jvp(
        lambda w: jvp(lambda w: grad(summed(f))(w, X), (w,), (WS[1],)), (W,), (WS[0],)
    ),
    "jvp(grad(jvp))": lambda f: jvp(
        grad(lambda w: jvp(lambda x: f(w, x), (X,), (ONES,))[1].sin().sum()), (W,), (WS[0],)
    ),
    "of the cotangent": lambda f: grad(lambda ct: vjp(f, W, X)[1](ct)[0].sin().sum())(ONES),
}
POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "names": save_names("h"),
    "host": offload(save_names("h")),
    "budget": checkpoint_policy(budget=0.5),
}


def regions(f: Any, policy: Any) -> dict[str, tuple[Any, Any]]:
    """By how regions nest: with and without them."""
    inner = remat(f, policy=policy)
    return {
        "one": (inner, f),
        "after itself": (lambda w, x: inner(w, inner(w, x)), lambda w, x: f(w, f(w, x))),
        "inside": (remat(lambda w, x: inner(w, x.cos()) * 2), lambda w, x: f(w, x.cos()) * 2),
    }


@pytest.mark.parametrize(("way", "policy"), crossed(WAYS, POLICIES, every=12))
def test_bit_for_bit(way: str, policy: str) -> None:
    for how, (ours, plain) in regions(block, POLICIES[policy]).items():
        want = pytree.tree_leaves(WAYS[way](plain))
        for call in range(2):
            got = pytree.tree_leaves(WAYS[way](ours))
            near = 1e-12 if way == "of the cotangent" else 0.0  # two levels: the function runs again below
            assert all(torch.allclose(a, b, near, near) for a, b in zip(got, want, strict=True)), (how, call)
            assert not any(t.requires_grad for t in (*got, *want))  # nor where the transform was over


@pytest.mark.parametrize("way", [way for way in WAYS if way != "of the cotangent"])
def test_the_function_runs_once(way: str) -> None:
    calls = []

    def f(w: Tensor, x: Tensor) -> Tensor:
        calls.append(None)
        return block(w, x)

    for _ in range(2):
        calls.clear()
        WAYS[way](remat(lambda w, x: remat(f)(w, x).cos()))
        assert len(calls) == 1


FORMULAS = {
    "solve": lambda w, x: torch.linalg.solve(w @ w.T + 9 * torch.eye(6, dtype=w.dtype), x.T).T,
    "group norm": lambda w, x: F.group_norm((x @ w)[:, :, None], 2).squeeze(-1),
    "zeros and views": lambda w, x: torch.cat(
        [(x @ w).split(2, -1)[1], torch.zeros_like(x), x.T[0, :, None]], -1
    ),
    "no gradient": lambda w, x: (x @ w) / (x @ w).detach().abs().max() + torch.where(x > 0, x, 0.0),
    "forward mode inside": lambda w, x: jvp(lambda x: (x @ w).sin(), (x,), (x.cos(),))[1] * x,
    "batches inside": lambda w, x: vmap(lambda row: (row @ w).sin() * row)(x),
}


@pytest.mark.parametrize(
    ("program", "way"),
    crossed(FORMULAS, [w for w in WAYS if "jvp" in w or w in ("hessian", "laplacian")], every=4),
)
def test_backward_formulas_that_forward_mode_goes_through(way: str, program: str) -> None:
    """Where nothing is recorded torch takes another formula for some, of which forward mode does not know."""
    f: Any = FORMULAS[program]
    if program == "zeros and views" and way in ("jvp(vjp)", "vmap(jvp(grad))", "grad(vmap(jvp))"):
        f = lambda w, x, f=f: f(w, x)[:, :6]  # noqa: E731
    want, region = pytree.tree_leaves(WAYS[way](f)), remat(f)
    for _ in range(2):
        got = pytree.tree_leaves(WAYS[way](region))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("around", ["grad", "jvp(grad)"])
def test_a_backward_at_the_level_records_nothing_of_what_is_recomputed(around: str) -> None:
    x, ws = torch.randn(512, 32), [torch.randn(32, 32) for _ in range(12)]

    def peak(f: Any) -> int:
        def loss(ws: list[Tensor]) -> Tensor:
            h = x
            for w in ws:
                h = f(w, h)
            return h.sum()

        def run() -> Any:
            return grad(loss)(ws) if around == "grad" else jvp(grad(loss), (ws,), (ws,))

        run()
        with LiveBytes() as live:
            run()
        return live.peak

    def wide(w: Tensor, x: Tensor) -> Tensor:
        return x + (x @ w).tanh().exp().sin().cos().tanh().sin()

    assert peak(remat(wide)) < 0.45 * peak(wide)


def test_one_region_with_one_derivative_and_two() -> None:
    region = remat(block)
    for _ in range(2):
        for way in (
            lambda f: grad(summed(f))(W, X),
            lambda f: hessian(lambda w: summed(f)(w, X))(W),
            lambda f: jvp(lambda w: grad(summed(f))(w, X), (W,), (W,)),
            lambda f: grad(lambda w: grad(summed(f))(w, X).sin().sum())(W),
        ):
            torch.testing.assert_close(way(region), way(block), rtol=1e-10, atol=1e-10)


def test_a_derivative_of_the_same_level_is_refused_in_words() -> None:
    region = remat(torch.sin)

    def forces(x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(region(x).sum(), x, create_graph=True)
        return force.square().sum()

    with pytest.raises(RematError, match="inside a torch.func transform"):
        grad(forces)(X)
    torch.testing.assert_close(grad(lambda x: region(x).sum())(X), X.cos())


@pytest.mark.parametrize("way", ["jvp", "jacfwd", "vmap"])
def test_with_nothing_to_reverse_the_function_runs_as_it_is(way: str) -> None:
    seen = []

    def f(w: Tensor, x: Tensor) -> Tensor:
        seen.append(_len_torch_dispatch_stack())
        return block(w, x)

    def run(f: Any) -> Any:
        if way == "vmap":
            return vmap(f, (None, 0))(W, XS)
        return jvp(f, (W, X), (W, X)) if way == "jvp" else torch.func.jacfwd(f)(W, X)

    torch.testing.assert_close(run(remat(f)), run(block), rtol=0, atol=0)
    assert seen == [0]


def test_parameters_that_are_frozen_and_trained_in_turns() -> None:
    """Plain autograd differentiates what torch.func does, in calls that look like earlier ones."""
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Dropout()).double()
    region = remat(lambda x: net(x) * x)

    def step(f: Callable[[Tensor], Tensor], trained: bool) -> Any:
        net.requires_grad_(trained)
        torch.manual_seed(1)
        force = grad(lambda x: f(x).square().sum())(X)
        weights = torch.autograd.grad(force.square().sum(), list(net.parameters())) if trained else ()
        return force, weights, torch.rand(1)

    for trained in (False, False, True, True, False, True):
        torch.testing.assert_close(step(region, trained), step(lambda x: net(x) * x, trained))


LAZY: dict[str, Callable[[Tensor], Tensor]] = {
    "penalty": lambda a: torch.autograd.grad(a.sin().exp().sum(), a, create_graph=True)[0] * a,
    "past torch": lambda a: a + unseen(a.detach()),
    "data": lambda a: a + replaced(a),
}


def replaced(a: Tensor) -> Tensor:
    other = a.detach() * 1
    other.data = other.data.sin()
    return other


@pytest.mark.parametrize("way", ["grad", "jvp(grad)"])
@pytest.mark.parametrize("what", LAZY)
def test_what_only_a_later_call_does_happens_once(what: str, way: str) -> None:
    """A frame that follows an earlier call has not noted what the function is about to change."""

    def found(region: Any) -> list[Any]:
        calls, seen = [0], rand(4, 6)

        def fn(a: Tensor) -> Tensor:
            nonlocal seen
            calls.append(len(calls))
            seen = seen + 1
            a = a * torch.rand_like(a)
            return (LAZY[what](a) if len(calls) == 4 else a).exp()

        torch.manual_seed(0)
        remembered = region(fn)
        over = grad(lambda x: remembered(x).sum())
        run = over if way == "grad" else lambda x: jvp(over, (x,), (x,))[1]
        results = []
        for _ in range(3):
            state = torch.get_rng_state()
            try:
                results.append((run(X).tolist(), calls[:], seen.tolist()))
            except RematError:  # torch refuses it, too
                assert what != "penalty" and torch.equal(torch.get_rng_state(), state)
                results.append(None)
            except RuntimeError:
                results.append(None)
        return results[: 3 if what == "penalty" else 2] + [len(results)]

    assert found(remat) == found(lambda f: f)
