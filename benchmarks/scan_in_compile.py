"""What a scan inside torch.compile costs: CPU seconds to compile, and time a step, for short and long scans.

    python -m benchmarks.scan_in_compile [--backend inductor] [--repeats 3]

Compiling is timed as the first gradient less the second one, in CPU seconds of the process, with the
compiler's caches off; lengths take turns, so that drift of the machine meets all alike. Prints CSV.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch._inductor.config

from remat import scan_remat

WIDTH = 16
LENGTHS = (10, 10_000)


def gradient(n: int, backend: str) -> Callable[[], object]:
    """A function that computes one compiled gradient of an RNN of `n` steps."""
    sizes = (WIDTH, WIDTH), (WIDTH,), (n, WIDTH)
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]

    def loss(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        def body(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(h @ w + x)
            return h, h.sin()

        end, ys = scan_remat(body, h, xs, checkpoints="all")
        return end.sum() + ys.sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    return lambda: torch.autograd.grad(compiled(*leaves), leaves)


def measure(n: int, backend: str) -> tuple[float, float]:
    """CPU seconds to compile, and seconds a step of one gradient after that."""
    torch._dynamo.reset()
    run = gradient(n, backend)
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    again = min(times[1:])
    return times[0] - again, again / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    measure(LENGTHS[0], options.backend)  # what is loaded and built once
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in LENGTHS}
    for _ in range(options.repeats):
        for n in LENGTHS:
            found[n].append(measure(n, options.backend))
    print("backend,length,compile_cpu_s,step_us,torch")
    for n, pairs in found.items():
        compile_s, step_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{options.backend},{n},{compile_s:.3f},{step_s * 1e6:.1f},{torch.__version__}")


if __name__ == "__main__":
    main()
