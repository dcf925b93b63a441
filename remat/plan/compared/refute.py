"""What the machine says of points on a frontier: forward and backward under each, in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remat._inspect import looked_at
from remat._region import with_policy
from remat.plan.graph import in_turns
from remat.policies import Policy
from remat.transforms import RematError, is_tensor, leaves_behind, tree_leaves
from remat.transforms.compat import is_fake

# A point is refuted by another one that keeps no more and takes less than this share of its time.
BEATEN = 0.98


def measured(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policies: Sequence[Policy],
    rounds: int,
) -> list[float]:
    """Median seconds of a forward and backward of `fn` under each policy; nothing is left of the runs.

    Raises:
        RematError: a tensor has no data.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if is_tensor(leaf)]
    if any(tensor.is_meta or is_fake(tensor) for tensor in tensors):
        raise RematError(
            "measure=True runs the function, and its arguments have no data. Leave it out, and name the "
            'device of the prices: pareto(fn, x, cost="roofline", device="h100").'
        )
    device = str(next((tensor.device for tensor in tensors), "cpu"))
    regions = [with_policy(fn, policy) for policy in policies]
    # A mode that watches writes would take its time, so memory that may be written to is copied before.
    with looked_at(fn, args, kwargs, ops=False), torch.enable_grad():
        leaves = leaves_behind(_active(fn(*args, **kwargs)))
        steps = [functools.partial(_step, region, args, kwargs, leaves) for region in regions]
        return in_turns(steps, device, rounds)


def _active(out: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(out) if is_tensor(t) and t.requires_grad]


def _step(region: Callable[..., Any], args: Any, kwargs: Any, leaves: Sequence[torch.Tensor]) -> None:
    active = _active(region(*args, **kwargs))
    # Gradients are not added to the leaves', which are the user's.
    torch.autograd.grad(active, leaves, [torch.ones_like(t) for t in active], allow_unused=True)


def beaten_by(bytes_: int, seconds: float, others: Sequence[tuple[str, int, float]]) -> str:
    """The fastest of the others (name, bytes, seconds) that keeps no more and is faster by far; or nobody."""
    better = [other for other in others if other[1] <= bytes_ and other[2] < BEATEN * seconds]
    return min(better, key=lambda other: other[2])[0] if better else ""
