"""Functions `report(fn, *args, **kwargs)` with options of their own, whose names `fn` may have for itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import torch

from remat._core.shown import described, name_of
from remat.transforms import RematError, WrongType

P = ParamSpec("P")
R = TypeVar("R")


class KeywordError(RematError, TypeError):
    """A keyword that may be meant for two functions."""


def keywords_apart(function: Callable[P, R], *, of_several: bool = False) -> Callable[P, R]:
    """Let no option of `function(fn, *args, kwargs=None, **keywords)` be taken from `fn`.

    Every keyword that is not an option is `fn`'s. An option is refused if `fn` has an argument of the same
    name, unless the call says by `kwargs={...}` what is `fn`'s. With `of_several`, `fn` may be a list.

    Raises:
        RematError: when called: an option that may be either's, or a keyword that is given twice (also a
            TypeError).
    """
    parameters = inspect.signature(function).parameters.values()
    own = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    name = getattr(function, "__name__", "")

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        if not (of_several and args and isinstance(args[0], (list, tuple))):
            check_callable(name, args)
        theirs: Any = keywords.get("kwargs")
        if theirs is None:
            doubtful = own & keywords.keys() - {"kwargs"}
            if doubtful and args and (both := sorted(doubtful & _named(args[0]))):
                raise KeywordError(_said(name, both[0], args[0], keywords[both[0]]))
        elif not isinstance(theirs, Mapping):
            raise KeywordError(
                f"{name}(kwargs=...): expected keywords of the function, as {{'scale': 2.0}}, got {theirs!r}"
            )
        elif twice := sorted(set(map(str, cast("Mapping[str, Any]", theirs))) & keywords.keys() - own):
            raise KeywordError(f"{name}: the function's {twice[0]!r} is given both by itself and in kwargs.")
        return function(*args, **keywords)

    return checked


def check_callable(name: str, args: tuple[Any, ...]) -> None:
    """Raise where the first of a report's arguments is no function, such as a result of one."""
    if not args:
        return
    fn, kind = args[0], type(args[0]).__name__
    if isinstance(fn, type) and issubclass(fn, torch.nn.Module):
        raise WrongType(
            f"{name}(fn, *args) got {described(fn)}, and not a module. Write {name}({fn.__name__}(...), x)."
        )
    if callable(args[0]):
        return
    got = repr(fn) if isinstance(fn, (str, int, float, type(None))) else f"a {kind}"
    why = ", which a call gives" if kind in ("Tensor", "tuple") else ""
    raise WrongType(
        f"{name}(fn, *args): fn must be a function or a module, got {got}{why}. Write {name}(fn, x): the "
        "function and its arguments apart."
    )


def _named(fn: Any) -> set[str]:
    """The arguments of `fn` that can be given by name."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    try:
        # Of a module the forward's; a model wrapped by others may have a signature that says nothing.
        parameters = inspect.signature(getattr(fn, "forward", fn)).parameters.values()
    except (TypeError, ValueError):
        return set()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.kind in named}


def _said(name: str, option: str, fn: Any, value: Any) -> str:
    label = name_of(fn)
    return (
        f"{name}({option}={value!r}): {option} is an option of {name}, and {label} has an argument of that "
        f"name. For {label}'s write {name}({label}, ..., kwargs={{{option!r}: {value!r}}}); for {name}'s "
        f"write {name}({label}, ..., {option}={value!r}, kwargs={{}})."
    )


def joined_keywords(keywords: dict[str, Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """All keywords of the function."""
    return {**keywords, **(kwargs or {})}
