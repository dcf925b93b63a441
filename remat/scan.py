"""scan_remat: `lax.scan` for PyTorch, its backward run by a checkpointing schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.schedules import Multilevel, Schedule, as_schedule
from remat.transforms import _tree
from remat.transforms._body import Body
from remat.transforms._capture import Missed, captured
from remat.transforms._scan import make, run


def scan_remat(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    checkpoints: str | int | Schedule = "sqrt",
    offload: bool = False,
    on_step: Callable[[str, int], None] | None = None,
) -> tuple[Any, Any]:
    schedule = as_schedule(checkpoints)
    name = f"scan_remat({getattr(body, '__qualname__', type(body).__name__)})"
    rows = [row for row in _tree.flatten(xs)[0] if row is not None]
    n = length if not rows else rows[0].shape[0]
    found = captured(body)
    while True:
        try:
            step = Body(body, init, xs, found, name)
            carry = _tree.flatten(init)[0]
            scan, operands = make(
                step, found, carry, rows, n, schedule, reverse=reverse, on_step=on_step, name=name
            )
            end, ys = run(scan, operands)
            return _tree.unflatten(end, step.carry_spec), step.stacked(ys)
        except Missed as missed:
            found = [*found, missed.tensor]
