"""Bytes that live throughout a step: weights, what the optimizer keeps, and what the step is called with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from remat._core import OPTIMIZERS, described, format_bytes
from remat.transforms import RematError, is_tensor, tree_leaves
from remat.transforms.compat import storage_key


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that live throughout a step, each storage once.

    Attributes:
        parameters, buffers: of the model.
        gradients: those that are there before the step; the others are made in its backward.
        optimizer: state of the optimizer.
        inputs: tensors that the step is called with.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    inputs: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(astuple(self))

    def __str__(self) -> str:
        parts = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)


def held_by(
    model: torch.nn.Module, given: Any, optimizer: torch.optim.Optimizer | str | None = None, shards: int = 1
) -> HeldBytes:
    """What lives throughout a step of `model` with the arguments `given`.

    Args:
        model: the model.
        given: a tree of the arguments of its call.
        optimizer: what updates it: its state is measured, or found by a step without data. Or "adamw", "sgd",
            "momentum".
        shards: devices that share weights, gradients and state.
    """
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise RematError(f"remat.fit(shards={shards!r}): shards is 1 or more; write shards=8 for 8 devices.")
    seen: set[int] = set()
    parameters = [*model.parameters()]
    return HeldBytes(
        parameters=_bytes(parameters, seen) // shards,
        buffers=_bytes(model.buffers(), seen),
        gradients=_bytes([p.grad for p in parameters if p.grad is not None], seen) // shards,
        optimizer=_state(optimizer, parameters, seen) // shards,
        inputs=_bytes([t for t in tree_leaves(given) if is_tensor(t)], seen),
    )


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        strided = tensor.layout is torch.strided
        key = storage_key(tensor) if strided else id(tensor)
        if key not in seen:
            seen.add(key)
            total += tensor.untyped_storage().nbytes() if strided else tensor.numel() * tensor.itemsize
    return total


def _state(optimizer: Any, parameters: list[torch.nn.Parameter], seen: set[int]) -> int:
    trained = [p for p in parameters if p.requires_grad]
    if optimizer is None or isinstance(optimizer, str):
        if str(optimizer).lower() not in OPTIMIZERS:
            raise RematError(
                f"remat.fit(optimizer={optimizer!r}) knows no such optimizer: write one of "
                f"{', '.join(OPTIMIZERS)}, or pass the optimizer itself."
            )
        return OPTIMIZERS[str(optimizer).lower()] * sum(p.nbytes for p in trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RematError(
            f"remat.fit(optimizer=...) takes a torch optimizer or its name, got {described(optimizer)}. "
            'Write optimizer="adamw", or the optimizer that was made: torch.optim.AdamW(model.parameters()).'
        )
    if optimizer.state:
        state = (t for values in optimizer.state.values() for t in tree_leaves(values))
        return _bytes([t for t in state if is_tensor(t)], seen)
    return _after_a_step(optimizer)


def _after_a_step(optimizer: torch.optim.Optimizer) -> int:
    """State that the optimizer makes in its first step: one of the same class takes that without data."""
    groups = []
    for group in optimizer.param_groups:
        like = [
            torch.empty_like(p, device="meta").requires_grad_() for p in group["params"] if p.requires_grad
        ]
        for parameter in like:
            parameter.grad = torch.empty_like(parameter)
        options = {k: v for k, v in group.items() if k not in ("params", "fused", "foreach")}
        groups.append({**options, "params": like})
    try:
        kind: Any = type(optimizer)
        other = kind([group for group in groups if group["params"]])
        other.step()
    except Exception as error:
        raise RematError(
            f"The state of {type(optimizer).__name__} cannot be found without data ({error}). Take a step "
            'with it first, or say optimizer="adamw" for one with two values a parameter.'
        ) from error
    state = (t for values in other.state.values() for t in tree_leaves(values))
    return sum(t.nbytes for t in state if is_tensor(t))
