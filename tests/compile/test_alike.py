"""Regions of one graph that are alike are traced once: copies are what tracing would have come to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat import checkpoint_policy, remat, save_matmuls
from remat.debug import recomputed
from remat.policies import save_larger_than, save_nothing
from remat.transforms import value_and_grad
from tests.compile.inside import PolicySelector, Template, _code, compiled_for_graphs
from tests.compile.inside import compiled as entry
from tests.compiled import compiled
from tests.helpers import gradients, rand, same


@pytest.fixture
def copies(monkeypatch) -> list[bool]:
    """Whether each attempt to copy succeeded."""
    found: list[bool] = []
    paste = Template.paste

    def counted(*args):
        made = paste(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(Template, "paste", counted)
    return found


@contextmanager
def no_copies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "dedup_key", lambda *_: None)
        yield


def joint_graph(fn: Callable[..., Any], args: Any) -> tuple[list[Any], Any]:
    """What AOTAutograd's graph of forward and backward consists of, and the results."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    # Its entries may have been made with views of another offset.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        run = compiled_for_graphs(fn, lambda m: graphs.extend(lines(m)), lambda _: None)
        return graphs, run(*args)


def lines(module: torch.fx.GraphModule) -> Iterator[Any]:
    numbers: dict[torch.fx.Node, int] = {}
    storages: dict[int, int] = {}
    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        tags = {key: str(tag).partition(" ")[2] for key, tag in node.meta.get("custom", {}).items()}
        value = pytree.tree_map_only(Tensor, functools.partial(_value, storages), node.meta.get("val"))
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        yield str(node.target), str(operands), str(value), tags, node.meta.get("partitioner_tag")


def _value(storages: dict[int, int], tensor: Tensor) -> Any:
    storage = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, storage


# -- what is copied, and what is not -----------------------------------------------------------------


def mlp(w: dict[str, Tensor], x: Tensor, factor: float = 1.0) -> Tensor:
    return x + factor * F.gelu(F.layer_norm(x, x.shape[-1:]) @ w["up"]) @ w["down"]


def weights(count: int = 4, grad: bool = True) -> list[dict[str, Tensor]]:
    made = [{"up": rand(8, 16, seed=i), "down": rand(16, 8, seed=-i - 1)} for i in range(count)]
    return pytree.tree_map(lambda t: t.requires_grad_(grad), made)


def chain(block: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(ws, x):
        for w in ws:
            x = block(w, x)
        return x.square().sum()

    return run


def by_func(block: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(ws, x):
        value, grads = value_and_grad(chain(block))(ws, x)
        return value + sum(g.square().sum() for g in pytree.tree_leaves(grads))

    return run


def tied(ws, x):
    block = remat(mlp)
    x = block(ws[0], x)
    return chain(block)([ws[0], ws[1], ws[0], ws[1]], x)


def factors(ws, x):
    block = remat(mlp)
    for i, w in enumerate(ws):
        x = block(w, x, 1.0 if i % 2 else 2.0)
    return x.square().sum()


def some_frozen(ws, x):
    block = remat(mlp)
    for i, w in enumerate(ws):
        x = block(w if i % 2 else {"up": w["up"].detach(), "down": w["down"]}, x)
    return x.square().sum()


def lengths(ws, x):
    block = remat(mlp)
    return chain(block)(ws[:1], x) + chain(block)(ws[:1], x[:2])


def nested(ws, x):
    return chain(remat(lambda w, x: remat(mlp)(w, x).sin()))(ws, x)


def two_views(w, x):
    h = F.gelu(x @ w["up"])
    return h, h.view(-1, 8)


def share_memory(ws, x):
    block = remat(two_views)
    for w in ws:
        h, flat = block(w, x)
        x = flat[: len(x)] + h.mean()
    return x.square().sum()


def draws(w, x):
    return x + F.dropout(F.gelu(x @ w["up"]), 0.5) @ w["down"]


def writes(w, x):
    h = x.clone()
    h[0] = 1.0
    return mlp(w, h)


@pytest.mark.slow
def test_graphs_and_gradients_are_those_of_tracing():
    def run():
        ws, x = weights(3), rand(4, 8).requires_grad_()
        graph, out = joint_graph(chain(remat(mlp, policy=save_matmuls)), (ws, x))
        return graph, (out, gradients(out, [*pytree.tree_leaves(ws), x]))

    copied, got = run()
    with no_copies():
        traced, expected = run()
    assert copied == traced
    same(got, expected, 1e-12)


# Forwards and pull-backs copied, of four regions each that are alike: all but one and one, if any.
COPIED = {
    "chain": (chain(remat(mlp)), 6),
    "chain, kept products": (chain(remat(mlp, policy=save_matmuls)), 6),
    "chain, a rule asked again": (
        chain(remat(mlp, policy=checkpoint_policy(lambda info: info.index % 2 == 0, stateful=True))),
        0,
    ),
    # One pull-back is moved ahead of a reader outside (`compiled/lowering.py`), and traced by itself.
    "under value_and_grad": (by_func(remat(mlp)), 5),
    "tied weights": (tied, 6),
    "two factors": (factors, 4),
    "two lengths": (lengths, 0),
    "some frozen": (some_frozen, 4),
    "regions in regions": (nested, 0),
    "results that share memory": (share_memory, 0),
    "written inside": (chain(remat(writes)), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIED)
def test_what_is_copied(name, copies):
    program, expected = COPIED[name]
    ws, x = weights(), rand(4, 8).requires_grad_()
    leaves = [*pytree.tree_leaves(ws), x]
    out = compiled(program)(ws, x)
    got = out, gradients(out, leaves)
    assert copies == [True] * expected
    eager = program(ws, x)
    same(got, (eager, gradients(eager, leaves)))


def test_each_copy_draws_its_own_numbers(copies):
    ws, x = weights(2), rand(64, 8).requires_grad_()
    twin = [ws[0], ws[0]]

    def run(ws, x):
        block = remat(draws)
        one, other = [block(w, x) for w in ws]
        return one - other

    graph, out = joint_graph(run, (twin, x))
    out.sum().backward()
    assert copies == [True, True]
    assert sum(line[0] == "aten.randint.low" or "randint" in line[0] for line in graph) == 2
    assert out.detach().abs().max() > 0.1


@pytest.mark.slow
def test_policies_are_asked_once_for_regions_that_are_alike(monkeypatch):
    asked = []
    decide = PolicySelector.decide

    def counted(self, *args):
        asked.append(args)
        return decide(self, *args)

    monkeypatch.setattr(PolicySelector, "decide", counted)
    counts = []
    for count in (2, 8):
        torch._dynamo.reset()
        asked.clear()
        out = compiled(chain(remat(mlp, policy=save_matmuls)))(weights(count), rand(4, 8).requires_grad_())
        out.backward()
        counts.append(len(asked))
    assert counts[0] > 0
    # One pass for metadata, in which nothing is written down to copy from, and one traced forward.
    per_run = counts[0] / 3
    assert counts[1] == 9 * per_run


def test_each_copy_is_reported_as_a_region_of_its_own():
    found = recomputed(chain(remat(mlp)), weights(), rand(4, 8).requires_grad_())
    assert [entry.region for entry in found] == ["mlp"] * 4
    assert all(entry.survived and entry.ops["erf"] == 1 for entry in found)
    assert len({entry.bytes for entry in found}) == 1


def test_code_that_holds_a_constant_is_like_no_other():
    assert _code(torch.fx.symbolic_trace(nn.GELU())) is not None
    assert _code(torch.fx.symbolic_trace(nn.Linear(2, 2))) is None


# -- values of the graph stay what they were ----------------------------------------------------------


@pytest.mark.parametrize("policy", (save_nothing, save_larger_than(0)))
def test_kept_values_are_not_what_is_written_to_results_later(policy):
    region = remat(torch.exp, policy=policy)

    def run(x):
        for _ in range(3):
            y = region(x * 0.1)
            y.mul_(2.0)
            x = y + 1
        return x.sum()

    def without(x):
        for _ in range(3):
            x = torch.exp(x * 0.1) * 2.0 + 1
        return x.sum()

    x = rand(4, 8).requires_grad_()
    same(gradients(compiled(run)(x), [x]), gradients(without(x), [x]))
