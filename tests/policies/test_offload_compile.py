"""Offloaded values in compiled code: copies are ops of the graph, one for each value."""

import pytest
import torch
from torch.func import grad, vmap

from remat import checkpoint_name, offload, remat, save_names, save_nothing
from tests.compiled import Graphs
from tests.helpers import same, sparse
from tests.policies.test_offload import THREE, X, layer, model, weights

SIZES = [X.shape[0] * size * X.itemsize for size in THREE]


def graphs(policy, run):
    torch._dynamo.reset()
    region = remat(layer, policy=policy)
    return Graphs(lambda ws: run(lambda ws: model(X, ws, region), ws))


@pytest.mark.slow
def test_a_graph_sends_each_value_once_and_keeps_it_nowhere_else():
    ws = weights(*THREE)
    expected = torch.autograd.grad(model(X, ws), ws)
    found = {}
    for policy in (offload(save_names("h")), save_names("h"), save_nothing):
        found[policy] = compiled = graphs(policy, lambda f, ws: f(ws))
        for _ in range(2):
            same(torch.autograd.grad(compiled(ws), ws), expected)
    sent, kept, nothing = found.values()
    assert (sent.forward["send"], kept.forward["send"]) == (len(THREE), 0)
    # What the graph hands on are the copies, in place of the values and not beside them.
    assert sent.saved_bytes == kept.saved_bytes == nothing.saved_bytes + sum(SIZES)
    # Nor are they computed again: of sin's and cos's only the derivatives are left.
    assert sent.backward["mm"] == kept.backward["mm"] and sent.backward["sin"] == kept.backward["sin"]
    assert nothing.backward["sin"] == 2 * kept.backward["sin"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sparse(["vmap grad", "grad"], 2))
def test_a_graph_of_torch_func_sends_each_value_once(name):
    ws = [w.detach() for w in weights(*THREE)]

    def run(f, ws):
        if name == "grad":
            return grad(f)(ws)
        return vmap(grad(lambda ws, scale: f(ws) * scale), (None, 0))(ws, X[0])

    expected = run(lambda ws: model(X, ws), ws)
    sent, kept = graphs(offload(save_names("h")), run), graphs(save_names("h"), run)
    same(sent(ws), expected)
    same(kept(ws), expected)
    assert sent.forward["send"] - kept.forward["send"] == len(THREE)
    assert {n: c for n, c in sent.forward.items() if n in ("mm", "bmm", "sin", "cos")} == {
        n: c for n, c in kept.forward.items() if n in ("mm", "bmm", "sin", "cos")
    }


def layer_of_input(x, w):
    return layer(checkpoint_name(x, "input"), w)


def test_the_input_of_a_block_in_a_graph():
    torch._dynamo.reset()
    region = remat(layer_of_input, policy=offload(save_names("input")))
    ws = weights(5, 6)
    compiled = Graphs(lambda ws: model(X * 2, ws, region))
    same(torch.autograd.grad(compiled(ws), ws), torch.autograd.grad(model(X * 2, ws), ws))
    assert compiled.forward["send"] == 2
