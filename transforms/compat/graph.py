"""Autograd's graph: what its nodes tell of what they have saved.

Private names of torch, each with its reason. Supported: torch 2.11 to 2.15, tried on 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from remat.transforms.compat.autograd import (
    VMAP,
    is_batched,
    is_dead,
    is_wrapped,
    level_of,
    level_stack,
    running_node,
    unwrap_once,
)

_MOST = 100


@functools.lru_cache(maxsize=1024)
def saved_slots(kind: type) -> tuple[str, ...]:
    """Where a node of this kind saves tensors. (`_saved_...` unpacks one, `_raw_saved_...` does not.)"""
    return tuple([name for name in dir(kind) if name.startswith("_raw_saved_")])


def is_stale(tensor: torch.Tensor) -> bool:
    """Whether a tensor is left from an earlier step: its levels are gone, its graph is freed, or it refuses.

    A node with such a tensor as its operand would lead a backward there, whether it is read or not. Of the
    graph the nearest 100 nodes are asked.
    """
    # In a backward levels may be gone whose tensors run again.
    if is_wrapped(tensor) and running_node() is None:
        dead = is_dead(tensor)
        while is_wrapped(tensor) and is_dead(tensor):
            tensor = unwrap_once(tensor)
        if dead and not (is_wrapped(tensor) or tensor.requires_grad):
            return True
        kinds = {level.level(): level.key() for level in level_stack() or ()} if is_batched(tensor) else {}
        while is_batched(tensor):
            if kinds.get(level_of(tensor)) != VMAP:
                return True
            tensor = unwrap_once(tensor)
    nodes: list[Any] = [] if is_wrapped(tensor) or tensor.is_leaf else [tensor.grad_fn]
    seen = set[Any]()
    for node in nodes:  # they grow
        refuses = getattr(getattr(node, "_forward_cls", None), "refuses", False)
        if refuses or any(_gone(node, name) for name in saved_slots(type(node))):
            return True
        for after, _ in node.next_functions:
            if after is not None and after not in seen and len(nodes) < _MOST:
                seen.add(after)
                nodes.append(after)
    return False


def _gone(node: Any, name: str) -> bool:
    try:
        slots = getattr(node, name)
        # A hook would run, and ours compute something again; what is freed has none. (2.11 does not tell.)
        if not any(getattr(slot, "unpack_hook", True) for slot in listed(slots)):
            getattr(node, name.removeprefix("_raw"), None)
    except RuntimeError as error:
        return "a second time" in str(error)
    return False


class Hooked(Exception):
    """Raised by hooks of ours that are asked for a value when all that is asked is whether they are there."""


def hook_saved(node: Any, pack: Any, unpack: Any) -> None:
    """Give hooks to the tensors that a node has saved without any. What was written to since stays as it is,
    so that autograd says so."""
    for slot, value in saved_by(node):
        # Autograd packs no Python number, which our dispatch modes take for one.
        if value.dim() or value.requires_grad or not value.is_cpu:
            # (Torch would give an alias, by `detach`, which drops tangents.)
            slot.register_hooks(lambda _, given=[value]: pack(given.pop()), unpack)


def saved_by(node: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """The tensors that a node has saved without hooks, with their slots, but for those written to since."""
    for name in saved_slots(type(node)):
        slots = listed(getattr(node, name))
        # (2.11 does not tell.)
        if not any([getattr(slot, "unpack_hook", None) is not None for slot in slots]):
            pairs = zip(slots, _unwritten(node, name), strict=False)
            yield from [(slot, value) for slot, value in pairs if value is not None]


def _unwritten(node: Any, name: str) -> Any:
    try:
        saved = name.removeprefix("_raw")
        # (A node of an autograd.Function has no underscore there.)
        return listed(getattr(node, saved if hasattr(type(node), saved) else saved[1:]))
    except Hooked:
        return ()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return ()


def listed(value: Any) -> Any:
    """What one such slot holds: a saved tensor, or several."""
    return value if isinstance(value, (tuple, list)) else (value,)
