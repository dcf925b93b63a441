"""Pytrees at the user's boundary.

torch.func knows torch's registry only, so arguments and results are flattened by torch's rules: what a user
registered with `torch.utils._pytree` is a container here, anything else is a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from remat.transforms.compat import Spec as Spec
from remat.transforms.compat import flatten as flatten
from remat.transforms.compat import map_leaves as map_leaves
from remat.transforms.compat import map_only as map_only
from remat.transforms.compat import paths as paths
from remat.transforms.compat import shown as shown
from remat.transforms.compat import tree_leaves as tree_leaves
from remat.transforms.compat import unflatten as unflatten
from remat.transforms.errors import RematError


def split(leaves: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """The tensors among `leaves`, and their positions."""
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return [leaves[i] for i in at], at


def smooth(leaf: Any) -> bool:
    """Whether `leaf` is a tensor that can carry a derivative."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def merge(leaves: Sequence[Any], at: Sequence[int], tensors: Iterable[Any]) -> list[Any]:
    """`leaves` with the tensors at positions `at` replaced."""
    merged = list(leaves)
    for i, tensor in zip(at, tensors, strict=True):
        merged[i] = tensor
    return merged


def check_results(tree: Any, region: str) -> None:
    """Raise when a result holds tensors in a container that is not a pytree, which torch.func would lose."""
    for at, leaf in enumerate(tree_leaves(tree)):
        if isinstance(leaf, torch.Tensor) or isinstance(leaf, (int, float, complex, str, bool, type(None))):
            continue
        if held := [k for k, v in getattr(leaf, "__dict__", {}).items() if isinstance(v, torch.Tensor)]:
            raise RematError(
                f"region {region!r} returns at `result{paths(tree)[at]}` a {type(leaf).__name__}, which is "
                f"no pytree but holds tensors ({', '.join(held)}). Under torch.func their gradients would "
                "be lost. Register the class with torch.utils._pytree.register_pytree_node (or "
                "register_dataclass), or return the tensors themselves."
            )
