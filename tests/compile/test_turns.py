"""When recomputations have their turn in a graph: before who reads their results, behind what is fetched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from remat import offload, remat, save_matmuls, save_nothing
from tests.compiled import Graphs, compiled
from tests.helpers import rand, same


class Nodes(Graphs):
    """Keeps the graphs: `nodes` of the last one, of the backward where there is one."""

    def _forward(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        module.graph.eliminate_dead_code()
        self.nodes = list(module.graph.nodes)
        return super()._forward(module, inputs)

    def _backward(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.nodes = list(module.graph.nodes)
        return super()._backward(module, inputs)

    def at(self, name: str) -> list[int]:
        """Where an op stands."""
        return [i for i, node in enumerate(self.nodes) if str(node.target) == name]

    def held(self) -> list[tuple[int, ...]]:
        """Shapes of what the backward is given."""
        return [tuple(n.meta["val"].shape) for n in self.nodes if n.op == "placeholder"]


# -- results that are read behind a region, by what is no region ---------------------------------------------


def pooled(wrap: Callable[..., Any], view: bool = False) -> Callable[..., Tensor]:
    """Regions with poolings between them, whose gradients read what the regions have returned."""
    region = wrap(lambda w, x: torch.tanh(F.conv2d(x.sin(), w, padding=1)) * 2)

    def loss(ws: list[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = region(w, x)
            x = F.max_pool2d(x.transpose(2, 3) if view else x, 2)
        return x.square().mean()

    return loss


def images() -> tuple[list[Tensor], Tensor]:
    return [rand(4, 4, 3, 3).requires_grad_() for _ in range(3)], rand(2, 4, 16, 16).requires_grad_()


@pytest.mark.parametrize(
    ("view", "policy"), [(False, save_nothing), (True, save_matmuls), (True, save_nothing)]
)
def test_a_result_that_only_later_ops_read_is_recomputed(policy, view):
    ws, x = images()
    graphs = Nodes(pooled(lambda f: remat(f, policy=policy), view))
    got = torch.autograd.grad(graphs(ws, x), [*ws, x])
    same(got, torch.autograd.grad(pooled(lambda f: f, view)(ws, x), [*ws, x]))
    again = 0 if policy is save_matmuls else 3
    assert graphs.backward["tanh"] == 3 and graphs.backward["convolution"] == again
    # The last result is read before any region is recomputed: it is held, at no cost to the peak. Beside
    # inputs of regions there are the products that a policy keeps, and indices.
    kept = 1 if policy is save_matmuls else 0
    assert [graphs.held().count((2, 4, n, n)) for n in (16, 8)] == [1 + kept, 2 + kept]


@pytest.mark.slow
def test_a_result_is_recomputed_in_one_graph_too():
    ws, x = images()
    same(compiled(grad(pooled(remat)))(ws, x), torch.autograd.grad(pooled(lambda f: f)(ws, x), ws))


def test_what_other_regions_take_is_held():
    """The same result goes to a region and to a pooling: recomputed, it would be there twice."""
    region = remat(lambda w, x: torch.tanh(x.sin() * w))

    def loss(w: Tensor, x: Tensor) -> Tensor:
        first = region(w, x)
        return region(w, region(w, first)).sum() + F.max_pool2d(first, 2).square().sum()

    w, x = rand(1).requires_grad_(), rand(2, 4, 16, 16).requires_grad_()
    graphs = Nodes(loss)
    torch.autograd.grad(graphs(w, x), [w, x])
    assert graphs.backward["tanh"] == 3 and graphs.held().count((2, 4, 16, 16)) == 3


# -- within a region -------------------------------------------------------------------------------------


def layers(wrap: Callable[..., Any]) -> Callable[..., Tensor]:
    block = wrap(lambda w, x: torch.sigmoid(torch.tanh(x @ w[0]) @ w[1]))

    def loss(ws: list[Tensor], x: Tensor) -> Tensor:
        for w in ws:
            x = block(w, x)
        return x.square().mean()

    return loss


@pytest.mark.parametrize("functional", [False, True])
def test_an_op_runs_again_right_before_its_first_reader(functional):
    """In the forward's order `tanh` would be held while the gradient of `sigmoid` is computed."""
    ws, x = [rand(2, 4, 4).requires_grad_(not functional) for _ in range(3)], rand(5, 4)
    loss = layers(lambda f: remat(f, policy=save_matmuls))
    graphs = Nodes(grad(loss) if functional else loss)
    out = graphs(ws, x)
    got = out if functional else torch.autograd.grad(out, ws)
    same(got, grad(layers(lambda f: f))([w.detach() for w in ws], x))
    pulled, again = graphs.at("aten.sigmoid_backward.default"), graphs.at("aten.tanh.default")[-3:]
    before = [-1, *graphs.at("aten.tanh_backward.default")]
    assert len(pulled) == 3
    for last, sigmoid, tanh in zip(before, pulled, again, strict=False):
        assert last < sigmoid < tanh


@pytest.mark.parametrize(("hidden", "functional"), [(4, False), (16, False), (16, True)])
def test_a_wide_activation_is_there_before_the_product_that_makes_its_gradient(hidden, functional):
    """Or compilers fuse it with its derivative, and hold all that both read and write."""

    def mlps(wrap: Callable[..., Any]) -> Callable[..., Tensor]:
        block = wrap(lambda w, x: x + F.silu(x @ w[0]) @ w[1])
        return lambda ws, x: block(ws[1], block(ws[0], x)).square().mean()

    pairs = [(rand(4, hidden), rand(hidden, 4)) for _ in range(2)]
    ws, x = [tuple(w.requires_grad_(not functional) for w in pair) for pair in pairs], rand(5, 4)
    loss = mlps(lambda f: remat(f, policy=save_matmuls))
    graphs = Nodes(grad(loss) if functional else loss)
    out = graphs(ws, x)
    flat = [w for pair in ws for w in pair]
    got = [w for pair in out for w in pair] if functional else torch.autograd.grad(out, flat)
    plain = grad(mlps(lambda f: f))([tuple(w.detach() for w in pair) for pair in ws], x)
    same(got, [w for pair in plain for w in pair])
    waits = [
        [str(user.target) for user in node.users]
        for node in graphs.nodes
        if str(node.target) == "remat.fence.default"
        and any("remat_recomputed" in after.meta.get("custom", {}) for after in node.args[1])
    ]
    assert waits == [["aten.mm.default"]] * (2 if hidden > 4 else 0)


# -- what was sent to the host ---------------------------------------------------------------------------


def chain(w: Tensor, x: Tensor) -> Tensor:
    region = remat(lambda x: torch.tanh(x @ w).sin(), policy=offload(save_matmuls))
    for _ in range(4):
        x = region(x)
    return x.square().sum()


@pytest.mark.parametrize("functional", [False, True])
def test_what_was_sent_is_fetched_one_region_ahead(functional):
    w, x = rand(8, 8).requires_grad_(not functional), rand(8, 8)
    step = grad(chain) if functional else chain
    graphs = Nodes(step)
    out = graphs(w, x)
    got = out if functional else torch.autograd.grad(out, w)[0]
    same(got, grad(chain)(w.detach(), x))
    fetched, arrived = graphs.at("remat.fetch.default"), graphs.at("remat.arrived.default")
    assert len(fetched) == len(arrived) == 4 and graphs.both["mm"] == 4 + 7
    # The last region's is fetched as the backward begins, each other one before the recomputation of the
    # region behind it.
    for first, (begun, then) in enumerate(zip(fetched, arrived, strict=True)):
        assert begun < (arrived[first - 1] if first else then)
    for this in arrived[:-1]:
        fence = graphs.nodes[this]
        assert any(str(node.target) == "remat.fetch.default" for node in fence.args[1]), fence.args


def test_the_code_fetches_ahead():
    from torch._inductor.utils import run_and_get_code

    w, x = rand(8, 8).requires_grad_(), rand(8, 8)
    got, sources = run_and_get_code(lambda: torch.autograd.grad(compiled(chain, "inductor")(w, x), w)[0])
    same(got, torch.autograd.grad(chain(w, x), w)[0])
    lines = re.findall(r"= torch.ops.remat.(send|fetch)|torch.ops.remat.arrived.(wait)", sources[-1])
    kinds = ["".join(line) for line in lines]
    assert kinds == ["fetch", "fetch", "wait", "fetch", "wait", "fetch", "wait", "wait"], kinds


@pytest.mark.slow
def test_second_order_where_later_ops_read_results():
    """The pull-back of a pull-back was taken for the region's: its gradients stood for the results."""
    w = rand(4, 4).requires_grad_()

    def block(x, total):
        h = torch.tanh(x @ w)
        return h, total + h.sum(0), h.detach(), total

    def loss(region, x):
        total, read = torch.zeros(4, dtype=x.dtype), []
        for _ in range(3):
            x, total, again, before = region(x, total)
            read.append(again * before)
        return torch.stack([t.square().sum() + t.sum() for t in (x, total, *read)]).sum()

    def twice(region):
        return grad(lambda x: grad(lambda x: loss(region, x))(x).square().sum())

    same(compiled(twice(remat(block, policy=save_matmuls)))(rand(3, 4)), twice(block)(rand(3, 4)))
