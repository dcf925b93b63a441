"""`while_remat`: a differentiable loop of unknown length in a fixed number of carries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from remat._scan.scan import run_eager, structure
from remat.schedules import Online, Revolve, Schedule, as_schedule
from remat.transforms import WrongValue
from remat.transforms.compat import uncompiled
from remat.transforms.scan import ScanSpec, check_count, name_of

C = TypeVar("C")


def while_remat(
    cond: Callable[[C], Any],
    body: Callable[[C], C],
    init: C,
    *,
    checkpoints: int | Schedule | None = None,
    max_steps: int | None = None,
    on_step: Callable[[str, int], None] | None = None,
) -> C:
    """`while cond(carry): carry = body(carry)`, reverse-differentiable with `checkpoints` kept carries.

    The loop decides as it runs which carries to keep (Stumm and Walther 2010, then Wang and Moin 2008). With
    n steps and c carries the recomputation is the offline optimum while n < (c + 1)(c + 2) / 2. Composes as
    `scan_remat` does; under `vmap` the loop goes on while any example's condition holds, and an example that
    is done keeps its carry.

    Args:
        cond: carry -> a bool or a tensor of one element.
        body: carry -> carry of the same structure, shapes, dtypes and Python types.
        init: the first carry.
        checkpoints: the number of kept carries, the first one counted, or an `Online` schedule. Left out it
            is taken from `max_steps`, as the least number with which no step is recomputed more than once.
        max_steps: stop after so many steps, whatever `cond` says.
        on_step: called with ("forward" | "advance" | "reverse", step) after each evaluation.

    Returns:
        The last carry.

    Raises:
        RematError: (also a `ValueError`) neither `checkpoints` nor `max_steps`; either out of range.
        RematError: as `scan_remat`.

    Example:
        >>> import torch
        >>> from remat import while_remat
        >>> a = torch.tensor(2.0, requires_grad=True)
        >>> def far(x):
        ...     return (x * x - a).abs() > 1e-6
        >>> root = while_remat(far, lambda x: (x + a / x) / 2, a, checkpoints=3)
        >>> root.backward()
        >>> a.grad  # 1 / (2 sqrt(2))
        tensor(0.3536)
    """
    name = name_of("while_remat", body)
    check_count(name, "max_steps", max_steps)
    if checkpoints is None:
        if max_steps is None:
            raise WrongValue(f"{name}: write checkpoints=..., or max_steps=... from which it can be taken.")
        checkpoints = default_slots(max_steps)
    schedule = as_schedule(checkpoints)
    if isinstance(schedule, Revolve):
        schedule = Online(schedule.slots)
    if not isinstance(schedule, Online):
        raise WrongValue(
            f"{name}: got checkpoints={checkpoints!r}; a loop of unknown length needs a number of carries "
            "or an Online schedule."
        )
    # Opaque to an enclosing torch.compile: traced, the loop would be unrolled and its graph grow with n.
    loop: Any = torch.compiler.disable(_loop) if torch.compiler.is_compiling() else _loop
    return loop(name, cond, body, init, max_steps, schedule, on_step)


@uncompiled
def _loop(
    name: str, cond: Any, body: Any, init: Any, max_steps: int | None, schedule: Schedule, on_step: Any
) -> Any:
    spec = ScanSpec(name, max_steps, structure(init), structure(None), schedule, on_step=on_step)
    step = lambda carry, _: (body(carry), None)  # noqa: E731
    return run_eager(step, spec, init, [], (cond, body), cond)[0]


def default_slots(max_steps: int) -> int:
    """The least c with (c + 1)(c + 2) / 2 > max_steps, about sqrt(2 max_steps).

    Example:
        >>> [default_slots(n) for n in (1, 10, 100, 1000)]
        [1, 4, 13, 44]
    """
    return max(1, math.ceil((math.sqrt(8 * max_steps + 9) - 3) / 2))
