"""What depends on nothing that a region is given is computed once in a graph, and truly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad

from remat import remat, save_matmuls, save_nothing, save_ops
from tests.compiled import Graphs, compiled
from tests.helpers import gradients, rand, same
from tests.rotary import Alone, angles, block, chain, inputs, rotate


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "dynamic"), [(save_nothing, False), (save_matmuls, True)])
def test_a_backward_evaluates_no_sines(policy, dynamic):
    """Whether the length of the tables is a number or a symbol."""
    w, x = inputs()
    graphs = Graphs(chain(remat(block, policy=policy)), dynamic=dynamic)
    out = graphs(w, x)
    same(gradients(out, [w]), gradients(chain(block)(w, x), [w]))
    assert (graphs.forward["cos"], graphs.forward["sin"]) == (1, 1)
    assert not graphs.backward["cos"] and not graphs.backward["sin"] and not graphs.backward["arange"]


@pytest.mark.slow
def test_tables_are_kept_once_and_counted():
    w, x = inputs()
    saved = []
    for depth in (2, 3):
        graphs = Graphs(chain(remat(block), depth))
        graphs(w, x).backward()
        saved.append(graphs.saved_bytes)
    # One more region keeps one more input, and no table: that is 6 x 2 doubles.
    assert saved[1] - saved[0] == 8 * x.numel()
    barred = Graphs(chain(remat(block, policy=Alone())))
    barred(w, x).backward()
    assert saved[1] - barred.saved_bytes == 2 * 8 * 6 * 2


def test_a_policy_may_bar_it():
    w, x = inputs()
    graphs = Graphs(chain(remat(block, policy=Alone() | save_matmuls)))
    same(gradients(graphs(w, x), [w]), gradients(chain(block)(w, x), [w]))
    assert graphs.backward["cos"] and not graphs.forward["once"]


@pytest.mark.slow
def test_one_graph_has_one_table():
    w, x = inputs()
    graphs = Graphs(grad(chain(remat(block))))
    same(graphs(w, x), grad(chain(block))(w, x))
    assert graphs.forward["once"] == 4  # rates, angles, cosines, sines


@pytest.mark.slow
def test_tables_of_other_numbers_are_others():
    w, x = inputs()

    def run(wrap):
        def loss(w, x):
            for base in (100.0, 50.0):
                x = wrap(lambda w, x, base=base: rotate(x @ w, base))(w, x)
            return x.square().sum()

        return loss

    graphs = Graphs(run(remat))
    same(gradients(graphs(w, x), [w]), gradients(run(lambda f: f)(w, x), [w]))
    assert graphs.forward["cos"] == 2 and not graphs.backward["cos"]


@pytest.mark.slow
def test_writes_to_a_table_stay_where_they_are():
    def written(w: Tensor, x: Tensor) -> Tensor:
        table, other = angles(x).cos(), angles(x).cos()
        table[0] = 3.0
        table.mul_(2.0)
        y = x @ w
        return torch.cat([y[..., :2] * table, y[..., 2:] * other], -1).tanh()

    def loss(wrap):
        return lambda w, x: wrap(block)(w, wrap(written)(w, wrap(written)(w, x))).square().sum()

    w, x = inputs()
    same(gradients(compiled(loss(remat))(w, x), [w]), gradients(loss(lambda f: f)(w, x), [w]))


@pytest.mark.slow
def test_results_that_are_tables_are_the_callers_own():
    region = remat(lambda w, x: (rotate(x @ w), angles(x).cos()))

    def run(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y, first = region(w, x)
        z, second = region(w, y)
        return z.square().sum(), first, second

    w, x = inputs()
    out, first, second = compiled(run, "inductor")(w, x)
    first.fill_(7.0)
    same(second, angles(x).cos())
    same(gradients(out, [w]), gradients(chain(lambda w, x: rotate(x @ w), 2)(w, x), [w]))


@pytest.mark.slow
def test_what_is_large_or_drawn_is_no_table():
    large = remat(lambda w, x: x @ w + torch.arange(4000, dtype=x.dtype).cos()[:4] * (x @ w).sin())
    drawn = remat(lambda w, x: (x @ w) * torch.rand(6, 4, dtype=x.dtype).cos())
    w, x = inputs()
    for region in (large, drawn):
        graphs = Graphs(chain(region, 2))
        graphs(w, x).backward()
        assert not graphs.forward["once"]
    loss = chain(large, 2)
    same(gradients(compiled(loss)(w, x), [w]), gradients(loss(w, x), [w]))


@pytest.mark.slow
def test_nested_regions_and_kept_tables():
    w, x = inputs()
    inner = remat(block)
    outer = remat(lambda w, x: inner(w, rotate(inner(w, x))), policy=save_matmuls)
    kept = remat(block, policy=save_ops(torch.ops.aten.cos))
    plain = chain(lambda w, x: block(w, rotate(block(w, x))), 2)
    same(gradients(compiled(chain(outer, 2))(w, x), [w]), gradients(plain(w, x), [w]))
    same(gradients(compiled(chain(kept, 2))(w, x), [w]), gradients(chain(block, 2)(w, x), [w]))


# -- independent chains --------------------------------------------------------------------------------


def two(region):
    one = chain(region, 2)
    return lambda w, x, y: one(w, x) + one(w, y).cos()


def test_recomputations_of_independent_chains_follow_each_other():
    from tests.compile.inside import compiled_for_graphs

    w, x = rand(4, 4), rand(2, 4)
    y = rand(2, 4, seed=1)
    region = remat(lambda w, x: torch.tanh(x @ w).sin(), policy=save_nothing)
    seen: list[torch.fx.GraphModule] = []
    got = compiled_for_graphs(grad(two(region)), lambda _: None, seen.append)(w, x, y)
    same(got, grad(two(lambda w, x: torch.tanh(x @ w).sin()))(w, x, y))
    (graph,) = (module.graph for module in seen)
    behind: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in graph.nodes:
        behind[node] = set().union(*[behind[i] | {i} for i in node.all_input_nodes])
    calls: dict[str, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if key := node.meta.get("custom", {}).get("remat_recomputed"):
            calls.setdefault(key, []).append(node)
    assert len(calls) == 4
    before: set[torch.fx.Node] = set()
    for nodes in calls.values():
        fences = [n for n in nodes if n.target is torch.ops.remat.fence.default]
        # Every recomputation waits for something of the one before it, in this order.
        assert fences and (not before or all(before & behind[n] for n in fences))
        before = {n for m in nodes for n in graph.nodes if m in behind[n]}
