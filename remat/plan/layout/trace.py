"""The blocks of a local program as graphs, equal ones traced once, and what the model runs around them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat._blocks import fitting, regions
from remat.plan.graph import Graph
from remat.plan.joint import record
from remat.plan.layout.alike import likeness, likeness_of_call
from remat.plan.layout.around import Around, stand_in
from remat.plan.layout.local import Local
from remat.transforms import RematError, flatten, unflatten, wraps

# Blocks that differ in numbers alone: so many are traced, and where their ops are the same so are all.
_ENOUGH = 3


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


def traced(local: Local, chosen: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModel:
    """Trace a local program on fake arguments; `chosen` are the names of its blocks."""
    walk = _Walk(local, chosen, _ENOUGH)
    graphs = walk.run(args, kwargs)
    if graphs is None:
        walk = _Walk(local, chosen, None)
        graphs = walk.run(args, kwargs)
    assert graphs is not None
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(graphs[met.kind].signature, len(numbers)) for met in walk.met]
    first = {kind: graphs[met.kind] for kind, met in reversed(list(zip(kinds, walk.met, strict=True)))}
    with walk.standing_in():
        around = record(local.model, args, kwargs)
    there = {id(tensor) for tensor in (*local.model.parameters(), *local.model.buffers())}
    return TracedModel(
        names=tuple([met.name for met in walk.met]),
        kinds=tuple(kinds),
        graphs=tuple([first[k] for k in range(len(first))]),
        around=Around(around, len(walk.met)),
        outer=walk.outer,
        shared=sum(t.numel() * t.dtype.itemsize for t in walk.shared() if id(t) not in there),
    )


def block_names(model: torch.nn.Module, layers: str | Sequence[str]) -> list[str]:
    """The outermost modules that a pattern fits, or those that are regions already.

    Raises:
        RematError: there are none.
    """
    return regions(model) or fitting(model, layers, "Layout")


@dataclass
class _Met:
    """A block that was called."""

    name: str
    kind: int
    leaves: list[Any]
    spec: Any
    made: Any
    forward: Callable[..., Any]


class _Walk:
    """One run of the model, in which of equal blocks only the first runs.

    Args:
        enough: of blocks that differ in numbers alone so many run; None means all.
    """

    def __init__(self, local: Local, chosen: Sequence[str], enough: int | None) -> None:
        self.local, self.enough = local, enough
        self.blocks = {name: local.model.get_submodule(name) for name in chosen}
        self.about = {
            (name, numbers): likeness(block, numbers=numbers)
            for name, block in self.blocks.items()
            for numbers in (True, False)
        }
        self.met: list[_Met] = []
        self.outer: dict[str, int] = {}
        self.first: list[_Met] = []  # for each kind
        self.exact: dict[Hashable, int] = {}
        self.rough: dict[Hashable, list[int]] = {}

    def run(self, args: Any, kwargs: Any) -> list[Graph] | None:
        """The graph of each kind; None where blocks that seemed alike are not."""
        with self.local.on_fakes(), self._answering(self._call), self._outer_watched():
            self.local.model(*args, **kwargs)
        if not self.met:
            raise RematError("remat.fit(mesh=...): the model calls none of its blocks.")
        shared = {id(t) for t in self.shared()}
        graphs = []
        for one in self.first:
            held = [k for k, leaf in enumerate(one.leaves) if id(leaf) in shared]
            args, kwargs = unflatten(one.leaves, one.spec)
            graphs.append(Graph(record(one.forward, args, kwargs, held=held)))
        groups = [group for group in self.rough.values() if len(group) == self.enough]
        alike = all(len({graphs[kind].signature for kind in group}) == 1 for group in groups)
        return graphs if alike else None

    def shared(self) -> list[torch.Tensor]:
        """Tensors that several blocks are called with."""
        tensors = {id(x): x for met in self.met for x in met.leaves if isinstance(x, torch.Tensor)}
        count = Counter(id(x) for met in self.met for x in {id(x): x for x in met.leaves}.values())
        return [tensor for key, tensor in tensors.items() if count[key] > 1]

    def standing_in(self) -> contextlib.AbstractContextManager[None]:
        """Within, a call of a block is one op that keeps nothing."""
        numbers = {met.name: k for k, met in enumerate(self.met)}

        def call(name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            number = numbers[name]
            return stand_in(number, self.met[number].made, (args, kwargs))

        return self._answering(call)

    def _call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if any(met.name == name for met in self.met):
            raise RematError(
                f"remat.fit(mesh=...): block {name} is called twice; plans are by call of a block."
            )
        leaves, spec = flatten((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and wraps(leaf) for leaf in leaves):
            raise RematError(
                f"remat.fit(mesh=...): block {name} is called with a DTensor. Between blocks plans know "
                "plain tensors of one rank: write use_local_output=True in Layout(parallelize=...)."
            )
        exact, rough = (
            (self.about[name, numbers], likeness_of_call(leaves, spec, numbers=numbers))
            for numbers in (True, False)
        )
        group = self.rough.setdefault(rough, [])
        kind = self.exact.get(exact)
        if kind is None and len(group) == self.enough:
            kind = group[0]
        met = _Met(name, len(self.first) if kind is None else kind, leaves, spec, None, forward)
        if kind is None:
            met.made = forward(*args, **kwargs)
            self.exact[exact] = met.kind
            group.append(met.kind)
            self.first.append(met)
        else:
            made, shape = flatten(self.first[kind].made)
            met.made = unflatten([_like(x) for x in made], shape)
        self.met.append(met)
        return met.made

    @contextlib.contextmanager
    def _answering(self, call: Callable[..., Any]) -> Iterator[None]:
        """Within, `call(name, forward, args, kwargs)` answers for the blocks' forwards."""

        def forward(name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return call(name, plain, args, kwargs)

        own = {name: vars(block).get("forward") for name, block in self.blocks.items()}
        for name, block in self.blocks.items():
            answer: Any = functools.wraps(block.forward)(functools.partial(forward, name, block.forward))
            vars(block)["forward"] = answer
        try:
            yield
        finally:
            for name, block in self.blocks.items():
                del vars(block)["forward"]
                if own[name] is not None:
                    vars(block)["forward"] = own[name]

    @contextlib.contextmanager
    def _outer_watched(self) -> Iterator[None]:
        """Within, modules outside of blocks are noted with how many blocks have run."""
        inside = tuple([f"{name}." for name in self.blocks])
        handles = []
        for name, module in self.local.model.named_modules():
            if name not in self.blocks and not name.startswith(inside):
                note = functools.partial(self._note, name)
                handles.append(module.register_forward_pre_hook(note))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, *_: Any) -> None:
        self.outer.setdefault(name, len(self.met))


def _like(value: Any) -> Any:
    return (
        torch.empty_like(value).requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
    )
