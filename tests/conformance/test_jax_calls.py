"""JAX's own tests of jax.checkpoint, continued: calls counted, and options; see test_jax_remat.py."""

import traceback

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.func import grad, vmap

from remat import RematError, remat
from remat.interop.jax import checkpoint
from tests.conformance.counting import COMPILES
from tests.conformance.rows import jax
from tests.helpers import OpCounter, rand, vjp

X = rand(3)


def sin_sin(x):
    return torch.sin(torch.sin(x))


STATIC = pytest.mark.parametrize("static", [(), (1,)], ids=["", "static"])


@jax(
    5, "adapted", "one call without derivatives, two with; compiled once in 20 calls", name="remat_retracing"
)
@jax(6, "adapted", "the same with a static argument", name="remat_static_agnums_retracing")
@STATIC
def test_retracing(static):
    """Nothing is traced ahead: a call is one call, also with one derivative, and two more with two."""
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
    assert len(calls) == 20
    for _ in range(10):
        grad(lambda x: grad(lambda x: region(x, True).sum())(x).sum())(X)
    assert len(calls) == 50


@jax(24, "adapted", "without derivatives a region adds no op, nor a fence to the graph")
def test_no_cse_widget_on_primals():
    region = remat(lambda x: (sin_sin(x), 3.0))
    with torch.no_grad(), OpCounter() as ops:
        region(X.clone().requires_grad_())
    assert (
        dict(ops.counts) == {"sin": 2, "clone": 1} or ops.counts.total() == 2 + ops["clone"] + ops["detach"]
    )


@jax(48, "adapted", "the same", name="vjp_caching")
@jax(49, "adapted", "the same with a static argument", name="vjp_caching_static_argnums")
@STATIC
def test_pulls(static):
    """One forward, and for each of 20 pulls its ops once more: nothing is built again, nothing piles up."""
    calls = []

    def f(x, double):
        calls.append(1)
        return torch.exp(2 * x if double else x)

    region = remat(f, static_argnums=static)
    out, pull = vjp(lambda x: region(x, True), X)
    with OpCounter() as ops:
        results = [pull(torch.ones_like(out))[0] for _ in range(20)]
    assert (len(calls), ops["exp"]) == (1, 20)
    assert all(torch.equal(r, results[0]) for r in results)


@jax(47, "adapted", "20 pulls, 20 recomputations and no other call; `torch.func.linearize` of a region")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize_caching():
    """torch's linearize folds the forward away, in regions too: JAX's `f_lin` is the pull-back transposed."""
    out, push = torch.func.linearize(remat(sin_sin), X)
    torch.testing.assert_close(out, sin_sin(X))
    with OpCounter() as ops:
        pushes = [push(torch.ones_like(X)) for _ in range(20)]
    # Once, when its graph is folded.
    assert (ops["sin"], ops["cos"]) == (2, 2)
    torch.testing.assert_close(pushes, [torch.cos(torch.sin(X)) * torch.cos(X)] * 20)


@jax(50, "adapted", "20 forwards, 20 calls; compiled once", name="fwd_caching")
@jax(51, "adapted", "the same with a static argument", name="fwd_caching_static_argnums")
@STATIC
def test_forwards(static):
    calls = []

    def f(x, double):
        calls.append(1)
        return 2 * x if double else x

    region = remat(f, static_argnums=static)
    for _ in range(20):
        vjp(lambda x: region(x, True), X)
    assert len(calls) == 20


@jax(
    74,
    "adapted",
    "the error of an `if` under vmap shows the user's line",
    name="concreteness_error_includes_user_code",
)
@jax(75, "adapted", "the same", name="concreteness_error_includes_user_code_with_static_argnums")
@STATIC
def test_concreteness_error(static):
    """vmap cannot branch on data; its error leads to the user's line."""

    def f(x, _):
        if x > 0:
            return x
        return torch.sin(x)

    with pytest.raises(RuntimeError) as caught:
        vmap(grad(lambda x: remat(f, static_argnums=static)(x, 1.0)))(X)
    assert not isinstance(caught.value, RematError)
    assert "if x > 0" in "".join(traceback.format_exception(caught.value))


def check_prevent_cse(prevent, as_dict=False):
    """Taken, and of no effect: eager code has nothing to prevent. Compiled code has one fence a layer, around
    what nothing else is computed from: the activation, never the weight."""
    if as_dict:
        of_dict = checkpoint(lambda d: torch.tanh(d["x"] @ d["w"] + torch.arange(3.0)), prevent_cse=prevent)
        layer = lambda w, x: of_dict({"w": w, "x": x})  # noqa: E731
    else:
        layer = checkpoint(lambda w, x: torch.tanh(x @ w + torch.arange(3.0)), prevent_cse=prevent)

    def loss(net, ws, x):
        for w in ws:
            x = net(w, x)
        return (x**2).sum()

    ws, x = [rand(3, 3), rand(3, 3).T], rand(2, 3)
    expected = grad(lambda ws: loss(lambda w, x: torch.tanh(x @ w + torch.arange(3.0)), ws, x))(ws)
    torch.testing.assert_close(grad(lambda ws: loss(layer, ws, x))(ws), expected)
    return lambda ws, x: grad(lambda ws, x: loss(layer, ws, x), (0, 1))(ws, x), ws, x


def check_fences(step, ws, x):
    graphs = []

    def keep(module, _):
        graphs.append(module)
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    got = torch.compile(step, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(ws, x)
    torch.testing.assert_close(got, step(ws, x))
    (graph,) = graphs
    *weights, given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    fenced = [node.args[0] for node in graph.graph.nodes if "fence" in node.name and node.args]
    fenced = [node for node in fenced if "fence" not in node.name]
    assert len(fenced) == 2 and given in fenced and not set(fenced) & set(weights)


@jax(25, "adapted", "`jax_names.checkpoint` takes the switch; it has no effect: see 24")
def test_no_cse_widget_with_prevent_cse_false():
    check_prevent_cse(False)


@jax(
    77,
    "adapted",
    "the switch has no effect; of its own the compiled graph has a fence around each activation, and "
    "none around a weight",
)
@COMPILES
def test_remat_partial_cse_prevention():
    check_fences(*check_prevent_cse((False, True)))


@jax(78, "adapted", "it does not crash")
def test_remat_partial_cse_prevention_all_false():
    check_prevent_cse((False, False))


@jax(79, "adapted", "the same as 77, through a dict")
@COMPILES
@pytest.mark.slow
def test_remat_partial_cse_prevention_pytree():
    check_fences(*check_prevent_cse(({"w": False, "x": True},), as_dict=True))
