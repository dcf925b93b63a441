"""What a rank holds whatever its blocks keep, line by line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat._torch import reduced_in
from remat.plan.layout.layout import Layout
from remat.plan.layout.local import Weight


@dataclass(frozen=True)
class Flow:
    """What goes through a stage.

    Attributes:
        stage: its number.
        input, output: bytes of a microbatch that it receives, and that it sends to the next stage.
    """

    stage: int
    input: int
    output: int


def fixed_lines(layout: Layout, flow: Flow, units: Sequence[Sequence[Weight]]) -> dict[str, int]:
    """Bytes of a rank by what they are for; `units` are the parameters outside of blocks, then of each block.

    A block is what FSDP2 gathers and frees at once. What is outside of blocks stays gathered through a step.
    """
    distinct = {weight.number: weight for unit in units for weight in unit}.values()
    stored = sum(_shard(w, layout) * w.dtype.itemsize for w in distinct)
    trained = sum(_shard(w, layout) * w.dtype.itemsize for w in distinct if w.trained)
    lines = {
        "sharded parameters" if layout.dp_shard > 1 else "parameters": stored,
        "sharded gradients" if layout.dp_shard > 1 else "gradients": trained,
        "optimizer state": layout.states * trained,
    }
    if layout.dp_shard > 1:
        lines |= _gathered(layout, [_whole(unit, layout) for unit in units])
    elif layout.dp_replicate > 1:
        lines["buckets of gradients"] = trained
    if layout.pp > 1:
        lines["pipeline buffers"] = _buffers(layout, flow)
    return {name: size for name, size in lines.items() if size}


def _gathered(layout: Layout, units: list[tuple[int, int, int]]) -> dict[str, int]:
    """What FSDP2 holds beside the shards; of each unit what `_whole` says."""
    root, blocks = units[0], units[1:]
    largest, gradients, reduced = (max([unit[k] for unit in blocks], default=0) for k in range(3))
    # A pipeline's backward leaves parameters gathered and gradients whole until its last microbatch.
    whole = layout.pp > 1
    if whole or not layout.reshard:
        lines = {"gathered layers": sum(unit[0] for unit in units)}
    else:
        lines = {"gathered outside of layers": root[0], "the gathered layer": largest}
    lines["the prefetched layer"] = largest if len(blocks) > 1 else 0
    if whole:
        lines["whole gradients"] = sum(unit[2] for unit in units)
    else:
        lines["whole gradients of a layer"] = max(gradients, root[1])
    # The buffer of a reduce-scatter lives until the next one has begun.
    lines["reduce-scatter buffers"] = reduced + max(reduced, root[2])
    return lines


def _whole(unit: Sequence[Weight], layout: Layout) -> tuple[int, int, int]:
    """Bytes of a unit that is gathered, of its gradients as they are made, and as they are added up."""
    distinct = {weight.number: weight for weight in unit}.values()
    gathered = made = reduced = 0
    for weight in distinct:
        count, dtype = math.prod(weight.local), layout.param_dtype or weight.dtype
        gathered += count * dtype.itemsize
        made += count * dtype.itemsize * weight.trained
        reduced += count * reduced_in(layout.reduce_dtype, dtype, weight.dtype).itemsize * weight.trained
    return gathered, made, reduced


def _shard(weight: Weight, layout: Layout) -> int:
    """Numbers of the first rank's shard: FSDP2 splits the first dimension, the last ranks may have less.

    Of experts that are fewer than ranks it is the second one, as torchtitan has it.
    """
    ranks = layout.dp_shard // (layout.ep if weight.expert else 1)
    shape = weight.local or (1,)
    split = 1 if weight.expert and len(shape) > 1 and shape[0] < ranks else 0
    return math.ceil(shape[split] / ranks) * math.prod(shape) // shape[split] if shape[split] else 0


def _buffers(layout: Layout, flow: Flow) -> int:
    """Torch's schedules receive every microbatch into memory of its own.

    What is in flight on the way in counts as kept by the first block; on the way out it is kept here.
    """
    flying = layout.in_flight(flow.stage)
    incoming = (layout.microbatches - flying) * flow.input if flow.stage else 0
    outgoing = (layout.microbatches + flying) * flow.output if flow.stage < layout.pp - 1 else 0
    return incoming + outgoing
