"""Joint graphs, remembered by what a call looks like; each remembers what was solved on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from remat.plan.graph import Graph
from remat.plan.keys import call_key
from remat.plan.looking import looking
from remat.transforms import BoundedCache, Key
from remat.transforms.closure import swapping
from remat.transforms.compat import in_transform
from remat.transforms.joint import Peeled, captured_at_levels, peel, record, record_peeled

# A graph of a block has some hundred ops and holds no tensor, so that these are a few megabytes.
_GRAPHS: BoundedCache[Hashable, Graph] = BoundedCache(256)


def graph_of(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Graph:
    """The joint graph of a call, traced once for all calls that look alike.

    Under functorch levels: the graph of what they run at the bottom.
    """
    # Below a region around, what is captured may belong to levels that are not in force here.
    captured = captured_at_levels(fn) if in_transform() or swapping() else ()
    call = peel(args, kwargs or {}, captured) if in_transform() or captured else None
    key = call_key(fn, args, kwargs or {}) if call is None else _peeled_key(fn, call)
    found = None if key is None else _GRAPHS.recall(key)
    if found is None:
        # Torch's planner can be asked about the same graph where there are no levels.
        with looking(fn, args, kwargs):
            found = Graph(record(fn, args, kwargs)) if call is None else Graph(record_peeled(fn, call), False)
        if key is not None:
            _GRAPHS[key] = found
    return found


def forget(graph: Graph) -> None:
    """Trace anew whatever call this graph was of: it turned out to run other ops."""
    for key in [key for key, known in list(_GRAPHS.items()) if known is graph]:
        _GRAPHS.pop(key, None)


def _peeled_key(fn: Callable[..., Any], call: Peeled) -> Hashable | None:
    key = call_key(fn, call.leaves, {})
    return None if key is None else Key(key, call.steps, str(call.spec), len(call.captured))
