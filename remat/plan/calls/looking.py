"""Running a user's function on tensors without data, so that none of those is left."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from remat._core import Reach, isolating
from remat.transforms import RematError
from remat.transforms.closure import PythonState, reached
from remat.transforms.compat import (
    fakes_watched,
    functions_as_they_are,
    is_fake,
    outside_all_modes,
    unwrapped,
)

T = TypeVar("T")


@contextlib.contextmanager
def looking(*roots: Any) -> Iterator[Reach]:
    """Isolate what a look must not touch, and see that no tensor without data outlives it.

    Raises:
        RematError: one does, in something out of reach; the message names it.
    """
    with fakes_watched() as modes:
        with isolating(*roots) as reach:
            reach.mute()
            try:
                with _one_sequence_a_row():
                    yield reach
            finally:
                _take_out(reach, modes)
    # Cycles hold some. What is young is found soon.
    for generation in (0, 1, 2):
        if any(mode() is not None for mode in modes):
            gc.collect(generation)
    if left := [mode for mode in modes if mode() is not None]:
        _refuse(left, roots[0])


def _take_out(reach: Reach, modes: list[Any]) -> None:
    """Take tensors of these modes out of whatever in reach has come to hold them."""
    alive = [mode for ref in modes if (mode := ref()) is not None]

    def made(tensor: Any) -> bool:
        bottom: Any = unwrapped(tensor)  # (a transform inside, or around, wraps what is made in it)
        return is_fake(bottom) and any(bottom.fake_mode is mode for mode in alive)

    if alive:
        reach.without(made)


def looked(make: Callable[[Reach], T], *roots: Any, restored: bool = False) -> T:
    """What `make` makes of a look.

    `restored`: the call itself follows, and is to find the caches as they were.
    """
    with looking(*roots) as reach:
        before = PythonState(reached(*roots)) if restored else None
        # Context variables that are set inside are set there alone.
        made = contextvars.copy_context().run(make, reach)
        if before is not None:
            before.restore_state()
        return made


def _one_sequence_a_row() -> contextlib.AbstractContextManager[Any]:
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    return contextlib.nullcontext() if find is None else _OneSequence(find.__code__)


class _OneSequence(TorchFunctionMode):
    """Lets transformers take rows for one sequence each, as they are unless somebody packs them.

    It looks at the positions to find that out. Of positions without data it supposes that rows are packed,
    and has attention read a mask that no run with data has: its plans would be of other ops. So that one
    function of it computes with the positions of one sequence.
    """

    def __init__(self, code: types.CodeType) -> None:
        super().__init__()
        self.code = code

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        # Between that function and this one are other modes.
        while frame is not None and frame.f_code.co_name == "__torch_function__":
            frame = frame.f_back
        if frame is not None and frame.f_code is self.code:
            args = [_Positions.like(a) if is_fake(a) else a for a in args]
        return func(*args, **(kwargs or {}))


class _Positions(torch.Tensor):
    """The positions of tokens, and numbers that are computed of them, with data whatever modes are on."""

    @classmethod
    def like(cls, fake: torch.Tensor) -> torch.Tensor:
        with outside_all_modes(), functions_as_they_are():
            return torch.arange(fake.shape[-1], device="cpu").expand(fake.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with outside_all_modes():
            return super().__torch_function__(func, types, args, kwargs)


def _refuse(modes: list[Any], fn: Any) -> None:
    for seconds in (0.0, 0.01, 0.1):
        time.sleep(seconds)  # a collection that another thread has begun ends first: this one would not run
        gc.collect()
        if not (alive := [mode for ref in modes if (mode := ref()) is not None]):
            return
    # (Not by a list of all objects there are: a tuple that another thread is just making would be in it, and
    # Python refuses to go on with one that somebody else holds.)
    found = gc.get_referrers(*alive)
    found += gc.get_referrers(*[held for held in found if type(held) is dict])
    fakes = [t for t in found if issubclass(type(t), torch.Tensor) and is_fake(t) and t.fake_mode in alive]
    # One search for all of them: it goes through all objects that there are.
    dicts = [held for held in gc.get_referrers(*fakes) if isinstance(held, dict)] if fakes else []
    for fake in fakes:
        if (holder := _holder(fake, dicts)) is not None:
            name = getattr(fn, "__name__", type(fn).__name__)
            raise RematError(
                f"Planning {name} left a tensor without data in {holder}, where the function would find it "
                "later: it was taken out. Nothing that the function can reach leads there. Fill such a "
                "cache before the first call, fill it only if not remat.is_recomputing(), or use a policy "
                "without a budget."
            )


def _holder(fake: Any, dicts: list[dict[Any, Any]]) -> str | None:
    """Who holds a tensor, in words, once it has been taken from there; None where no container does."""
    for held in dicts:
        key = next((k for k, v in held.items() if v is fake), None)
        if key is None or held is getattr(fake, "__dict__", None):
            continue
        owner = next((o for o in gc.get_referrers(held) if getattr(o, "__dict__", None) is held), None)
        if isinstance(owner, types.FrameType) or is_fake(owner):
            continue
        del held[key]
        shown = repr(key) if type(key) in (str, int) else f"a {type(key).__name__}"
        return f"a dict, under {shown}" if owner is None else f"{shown} of a {type(owner).__name__}"
    return None
