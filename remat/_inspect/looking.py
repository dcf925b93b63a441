"""Running a user's function for a look, on the real thing: modules and tensors are as they were then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat._core import Isolated, isolated, isolating
from remat._torch import resize_storage
from remat.transforms import targets, traits, version_of
from remat.transforms.compat import (
    DispatchMode,
    below_levels,
    functions_as_they_are,
    is_strided,
    is_wrapped,
    set_version,
    storage_key,
)
from remat.transforms.tape import made_by


@contextlib.contextmanager
def looked_at(*roots: Any, ops: bool = True, adding: Iterable[Tensor] = ()) -> Iterator[None]:
    """Isolate what a look must not touch: modules, tensors with their gradients and hooks, random streams.

    Without `ops` (what is compiled shows none) the memory of all tensors in reach is copied before.
    `adding` is as for `isolated`.
    """
    with isolating(*roots) as reach:
        for module in reach.modules:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                # It expects gradients after a forward, which a look gives to nobody.
                module.require_backward_grad_sync = False
        plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        found = [t for t in reach.tensors if type(t) in plain and not is_wrapped(t)]
        # (A transform's level would make other tensors of these.)
        with functions_as_they_are(), below_levels():
            states = [_State(tensor, copied=not ops or _is_small(tensor)) for tensor in found]
        try:
            # Storages have their sizes again before anything is written there.
            with contextlib.ExitStack() as stack:
                writes = stack.enter_context(_Writes()) if ops else None
                kept = stack.enter_context(isolated(adding=adding))
                if writes is not None:
                    writes.kept = kept
                yield
        finally:
            with functions_as_they_are(), below_levels():
                for state in states:
                    state.restore()


# Buffers on a CPU of at most so many bytes are copied: NumPy and extensions write there, which is no op.
_SMALL = 1 << 26


def _is_small(tensor: Tensor) -> bool:
    return not tensor.requires_grad and tensor.device.type == "cpu" and _size(tensor) <= _SMALL


class _State:
    """A tensor: its history, its hooks, its gradient and its memory."""

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self.leaf, self.requires_grad = tensor, tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if self.leaf else None
        self.hooks = {name: _hooks(tensor, name) for name in _HOOKS}
        self.data, self.version = tensor.detach(), version_of(tensor)
        self.size = _size(tensor)
        copied = copied and is_strided(tensor) and not tensor.is_meta and bool(self.size)
        # Weights fill their device already.
        place = "cpu" if tensor.requires_grad else tensor.device
        self.copy = tensor.detach().to(place, copy=True) if copied else None

    def restore(self) -> None:
        tensor = self.tensor
        if self.leaf and not tensor.is_leaf:
            # It was written to with a history; a view must keep its own.
            with contextlib.suppress(RuntimeError):
                tensor.detach_()
        if is_strided(tensor) and _place(tensor) != _place(self.data):
            tensor.data = self.data
        if self.leaf and tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad
        self._restore_hooks()
        # (Batch normalization writes its statistics and leaves the version as it was.)
        if self.copy is not None and (version_of(tensor) != self.version or _differ(self.data, self.copy)):
            _write_back(tensor, self.data, self.copy, self.version, self.size)

    def _restore_hooks(self) -> None:
        for name, before in self.hooks.items():
            hooks = getattr(self.tensor, name, None)
            if hooks is None or dict(hooks) == (before or {}):
                continue
            if before is None:
                setattr(self.tensor, name, None)
            else:
                hooks.clear()
                hooks.update(before)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks(tensor: Tensor, name: str) -> dict[int, Any] | None:
    hooks = getattr(tensor, name, None)
    return None if hooks is None else dict(hooks)


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if is_strided(tensor) else 0


class _Writes(DispatchMode):
    """Undoes, at its end, what ops inside wrote into tensors from outside, such as running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}
        self._before: dict[int, tuple[Tensor, Tensor, Tensor | None, int, int]] = {}
        self.kept: Isolated | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in targets(traits(func), args, kwargs):
            if is_strided(tensor) and not self._is_made(tensor) and id(tensor) not in self._before:
                size = _size(tensor)
                there = size >= _reaches(tensor) and not (self.kept is not None and self.kept.has(tensor))
                before = tensor.clone() if there else None
                # (An alias keeps its shape, whatever becomes of the tensor's.)
                self._before[id(tensor)] = tensor, tensor.detach(), before, version_of(tensor), size
        out = func(*args, **kwargs)
        for key, storage in made_by(args, kwargs, out):
            self._made[key] = StorageWeakRef(storage)
        return out

    def _is_made(self, tensor: Tensor) -> bool:
        made = self._made.get(storage_key(tensor))
        return made is not None and not made.expired()

    def __exit__(self, *exc: Any) -> Any:
        done = super().__exit__(*exc)
        with functions_as_they_are(), below_levels():
            for noted in reversed(self._before.values()):
                _write_back(*noted)
        return done


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return storage_key(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()


def _reaches(tensor: Tensor) -> int:
    """How many bytes of its storage a tensor needs."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _differ(one: Tensor, other: Tensor) -> bool:
    return _size(one) >= _reaches(one) and not torch.equal(one, other.to(one.device))


def _write_back(tensor: Tensor, alias: Tensor, before: Tensor | None, version: int, size: int) -> None:
    if not alias.is_meta and before is not None:
        storage = alias.untyped_storage()
        if storage.nbytes() > size:
            resize_storage(storage, size)
        # Memory that was not there before the look has gone again.
        if storage.nbytes() >= _reaches(alias):
            with torch.no_grad():
                alias.copy_(before)
    if not tensor.is_inference():
        # Whoever has saved it for a backward finds what was there then.
        set_version(tensor, version)
