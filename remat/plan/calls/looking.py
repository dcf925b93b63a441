"""Running a user's function on tensors without data, so that nothing of that is left."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from remat._core import Notes, untouched
from remat.transforms import RematError
from remat.transforms.compat import fakes_watched, is_fake, is_hook_refusal
from remat.transforms.joint import NotOnFakes

T = TypeVar("T")


@contextlib.contextmanager
def looking(*roots: Any) -> Iterator[Notes]:
    """Leave all that `roots` can reach as it is, and see that no tensor without data outlives the look.

    Raises:
        RematError: one does, in something out of reach; the message names it.
    """
    # What the look makes stays young, so that a quick collection finds it all.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with fakes_watched() as modes, untouched(*roots) as notes, _one_sequence_a_row():
            yield notes
    finally:
        if collecting:
            gc.enable()
    # A look inside of this one has made older what this one had made by then.
    for generation in (0, 1):
        if any(mode() is not None for mode in modes):
            gc.collect(generation)
    if left := [mode for mode in modes if mode() is not None]:
        _refuse(left, roots[0])


def looked(make: Callable[[Notes, bool], T], *roots: Any) -> T:
    """What `make` makes of a look; it is told whether hooks on saved tensors may be used.

    The look begins again without them where torch.func, used inside the function, refuses them.
    """

    def look(hooks: bool) -> T:
        with looking(*roots) as notes:
            return make(notes, hooks)

    return with_hooks_or_without(look)


def with_hooks_or_without(make: Callable[[bool], T]) -> T:
    """What `make` makes: with hooks on saved tensors, or without them where torch.func refuses them."""
    try:
        return make(True)
    except NotOnFakes as error:
        if not is_hook_refusal(error):
            raise
    return make(False)


@contextlib.contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """Let transformers take rows for one sequence each, as they are unless somebody packs them.

    It looks at the data to find that out. Of tensors without data it supposes that rows are packed, and has
    attention read a mask that no run with data has: its plans would be of other ops.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(masking, "find_packed_sequence_indices", None)
    if find is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = find


def _refuse(modes: list[Any], fn: Any) -> None:
    gc.collect()
    alive = [mode for ref in modes if (mode := ref()) is not None]
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    fakes = [t for t in tensors if is_fake(t) and any(t.fake_mode is mode for mode in alive)]
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
        return f"a dict, under {key!r}" if owner is None else f"{key!r} of a {type(owner).__name__}"
    return None
