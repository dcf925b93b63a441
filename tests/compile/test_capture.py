"""capture and capture_grads in functions that torch.compile compiles: equal to eager, in one graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import exc
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from remat import (
    RematError,
    capture,
    capture_grads,
    checkpoint_name,
    checkpoint_policy,
    remat,
    save_everything,
    save_names,
    scan_remat,
)
from remat.debug import assert_recomputed
from remat.transforms import value_and_grad
from tests.compile.inside import in_transform
from tests.compiled import Graphs, compiled
from tests.helpers import TORCH, rand, same, sparse
from tests.tools.test_capture import RUNS, WRAPS, W, X, model

NAMES = ["h", "out"]


def equal(fn, *args, tolerance=1e-10, **options):
    """`fn` does the same compiled and in eager."""
    same(compiled(fn, **options)(*args), fn(*args), tolerance)


# Two siblings of one function each, and a name outside: transforms, captures and kinds of region take turns.
REGIONS = [name for name in WRAPS if name != "none"]
TURNS = [
    pytest.param((capture, capture_grads)[i % 2], name, REGIONS[i % len(REGIONS)], id=name)
    for i, name in enumerate(name for name in RUNS if name != "vmap both")
]


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "run", "wrap"), TURNS[::3])
def test_every_transform(transform, run, wrap):
    def of(wrap):
        return RUNS[run](transform(model(WRAPS[wrap]), NAMES))

    same(compiled(lambda: of(wrap))(), of("none"))


def loss_of(wrap, names=("h",)):
    """Three calls of one region, each value of which is named by all `names`."""

    def block(x, w):
        x = torch.tanh(x @ w)
        for name in names:
            x = checkpoint_name(x, name)
        return (x.sin() @ w + x) @ w

    region = wrap(block)

    def loss(w, x):
        for _ in range(3):
            x = region(x, w)
        return checkpoint_name(x.exp(), "out").square().sum()

    return loss


@pytest.mark.slow
def test_the_function_itself_and_in_other_code():
    f = capture_grads(loss_of(remat), NAMES)
    want = capture_grads(loss_of(WRAPS["none"]), NAMES)(W, X)
    same(compiled(f)(W, X), want)
    same(compiled(lambda w, x: capture_grads(loss_of(remat), NAMES)(w, x))(W, X), want)


@pytest.mark.slow
def test_gradients_of_arguments():
    def f(a, b, c):
        loss = loss_of(remat)
        return loss(a, X) + loss(a * 2, X) + (b * W * c["scale"]).sum()

    for argnums in (0, (2, 0, 1)):
        # One tensor twice: two gradients.
        equal(capture_grads(f, "h", argnums=argnums), W, W, {"scale": rand(3)})
    with pytest.raises(exc.Unsupported, match="must be a pytree of tensors"):
        compiled(capture_grads(f, "h", argnums=2))(W, W, {"scale": 3.0})


def test_captured_parameters():
    net = nn.Linear(3, 3).double()

    def loss(x):
        return checkpoint_name(remat(net)(x), "h").square().sum()

    value, named = compiled(capture_grads(loss, "h"))(X)
    same(named["h"], 2 * net(X))
    value.backward()
    same(net.weight.grad, grad(lambda w: F.linear(X, w, net.bias).square().sum())(net.weight.detach()))


@pytest.mark.slow
def test_trees_and_integers_and_repeated_names():
    def f(x):
        h = checkpoint_name({"a": x.exp(), "i": x.argmax(), "s": 3}, "t")
        for _ in range(3):
            x = checkpoint_name(x * 2, "x")
        return (h["a"] + x).sum()

    same(compiled(capture_grads(remat(f), ("t", "x")))(X), capture_grads(f, ("t", "x"))(X))


@pytest.mark.slow
def test_captures_in_captures():
    def outer(wrap):
        inner = capture(wrap(lambda x: checkpoint_name(x * 2, "a").exp()), "a")
        scored = capture_grads(wrap(lambda x: (checkpoint_name(x.sin(), "a") * x).sum()), "a", argnums=0)

        def f(x):
            y, named = inner(x)
            value, gradient, grads = scored(y)
            return checkpoint_name(y + named["a"] + gradient * grads["a"], "b").sum() + value

        return wrap(f)

    same(
        compiled(capture_grads(outer(remat), ["a", "b"]))(X),
        capture_grads(outer(WRAPS["none"]), ["a", "b"])(X),
    )


POLICIES = {"everything": save_everything, "names": save_names("h"), "budget": checkpoint_policy(budget=0.5)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_nothing_more_is_kept_or_run_again(policy):
    loss = loss_of(lambda f: remat(f, policy=policy), ("g", "h"))
    facts = []
    for f in (lambda w, x: (loss(w, x),), capture(loss, "g")):
        torch._dynamo.reset()
        graphs = Graphs(f)
        w = W.clone().requires_grad_()
        for _ in range(2):
            graphs(w, X)[0].backward()
        facts.append((graphs.frames, graphs.saved_bytes, graphs.backward["tanh"], graphs.both["mm"]))
    if policy is save_everything:
        # No region at all: the compiler may keep what it hands out anyway.
        assert facts[1][2:] == facts[0][2:]
    else:
        assert facts[0] == facts[1]


CAPTURED = {
    "under grad": lambda loss: value_and_grad(capture(loss, "h"), has_aux=True),
    "gradients": lambda loss: capture_grads(loss, NAMES),
    "backward": lambda loss: capture(loss, NAMES),
}


@pytest.mark.parametrize("how", sparse(CAPTURED))
def test_recomputation_survives(how):
    w = W.clone().requires_grad_(how == "backward")
    assert_recomputed(CAPTURED[how](loss_of(remat)), w, X, ops=["tanh"])


@pytest.mark.slow
def test_random_numbers_are_those_of_the_function():
    f = remat(lambda x: checkpoint_name(F.dropout(x, 0.5), "h").sum())
    torch.manual_seed(0)
    want = compiled(value_and_grad(f))(X)[0]
    torch.manual_seed(0)
    value, named = compiled(capture_grads(f, "h"))(X)
    same(value, want, 0.0)
    same(named["h"], torch.ones_like(X), 0.0)
    torch.manual_seed(0)
    (value, named), _ = compiled(lambda x: value_and_grad(capture(f, "h"), has_aux=True)(x))(X)
    same(named["h"].sum(), value)


@pytest.mark.slow
def test_through_inductor():
    equal(
        vmap(capture_grads(loss_of(remat), NAMES), (None, 0)),
        W,
        X[:, None],
        backend="inductor",
        tolerance=1e-7,
    )


def scanned(x):
    return scan_remat(lambda c, row: (checkpoint_name(c + row, "c"), None), x[0], x)[0].sum()


@remat
def torch_(x):
    return checkpoint(lambda x: checkpoint_name(x.sin(), "c"), x, use_reentrant=False).sum()


REFUSED = {
    "unknown": (remat(lambda x: checkpoint_name(x, "hidden").sum()), "'hidden'; did you mean"),
    "none": (torch.sum, "gave none at all"),
    "scan": (scanned, "among the ys of the body"),
    "torch": (torch_, "inside an operator of torch's"),
}


@pytest.mark.parametrize(("f", "message"), REFUSED.values(), ids=REFUSED)
def test_errors(f, message):
    with pytest.raises(exc.Unsupported) as refused:
        compiled(capture_grads(f, "hiden" if "hidden" in message else "c"))(X)
    text = str(refused.value).replace("\\'", "'")
    # Until 2.12 an exception that leaves an operator's graph may be a side effect to Dynamo.
    old = TORCH < (2, 13) and f in (scanned, torch_)
    assert message in text or (old and "Unsafe side effect" in text)
    if f is not torch_:  # torch.func refuses torch.utils.checkpoint
        # What is not asked for may stand anywhere.
        equal(capture_grads(f, []), X)


def test_no_scalar():
    with pytest.raises(exc.Unsupported, match="Expected the function to return a scalar tensor"):
        compiled(capture_grads(lambda x: checkpoint_name(x, "h"), "h"))(X)


def test_what_dynamo_refuses_in_a_region_names_it():
    region = remat(lambda x: checkpoint_name(x.sin() if x.sum() > 0 else x, "h").sum(), name="my block")
    with pytest.raises(exc.Unsupported) as refused:
        # Of an operator around one whose graph is still empty 2.13 cannot print the error.
        compiled(capture_grads(lambda x: region(x.cos()) * 2, "h"))(X)
    assert "region 'my block'" in str(refused.value)
    assert "write torch.where for if, return values, draw outside" in str(refused.value)


@pytest.mark.slow
def test_a_broken_graph_says_so():
    def broken(x):
        y = checkpoint_name(x.sin(), "h")
        torch._dynamo.graph_break()
        return y.sum()

    for f in (broken, remat(broken)):
        torch._dynamo.reset()
        with pytest.raises(RematError, match="broke the graph inside the function that is looked into"):
            torch.compile(capture_grads(f, "h"), backend="aot_eager")(X)
        same(capture_grads(f, "h")(X), capture_grads(lambda x: checkpoint_name(x.sin(), "h").sum(), "h")(X))


def test_a_failure_leaves_no_level():
    policy = checkpoint_policy(lambda info: 1 / 0)  # pyright: ignore
    region = remat(lambda x: checkpoint_name(x.sin(), "h").exp(), policy=policy)
    with pytest.raises(exc.BackendCompilerFailed, match="division by zero"):
        compiled(vmap(grad(lambda x: capture_grads(lambda x: region(x).sum(), "h")(x)[0])))(X)
    assert not in_transform()
    checkpoint(torch.sin, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
