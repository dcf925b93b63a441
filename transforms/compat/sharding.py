"""DTensor: what it runs to find out how results lie, which is no part of a program.

Private names of torch, each with its reason. Tried on 2.13.0 (CPU).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def sharding_aside(run: Callable[..., Any]) -> None:
    """Let `run(function, *args)` call what DTensor propagates shardings by, from now on.

    The first call of an op with operands that lie so tries it on fake tensors and weighs what moving them
    costs, on small tensors of its own; later calls find that in a cache. Dispatch modes see all of it.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    dispatcher: Any = getattr(getattr(tensors, "DTensor", None), "_op_dispatcher", None)
    if dispatcher is None or getattr(dispatcher, "_remat_aside", False):
        return
    dispatcher._remat_aside = True
    # What the dispatcher in C++ calls on a miss of its cache; what some ops with rules of their own call.
    for holder, name in (
        (dispatcher, "_propagate_op_sharding_dispatch_slow_path"),
        (dispatcher.sharding_propagator, "propagate"),
    ):
        plain = getattr(holder, name, None)
        if plain is not None:
            setattr(holder, name, functools.partial(run, plain))
