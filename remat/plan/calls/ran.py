"""The regions of a model met in one run with data: for functions that cannot run without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from remat._overrides import standing_for
from remat.plan.calls.alike import Regions
from remat.plan.graph import Graph
from remat.plan.joint import Apart, Joint


@dataclass
class RanRegions(Regions):
    """The same, where each region runs, apart from what is around it."""

    _calls: list[Apart] = field(default_factory=list)
    _known: dict[Any, Graph] = field(default_factory=dict)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Within, calls of regions are noted, and run apart."""
        with super().meeting():
            yield
        for call in self._calls:
            call.finish()

    def _result(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        met = self.note(fn, _NONE)

        def tell(joint: Joint) -> None:
            graph = Graph(joint, False)
            met.graph = self._known.setdefault(graph.signature, graph)

        def run(*args: Any, **kwargs: Any) -> Any:
            with standing_for(None):
                return fn(*args, **kwargs)

        call = Apart(run, args, kwargs, tell)
        self._calls.append(call)
        return call.run()


_NONE = Graph(Joint((), (), (), (), ()))
