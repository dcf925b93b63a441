"""Steps of torch's fused optimizers, which write to parameters and move no version counter.

Private names of torch, each with its reason. Supported: torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# What fused optimizers call, and what may be called by hand.
_STEPS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
_library = torch.library.Library("aten", "IMPL")


def watch_fused_steps(tell: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Have `tell` called with the parameters that a fused step has written to. To be called once.

    `ADInplaceOrView` is the key at which torch counts writes up; these ops have no kernel there (2.13). In
    code that Inductor compiles, no op is called and nothing is told.
    """
    for name in _STEPS:
        packet: Any = getattr(torch.ops.aten, name, None)
        for overload in ("default", "tensor_lr") if packet is not None else ():
            if (op := getattr(packet, overload, None)) is not None:
                _library.impl(op.name().removeprefix("aten::"), _told(op, tell), "ADInplaceOrView")


def _told(op: Any, tell: Callable[[Sequence[torch.Tensor]], None]) -> Callable[..., None]:
    def step(parameters: Any, *args: Any, **kwargs: Any) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op(parameters, *args, **kwargs)
        tell(parameters)

    return step
