"""Regions inside regions, and which policy wins."""

import pytest
import torch
from torch.func import grad, vmap

from remat import remat
from remat.policies import save_everything, save_matmuls, save_nothing, save_ops
from tests.compiled import Graphs, dots
from tests.helpers import POLICIES, OpCounter, crossed, rand, same

aten = torch.ops.aten
W = rand(4, 4)


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
