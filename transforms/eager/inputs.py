"""What a region was called with in plain autograd, and under what: enough to call it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from remat.transforms.closure import Bindings, innermost, of_arguments, of_captured
from remat.transforms.compat import modules_watched, top_hooks, without_module_trackers
from remat.transforms.eager.saved import Absent, Held
from remat.transforms.errors import RematError
from remat.transforms.intermediates import again, current, marks
from remat.transforms.pytree import flatten, flatten_call, split, unflatten
from remat.transforms.region import Region
from remat.transforms.state import Ambient, RandomState, device_kinds
from remat.transforms.tape import written


class Inputs:
    """The arguments of one call, its random state, its ambient state, and the modules it sees."""

    __slots__ = (
        "ambient",
        "arguments",
        "bindings",
        "held",
        "hooks",
        "leaves",
        "random",
        "region",
        "spec",
        "swap",
        "taps",
        "tensors",
    )

    def __init__(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.region = region
        leaves, self.spec = flatten_call(args, kwargs)
        if self.spec is None:
            self.tensors, self.arguments = leaves, range(len(leaves))
            self.leaves: list[Any] = [None] * len(leaves)
        else:
            self.tensors, self.arguments = split(leaves)
            self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.hooks = top_hooks()
        self.held: list[Held | Absent] = [Held(t, self.hooks) for t in self.tensors]
        kinds = device_kinds(self.tensors)
        self.random = RandomState(self.tensors, kinds) if region.preserve_rng_state else None
        self.ambient = Ambient(kinds)
        self.bindings = Bindings(region.function, region.slots)
        self.swap = innermost()
        self.taps = marks()

    @property
    def label(self) -> str:
        return self.region.name

    def signature(self) -> Any:
        """What decides, besides the function, which ops run."""
        shapes = tuple([(t.shape, t.dtype, t.requires_grad) for t in self.tensors])
        training = getattr(self.region.function, "training", None)
        steering = tuple(self._steering()) if len(self.leaves) > len(self.tensors) else ()
        return shapes, training, self.ambient.autocast, self.spec, steering

    def _steering(self) -> Iterator[Any]:
        for leaf in self.leaves:
            yield leaf if isinstance(leaf, (int, float, str)) else type(leaf)

    def drop(self, at: int) -> None:
        """Let go of an argument that nothing in the backward reads."""
        self.held[at] = Absent(self.tensors[at])

    def readable(self) -> bool:
        """Whether all arguments could be read, those that nothing in the backward reads included."""
        return all([held.readable for held in self.held if isinstance(held, Absent)])

    def rebuild(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, as leaves of a graph of their own."""
        leaves = list(self.leaves)
        for i, held in zip(self.arguments, self.held, strict=True):
            tensor = held.get(self, i)
            leaves[i] = tensor.requires_grad_() if held.requires_grad else tensor
            if self.ambient.casts and not held.leaf and held.requires_grad:
                # Autocast caches casts of leaves, and this one was none in the forward.
                with torch.enable_grad():
                    leaves[i] = tensor.view_as(tensor)
        # The structure of a call with tensors only is not even noted.
        return (tuple(leaves), {}) if self.spec is None else unflatten(leaves, self.spec)

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """What has to be put back for the function to see what it saw."""
        needed: list[AbstractContextManager[Any]] = []
        if self.taps or current():
            needed.append(again(self.taps))
        if self.swap is not None:
            needed.append(self.swap.lenient())
        if self.bindings.changed():
            needed.append(self.bindings.restored())
        needed.extend(self.ambient_contexts())
        if modules_watched():
            # They would add ops of their own to the replay: inputs are leaves there, not in the forward.
            needed.append(without_module_trackers())
        return needed

    def ambient_contexts(self) -> list[AbstractContextManager[Any]]:
        """What has to be put back for ops to do what they did."""
        return [self.ambient.restored()] if self.ambient.must_be_restored() else []

    def uncached(self, tensors: list[torch.Tensor]) -> set[int] | None:
        """Ids of arguments whose casts autocast does not cache; None without autocast."""
        if not self.ambient.casts:
            return None
        return {id(t) for t, held in zip(tensors, self.held, strict=True) if not held.leaf}

    def near_versions(self, places: list[int]) -> list[int]:
        """The versions of those tensors in the function's reach."""
        near = self.bindings.near
        return [0 if (tensor := near[i]) is None else tensor._version for i in places]

    def check_near(self, places: list[int], versions: list[int]) -> None:
        """Raise when one of these tensors was written since."""
        near = self.bindings.near
        for i, version in zip(places, versions, strict=True):
            tensor = near[i]
            if tensor is not None and tensor._version != version:
                raise RematError(written(self.label, tensor, self.path(None, tensor)))

    def path(self, at: int | None, tensor: torch.Tensor) -> str | None:
        """What the user calls the argument leaf number `at`, or a captured tensor."""
        if at is None:
            return of_captured(self.region.function, tensor)
        spec = self.spec or flatten((tuple(self.leaves), {}))[1]
        return of_arguments(self.region.function, spec).get(at)
