"""A diagonal state-space layer as an associative scan: gradients here, and in JAX with and without remat.

`python -m benchmarks.associative [STEPS] [WIDTH]` prints peaks (results and temporaries, without operands)
and the fastest of six runs. JAX's rows need JAX; its peaks are XLA's own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import jax_peer
from remat import associative_scan_remat
from remat.cli.measure import trace_memory


def combine(left: Any, right: Any) -> Any:
    """Two elements of h = a * h + b as one."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def fastest(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of six runs."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def ours(n: int, width: int) -> tuple[int, float]:
    """Bytes at the peak, and seconds."""
    a = (torch.rand(n, width) / 2 + 0.5).requires_grad_()
    b = torch.randn(n, width, requires_grad=True)

    def run() -> Any:
        return torch.autograd.grad(associative_scan_remat(combine, (a, b))[1].square().sum(), [a, b])

    seconds = fastest(run)
    return trace_memory(lambda mark: run()).peak, seconds


def peers(n: int, width: int) -> Iterator[tuple[str, int, float]]:
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

        def run(step: Any = step) -> Any:
            return jax.block_until_ready(step(a, b))

        yield name, peak, fastest(run)


def main() -> None:
    """Print a line for each."""
    n, width = [int(arg) for arg in [*sys.argv[1:], *("4096", "1024")[len(sys.argv[1:]) :]]]
    rows = [("remat", *ours(n, width))]
    rows += peers(n, width) if jax_peer.available() else []
    for name, peak, seconds in rows:
        print(f"{name:<20} {peak / 1e6:>8.1f} MB {seconds * 1e3:>8.0f} ms")


if __name__ == "__main__":
    main()
