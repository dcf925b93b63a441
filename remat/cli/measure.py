"""Bytes, ops, FLOPs and seconds of one step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from remat._core import Mark as Mark, Memory as Memory, OpInfo, describe, trace_memory as trace_memory
from remat.transforms.compat import DispatchMode

T = TypeVar("T")

# Ops that move no number: counting them would call a step's bookkeeping a recomputation.
BOOKKEEPING = {
    "detach",
    "alias",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
}


class Work(DispatchMode):
    """A dispatch mode that counts the aten ops run under it (views and bookkeeping aside) and their FLOPs.

    Example:
        >>> from remat.cli.measure import Work
        >>> with Work() as work:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> work.ops["mm"], work.flops
        (1, 48)
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "overloadpacket", func).__name__
        if not getattr(func, "is_view", False) and name not in BOOKKEEPING:
            self.ops[name] += 1
            outs = out if isinstance(out, (tuple, list)) else (out,)
            self.flops += OpInfo(func, describe(args), describe(kwargs), describe(tuple(outs))).flops
        return out

    def beyond(self, other: Work) -> tuple[int, int]:
        """Ops and FLOPs that this step ran and `other` did not."""
        return (self.ops - other.ops).total(), self.flops - other.flops


def seconds(step: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, float]:
    """`step()` and the wall-clock seconds it took, with CUDA's queue drained before and after."""
    drain = torch.cuda.synchronize if torch.device(device).type == "cuda" else (lambda: None)
    drain()
    start = time.perf_counter()
    result = step()
    drain()
    return result, time.perf_counter() - start


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile of `samples`, by linear interpolation.

    Example:
        >>> from remat.cli.measure import percentiles
        >>> percentiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        (2.0, 3.5, 5.0)
    """
    marks = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, p50, p80 = torch.tensor(samples, dtype=torch.float64).quantile(marks).tolist()
    return p20, p50, p80
