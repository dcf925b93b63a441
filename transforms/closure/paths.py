"""What the user calls a tensor that a function is given or closes over, like `params['layers'][0]['w']`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remat.transforms.compat import is_wrapped, storage_key, unwrapped
from remat.transforms.objects import is_module, is_tensor, named_tensors
from remat.transforms.pytree import Spec, flatten, paths, unflatten
from remat.transforms.sharded import local_tensors


def by_storage(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, tuple[str, str, int]]:
    """Block of memory -> ("argument" or "captured", path in the user's words, place in their order)."""
    found: dict[int, tuple[str, str, int]] = {}
    for path, value in _captured_by_name(fn):
        _note(found, "captured", path, value)
    for path, value in _arguments_by_name(fn, args, kwargs):
        _note(found, "argument", path, value)
    return found


def of_arguments(fn: Callable[..., Any], spec: Spec) -> dict[int, str]:
    """Position among the leaves of (args, kwargs) -> path."""
    try:
        args, kwargs = unflatten(list(range(spec.num_leaves)), spec)
        named = [
            (leaf, path + key)
            for path, value in _arguments_by_name(fn, args, kwargs)
            for key, leaf in zip(paths(value), flatten(value)[0], strict=True)
        ]
    except Exception:
        # A container of the user's that refuses numbers for leaves: the message then goes without a path.
        return {}
    return dict(named)


def of_captured(fn: Callable[..., Any], tensor: torch.Tensor) -> str | None:
    """The path of a tensor that `fn` closes over, None if it is not found."""
    if not _has_storage(tensor):
        return None
    return by_storage(fn, (), {}).get(storage_key(tensor), ("", None, 0))[1]


def _note(found: dict[int, tuple[str, str, int]], why: str, path: str, value: Any) -> None:
    if is_module(value):
        prefix = f"{path}." if path else ""
        pairs = [(f"{prefix}{name}", tensor) for name, tensor in named_tensors(value)]
    else:
        pairs = [(path + key, leaf) for key, leaf in zip(paths(value), flatten(value)[0], strict=True)]
    for at, leaf in pairs:
        for part in local_tensors([unwrapped(leaf)] if is_tensor(leaf) else ()):
            if _has_storage(part):
                found[storage_key(part)] = why, at, len(found)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_wrapped(tensor)


def _arguments_by_name(fn: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    try:
        called = fn.forward if is_module(fn) else fn
        bound = inspect.signature(called).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # Builtins have no signature.
        yield from (("args", args), *kwargs.items())
        return
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _captured_by_name(fn: Any) -> Iterator[tuple[str, Any]]:
    fn = inspect.unwrap(fn) if callable(fn) else fn
    if is_module(fn):
        yield "", fn
        return
    if inspect.ismethod(fn):
        yield ("" if is_module(fn.__self__) else "self"), fn.__self__
        fn = fn.__func__
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, cells or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:
            continue  # a cell not filled yet
        yield name, value() if type(value) is weakref.ref else value  # (as `Region.released` has it)
