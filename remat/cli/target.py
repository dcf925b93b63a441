"""`MODULE:FN` on a command line, and the tensors it is called with."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat._core import name_of
from remat.cli.errors import UsageError
from remat.transforms.closure import captured, reached


def load(
    target: str, shapes: Sequence[str] = (), dtype: str = "float32", device: str = "meta"
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that `MODULE:FN` names, and its arguments.

    Args:
        target: FN is a function or module of tensors, or without `shapes` a function of none that returns
            `(fn, *args)`.
        shapes: sizes of tensor arguments, such as `4x128x256`.
        dtype, device: of those tensors. On "meta" they have no data, which is enough to plan; those of a
            module that has parameters, or of a function that captures any, are where these are.

    Raises:
        UsageError: there is no such module, function, or shape.

    Example:
        >>> from remat.cli.target import load
        >>> fn, args = load("torch:sin", ["2x3"])
        >>> fn(*args).shape
        torch.Size([2, 3])
    """
    fn = named(target)
    if not callable(fn):
        raise UsageError(f"{target} is no function or module but {fn!r} of type {type(fn).__name__}.")
    if shapes:
        device = _device_of(fn, device)
        made = tuple(tensor(shape, dtype, device) for shape in shapes)
        check_count(target, fn, len(made))
        return fn, made
    if isinstance(fn, torch.nn.Module) or takes_arguments(fn):
        raise UsageError(
            f"{target} takes arguments: give each as --input 4x128x256, or name a function of none "
            "that returns (fn, *args)."
        )
    made = fn()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise UsageError(f"{target} must return (fn, *args), got {made!r} of type {type(made).__name__}.")
    return made[0], made[1:]


def _device_of(fn: Any, device: str) -> str:
    """Where the parameters are that `fn` leads to."""
    first = next(iter(captured(reached(fn))), None) if device == "meta" else None
    return device if first is None else str(first.device)


def named(target: str) -> Any:
    """What `MODULE:NAME` names, imported as `python -m` would import it."""
    module, _, name = target.partition(":")
    if not name or not module or module.startswith("."):
        raise UsageError(
            f"{target!r} names no function: write MODULE:FN, as in {_as_module(module) or 'mypackage.model'}:"
            f"{name or 'block'}."
        )
    # As `python -m` does: modules beside the user are found without being installed.
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = _member(found, part)
    except (ImportError, AttributeError) as error:
        hint = "" if _as_module(module) == module else f" Write {_as_module(module)}:{name}."
        raise UsageError(f"{target!r} cannot be loaded: {error}.{hint}") from error
    finally:
        sys.path.remove("")
    return found


def _member(found: Any, name: str) -> Any:
    if not hasattr(found, name):
        near = difflib.get_close_matches(name, dir(found), n=1)
        what = name_of(found)
        raise AttributeError(f"{what} has no {name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
    return getattr(found, name)


def _as_module(path: str) -> str:
    """A module as `import` spells it, where it was written as a file."""
    return path.removesuffix(".py").strip("./").replace("/", ".")


def check_count(target: str, fn: Callable[..., Any], count: int) -> None:
    """Raise where `fn` cannot be called with so many tensors."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except ValueError:
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        if not signature.parameters:
            raise UsageError(
                f"{target} takes no tensors. If it makes a module, give that a name in its file (as net = "
                f"{target.rpartition(':')[2]}()) and name it here with --input; if it returns (fn, *args), "
                "leave --input out."
            ) from None
        raise UsageError(
            f"{target}{signature} with {count} inputs: {error}. Give one --input SIZES for each argument, or "
            "name a function of none that returns (fn, *args)."
        ) from None


def takes_arguments(fn: Callable[..., Any]) -> bool:
    """Whether a function cannot be called without arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:
        # A builtin without a signature: what makes arguments for others is written in Python.
        return True
    return any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters)


def tensor(shape: str, dtype: str, device: str = "meta") -> torch.Tensor:
    """A tensor that requires grad where it can: normal numbers, or zeros for integer types."""
    try:
        sizes = [int(size) for size in shape.lower().split("x")]
        kind = getattr(torch, dtype)
        if not kind.is_floating_point:
            return torch.zeros(sizes, dtype=kind, device=device)
        return torch.randn(sizes, dtype=kind, device=device).requires_grad_()
    except (ValueError, AttributeError, RuntimeError, AssertionError) as error:
        where = "" if device == "meta" else f" --device {device}"
        raise UsageError(
            f"--input {shape} --dtype {dtype}{where} is no tensor: {error}. Write sizes as 4x128x256."
        ) from error
