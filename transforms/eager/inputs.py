"""What a region was called with in plain autograd, and under what: enough to call it again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from remat.transforms.closure import Bindings, innermost, of_arguments, of_captured, reached
from remat.transforms.compat import modules_watched, state_of, top_hooks, without_module_trackers
from remat.transforms.context import active
from remat.transforms.intermediates import again, current, marks
from remat.transforms.objects import plain_of
from remat.transforms.ops import lies, shape_of
from remat.transforms.pytree import flatten, split, unflatten
from remat.transforms.region import Region
from remat.transforms.sharded import PLAIN, Wrapper, local_tensors, wraps
from remat.transforms.state import Ambient, RandomState, device_kinds, under_levels

_strided = torch.strided
_STEERING = frozenset((int, float, str, bool))


class Inputs:
    """The arguments of one call, and the state around it.

    Attributes:
        tensors: the tensors among the arguments, while the forward runs.
        local, local_at: the local tensors behind those, and the argument that each belongs to.
        wrappers: how arguments that are wrappers are put together from local tensors.
        leaves, arguments, spec: the other leaves, the places of the tensors among them, and the structure.
        hooks: the saved-tensor hooks around the region.
        random, bindings, swap, originals: generators, modules, captured tensors and arguments as the function
            found them; only where the function runs again.
    """

    def __init__(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.region = region
        self.spec: Any = None  # where there are tensors only, as is common
        if not kwargs and all([issubclass(type(arg), torch.Tensor) for arg in args]):
            self.tensors, self.arguments = list(args), range(len(args))
            self.leaves: list[Any] = []
        else:
            leaves, self.spec = flatten((args, kwargs))
            self.tensors, self.arguments = split(leaves)
            self.leaves = [None if issubclass(type(leaf), torch.Tensor) else leaf for leaf in leaves]
        self.wrappers = {
            i: Wrapper(t, lambda _: None)
            for i, t in enumerate(self.tensors)
            if type(t) not in PLAIN and wraps(t)
        }
        self.local, self.local_at = self.tensors, range(len(self.tensors))
        if self.wrappers:
            self.local_at = [at for at, t in enumerate(self.tensors) for _ in local_tensors([t])]
            self.local = list(local_tensors(self.tensors))
        self.hooks = top_hooks()
        self.kinds = device_kinds(self.tensors)
        self.ambient = Ambient(self.kinds)
        self.levels = active.seen is not None and under_levels()
        self.taps = marks() if active.sessions else ()
        self.random: RandomState | None = None
        self.bindings: Bindings | None = None
        self.swap: Any = None
        self.originals: list[Any] = []
        self.leaf: list[tuple[int, bool, bool]] = []

    def note_random(self, of: Callable[[torch.Generator], Any] = state_of) -> None:
        """Note the state of the generators before the forward; one that leaves its tape may note it there,
        where none of the ops so far has drawn. `of`: how it is read."""
        if self.region.preserve_rng_state and self.random is None:
            self.random = RandomState(self.tensors, self.kinds, of=of)

    def note_surroundings(self) -> None:
        """Note what a run of the function itself needs besides its arguments."""
        self.bindings = Bindings(reached(self.region.function), bound=not self.ambient.captured)
        self.swap = innermost()
        self.originals = [weakref.ref(t) for t in self.tensors]

    def signature(self) -> Any:
        """What decides, besides the function, which ops run."""
        # (`lies` by itself for the usual case: this runs at every call.)
        shapes = tuple(
            [
                (t.shape, t.dtype, t.requires_grad, None)
                if t.layout is _strided and not t.is_nested and t.is_contiguous()
                else (shape_of(t), t.dtype, t.requires_grad, lies(t))
                for t in ((*self.tensors, *self.local) if self.wrappers else self.tensors)
            ]
        )
        training = getattr(self.region.function, "training", None)
        own = tuple(steering(self.leaves)) if len(self.leaves) > len(self.tensors) else ()
        wrappers = tuple([(i, w.signature()) for i, w in self.wrappers.items()])
        return shapes, training, self.ambient.autocast, self.spec, own, wrappers

    def rebuild(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, in a graph of their own; one that was passed twice is one again."""
        if self.wrappers:
            parts = iter(tensors)
            count = range(len(self.arguments))
            tensors = [w.around(parts) if (w := self.wrappers.get(i)) else next(parts) for i in count]
        leaves: list[Any] = list(self.leaves) if self.spec is not None else [None] * len(tensors)
        again: dict[int, Any] = {}
        for i, (tensor, (key, leaf, graded)) in zip(
            self.arguments, zip(tensors, self.leaf, strict=True), strict=True
        ):
            made = again.get(key)
            if made is None:
                made = tensor.requires_grad_() if graded else tensor
                if graded and not leaf:
                    # As in the forward: autocast and regions inside tell leaves apart.
                    with torch.enable_grad():
                        made = tensor.view_as(tensor)
                again[key] = made
            leaves[i] = made
        # The structure of a call with tensors only is not even noted.
        return (tuple(leaves), {}) if self.spec is None else unflatten(leaves, self.spec)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
        """What `rebuild` has made, by the ids of the user's tensors that are still there."""
        made = split(flatten((args, kwargs))[0])[0]
        pairs = zip(self.originals, made, strict=True)
        return {id(was): tensor for ref, tensor in pairs if (was := ref()) is not None}

    def finish(self) -> None:
        """The forward is over: let go of the arguments."""
        first: dict[int, int] = {}
        self.leaf = [
            (first.setdefault(id(t), i), t.is_leaf, t.requires_grad) for i, t in enumerate(self.tensors)
        ]
        self.tensors = self.local = []

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """What has to be put back for the function to see what it saw."""
        needed: list[AbstractContextManager[Any]] = []
        if self.taps or current():
            needed.append(again(self.taps))
        if self.swap is not None:
            needed.append(self.swap.lenient())
        if self.bindings is not None and self.bindings.changed():
            needed.append(self.bindings.restored())
        if self.ambient.must_be_restored():
            needed.append(self.ambient.restored(True))
        if modules_watched():
            # They would add ops of their own to the replay: inputs are leaves there, not in the forward.
            needed.append(without_module_trackers())
        return needed

    def path(self, at: int | None, tensor: torch.Tensor) -> str | None:
        """What the user calls the argument number `at`, or a captured tensor."""
        if at is None or at >= len(self.local_at):
            return of_captured(self.region.function, tensor)
        spec = self.spec or flatten((tuple([None] * len(self.arguments)), {}))[1]
        return of_arguments(self.region.function, spec).get(self.arguments[self.local_at[at]])


def steering(leaves: Iterable[Any]) -> Iterator[Any]:
    """What arguments that are no tensors tell of the ops that run."""
    for leaf in leaves:
        # A class as a number: a metaclass may define a hash, and the ops are compared anyway.
        kind = type(leaf)
        yield leaf if kind in _STEERING else id(kind)
        if (number := plain_of(leaf)) is not None:
            yield number
