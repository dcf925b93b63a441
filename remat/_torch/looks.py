"""What a look must see that neither ops nor torch functions show: backwards inside, resized storages,
and states of generators that are taken.

Private names of torch, each with its reason. Tried on 2.13.0 (CPU).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remat.transforms.compat import exchange

# Every backward that Python starts ends in this object's `run_backward`; torch has no hook around it.
_variable: Any = torch.autograd.Variable
# The order in which callers give its arguments, some by position.
_ARGUMENTS = ("tensors", "grad_tensors", "keep_graph", "create_graph", "inputs")
_ARGUMENTS += ("allow_unreachable", "accumulate_grad")


class _Watchers(threading.local):
    """Who is asked on this thread, the innermost last."""

    def __init__(self) -> None:
        self.backwards: list[Callable[..., Any]] = []
        self.resizes: list[Callable[[torch.UntypedStorage], None]] = []
        self.states: list[Callable[[torch.Tensor], None]] = []


_watchers = _Watchers()
_lock = threading.Lock()
_looks: list[None] = []


class _Engine:
    """Torch's engine, which asks the innermost look on this thread about every backward."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def is_checkpoint_valid(self) -> bool:
        """Torch's reentrant checkpoint refuses a backward that is told its inputs, as a look's is."""
        return bool(_watchers.backwards) or self._engine.is_checkpoint_valid()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        run = self._engine.run_backward
        if not _watchers.backwards:
            return run(*args, **kwargs)
        return _watchers.backwards[-1](run, {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs})


# The method of torch's base class, which the class that users see inherits.
resize_storage: Callable[..., Any] = torch._C.StorageBase.resize_  # pyright: ignore[reportAttributeAccessIssue]


def _resize(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
    for note in _watchers.resizes:
        note(storage)
    return resize_storage(storage, *args, **kwargs)


class _States:
    """Torch's function, or a user's, that takes the CPU generator's state: it tells the innermost look."""

    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self.take = take

    def __call__(self) -> torch.Tensor:
        state = self.take()
        for note in _watchers.states[-1:]:
            note(state)
        return state


@contextlib.contextmanager
def states_watched(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within a look, on this thread, `note` is told of states of the CPU's generator that are taken, as
    torch's checkpoint takes them. Of several the innermost is."""
    _watchers.states.append(note)
    try:
        yield
    finally:
        _watchers.states.pop()


@contextlib.contextmanager
def backwards_watched(
    backward: Callable[..., Any], resize: Callable[[torch.UntypedStorage], None]
) -> Iterator[None]:
    """Within, on this thread, `backward(run, arguments)` runs what Python starts, `arguments` by their names.

    `resize` is told of every storage that is about to get another size, which is no op. Torch's own objects
    stand there again when no thread looks.
    """
    with _lock:
        _looks.append(None)
        if len(_looks) == 1:
            exchange(_variable, "_execution_engine", _Engine(_variable._execution_engine))
            exchange(torch.UntypedStorage, "resize_", _resize)
            exchange(torch, "get_rng_state", _States(torch.get_rng_state))
    _watchers.backwards.append(backward)
    _watchers.resizes.append(resize)
    try:
        yield
    finally:
        _watchers.backwards.pop()
        _watchers.resizes.pop()
        with _lock:
            _looks.pop()
            if not _looks:
                exchange(_variable, "_execution_engine", _variable._execution_engine._engine)
                del torch.UntypedStorage.resize_
                if isinstance(torch.get_rng_state, _States):  # else a user has put another one there
                    exchange(torch, "get_rng_state", torch.get_rng_state.take)
