"""Tiles of tokens: bytes and CPU time of a SwiGLU and of the loss head, and the latter on a card, simulated.

    python -m benchmarks.tiles      # needs Triton for the simulated rows (pip install 'remat[gpu]')

Bytes are counted above the operands, by the profiler. To those of the card, which the simulator counts, the
bytes of hidden, weight and targets are added. Ways take turns in every round, and a time is a multiple of the
first way's in the same round: medians of the process's CPU time, since others use the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from benchmarks.common.records import Record, Target, conclude
from remat import remat, tiled
from remat.cli.measure import percentiles, trace_memory
from remat.gpu import compile_for
from remat.losses import linear_cross_entropy

Ways = dict[str, Callable[[], Any]]
SWIGLU, HEAD, GRADS, TOKENS = "SwiGLU", "loss head", "loss head, functional", "loss head, a loss a token"
CARD = "loss head on an H100, simulated"


@dataclass
class Tiles:
    """Bytes and times of tiles."""

    tokens: int = 8192
    """Tokens of the SwiGLU, 256 wide and 1024 inside."""
    head: tuple[int, int, int] = (1024, 256, 8192)
    """Tokens, width and classes of the loss head that runs."""
    card: tuple[int, int, int] = (16384, 2048, 248320)
    """Those of the one that is simulated, in bfloat16."""
    rounds: int = 5
    """Interleaved rounds."""
    save: bool = True
    """Write results/tiles.csv."""

    def __call__(self) -> int:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        records = self.run()
        return conclude("tiles", "Tiles of tokens", records, targets(records), self.save)

    def run(self) -> list[Record]:
        records = [*self.measured(SWIGLU, self.swiglu()), *self.simulated()]
        for mode, ways in self.heads().items():
            records += self.measured(mode, ways)
        return records

    def swiglu(self) -> Ways:
        gate, up, down = (nn.Linear(*s, bias=False) for s in ((256, 1024), (256, 1024), (1024, 256)))
        x = torch.randn(self.tokens, 256, requires_grad=True)
        of = [x, gate.weight, up.weight, down.weight]

        def mlp(x: Tensor) -> Tensor:
            return down(F.silu(gate(x)) * up(x))

        region = remat(mlp)
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "whole": mlp,
            "a region": region,
            "regions of 16 chunks": lambda x: torch.cat([region(part) for part in x.chunk(16)]),
            "tiled": tiled(mlp),
            "tiled, 16 tiles": tiled(mlp, tiles=16),
            "tiled, peak=32MiB": tiled(mlp, peak="32MiB"),
        }
        ways |= {"tiled, compiled": torch.compile(ways["tiled"], fullgraph=True)}
        return {
            name: lambda fn=fn: torch.autograd.grad(fn(x).square().sum(), of) for name, fn in ways.items()
        }

    def heads(self) -> dict[str, Ways]:
        count, width, classes = self.head
        hidden = torch.randn(count, width, requires_grad=True)
        weight = (torch.randn(classes, width) / width**0.5).requires_grad_()
        targets, chunks = torch.randint(classes, (count,)), torch.nn.LinearCrossEntropyOptions()
        of = hidden, weight
        bare = [t.detach() for t in of]
        ct = torch.randn(count)

        def torchs(reduction: str) -> Tensor:
            return F.linear_cross_entropy(hidden, weight, targets, options=chunks, reduction=reduction)

        def whole(hidden: Tensor, weight: Tensor, reduction: str) -> Tensor:
            return F.cross_entropy(F.linear(hidden, weight), targets, reduction=reduction)

        def ours(hidden: Tensor, weight: Tensor, reduction: str) -> Tensor:
            return linear_cross_entropy(hidden, weight, targets, reduction=reduction)

        def each(fn: Callable[..., Tensor]) -> Callable[[], Any]:
            return lambda: torch.autograd.grad(fn("none"), of, ct)

        grad = torch.func.grad
        torchs_mean = lambda: torch.autograd.grad(torchs("mean"), of)  # noqa: E731
        return {
            HEAD: {
                "torch's chunks": torchs_mean,
                "whole logits": lambda: torch.autograd.grad(whole(*of, "mean"), of),
                "ours": lambda: torch.autograd.grad(ours(*of, "mean"), of),
            },
            TOKENS: {
                "torch's chunks": each(torchs),
                "whole logits": each(lambda r: whole(*of, r)),
                "ours": each(lambda r: ours(*of, r)),
            },
            # Torch's chunks have no derivatives under torch.func: those of plain autograd stand beside.
            GRADS: {
                "torch's chunks, plain": torchs_mean,
                "whole logits": lambda: grad(lambda h, w: whole(h, w, "mean"), (0, 1))(*bare),
                "ours": lambda: grad(lambda h, w: ours(h, w, "mean"), (0, 1))(*bare),
                "ours, smaller tiles": lambda: grad(
                    lambda h, w: linear_cross_entropy(h, w, targets, tiles=64), (0, 1)
                )(*bare),
            },
        }

    def measured(self, mode: str, ways: Ways) -> list[Record]:
        """Peaks of the ways, and CPU times over the first one's."""
        expected, records = next(iter(ways.values()))(), []
        for name, step in ways.items():
            step()
            found = trace_memory(lambda mark: step())  # noqa: B023
            torch.testing.assert_close(found.result, expected, rtol=1e-3, atol=1e-3)
            records.append(Record("tiles", mode, name, "peak", "MiB", found.peak / 2**20))
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self.rounds):
            round = {name: cpu_seconds(step) for name, step in ways.items()}
            first = next(iter(round.values()))
            for name, seconds in round.items():
                taken[name].append(seconds / first)
        for name, multiples in taken.items():
            p20, p50, p80 = percentiles(multiples)
            records.append(Record("tiles", mode, name, "CPU time", "times the first", p50, p20, p50, p80))
        return records

    def simulated(self) -> list[Record]:
        count, width, classes = self.card
        records: list[Record] = []

        def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(hidden, weight), targets)

        ways: dict[str, Callable[..., Tensor]] = {
            "whole logits": whole,
            "ours": linear_cross_entropy,
            "ours, 16 tiles": lambda *args: linear_cross_entropy(*args, tiles=16),
        }
        for name, fn in ways.items():
            made = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
            hidden, weight = torch.empty(count, width, **made), torch.empty(classes, width, **made)
            args = hidden, weight, torch.empty(count, dtype=torch.int64, device="meta")
            found = compile_for("h100", fn, *args, machine_code=False)
            total = found.peak + sum(t.nbytes for t in args)
            records.append(Record("tiles", CARD, name, "peak with operands", "GB", total / 1e9))
            records.append(Record("tiles", CARD, name, "time by the roofline", "ms", 1e3 * found.seconds))
        return records


def cpu_seconds(step: Callable[[], Any]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def targets(records: list[Record]) -> list[Target]:
    """What is claimed; the limits are part of the claim."""
    value = {(r.mode, r.policy, r.metric): r.value for r in records}

    def over(mode: str, ours: str, theirs: str, metric: str) -> float | None:
        above, below = value.get((mode, ours, metric)), value.get((mode, theirs, metric))
        return above / below if above and below else None

    time, peak = "CPU time", "peak"
    return [
        Target("SwiGLU: MiB of tiles", value.get((SWIGLU, "tiled", peak)), 33.0),
        # The cotangent, which comes from outside, takes 8 MiB.
        Target("SwiGLU: MiB of a planned peak", value.get((SWIGLU, "tiled, peak=32MiB", peak)), 32.0 + 8.0),
        Target(f"{CARD}: GB", value.get((CARD, "ours", "peak with operands")), 6.0),
        Target(f"{CARD}: time over whole", over(CARD, "ours", "whole logits", "time by the roofline"), 1.64),
        Target(f"{HEAD}: time over torch's chunks", over(HEAD, "ours", "torch's chunks", time), 1.05),
        Target(f"{HEAD}: peak over torch's chunks", over(HEAD, "ours", "torch's chunks", peak), 1.0),
        Target(f"{TOKENS}: time over torch's chunks", over(TOKENS, "ours", "torch's chunks", time), 1.4),
        Target(f"{TOKENS}: peak over torch's chunks", over(TOKENS, "ours", "torch's chunks", peak), 1.0),
        Target(f"{GRADS}: time over torch's", over(GRADS, "ours", "torch's chunks, plain", time), 1.4),
    ]


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Tiles)())
