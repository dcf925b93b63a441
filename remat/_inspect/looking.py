"""Running a user's function for a look, on the real thing: tensors too are afterwards as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat._core import untouched
from remat.transforms import targets, traits
from remat.transforms.compat import (
    TorchDispatchMode,
    functions_as_they_are,
    is_strided,
    is_wrapped,
    set_version,
    storage_key,
)
from remat.transforms.tape import made_by


@contextlib.contextmanager
def looked_at(*roots: Any, ops: bool = True) -> Iterator[None]:
    """Leave all that `roots` can reach as it is: objects, random numbers, tensors and what they hold.

    Without `ops` (what is compiled shows none) the memory of all buffers in reach is copied before.
    """
    with untouched(*roots) as notes:
        plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        found = [t for t in notes.tensors if type(t) in plain and not is_wrapped(t)]
        with functions_as_they_are():
            states = [_State(tensor, copied=not ops and not tensor.requires_grad) for tensor in found]
        try:
            with _Writes() if ops else contextlib.nullcontext():
                yield
        finally:
            with functions_as_they_are():
                for state in states:
                    state.restore()


class _State:
    """A tensor: its history, its hooks, its gradient and its memory."""

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self.leaf, self.requires_grad = tensor, tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if self.leaf else None
        hooks = tensor._backward_hooks
        self.hooks = None if hooks is None else dict(hooks)
        self.data, self.version = tensor.detach(), 0 if tensor.is_inference() else tensor._version
        self.copy = tensor.detach().clone() if copied else None

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
        if self.copy is not None and (tensor._version != self.version or _differ(self.data, self.copy)):
            _write_back(tensor, self.data, self.copy, self.version)

    def _restore_hooks(self) -> None:
        hooks = self.tensor._backward_hooks
        if hooks is None or dict(hooks) == (self.hooks or {}):
            return
        if self.hooks is None:
            self.tensor._backward_hooks = None
        else:
            hooks.clear()
            hooks.update(self.hooks)


class _Writes(TorchDispatchMode):
    """Undoes, at its end, what ops inside wrote into tensors from outside, such as running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}
        self._before: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in targets(traits(func), args, kwargs):
            if is_strided(tensor) and not self._is_made(tensor) and id(tensor) not in self._before:
                version = 0 if tensor.is_inference() else tensor._version
                # (An alias keeps its shape, whatever becomes of the tensor's.)
                self._before[id(tensor)] = tensor, tensor.detach(), tensor.clone(), version
        out = func(*args, **kwargs)
        for key, storage in made_by(args, kwargs, out):
            self._made[key] = StorageWeakRef(storage)
        return out

    def _is_made(self, tensor: Tensor) -> bool:
        made = self._made.get(storage_key(tensor))
        return made is not None and not made.expired()

    def __exit__(self, *exc: Any) -> Any:
        done = super().__exit__(*exc)
        for tensor, alias, before, version in reversed(self._before.values()):
            _write_back(tensor, alias, before, version)
        return done


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return storage_key(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()


def _differ(one: Tensor, other: Tensor) -> bool:
    return is_strided(one) and not one.is_meta and not torch.equal(one, other)


def _write_back(tensor: Tensor, alias: Tensor, before: Tensor, version: int) -> None:
    with torch.no_grad():
        alias.copy_(before)
    if not tensor.is_inference():
        # Whoever has saved it for a backward finds what was there then.
        set_version(tensor, version)
