"""The pipelines of `benchmarks.many_devices`: two ranks, four blocks, four microbatches, schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.many_devices.models import Block

BLOCKS = MICROBATCHES = 4
# The blocks of each stage of a rank: one stage a rank, two in a loop over the ranks, or two in a V.
_ONE, _LOOP, _V = ([[0], [1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]])
SCHEDULES: dict[str, tuple[Any, list[list[int]]]] = {
    "GPipe": (pipelining.ScheduleGPipe, _ONE),
    "1F1B": (pipelining.Schedule1F1B, _ONE),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, _LOOP),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, _LOOP),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, _LOOP),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, _V),
    "DualPipeV": (pipelining.ScheduleDualPipeV, _V),
}
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class Part(nn.Module):
    """The blocks of one stage."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Piped(nn.Module):
    """What one rank has of a pipeline.

    Args:
        name: of the schedule, in `SCHEDULES`.
        policy: of the blocks.
        with_policy: makes each of a part's blocks a region, or puts it into torch's checkpoint.
    """

    def __init__(self, name: str, policy: Any, with_policy: Callable[[Any, Any], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Block() for _ in range(BLOCKS)]
        schedule, places = SCHEDULES[name]
        mine, count = places[dist.get_rank()], sum(map(len, places))
        each = BLOCKS // count
        self.parts: Any = nn.ModuleList([Part(blocks[each * at : each * (at + 1)]) for at in mine])
        for part in self.parts:
            with_policy(part, policy)
        if name in SPLIT:
            _in_parts(self.parts[0])
        device = torch.device("cpu")
        self.stages = [
            pipelining.PipelineStage(part, at, count, device)
            for part, at in zip(self.parts, mine, strict=True)
        ]
        stages: Any = self.stages if len(mine) > 1 else self.stages[0]
        self.schedule = schedule(stages, MICROBATCHES, loss_fn=lambda out, _: out.square().sum())
        self.first, self.last = 0 in mine, count - 1 in mine
        self.x = torch.randn(2 * MICROBATCHES, 32, 64)

    def step(self, mark: Callable[[], None]) -> None:
        """One step of the schedule; `mark` is called where the first backward of this rank begins."""
        begun = False

        def watched(backward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal begun
                if not begun:
                    begun = True
                    mark()
                return backward(*args, **kwargs)

            return run

        for stage in self.stages:
            kind: Any = type(stage)
            stage.backward_one_chunk = watched(kind.backward_one_chunk.__get__(stage))  # type: ignore[method-assign]
        given: dict[str, Any] = {"target": self.x} if self.last else {}
        self.schedule.step(*([self.x] if self.first else []), **given)


def _in_parts(part: Part) -> None:
    """A backward in parts on one rank alone: if it raises in the pipeline, other ranks wait for ever."""
    x = torch.randn(2, 32, 64, requires_grad=True)
    out = part(x)
    groups = stage_backward_input([out], [torch.ones_like(out)], [x], part.parameters())[1]
    stage_backward_weight(part.parameters(), groups)
    part.zero_grad()
