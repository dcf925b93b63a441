"""Regions inside regions, and which policy wins."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from remat import remat, scan_remat
from remat.policies import save_everything, save_matmuls, save_nothing, save_ops
from tests.compiled import Graphs, dots
from tests.helpers import FEW, POLICIES, OpCounter, crossed, rand, same

aten = torch.ops.aten
W = rand(4, 4)


def stack(depth, wrap):
    """`wrap` around the same function `depth` times."""
    fn = lambda x, w: torch.tanh(torch.sin(x @ w) @ w)  # noqa: E731
    for _ in range(depth):
        fn = wrap(fn)
    return fn


RUNS = {
    "backward": lambda fn, x, w: torch.autograd.grad(fn(x, w).square().sum(), (x, w)),
    "grad": lambda fn, x, w: grad(lambda x, w: fn(x, w).square().sum(), (0, 1))(x.detach(), w.detach()),
    "vmap_grad": lambda fn, x, w: vmap(grad(lambda x, w: fn(x, w).square().sum(), (0, 1)), (0, None))(
        torch.stack([x, 2 * x]).detach(), w.detach()
    ),
    "grad_grad": lambda fn, x, w: grad(lambda x: grad(lambda x: fn(x, w).square().sum())(x).square().sum())(
        x.detach()
    ),
}


COMBINED = pytest.mark.parametrize(
    ("run", "outer", "inner"), crossed(RUNS, FEW, ["nothing", "matmuls", "everything"], every=4)
)


@COMBINED
def test_a_view_of_a_weight_inside(run, outer, inner):
    """Autograd saves the transposed weight: a look at a tensor that the region around is to hand over."""
    x, w = rand(2, 3).requires_grad_(), rand(3, 3).requires_grad_()
    layer = lambda x, w: F.linear(x.sin(), w).sin()  # noqa: E731
    inside = remat(layer, policy=POLICIES[inner])
    region = remat(lambda x, w: inside(x, w).cos(), policy=POLICIES[outer])
    expected = RUNS[run](lambda x, w: layer(x, w).cos(), x, w)
    for _ in range(3):
        same(RUNS[run](region, x, w), expected)


def test_a_view_of_a_weight_under_hooks_of_the_users():
    x, w = rand(2, 3).requires_grad_(), rand(3, 3).requires_grad_()
    layer = lambda x, w: F.linear(x.sin(), w).sin()  # noqa: E731
    with torch.autograd.graph.save_on_cpu():
        out = remat(layer, policy=save_matmuls)(x, w).square().sum()
    same(torch.autograd.grad(out, (x, w)), RUNS["backward"](layer, x, w))


def test_many_calls_in_a_row():
    """Python gives a new tensor the address of one that is gone: it must not be taken for that one."""
    x, w = rand(2, 3).requires_grad_(), rand(3, 3).requires_grad_()
    inside = remat(stack(0, None), policy=save_everything)
    region = remat(lambda x, w: inside(x.sin(), w).exp(), policy=POLICIES["unbatched"])
    expected = RUNS["grad"](lambda x, w: stack(0, None)(x.sin(), w).exp(), x, w)
    for _ in range(100):
        same(RUNS["grad"](region, *[rand(*t.shape).requires_grad_() for t in (x, w)]), expected)


def backward_counts(fn, *args):
    out = fn(*[a.detach().requires_grad_() for a in args]).sum()
    with OpCounter() as ops:
        out.backward()
    return ops


@pytest.mark.parametrize(
    ("outer", "inner", "recomputed"),
    [
        (save_nothing, save_nothing, 1),
        (save_everything, save_nothing, 0),
        (save_nothing, save_everything, 0),
        (save_ops(aten.exp), save_nothing, 0),
        (save_nothing, save_ops(aten.exp), 0),
    ],
)
def test_what_any_enclosing_region_saves_is_not_recomputed(outer, inner, recomputed):
    """`exp` is read by its own derivative: how often it runs again tells who kept it."""
    inside = remat(lambda x: x.exp().sin(), policy=inner)
    ops = backward_counts(remat(lambda x: inside(x * 2), policy=outer), rand(3))
    assert ops["exp"] == recomputed


def test_scan_in_a_region_in_a_region_by_capturing():
    ws, x = rand(2, 4, 4), rand(3, 4)

    def scanned(w, x):
        body = lambda h, _: (torch.tanh(h @ w), None)  # noqa: E731
        return scan_remat(body, x, length=1, checkpoints="sqrt", policy=save_ops(aten.tanh))[0]

    inner = lambda w, x: remat(lambda x: scanned(w, x), policy=save_matmuls)(x)  # noqa: E731
    region = remat(lambda w, x: inner(w, x).sum(), policy=save_matmuls)
    expected = vmap(lambda w: grad(lambda x: torch.tanh(x @ w).sum())(x))(ws)
    for _ in range(5):  # memory that nobody has written may hold the right numbers
        same(vmap(lambda w: grad(region, 1)(w, x))(ws), expected)


WAYS = {
    "backward": lambda fn, *args: torch.autograd.grad(fn(*args).sum(), args),
    "grad": lambda fn, *args: grad(lambda *args: fn(*args).sum(), (0, 1, 2))(*[a.detach() for a in args]),
    "vmap_grad": lambda fn, x, *ws: vmap(
        grad(lambda x, *ws: fn(x, *ws).sum(), (0, 1, 2)), (0, None, None)
    )(x.detach()[None], *[w.detach() for w in ws]),
}  # fmt: skip


def blocks(policies, inner):
    """Two calls of a block of two products, in regions with these policies, from the innermost."""
    fn = remat(lambda x, v, w: torch.tanh(torch.sin(x @ v) @ w), policy=inner)
    both = lambda x, v, w: fn(fn(x.cos(), v, w).exp(), w, v).sin()  # noqa: E731
    for policy in policies:
        both = remat(both, policy=policy)
    return both


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_policy_inside_keeps_does_not_run_again_for_any_region_around(way, depth):
    args = [rand(64, 8).requires_grad_(), rand(8, 8).requires_grad_(), rand(8, 8).requires_grad_()]
    region = blocks([save_nothing] * depth, save_matmuls)
    for _ in range(2):
        with OpCounter() as ops:
            WAYS[way](region, *args)
        assert ops.dots == 12


@pytest.mark.parametrize(
    ("way", "inner", "depth"), crossed(["backward", "grad"], [save_matmuls, save_everything], [1, 2])
)
def test_what_a_policy_inside_keeps_does_not_run_again_in_graphs(way, inner, depth):
    args = [rand(64, 8).requires_grad_(), rand(8, 8).requires_grad_(), rand(8, 8).requires_grad_()]
    region = blocks([save_nothing] * depth, inner)
    graphs = Graphs(lambda *args: WAYS[way](region, *args) if way == "grad" else region(*args))
    out = graphs(*args)
    got = out if way == "grad" else torch.autograd.grad(out.sum(), args)
    assert dots(graphs.both) == 12 if way == "backward" else dots(graphs.forward) == 12
    same(got, WAYS["backward"](blocks([], save_nothing), *args))


@pytest.mark.parametrize("outermost", [lambda f: f, remat], ids=["two", "three"])
@pytest.mark.parametrize("innermost", ["nothing", "everything"])
def test_every_call_runs_as_many_ops_as_the_first(innermost, outermost):
    """What a region keeps for one inside is kept in later calls. Its own backward may read none of it."""
    inner = remat(torch.exp, policy=POLICIES[innermost])
    region = outermost(remat(lambda t: inner(t.sin()) + 1, policy=POLICIES["everything"]))
    x, counts = rand(4, 8).requires_grad_(), []
    for _ in range(4):
        with OpCounter() as counter:
            region(x * 1).sum().backward()
        counts.append((counter["sin"], counter["exp"]))
    assert counts == [(1, 1)] * 4


# A region inside makes a view of what is seen nowhere else. The one around returns overlapping views of it.
VIEWS = {
    "expanded": lambda x: x.sum(0, keepdim=True).sin().expand_as(x),
    "part": lambda x: x.sin()[:2],
    "windows": lambda x: x.sin().reshape(-1).unfold(0, 4, 2),
    "transposed": lambda x: x.sin().t(),
    "complex": lambda x: torch.complex(x.sin(), x.cos())[:2],
}
OVERLAPS = {
    "twice": lambda v: (v, v),
    "alike": lambda v: (v, v.view_as(v)),
    "rows": lambda v: (v[:2], v[1:3]),
    "columns": lambda v: (v[..., 0], v[..., :2], v[..., 1:]),
    "reals": lambda v: (v[..., :2], (torch.view_as_real(v) if v.is_complex() else v)[..., 1:], v[..., 1:]),
}


@pytest.mark.parametrize(("inner", "outer"), list(zip(VIEWS, OVERLAPS, strict=True)))
def test_overlapping_views_of_what_a_region_inside_made(inner, outer):
    def loss(wrap):
        made = wrap(VIEWS[inner])
        seen = wrap(lambda x: OVERLAPS[outer](made(x)))
        return lambda x: sum((k * t).abs().square().sum() for k, t in enumerate(seen(x), 1))

    x = rand(3, 4)
    for transform in (grad, lambda f: grad(lambda x: grad(f)(x).square().sum())):
        same(transform(loss(remat))(x), transform(loss(lambda f: f))(x))
    rows = torch.stack([x, 2 * x])
    same(vmap(grad(loss(remat)))(rows), vmap(grad(loss(lambda f: f)))(rows))


@pytest.mark.parametrize("read", [False, True])
def test_a_decision_beside_an_operand_that_is_copied_first(read):
    """The inner operand is an expanded tensor, copied in the forward alone. What the outer one keeps is
    the inner one's too, in its recomputation as well."""

    def loss(x, wrap):
        def block(x):
            other = (x @ W).tanh()

            def inner(moving, still):
                chosen = torch.where(still > 0, still, still.sin())
                return chosen * moving if read else chosen

            wide = x.sum(0, keepdim=True).sin().expand_as(other)
            return grad(lambda moving: wrap(inner)(moving, other).sum())(wide) + x

        return wrap(block)(x).sum()

    x = rand(3, 4)
    for run in (
        lambda fn: torch.autograd.grad(fn(given := x.clone().requires_grad_()), given)[0],
        lambda fn: grad(fn)(x),
    ):
        same(run(lambda x: loss(x, remat)), run(lambda x: loss(x, lambda fn: fn)))
