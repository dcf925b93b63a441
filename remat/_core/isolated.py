"""What a look at a function must not touch, whatever runs inside: gradients of leaves, their hooks, storages.

Nothing is looked for before. A backward inside shows the leaves that it would accumulate into, and a storage
shows that it is resized: so what nobody can reach is isolated, too.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from remat._torch import backwards_watched, resize_storage
from remat.transforms import leaves_behind
from remat.transforms.compat import functions_as_they_are, outside_all_modes, storage_key

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def isolated(
    around: Context = contextlib.nullcontext, adding: Iterable[torch.Tensor] = ()
) -> Iterator[Isolated]:
    """Leave gradients, and the sizes of storages with what lies there, as they are, whatever runs inside.

    A backward inside gives leaves their gradients by assignment. So it calls none of the hooks that wait for
    an accumulation: those of optimizers in the backward, and of wrappers that reduce gradients.
    `around`: every backward inside runs within it; torch takes the torch-function modes off around some.
    `adding`: leaves whose gradients nobody else knows, which are added to as an engine does, in place.
    """
    kept = Isolated(around, adding)
    with backwards_watched(kept.backward, kept.resize), torch.autograd.set_multithreading_enabled(False):
        try:
            yield kept
        finally:
            with outside_all_modes(), functions_as_they_are():
                kept.restore()


class Isolated:
    """Gradients and storages as they were when they were first met."""

    def __init__(self, around: Context, adding: Iterable[torch.Tensor] = ()) -> None:
        self._around, self._adding = around, {id(leaf) for leaf in adding}
        # Leaves that are made inside, as torch's reentrant checkpoint makes them, go as they would.
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = {}

    def backward(self, run: Callable[..., Any], given: dict[str, Any]) -> Any:
        """One backward that starts inside."""
        leaves = _leaves(given["tensors"])
        ends = list(given.get("inputs") or leaves) if given.get("accumulate_grad") else []
        added = [leaf for leaf in ends if id(leaf) in self._adding and leaf.grad is not None]
        with self._around(), _muted(leaves), _added_at_once(added):
            if not ends:
                return run(**given)
            given = {**given, "inputs": tuple(ends), "allow_unreachable": True, "accumulate_grad": False}
            found = run(**given)
        # An engine that was given gradients may return them, and the same one twice.
        taken = {storage_key(g) for g in given["grad_tensors"] if isinstance(g, torch.Tensor) and _dense(g)}
        with functions_as_they_are(), torch.set_grad_enabled(bool(given["create_graph"])):
            for leaf, gradient in zip(ends, found, strict=True):
                if gradient is not None and all(leaf is not one for one in added):
                    self._give(leaf, gradient, taken)
        return None

    def _give(self, leaf: torch.Tensor, gradient: torch.Tensor, taken: set[int]) -> None:
        before, known = leaf.grad, self._gradients.get(id(leaf))
        if known is None or known[0]() is not leaf:
            self._gradients[id(leaf)] = weakref.ref(leaf), before
        if before is not None:
            gradient = before + gradient
        elif _dense(gradient):
            gradient = gradient.clone() if storage_key(gradient) in taken else gradient
            taken.add(storage_key(gradient))
        leaf.grad = gradient

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage is about to get another size."""
        key = storage._cdata
        if storage.device.type != "meta" and key not in self._storages:
            size = storage.nbytes()
            with outside_all_modes(), functions_as_they_are():
                copy = storage.clone() if size else None
            self._storages[key] = storage, size, copy

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor was given another size, and will be what it was."""
        return bool(self._storages) and storage_key(tensor) in self._storages

    def restore(self) -> None:
        """Put all back."""
        for reference, gradient in self._gradients.values():
            if (leaf := reference()) is not None:
                leaf.grad = gradient
        for storage, size, copy in self._storages.values():
            if storage.nbytes() != size:
                resize_storage(storage, size)
            if copy is not None:
                storage.copy_(copy)
        self._gradients, self._storages = {}, {}


@contextlib.contextmanager
def _muted(leaves: list[torch.Tensor]) -> Iterator[None]:
    """Within, the hooks on gradients of these are not called."""
    # The tables stay the same: torch reads them in every call, and handles remove from them.
    with functions_as_they_are():
        tables = [table for leaf in leaves if (table := leaf._backward_hooks)]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            added = dict(table)
            table.clear()
            table.update({**hooks, **added})


@contextlib.contextmanager
def _added_at_once(leaves: list[torch.Tensor]) -> Iterator[None]:
    """Within, gradients of these go into those that are there as they come, and take no more memory."""

    def add(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        with functions_as_they_are(), torch.no_grad():
            assert leaf.grad is not None
            leaf.grad.add_(gradient)
            return gradient.new_zeros(()).expand(gradient.shape)

    handles = [leaf.register_hook(functools.partial(add, leaf)) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaves(roots: Any) -> list[torch.Tensor]:
    own = [t for t in roots if t.is_leaf and t.requires_grad]
    # The same leaf may stand behind several nodes.
    return list({id(t): t for t in (*own, *leaves_behind(list(roots)))}.values())


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
