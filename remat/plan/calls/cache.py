"""What calls run, remembered by what they look like: the graphs of looks at them, and of what they did."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from remat._core import forget_when_priced, name_of, warn_user
from remat.plan.calls.keys import Loose, alike, alike_key, call_key
from remat.plan.calls.looking import Reach, looked
from remat.plan.calls.trusted import ENOUGH, Trust, trust_nobody
from remat.plan.graph import Graph
from remat.plan.joint import (
    NotOnFakes,
    Peeled,
    captured_at_levels,
    is_held,
    learned,
    peel,
    record,
    record_peeled,
)
from remat.transforms import BoundedCache, Key, flatten, is_tensor
from remat.transforms.closure import swapping
from remat.transforms.compat import in_transform, is_tracing
from remat.transforms.entry import under_hooks
from remat.transforms.tape import Tape

# So many paths of one function are told apart. A number that counts layers is taken for that after so many of
# them; later ones are looked at ever less.
_SEVERAL = 8
# Parts of keys: of calls that have to keep the same in every run, of those that differ in numbers alone, and
# of those that differ in one number and in whose tensors they read, as those of the layers of a model do.
_SAME, _NUMBERS, _LAYERS = "the same in every run", "but for numbers", "but for one number"


class SeenCalls:
    """What is known of the calls with one key.

    Attributes:
        graph: what a look saw.
        learned: what they turned out to run that were seen otherwise, or could not be looked at: the newest
            first. None where they ran what was seen.
        paths: both, and how they are followed: what a later call that looks alike needs not ask again.
        alike: how many in a row ran one graph, and which; None where looks failed. A counter in an object
            must not have every call looked at.
        kinds: what the layers of a model run.
    """

    __slots__ = ("alike", "graph", "kinds", "learned", "paths")

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.learned: tuple[Graph, ...] | None = None
        self.paths: Paths | None = None
        self.alike: tuple[int, Graph | None] = 0, None
        self.kinds: list[_Kind] = []


# The one answer to "was this call seen". A graph of a block has some hundred ops and holds no tensor, so that
# these are a few megabytes. Each graph remembers what was solved on it.
_SEEN: BoundedCache[Hashable, SeenCalls] = BoundedCache(512)
_warned: BoundedCache[Hashable, None] = BoundedCache(4096)


def _calls(key: Hashable) -> SeenCalls:
    return _SEEN.made(key, SeenCalls)


def _forget() -> None:
    # What was solved on a graph is remembered there.
    _SEEN.clear()
    trust_nobody()


forget_when_priced(_forget)


def graph_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    restored: bool = False,
) -> Graph:
    """The joint graph of a call, traced once for all calls that look alike.

    Under functorch levels: the graph of what they run at the bottom. `restored`: as in `looked`.

    Raises:
        NotOnFakes: the function needs data.
    """
    return _Call(fn, args, kwargs or {}, restored).graph()


@dataclass
class _Kind:
    """Calls that look alike; `doubted` where one of them turned out to run other ops."""

    key: list[Any]
    graph: Graph
    met: int = 1
    doubted: bool = False


class Paths:
    """The graphs that are known of a call, the likeliest first; none where it cannot be looked at.

    `held`: which of its tensors somebody else holds. `followed`: what policies have made of the graphs.
    """

    __slots__ = ("followed", "graphs", "held", "key", "name", "trust")

    def __init__(
        self, name: str, key: Hashable | None, graphs: tuple[Graph, ...], held: tuple[bool, ...]
    ) -> None:
        self.name, self.key, self.graphs, self.held = name, key, graphs, held
        self.followed: dict[Hashable, Any] = {}
        self.trust: Trust | None = None

    @property
    def learns(self) -> bool:
        """Whether what it is told changes later calls."""
        return self.key is not None

    def learn(self, tape: Tape, fitting: bool = False) -> None:
        """Remember what a call has run that was recorded: none of these, unless a plan was `fitting`."""
        if self.trust is not None:
            # It may have been another call than it looked like: then it teaches nothing of these.
            self.trust.surprise()
            return
        if self.key is None or fitting:
            return
        calls = _calls(self.key)
        rough = _calls(_rough(self.key))
        if rough.alike[1] is not None:
            rough.alike = 0, None
        calls.paths = None
        if is_tracing():
            # Sizes may be symbols there. It is looked at anew next time.
            calls.graph = None
            return
        before = calls.learned or ()
        if len(before) == _SEVERAL:
            _warn_once(
                self.name,
                f"{self.name} is under a budget and runs other ops at nearly every call. {_SEVERAL} paths of "
                "it have plans; what a call runs besides is recomputed. Make regions of the parts that are "
                "always the same.",
            )
            return
        graph = Graph(learned(tape, self.held), False)
        if not any(graph.signature == known.signature for known in before):
            calls.learned = (graph, *before)


def paths_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Paths:
    """What is known of a call that is about to run, after a look at it if nothing is.

    A function that cannot be looked at is planned from what its first call does, which keeps nothing. Hooks
    of the user's may run a call again and count what it packs, so there only looks count, which find the same
    in each run.
    """
    call, fixed = _Call(fn, args, kwargs), under_hooks()
    key, name = call.key, name_of(fn)
    place = Key(_SAME, key) if fixed and key is not None else key
    calls = None if place is None else _SEEN.get(place)
    if calls is not None and calls.paths is not None:
        return calls.paths
    if calls is not None and calls.learned is not None:
        # Of calls that were looked at that is one path more.
        graphs = calls.learned if calls.graph is None else (*calls.learned, calls.graph)
    else:
        seen = _seen(call, name, _KEEPS_NOTHING if fixed else _FOR_NOW)
        graphs = () if seen is None else (seen,)
        if seen is None and place is not None and not fixed:
            _calls(place).learned = ()
    found = Paths(name, None if fixed else key, graphs, call.held())
    if place is not None:
        _calls(place).paths = found
    return found


_KEEPS_NOTHING = "Under saved-tensor hooks, as torch's checkpoint has, it keeps nothing."
_FOR_NOW = (
    "For now the first call of each shape keeps nothing, and what it runs is planned for the later ones."
)


def _seen(call: _Call, name: str, otherwise: str) -> Graph | None:
    """What a look at a call sees; `otherwise` is said once where it cannot be looked at."""
    try:
        return call.graph_before()
    except NotOnFakes as error:
        _warn_once(name, f"{error} {otherwise}")
        return None


class _Call:
    """A call as planners see it."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], restored: bool = False
    ) -> None:
        self.fn, self.args, self.kwargs, self.restored = fn, args, kwargs, restored
        # Below a region around, what is captured may belong to levels that are not in force here.
        captured = captured_at_levels(fn) if in_transform() or swapping() else ()
        self.peeled = peel(args, kwargs, captured) if in_transform() or captured else None
        self.key = call_key(fn, args, kwargs) if self.peeled is None else _peeled_key(fn, self.peeled)

    def graph(self) -> Graph:
        """The graph, by a look where nobody has looked."""
        found = None if self.key is None else _calls(self.key).graph
        if found is None:
            found = self._of_kind(lambda: self._look(lambda reach: self._recorded()), False)
            if self.key is not None:
                _calls(self.key).graph = found
        return found

    def graph_before(self) -> Graph | None:
        """The same before the call runs: none where a look would take something out of an iterator."""
        if self.key is None:
            return self._careful()
        if (found := _calls(self.key).graph) is not None:
            return found
        rough = _rough(self.key)
        count, alike = _calls(rough).alike
        if count >= ENOUGH and not under_hooks():
            return alike
        try:
            found = self._of_kind(self._careful, True)
        except NotOnFakes:
            _calls(rough).alike = 1 if alike is not None else count + 1, None
            raise
        if found is None:
            return None
        same = alike is not None and alike.signature == found.signature
        # What was solved on the one is solved on the other.
        _calls(rough).alike = count, found = (count + 1, alike) if same and alike else (1, found)
        _calls(self.key).graph = found
        return found

    def _of_kind(self, look: Callable[[], Any], careful: bool) -> Any:
        """The graph of calls that look like this one, once they were seen to run it; else one by a look.

        `careful`: no look may take something out of an iterator.
        """
        key = None if self.peeled is not None else alike_key(self.fn, self.args, self.kwargs)
        if key is None:
            return look()
        kinds = _calls(Key(_LAYERS, *[int if type(part) is int else part for part in key])).kinds
        for kind in kinds:
            if alike(kind.key, key):
                kind.met += 1
                # Where not even a number differs, two comparisons are enough.
                counts = kind.met > _SEVERAL and bool(kind.met & (kind.met - 1))
                sure = kind.met > ENOUGH if kind.key == key else counts
                runs = (sure and not kind.doubted) or self._runs(kind.graph, careful)
                if runs:
                    return kind.graph
                if runs is None:
                    break
                # Some number makes a difference after all: every call is looked at.
                kind.doubted = True
        if (graph := look()) is not None:
            kinds.append(_Kind(key, graph))
            del kinds[:-_SEVERAL]
        return graph

    def _runs(self, graph: Graph, careful: bool) -> bool | None:
        """Whether the call runs the forward of a graph, None where it must not be looked at; what is
        differentiated is part of keys."""
        joint = graph.joint

        def same(reach: Reach) -> bool | None:
            if careful and reach.once is not None:
                return None
            other = record(self.fn, self.args, self.kwargs, backward=False)
            made = [(op.name, op.args, op.kwargs, op.reads, op.outputs) for op in other.ops]
            seen = [(op.name, op.args, op.kwargs, op.reads, op.outputs) for op in joint.forward]
            return made == seen and other.values == joint.values[: len(other.values)]

        return self._look(same)

    def _careful(self) -> Graph | None:
        return self._look(lambda reach: self._recorded() if reach.once is None else None)

    def _look(self, make: Callable[[Reach], Any]) -> Any:
        return looked(make, self.fn, self.args, self.kwargs, restored=self.restored)

    def _recorded(self) -> Graph:
        if self.peeled is None:
            return Graph(record(self.fn, self.args, self.kwargs))
        # Torch's planner can be asked about the same graph where there are no levels.
        return Graph(record_peeled(self.fn, self.peeled), False)

    def held(self) -> tuple[bool, ...]:
        """Which of its tensors somebody else holds: parameters, and leaves in containers."""
        if not self.kwargs and all(map(is_tensor, self.args)):
            return tuple([isinstance(a, torch.nn.Parameter) for a in self.args])
        tensors = [t for t in flatten((self.args, self.kwargs))[0] if is_tensor(t)]
        return tuple([is_held(t, self.args, self.kwargs) for t in tensors])


def _peeled_key(fn: Callable[..., Any], call: Peeled) -> Hashable | None:
    key = call_key(fn, call.leaves, {})
    return None if key is None else Key(key, call.steps, call.spec, len(call.captured))


def _rough(key: Any) -> Hashable:
    """A key without its numbers, and without what containers and objects hold."""
    return Key(_NUMBERS, *[part for part in key.parts if type(part) not in (int, float, Loose)])


def _warn_once(name: str, text: str) -> None:
    if name not in _warned:
        _warned[name] = None
        warn_user(f"{text} (Said once.)")
