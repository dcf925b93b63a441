"""The regions of a model met in one run without data, those that are alike traced once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from remat._core import name_of
from remat._overrides import standing_for
from remat.plan.calls.cache import graph_of
from remat.plan.calls.looking import looked
from remat.plan.graph import Graph
from remat.plan.joint import Joint, Shell, left_out, record, shell_of, tensors_given
from remat.policies import Policy
from remat.transforms.compat import in_transform, running_node
from remat.transforms.entry import under_hooks

# Under this a graph remembers what calls of its kind return.
_SHELL = "what calls return"
# And how the gradients of arguments lie, by how those of its results do.
_LIES = "how gradients lie"


@dataclass
class Met:
    """A region that was met.

    Attributes:
        owner: the module whose forward it is, None if it is none.
        graded: the places of results that have a gradient.
        gone: the places of results that the caller lets go of, and bytes that go with them.
    """

    name: str
    graph: Graph
    owner: Any
    graded: tuple[int, ...] = ()
    gone: tuple[tuple[int, ...], int] = (), 0


@dataclass
class Regions:
    """Meets the regions whose policy `wanted` says are to be planned, and stands for their calls.

    Attributes:
        found: in the order of the calls.
        present: for each the places of results that gradients come back for, and of those that go before
            the backward, and how these gradients lie, once that is known.
        theirs: the functions of regions under saved-tensor hooks, such as those of torch's checkpoint, or
            that a backward calls: what they keep, others decide.
    """

    wanted: Callable[[Policy], bool]
    found: list[Met] = field(default_factory=list)
    present: list[tuple[Any, ...] | None] = field(default_factory=list)
    theirs: list[Any] = field(default_factory=list)
    _graphs: dict[int, Graph] = field(default_factory=dict)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Within, calls of regions are noted, and return what they would without running."""
        with standing_for(self._stand):
            yield

    def _stand(
        self, fn: Callable[..., Any], policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        if in_transform() or not self.wanted(policy) or not torch.is_grad_enabled():
            return None
        with standing_for(None):
            if under_hooks() or running_node() is not None:
                self.theirs.append(_owner(fn))
                return (fn(*args, **kwargs),)
            return (self._result(fn, args, kwargs),)

    def _result(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of a region returns, which is noted."""
        every = graph = self.graph(fn, args, kwargs)
        at, gone = len(self.found), ((), 0)
        if at < len(self.present) and (ends := self.present[at]) is not None:
            graph = _from(ends, every, fn, args, kwargs)
            gone = ends[1], _only_in(every.joint, graph.joint)
        shell = _shell(every, fn, args, kwargs)
        self.note(fn, graph, tuple([k for k, meta in enumerate(shell.fresh) if meta.grad]), gone)
        lies = every.solved.made(_LIES, dict)
        lies.update([every.joint.lies, graph.joint.lies])
        return left_out(shell, lambda begun: lies.get(begun, graph.joint.lies[1]), args, kwargs)

    def around(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Joint:
        """The graph of `fn(*args, **kwargs)` with the regions left out that are met in it."""

        def recorded(_: Any) -> Joint:
            self.found.clear()
            with self.meeting():
                return record(fn, args, kwargs)

        return looked(recorded, fn, args, kwargs)

    @property
    def traced(self) -> int:
        """How many run a graph of their own: the others are like one of those."""
        return len(self._graphs)

    def narrowed(self, outside: Joint) -> bool:
        """Learn which gradients come back, and how they lie; whether to meet the regions again with that."""
        before = self.present or [None] * len(self.found)
        self.present = [*before]
        for at, (met, hole) in enumerate(zip(self.found, outside.holes, strict=False)):
            # A record of its own begins with the results in trees: not with those in objects and functions.
            lie = tuple([outside.values[v].stride for v in hole.cotangents])
            others = met.graph.joint.lies[0] != lie or not set(met.graded).issubset(hole.present)
            if others and hole.backward >= 0:
                self.present[at] = hole.present, hole.gone, lie
        return self.present != before

    def note(
        self,
        fn: Callable[..., Any],
        graph: Graph,
        graded: tuple[int, ...] = (),
        gone: tuple[tuple[int, ...], int] = ((), 0),
    ) -> Met:
        """Add a region."""
        owner = _owner(fn)
        met = Met(name_of(fn), graph, owner if isinstance(owner, torch.nn.Module) else None, graded, gone)
        self.found.append(met)
        return met

    def graph(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
        """The graph of a call, from one like it where there is one."""
        graph = graph_of(fn, args, kwargs, restored=True)
        self._graphs[id(graph)] = graph
        return graph


def _owner(fn: Callable[..., Any]) -> Any:
    return getattr(fn, "__self__", fn)


def _from(
    ends: tuple[Any, ...],
    graph: Graph,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Graph:
    """The graph of the same call whose backward begins with some of its results, others being gone."""

    def made() -> Graph:
        options: dict[str, Any] = {"present": ends[0], "gone": ends[1], "lie": ends[2]}
        joint = looked(lambda *_: record(fn, args, kwargs, **options), fn, args, kwargs, restored=True)
        return Graph(joint, graph.alone, every=graph if ends[1] else None)

    return graph.solved.made(("from", ends), made)


def _only_in(every: Joint, some: Joint) -> int:
    """Bytes that the one graph keeps for its backward, and the other, of the same forward, does not."""
    made, kept = {every.values[v].storage for v in every.made}, []
    for joint in (every, some):
        kept.append({s for s in joint.held_by_nodes if joint.owner[s] >= 0})
    return sum(every.storages[s] for s in kept[0] - kept[1] - made)


def _shell(graph: Graph, fn: Callable[..., Any], args: Any, kwargs: Any) -> Shell:
    """What a call of this graph returns."""
    known = graph.solved.recall(_SHELL)
    if known is None:
        shell = shell_of(fn, args, kwargs)
        known = shell.within(graph.joint, len(tensors_given(args, kwargs)))
        if shell.parts.general:
            graph.solved[_SHELL] = known
    return known
