"""Names for values, which policies see."""

# What users pass is checked, whatever its type was said to be.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from typing import TypeVar

import torch

from remat._dynamo import tap
from remat.transforms import WrongType, map_only
from remat.transforms.compiled import named
from remat.transforms.intermediates import tap as taps_tap

Tree = TypeVar("Tree")


def checkpoint_name(tree: Tree, name: str) -> Tree:
    """Name every tensor of `tree`, so that policies such as `save_names(name)` can speak of it.

    Identity on values and derivatives, under every transform. Outside a region it does nothing but alias.

    Args:
        tree: any pytree; leaves that are not tensors stay as they are.
        name: the name; several values may share it.

    Raises:
        RematError: `name` is not a string (also a `TypeError`).

    Example:
        >>> import torch
        >>> from remat import checkpoint_name, remat, save_names, saved_residuals
        >>> def f(x):
        ...     return checkpoint_name(x.sin(), "s").exp().sum()
        >>> x = torch.ones(3, requires_grad=True)
        >>> [r.name for r in saved_residuals(remat(f, policy=save_names("s")), x) if r.name]
        ['s']
    """
    if not isinstance(name, str):
        raise WrongType(
            "checkpoint_name(tree, name): the name must be a string, got "
            f"{'a tensor' if isinstance(name, torch.Tensor) else repr(name)}; write "
            "checkpoint_name(x, 'attn')"
        )
    marked = map_only(torch.Tensor, lambda tensor: named(tensor, name), tree)
    if torch.compiler.is_dynamo_compiling():
        tap(name, marked)
        return marked
    return taps_tap(name, marked)
