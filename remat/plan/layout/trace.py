"""The blocks of a local program as graphs, equal ones traced once, and what the model runs around them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat._blocks import fitting, regions
from remat.plan.calls import Regions
from remat.plan.graph import Graph
from remat.plan.layout.around import Around
from remat.plan.layout.local import Local
from remat.plan.model import plans_by_budget
from remat.transforms import RematError, is_tensor, tree_leaves, wraps


@dataclass(frozen=True)
class TracedModel:
    """A model as a planner sees it.

    Attributes:
        names: qualified names of the blocks, in the order in which they are called.
        kinds: for each block the number of its graph.
        graphs: one for each kind of block.
        around: what runs outside of blocks.
        outer: for modules outside of blocks, how many blocks have run when they are called.
        shared: bytes of what several blocks read beside their own input.
    """

    names: tuple[str, ...]
    kinds: tuple[int, ...]
    graphs: tuple[Graph, ...]
    around: Around
    outer: dict[str, int]
    shared: int


def traced(
    local: Local,
    chosen: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: Callable[[torch.nn.Module], Any],
) -> TracedModel:
    """Trace a local program on fake arguments; `chosen` are the names of its blocks.

    `region` makes a module a region with a budget, in place.
    """
    names = {local.model.get_submodule(name): name for name in chosen}
    inside, outer = tuple([f"{name}." for name in chosen]), dict[str, int]()
    blocks = _Blocks(plans_by_budget, names=names)
    for name, module in local.model.named_modules():
        if module not in names and not name.startswith(inside):
            module.register_forward_pre_hook(functools.partial(_note, blocks, outer, name))
    for block in names:
        region(block)

    around = blocks.around(local.model, args, kwargs)
    if not blocks.found:
        raise RematError("remat.fit(mesh=...): the model calls none of its blocks.")
    readers = Counter(s for hole in around.holes for s in {around.values[v].storage for v in hole.operands})
    shared = {s for s, count in readers.items() if count > 1}
    numbers: dict[Any, int] = {}
    graphs: dict[int, Graph] = {}
    kinds: list[int] = []
    for met, hole in zip(blocks.found, around.holes, strict=True):
        held = [k for k, v in enumerate(hole.operands) if around.values[v].storage in shared]
        graph = met.graph.solved.made(("held", *held), functools.partial(_held, met.graph, held))
        kinds.append(numbers.setdefault(graph.signature, len(numbers)))
        graphs.setdefault(kinds[-1], graph)
    first = (around.values[around.family[s][0]] for s in shared)
    return TracedModel(
        names=tuple([names[met.owner] for met in blocks.found]),
        kinds=tuple(kinds),
        graphs=tuple(graphs.values()),
        around=Around(around),
        outer=outer,
        shared=sum(value.bytes for value in first if value.origin != "parameter"),
    )


def block_names(model: torch.nn.Module, layers: str | Sequence[str]) -> list[str]:
    """The outermost modules that a pattern fits, or those that are regions already.

    Raises:
        RematError: there are none.
    """
    return regions(model) or fitting(model, layers, "Layout")


@dataclass
class _Blocks(Regions):
    """The blocks of a model as they are met, each once."""

    names: dict[torch.nn.Module, str] = field(default_factory=dict)

    def graph(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        owner: Any = getattr(fn, "__self__", fn)
        if any(met.owner is owner for met in self.found):
            raise RematError(
                f"remat.fit(mesh=...): block {self.names[owner]} is called twice; plans are by call of a "
                "block."
            )
        if any(is_tensor(leaf) and wraps(leaf) for leaf in tree_leaves((args, kwargs))):
            raise RematError(
                f"remat.fit(mesh=...): block {self.names[owner]} is called with a DTensor. Between blocks "
                "plans know plain tensors of one rank: write use_local_output=True in "
                "Layout(parallelize=...)."
            )
        return super().graph(fn, args, kwargs)


def _note(blocks: Regions, outer: dict[str, int], name: str, *_: Any) -> None:
    outer.setdefault(name, len(blocks.found))


def _held(graph: Graph, held: Sequence[int]) -> Graph:
    """The same where others hold these of the arguments."""
    values = list(graph.joint.values)
    for k in held:
        values[k] = replace(values[k], origin="parameter")
    return Graph(replace(graph.joint, values=tuple(values)), graph.alone)
