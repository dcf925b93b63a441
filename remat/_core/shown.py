"""What messages say: a value that a user passed (no addresses, no numbers of tensors, no pages of text), and
how to install what is missing."""

from __future__ import annotations

import types
from typing import Any

import torch

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)


def described(value: Any) -> str:
    """A value as a message calls it.

    Example:
        >>> from remat._core import described
        >>> described(described), described(0.4), described(float)
        ('the function described', '0.4 of type float', 'the class float')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, _FUNCTIONS):
        return f"the function {value.__name__}"
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return f"{article} {kind}"
    text = repr(value)
    if len(text) > 80 or " at 0x" in text:
        return f"{article} {kind}"
    return text if value is None else f"{text} of type {kind}"


def name_of(fn: Any) -> str:
    """What the user calls a function, or a module by its class."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def first_line(error: BaseException) -> str:
    """What an error says in its first line, without a full stop; its class's name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def to_install(*extras: str) -> str:
    """How to install what some extras of this package list.

    Example:
        >>> from remat._core import to_install
        >>> print(to_install("cli", "plan"))
        in the checkout, pip install '.[cli,plan]'
    """
    return f"in the checkout, pip install '.[{','.join(extras)}]'"
