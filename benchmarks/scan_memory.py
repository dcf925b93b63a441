"""Peak memory and time of the gradient of a long scan, for each schedule and next to what others have.

    python -m benchmarks.scan_memory                # cells of 10 to 10^5 steps, and 64 GPT blocks
    python -m benchmarks.scan_memory --million      # also 10^6 steps in 32 slots (minutes)

Each row of a cell runs in a process of its own, after a run of ten steps; its peak is the growth of the
resident set, Python objects included. Time a step is the processor's, of the second run where there are two
(up to 10^4 steps): compilation is measured apart, as the first run of a fresh process, by the clock. GPT
blocks are measured by torch's memory events.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.common.records import Record, Target, save, show
from benchmarks.scan_ways import SLOTS, cell, ways
from remat._scan import scan_layers, scan_remat, stack_params
from remat.cli.measure import trace_memory

MIB = 1 << 20
LENGTHS = (10, 100, 1_000, 10_000, 100_000)
TWICE = 10_000


@dataclass
class ScanMemory:
    """Peak and time against length."""

    lengths: tuple[int, ...] = LENGTHS
    """Steps of the tanh RNN (width 64, batch 4)."""
    gated: int = 1000
    """Steps of the gated cell (width 16, batch 4); 0: none."""
    blocks: int = 64
    """GPT blocks (width 128, 4 heads, 4 x 64 tokens); 0: none."""
    hop: int = 1000
    """Also torch's scan operator under torch.compile, up to so many steps."""
    first: bool = True
    """Also the first, compiling run at 10 and 10^4 steps."""
    million: bool = False
    """Also 10^6 steps of a cheap body in 32 slots."""
    save: bool = True
    """Write results/scan_memory.csv; what it holds of other lengths and of packages not here stays."""

    def __call__(self) -> int:
        records: list[Record] = []
        for n in self.lengths:
            records += rows("rnn", n, self.hop)
        if self.gated:
            records += rows("gru", self.gated, self.hop)
        if self.first:
            for n in (10, 10_000):
                records += measured(f"gru, {n} steps", "all, compiled", "first", "gru", n)
        if self.blocks:
            records += gpt_rows(self.blocks)
        if self.million:
            records += measured("cheap, 10^6 steps", "32 carries", "million", "rnn", 1_000_000)
        met = targets(records, max(self.lengths))
        show("Gradient of a scan", records, met)
        if self.save:
            print(save("scan_memory", records, beside=True))
        return int(not all(target.met for target in met))


def rows(model: str, n: int, hop: int) -> list[Record]:
    """Peak and time of every way to run `n` steps of a cell."""
    names = [name for name in ways() if installed(name) and not (name.startswith("torch scan") and n > hop)]
    return [record for name in names for record in measured(f"{model}, {n} steps", name, name, model, n)]


def installed(name: str) -> bool:
    """Whether what a way needs is there: JAX and equinox come with the extra `jax`."""
    module = name.split(",")[0].split()[0]
    return module not in ("jax", "equinox") or importlib.util.find_spec(module) is not None


def measured(mode: str, policy: str, name: str, model: str, n: int) -> list[Record]:
    """Run `name` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scan_memory", "--one", name, model, str(n)]
    peak = Record("scan_memory", mode, policy, "peak", "MiB")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return [replace(peak, error="over 900 s")]
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        told = next((line for line in lines if line.startswith("RuntimeError")), lines[-1])
        return [replace(peak, error=told[:120])]
    found = json.loads(done.stdout.splitlines()[-1])
    if name == "first":
        return [replace(peak, metric="first run", unit="s", value=found["seconds"])]
    each = replace(peak, metric="time a step", unit="us", value=found["seconds"] / n * 1e6)
    return [replace(peak, value=found["peak"] / MIB), each]


def one(name: str, model: str, n: int) -> None:
    """Measure in this process, and print."""
    if name == "first":
        # What a first run shares with all that compile is not counted.
        torch.compile(lambda x: x.sin() * 2)(torch.ones(3))
        print(json.dumps(timed(ways()["all, compiled"](cell(model), n), 1, time.perf_counter)))
        return
    way = (lambda _, n: lambda: million(n)) if name == "million" else ways()[name]
    # Short, but long enough to pay for whatever is set up once.
    way(cell(model), 10)()
    gc.collect()
    before, run = resident("VmRSS", reset=True), way(cell(model), n)
    found = timed(run, 2 if n <= TWICE else 1)
    print(json.dumps({**found, "peak": resident("VmHWM") - before}))


def timed(
    run: Callable[[], Any], times: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    seconds = 0.0
    gc.disable()
    for _ in range(times):
        start = clock()
        run()
        seconds = clock() - start
    gc.enable()
    return {"seconds": seconds}


def resident(field: str, *, reset: bool = False) -> int:
    """Bytes resident now (VmRSS) or at most (VmHWM) since the last reset; Linux only."""
    if reset:
        # 5 resets the high-water mark, which the imports may have set.
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def million(n: int) -> None:
    """A body of one op, so that 10^6 steps take minutes."""
    a = torch.tensor(0.999, requires_grad=True)
    scan_remat(lambda h, _: (h * a, None), torch.ones(8), length=n, checkpoints=32)[0].sum().backward()


class Block(torch.nn.Module):
    """A pre-norm GPT block."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


def gpt_rows(count: int) -> list[Record]:
    """Peak of the backward through `count` blocks, gradients checked against the loop's."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Block() for _ in range(count))
    stacked = {name: t.detach().requires_grad_() for name, t in stack_params(blocks).items()}
    x = torch.randn(4, 64, 128)

    def loop(wrap: Callable[..., Any]) -> Tensor:
        y = x
        for i in range(count):
            params = {name: t[i] for name, t in stacked.items()}
            y = wrap(lambda params, y: torch.func.functional_call(blocks[0], params, (y,)), params, y)
        return y

    ways: dict[str, Callable[[], Tensor]] = {
        "loop": lambda: loop(lambda f, *a: f(*a)),
        "torch checkpoint": lambda: loop(lambda f, *a: checkpoint(f, *a, use_reentrant=False)),
    } | {
        name: lambda slots=slots: scan_layers(blocks[0], stacked, x, checkpoints=slots)
        for name, slots in SLOTS.items()
    }
    expected = torch.autograd.grad(ways["loop"]().square().mean(), list(stacked.values()))
    records = []
    for name, way in ways.items():

        def step(_: Any, way: Callable[[], Tensor] = way) -> Any:
            return torch.autograd.grad(way().square().mean(), list(stacked.values()))

        torch.testing.assert_close(step(None), expected, rtol=1e-3, atol=1e-6)
        used = trace_memory(step).peak / MIB
        records.append(Record("scan_memory", f"{count} GPT blocks", name, "peak", "MiB", used))
    return records


def targets(records: list[Record], n: int) -> list[Target]:
    values = {(r.mode, r.policy): r.value for r in records if r.metric == "peak"}
    longest, blocks = f"rnn, {n} steps", next((r.mode for r in records if "GPT" in r.mode), "")

    def ratio(mode: str, a: str, b: str) -> float | None:
        above, below = values.get((mode, a)), values.get((mode, b))
        return above / below if above is not None and below else None

    found = [Target(f"{longest}: 32 carries over the loop", ratio(longest, "32 carries", "loop"), 0.1)]
    if blocks:
        found.append(Target(f"{blocks}: sqrt over the loop", ratio(blocks, "sqrt", "loop"), 0.4))
    if ("cheap, 10^6 steps", "32 carries") in values:
        found.append(Target("10^6 steps in 32 slots, MiB", values["cheap, 10^6 steps", "32 carries"], 64.0))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        raise SystemExit(tyro.cli(ScanMemory)())
