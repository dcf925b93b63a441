"""JAX's own tests of jax.checkpoint, continued: calls counted, and options; see test_jax_remat.py."""

import traceback

import pytest
import torch
from torch.func import grad, vmap

from remat import RematError, remat
from remat.interop.jax import checkpoint
from tests.helpers import OpCounter, rand, vjp

X = rand(3)


def sin_sin(x):
    return torch.sin(torch.sin(x))


def check_calls(static):
    """Nothing is traced ahead: a call without derivatives is one call, with derivatives two."""
    calls = []

    def g(x, flag=True):
        calls.append(1)
        return torch.sin(x) if flag else torch.cos(x)

    region = remat(g, static_argnums=static)
    for _ in range(10):
        region(X, True)
    assert len(calls) == 10
    for _ in range(10):
        grad(lambda x: region(x, True).sum())(X)
    assert len(calls) == 30


def test_remat_retracing():
    check_calls(())


def test_remat_static_agnums_retracing():
    check_calls((1,))


def test_no_cse_widget_on_primals():
    """Where nothing is differentiated a region costs no op of its own."""
    region = remat(lambda x: (sin_sin(x), 3.0))
    with torch.no_grad(), OpCounter() as ops:
        region(X.clone().requires_grad_())
    assert (
        dict(ops.counts) == {"sin": 2, "clone": 1} or ops.counts.total() == 2 + ops["clone"] + ops["detach"]
    )


def check_pulls(static):
    """One forward, and for each of 20 pulls one recomputation: nothing is built again, nothing piles up."""
    calls = []

    def f(x, double):
        calls.append(1)
        return torch.exp(2 * x if double else x)

    region = remat(f, static_argnums=static)
    out, pull = vjp(lambda x: region(x, True), X)
    results = [pull(torch.ones_like(out))[0] for _ in range(20)]
    assert len(calls) == 21
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize_caching():
    """torch's linearize folds the forward away, in regions too: JAX's `f_lin` is the pull-back transposed."""
    check_pulls(())
    out, push = torch.func.linearize(remat(sin_sin), X)
    torch.testing.assert_close(out, sin_sin(X))
    with OpCounter() as ops:
        pushes = [push(torch.ones_like(X)) for _ in range(20)]
    # Once, when its graph is folded.
    assert (ops["sin"], ops["cos"]) == (2, 2)
    torch.testing.assert_close(pushes, [torch.cos(torch.sin(X)) * torch.cos(X)] * 20)


def test_vjp_caching():
    check_pulls(())


def test_vjp_caching_static_argnums():
    check_pulls((1,))


def check_forwards(static):
    calls = []

    def f(x, double):
        calls.append(1)
        return 2 * x if double else x

    region = remat(f, static_argnums=static)
    for _ in range(20):
        vjp(lambda x: region(x, True), X)
    assert len(calls) == 20


def test_fwd_caching():
    check_forwards(())


def test_fwd_caching_static_argnums():
    check_forwards((1,))


def check_concreteness_error(static):
    """vmap cannot branch on data; its error leads to the user's line."""

    def f(x, _):
        if x > 0:
            return x
        return torch.sin(x)

    with pytest.raises(RuntimeError) as caught:
        vmap(grad(lambda x: remat(f, static_argnums=static)(x, 1.0)))(X)
    assert not isinstance(caught.value, RematError)
    assert "if x > 0" in "".join(traceback.format_exception(caught.value))


def test_concreteness_error_includes_user_code():
    check_concreteness_error(())


def test_concreteness_error_includes_user_code_with_static_argnums():
    check_concreteness_error((1,))


def check_prevent_cse(prevent):
    """Taken, and of no effect: there is nothing to prevent in eager code."""
    layer = checkpoint(lambda w, x: torch.tanh(x @ w), prevent_cse=prevent)
    w, x = rand(3, 3), rand(2, 3)
    expected = grad(lambda w: torch.tanh(x @ w).sum())(w)
    torch.testing.assert_close(grad(lambda w: layer(w, x).sum())(w), expected)


def test_no_cse_widget_with_prevent_cse_false():
    check_prevent_cse(False)


def test_remat_partial_cse_prevention():
    check_prevent_cse((False, True))


def test_remat_partial_cse_prevention_all_false():
    check_prevent_cse((False, False))


def test_remat_partial_cse_prevention_pytree():
    check_prevent_cse(({"w": False, "x": True},))
