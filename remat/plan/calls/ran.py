"""The regions of a model met in one run with data: for functions that cannot run without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from remat._overrides import standing_for
from remat.plan.calls.alike import Met
from remat.plan.graph import Graph
from remat.plan.joint import Apart, Joint
from remat.policies import Policy
from remat.transforms.compat import in_transform


@dataclass
class RanRegions:
    """Meets the regions whose policy `wanted` says are to be planned; each runs apart from what is around it.

    Attributes:
        found: in the order of the calls.
    """

    wanted: Callable[[Policy], bool]
    found: list[Met] = field(default_factory=list)
    _calls: list[Apart] = field(default_factory=list)
    _known: dict[Any, Graph] = field(default_factory=dict)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Within, calls of regions are noted, and run apart."""
        with standing_for(self._stand):
            yield
        for call in self._calls:
            call.finish()

    def _stand(
        self, fn: Callable[..., Any], policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        if in_transform() or not self.wanted(policy) or not torch.is_grad_enabled():
            return None
        owner = getattr(fn, "__self__", fn)
        name = getattr(fn, "__name__", None) or type(fn).__name__
        met = Met(name, _NONE, owner if isinstance(owner, torch.nn.Module) else None)
        self.found.append(met)

        def tell(joint: Joint) -> None:
            graph = Graph(joint, False)
            met.graph = self._known.setdefault(graph.signature, graph)

        def run(*args: Any, **kwargs: Any) -> Any:
            with standing_for(None):
                return fn(*args, **kwargs)

        call = Apart(run, args, kwargs, tell)
        self._calls.append(call)
        return (call.run(),)


_NONE = Graph(Joint((), (), (), (), ()))
