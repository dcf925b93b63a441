"""capture and capture_grads: named intermediates and their gradients as results, under every transform."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from remat import (
    RematError,
    capture,
    capture_grads,
    checkpoint_name,
    checkpoint_policy,
    remat,
    save_matmuls,
    save_names,
    saved_residuals,
    scan_remat,
)
from remat.transforms import value_and_grad
from tests.helpers import LiveBytes, OpCounter, crossed, jvp, rand, same, vjp

WRAPS = {
    "none": lambda f: f,
    "nothing": remat,
    "names": lambda f: remat(f, policy=save_names("h")),
    "matmuls": lambda f: remat(f, policy=save_matmuls),
    "nested": lambda f: remat(remat(f, policy=save_names("h"))),
    "budget": lambda f: remat(f, policy=checkpoint_policy(budget=1.0)),
    "nested names": lambda f: remat(remat(f), policy=save_names("h")),
}
SOME = ["none", "matmuls", "budget", "nested names"]
wraps = pytest.mark.parametrize("wrap", [WRAPS[name] for name in SOME], ids=SOME)
X, W = rand(4, 3), rand(3, 3)


def model(wrap, offsets=None):
    """Two blocks that name a value each, and a name outside of them; `offsets` are added to what is named."""
    given = iter(offsets or ())

    def named(value, name):
        return checkpoint_name(value, name) if offsets is None else value + next(given)

    def block(x, w):
        h = named(torch.tanh(x @ w), "h")
        return h.sin() @ w

    def loss(x, w):
        for _ in range(2):
            x = wrap(block)(x, w)
        return named(x.exp(), "out").square().sum()

    return loss


def by_hand(x, w):
    """Values and gradients by explicit offsets, without names and regions."""
    zeros = [torch.zeros_like(x) for _ in range(3)]
    grads = grad(lambda offsets: model(WRAPS["none"], offsets)(x, w))(zeros)
    return {"h": grads[:2], "out": grads[2]}


RUNS = {
    "plain": lambda f: f(X, W),
    "vmap": lambda f: vmap(f, (0, None))(X, W),
    "vmap both": lambda f: vmap(f)(rand(2, 4, 3), rand(2, 3, 3)),
    "grad": lambda f: grad(lambda w: pick(f(X, w)))(W),
    "vmap grad": lambda f: vmap(grad(lambda w, x: pick(f(x, w))), (None, 0))(W, X),
    "grad vmap": lambda f: grad(lambda w: pick(vmap(f, (0, None))(X, w)))(W),
    "jvp": lambda f: jvp(lambda w: f(X, w), (W,), (W.cos(),)),
    "grad grad": lambda f: grad(lambda w: grad(lambda w: pick(f(X, w)))(w).square().sum())(W),
    "hessian": lambda f: hessian(lambda w: pick(f(X, w)))(W),
    "jacrev": lambda f: jacrev(lambda w: f(X, w)[1]["h"][1])(W),
    "vjp": lambda f: vjp(lambda w: f(X, w)[1]["out"], W)[1](torch.ones_like(X))[0],
    "value_and_grad": lambda f: value_and_grad(lambda w: pick(f(X, w)))(W),
}


def pick(pair):
    """A scalar that reads all that was captured."""
    value, named = pair
    return value.sum() + named["h"][0].square().sum() + named["h"][1].cos().sum() + named["out"].sin().sum()


@pytest.mark.parametrize(
    ("transform", "run", "wrap"), crossed([capture, capture_grads], RUNS, WRAPS, every=6)
)
def test_every_transform_gives_what_it_gives_without_regions(transform, run, wrap):
    expected = RUNS[run](transform(model(WRAPS["none"]), ["h", "out"]))
    same(RUNS[run](transform(model(WRAPS[wrap]), ["h", "out"])), expected)


@pytest.mark.parametrize(("wrap", "mode"), crossed(WRAPS.values(), ["plain", "vmap", "inner vmap"]))
def test_values_are_those_by_hand_and_gradients_those_of_offsets(wrap, mode):
    f = model(wrap)
    if mode == "vmap":
        expected = vmap(by_hand, (0, None))(X, W)
        same(vmap(capture_grads(f, ["h", "out"]), (0, None))(X, W)[1], expected)
    elif mode == "inner vmap":
        expected = vmap(by_hand, (0, None))(X, W)
        got = capture_grads(lambda x, w: vmap(f, (0, None))(x, w).sum(), ["h", "out"])(X, W)[1]
        same(got, expected)
    else:
        value, named = capture(f, ["h", "out"])(X, W)
        hidden = torch.tanh(X @ W)
        second = torch.tanh(hidden.sin() @ W @ W)
        same(named, {"h": [hidden, second], "out": (second.sin() @ W).exp()}, 0.0)
        same(value, named["out"].square().sum(), 0.0)
        value, grads, named = capture_grads(f, ["h", "out"], argnums=(0, 1))(X, W)
        same(named, by_hand(X, W))
        same((value, grads), (f(X, W), grad(f, argnums=(0, 1))(X, W)))


@wraps
def test_a_name_inside_a_transform_of_the_function(wrap):
    inner = capture(lambda w: grad(lambda w: model(wrap)(X, w))(w), ["h", "out"])
    same(
        inner(W), (grad(lambda w: model(WRAPS["none"])(X, w))(W), capture(model(wrap), ["h", "out"])(X, W)[1])
    )
    batched = capture(lambda x: vmap(wrap(lambda row: checkpoint_name(row * 2, "row").sum()))(x), "row")
    same(batched(X)[1], {"row": X * 2})
    # The same for every example: the batch is in front all the same.
    constant = capture(lambda x: vmap(lambda row: checkpoint_name(W.sum(), "c") * row)(x), "c")
    same(constant(X)[1], {"c": W.sum().expand(4)})


@pytest.mark.parametrize("wrap", [WRAPS["nothing"], WRAPS["matmuls"]])
def test_nothing_more_is_kept_or_run_again(wrap):
    f = wrap(lambda x, w: checkpoint_name(torch.tanh(x @ w), "h").sin() @ w)
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

    def kept(g):
        return [(r.why, r.op, r.bytes) for r in saved_residuals(g, x, w)]

    assert kept(lambda x, w: capture(f, "h")(x, w)[0]) == kept(f)
    counts = []
    for g in (f, lambda x, w: capture(f, "h")(x, w)[0]):
        out = g(x, w).sum()
        with OpCounter() as ops:
            out.backward()
        counts.append((ops["tanh"], ops.dots))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("wrap", "under"),
    crossed(WRAPS.values(), ["backward", "grad", "vmap grad", "jacrev", "jvp grad"], every=4),
)
def test_between_forward_and_backward_only_what_is_named_lives_besides(wrap, under):
    """Of the bytes alive when the forward is over, a capture's are those of its results and no other."""
    f = model(wrap)

    def step(x, w, captures):
        with LiveBytes() as live:
            if captures:
                value, named = capture(f, ["h", "out"])(x, w)
                del named
            else:
                value = f(x, w)
            found.append(live.bytes)
        return value

    runs = {
        "backward": lambda run: run(W.clone().requires_grad_()).backward(),
        "grad": lambda run: grad(run)(W),
        "vmap grad": lambda run: vmap(grad(run))(torch.stack([W, 2 * W])),
        "jacrev": lambda run: jacrev(run)(W),
        "jvp grad": lambda run: jvp(grad(run), (W,), (W.cos(),)),
    }
    kept = []
    for captures in (False, True):
        # A first call may plan, search and learn.
        for _ in range(2):
            found: list[int] = []
            runs[under](lambda w, captures=captures: step(X, w, captures))
        kept.append(found)
    # (Forward mode around a capture's region takes the primitive, which keeps no tangent.)
    assert (kept[1] <= kept[0] if under == "jvp grad" else kept[0] == kept[1]) and kept[0]


@pytest.mark.parametrize("mode", ["plain", "func"])
def test_nothing_outlives_the_results(mode):
    f = remat(lambda x, w: checkpoint_name(torch.tanh(x @ w), "h").sin() @ w)

    def step(w):
        value, named = capture(f, "h")(X, w)
        return value.sum() + named["h"].sum()

    w = W.clone().requires_grad_()
    with LiveBytes() as live:
        (step(w).backward() if mode == "plain" else grad(step)(W))
        capture_grads(lambda w: step(w), "h")(W)
        w.grad = None
        # A graph that is dropped without a backward: no cycle through autograd may hold it.
        vmap(capture(f, "h"), (0, None))(X, w)
        assert live.bytes == 0


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda *args: checkpoint(f, *args, use_reentrant=False)])
def test_recomputations_are_not_collected(wrap):
    def step(w):
        wrap(lambda w: checkpoint_name(torch.tanh(X @ w), "h").sin())(w).sum().backward()

    w = W.clone().requires_grad_()
    _, named = capture(step, "h")(w)
    same(named["h"], torch.tanh(X @ W), 0.0)
    assert w.grad is not None


def test_offsets_change_no_bit():
    special = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), 1e-310])
    seen = []

    def f(x):
        seen.append(checkpoint_name(x, "h"))
        return seen[-1].sum()

    capture_grads(f, "h")(special)
    assert torch.equal(seen[0].view(torch.int32), special.view(torch.int32))


@pytest.mark.parametrize("mode", ["plain", "func"])
def test_random_numbers_are_those_of_the_function(mode):
    f = remat(lambda x: checkpoint_name(F.dropout(x, 0.5), "h").sum())
    drawn = []
    for g in (f, lambda x: capture(f, "h")(x)[0], lambda x: capture_grads(f, "h")(x)[0]):
        torch.manual_seed(0)
        drawn.append(g(X) if mode == "plain" else vmap(g, randomness="different")(X))
        drawn[-1] = (drawn[-1], torch.rand(()))
    same(drawn[1], drawn[0], 0.0)
    same(drawn[2], drawn[0], 0.0)


def test_trees_and_integers_and_repeated_names():
    def f(x):
        h = checkpoint_name({"a": x.exp(), "i": x.argmax(), "s": 3}, "t")
        for _ in range(3):
            x = checkpoint_name(x * 2, "x")
        return (h["a"] + x).sum()

    for wrap in (WRAPS["none"], remat):
        named = capture(wrap(f), ("t", "x"))(X)[1]
        same(named, {"t": {"a": X.exp(), "i": X.argmax(), "s": 3}, "x": [X * 2, X * 4, X * 8]}, 0.0)
        grads = capture_grads(wrap(f), ("t", "x"))(X)[1]
        ones = torch.ones_like(X)
        assert grads["t"]["i"] is None and grads["t"]["s"] == 3
        same(grads["x"], [4 * ones, 2 * ones, ones])


def test_what_the_result_does_not_depend_on_has_gradient_zero():
    f = remat(lambda x: (checkpoint_name(x.exp(), "unused"), x.sum())[1])
    same(capture_grads(f, "unused")(X)[1], {"unused": torch.zeros_like(X)})
    same(vmap(capture_grads(f, "unused"))(X)[1], {"unused": torch.zeros_like(X)})


def test_gradients_for_training_in_one_backward():
    """Parameters by closure, activations by name; a graph is kept where somebody may differentiate it."""
    net = nn.Linear(3, 3).double()

    def loss(x):
        return checkpoint_name(remat(net)(x), "h").square().sum()

    value, named = capture_grads(loss, "h")(X)
    same(named["h"], 2 * net(X))
    value.backward()
    assert net.weight.grad is not None and named["h"].requires_grad
    with torch.no_grad():
        value, named = capture_grads(loss, "h")(X)
    assert not value.requires_grad and not named["h"].requires_grad
    same(named["h"], 2 * net(X).detach())


def test_nested_captures():
    inner = capture(remat(lambda x: checkpoint_name(x * 2, "a").exp()), "a")

    def outer(x):
        y, named = inner(x)
        return checkpoint_name(y + named["a"], "b").sum()

    same(capture(outer, ["a", "b"])(X)[1], {"a": X * 2, "b": (X * 2).exp() + X * 2})
    same(capture_grads(outer, ["a", "b"])(X)[1], {"a": (X * 2).exp() + 1, "b": torch.ones_like(X)})
    same(vmap(capture(remat(outer), ["a", "b"]))(X)[1], {"a": X * 2, "b": (X * 2).exp() + X * 2})


@pytest.mark.parametrize("transform", [capture, capture_grads])
def test_errors(transform):
    f = remat(lambda x: checkpoint_name(x, "hidden").sum())
    with pytest.raises(RematError, match=r"nothing the name 'hiden'.*'hidden'; did you mean 'hidden'\?"):
        transform(f, "hiden")(X)
    with pytest.raises(RematError, match="gave none at all"):
        transform(torch.sum, "h")(X)
    with pytest.raises(TypeError, match="must be strings"):
        transform(f, [1])
    scanned = lambda x: scan_remat(lambda c, r: (checkpoint_name(c + r, "c"), None), x[0], x)[0].sum()  # noqa: E731
    with pytest.raises(RematError, match="among the ys"):
        transform(scanned, "c")(X)
    with pytest.raises(ZeroDivisionError):
        transform(lambda x: checkpoint_name(x, "h") / (1 // 0), "h")(X)
    # A failure leaves no session behind.
    assert transform(f, "hidden")(X)[1].keys() == {"hidden"}
    with pytest.raises(RuntimeError, match="scalar"):
        capture_grads(lambda x: checkpoint_name(x, "h"), "h")(X)


@pytest.mark.parametrize("transform", [capture, capture_grads])
def test_compiled_code_is_refused(transform):
    compiled = torch.compile(remat(lambda x: checkpoint_name(x * 2, "h").exp().sum()), backend="aot_eager")
    with pytest.raises(
        RematError, match=r"compile the capture instead, torch.compile\(capture\(fn, names\)\)"
    ):
        transform(compiled, "h")(X)


@pytest.mark.parametrize(
    ("transform", "around", "wrap"),
    crossed(
        [capture, capture_grads], [lambda f: f, vmap], [remat, WRAPS["matmuls"], lambda f: remat(remat(f))]
    ),
)
def test_a_region_that_opens_levels_itself(transform, around, wrap):
    """An offset comes into the region without the levels that the name is given under."""

    def loss(wrap):
        return wrap(lambda x: vmap(grad(lambda row: checkpoint_name(row.sin(), "row").exp().sum()))(x).sum())

    x = rand(2, 4, 3) if around is vmap else X
    same(around(transform(loss(wrap), "row"))(x), around(transform(loss(WRAPS["none"]), "row"))(x))


BUDGET = checkpoint_policy(budget=0.5)


@pytest.mark.parametrize("policy", [BUDGET, BUDGET | save_names("q")], ids=["budget", "or names"])
@pytest.mark.parametrize("first", ["plain", "capture", "capture_grads"])
def test_a_plan_is_the_same_whatever_call_comes_first(policy, first):
    """It is made by running the function on tensors without data, and knows nothing of offsets."""

    def loss(wrap):
        def block(x, w):
            x = checkpoint_name(checkpoint_name(torch.tanh(x @ w), "q").exp().sin(), "h")
            return (x.sin() @ w + x) @ w

        region = wrap(block)
        return lambda x, w: region(region(x, w), w).exp().sum()

    planned, plain = loss(lambda f: remat(f, policy=policy)), loss(WRAPS["none"])
    w = W.clone().requires_grad_()
    runs = {
        "plain": lambda x, w: (planned(x, w),),
        "capture": capture(planned, "h"),
        "capture_grads": capture_grads(planned, "h"),
    }
    counts = []
    for name in (first, *runs):
        value, *_ = runs[name](X, w)
        with OpCounter() as ops:
            value.backward()
        counts.append({"dots": ops.dots} | {op: ops[op] for op in ("tanh", "exp", "sin")})
    assert counts[1:] == counts[:1] * 3
    for transform in (capture, capture_grads):
        same(transform(planned, "h")(X, w), transform(plain, "h")(X, w))
        same(vmap(transform(planned, "h"), (0, None))(X, W), vmap(transform(plain, "h"), (0, None))(X, W))


@pytest.mark.parametrize("mode", ["plain", "func"])
def test_policies_are_not_asked_about_offsets(mode):
    asked = []
    policy = checkpoint_policy(lambda info: asked.append(str(info.op)) or False)
    f = remat(lambda w: checkpoint_name(torch.tanh(X @ w), "h").sin().sum(), policy=policy)
    for g in (value_and_grad(f), capture_grads(f, "h", argnums=0)):
        (g if mode == "plain" else vmap(g))(W if mode == "plain" else W[None])
    half = len(asked) // 2
    assert asked[:half] == asked[half:] != []
