"""How many Python calls a further block costs a compiler, and in which part of it.

    python -m benchmarks.compile_calls

A GPT of `depth` blocks and one of twice as many go through Dynamo, AOTAutograd, the partitioner and
Inductor, as far as the code of wrapper and kernels; nothing is compiled to machine code. Calls are counts,
the same on every machine. The difference of the two is what blocks after the first cost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import tyro
from einops import rearrange
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common.measures import python_calls
from benchmarks.common.models import named
from benchmarks.common.peers import peer
from remat.gpu.compile import trace
from remat.gpu.inductor import lowered

# Parts, by a piece of the file's path; the first that fits counts.
PARTS = {
    "ours": ("remat/transforms/", "remat/_", "/transforms/"),
    "Dynamo": ("torch/_dynamo",),
    "partitioner": ("_functorch/partitioners", "networkx"),
    "Inductor": ("torch/_inductor", "sympy", "torch/utils/_sympy"),
    "fx": ("torch/fx/",),
    "AOTAutograd and fake tensors": ("torch/",),
}


@dataclass
class CompileCalls:
    """Python calls of a compilation for each further block."""

    depth: int = 3
    """Blocks; the other model has twice as many."""
    peers: tuple[str, ...] = ("none", "save_nothing", "torch checkpoint", "save_matmuls", "torch SAC")
    """Rows; the first is what the others are compared with."""

    def __call__(self) -> int:
        # What einops sets up at its first call is nothing that a compiler may see.
        rearrange(torch.zeros(1, 1), "a b -> b a")
        calls(self.peers[0], 1)  # what is set up once
        whole = 0
        for name in self.peers:
            more = calls(name, 2 * self.depth)
            more.subtract(calls(name, self.depth))
            row = {part: count // self.depth for part, count in more.items()}
            whole = whole or sum(row.values())
            parts = ", ".join(f"{part} {count}" for part, count in sorted(row.items()))
            print(f"{name}: {sum(row.values())} ({sum(row.values()) / whole:.2f}): {parts}", flush=True)
        return 0


def calls(name: str, depth: int) -> Counter[str]:
    """Calls by parts of one compilation of a peer."""
    torch._dynamo.reset()
    with FakeTensorMode():
        problem = named("gpt2-medium", "cpu", depth=depth).problem(torch.device("cpu"), torch.float32, 0)
    loss, leaves = problem.bind(peer(name).around)

    def compile_both() -> None:
        traces, _ = trace(loss, (leaves(problem.params), problem.batch), {})
        assert traces.forward is not None and traces.backward is not None
        lowered(traces.forward, None, False, False)
        lowered(traces.backward, None, True, False, traces.donated)

    found: Counter[str] = Counter()
    with peer(name).compiling():
        for path, count in python_calls(compile_both).items():
            if path.endswith(".py"):
                part = next((part for part, keys in PARTS.items() if any(k in path for k in keys)), "rest")
                found[part] += count
    return found


if __name__ == "__main__":
    raise SystemExit(tyro.cli(CompileCalls)())
