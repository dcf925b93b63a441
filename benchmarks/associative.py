"""A diagonal state-space layer as an associative scan: gradients here, and in JAX with and without remat.

`python -m benchmarks.associative [STEPS] [WIDTH]` prints peaks (results and temporaries, without operands)
and medians of CPU seconds of ways that take turns, on one core, since others use the machine. JAX's rows need
JAX; its peaks are XLA's own. JAX's side is compiled, so the row to hold against it is the compiled one.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import jax_peer
from remat import associative_scan_remat
from remat.cli.measure import trace_memory

Way = tuple[str, int, Callable[[], Any]]


def combine(left: Any, right: Any) -> Any:
    """Two elements of h = a * h + b as one."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def ours(n: int, width: int) -> Iterator[Way]:
    """Of each way, its name, its bytes at the peak, and a step."""
    a = (torch.rand(n, width) / 2 + 0.5).requires_grad_()
    b = torch.randn(n, width, requires_grad=True)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return associative_scan_remat(combine, (a, b))[1].square().sum()

    for name, fn in (("remat, compiled", torch.compile(loss)), ("remat", loss)):

        def run(fn: Any = fn) -> Any:
            return torch.autograd.grad(fn(a, b), [a, b])

        run()
        yield name, trace_memory(lambda mark: run()).peak, run  # noqa: B023


def peers(n: int, width: int) -> Iterator[Way]:
    """The same of JAX."""
    import jax  # pyright: ignore[reportMissingImports]

    a, b = jax.numpy.full((n, width), 0.75), jax.numpy.ones((n, width))

    def layer(a: Any, b: Any) -> Any:
        return jax.lax.associative_scan(combine, (a, b))[1]

    for name, fn in (("JAX", layer), ("JAX, jax.checkpoint", jax.checkpoint(layer))):

        def loss(a: Any, b: Any, fn: Any = fn) -> Any:
            return jax.numpy.square(fn(a, b)).sum()

        step = jax.jit(jax.grad(loss, (0, 1))).lower(a, b).compile()
        memory: Any = step.memory_analysis()
        peak = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        yield name, peak, lambda step=step: jax.block_until_ready(step(a, b))


def main() -> None:
    """Print a line for each."""
    n, width = [int(arg) for arg in [*sys.argv[1:], *("4096", "1024")[len(sys.argv[1:]) :]]]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    ways = [*ours(n, width), *(peers(n, width) if jax_peer.available() else ())]
    taken: dict[str, list[float]] = {name: [] for name, _, _ in ways}
    for _ in range(12):
        for name, _, step in ways:
            start = time.process_time()
            step()
            taken[name].append(time.process_time() - start)
    for name, peak, _ in ways:
        print(f"{name:<20} {peak / 1e6:>8.1f} MB {statistics.median(taken[name]) * 1e3:>8.0f} ms")


if __name__ == "__main__":
    main()
