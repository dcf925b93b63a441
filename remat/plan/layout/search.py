"""The plan of a model spread by a layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from remat._core import DEVICES, format_bytes, parse_bytes
from remat.plan.graph import CostModel, cost_model
from remat.plan.joint import planned_for
from remat.plan.layout.layout import Layout
from remat.plan.layout.links import Linked
from remat.plan.layout.local import local_program
from remat.plan.layout.mesh_plan import Keeps, MeshPlan, StagePlan
from remat.plan.layout.rank import canonical, digest
from remat.plan.layout.stages import Part, Pipe, StageChoice
from remat.plan.layout.trace import block_names, traced
from remat.transforms import RematError


def plan_mesh(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout,
    memory: int | str | None,
    cost: str | CostModel,
    device: Any,
    region: Callable[[torch.nn.Module], Any],
) -> MeshPlan:
    """What `remat.fit(model, ..., mesh=layout, memory=...)` returns; `region` makes a block one.

    Raises:
        RematError: it is not a module, cannot be traced, or does not fit.
    """
    start = time.perf_counter()
    if not isinstance(model, torch.nn.Module):
        raise RematError(f"remat.fit(mesh=...) plans a module, whose parameters are spread; got {model!r}.")
    if not isinstance(layout, Layout):
        raise RematError(f"remat.fit(mesh=...) takes a remat.plan.Layout, got {layout!r}.")
    # The model has no memory here, so it is not for this machine.
    prices = cost_model(cost, device or "h100")
    if prices.unit != "s":
        raise RematError('remat.fit(mesh=...) weighs collectives by seconds: write cost="roofline".')
    named = getattr(prices, "device", None) or "h100"
    limit = _memory(memory, named)
    chosen = block_names(model, layout.layers)
    if len(chosen) < layout.pp:
        raise RematError(f"Layout(pp={layout.pp}): the model has {len(chosen)} blocks, fewer than stages.")
    if layout.split is not None and sum(layout.split) != len(chosen):
        raise RematError(f"Layout(split={layout.split}): the model has {len(chosen)} blocks.")
    # (Parts of a rank are fakes on the CPU, whose kernels are there.)
    with planned_for(named, everything=True), local_program(model, layout) as local:
        args, kwargs = local.arguments((args, kwargs), layout.param_dtype)
        seen = traced(local, chosen, args, kwargs, region)
        weights, groups = local.weights, local.groups
    linked = Linked(prices, named, groups)
    pipe = Pipe(seen, layout, weights, linked)
    split = pipe.split(limit)
    if split is None:
        raise RematError(_too_little(pipe, limit))
    return MeshPlan(
        model=type(model).__name__,
        layout=layout,
        device=named,
        memory=limit,
        stages=tuple([_stage(part, chosen) for part, chosen in split]),
        programs={digest(g.names): tuple(map(canonical, g.names)) for g in seen.graphs},
        weights={
            name: (w.shape, w.local, str(w.dtype).removeprefix("torch.")) for name, w in weights.items()
        },
        seconds=time.perf_counter() - start,
    )


def _memory(memory: int | str | None, device: str) -> int:
    """Bytes of a rank's device."""
    if memory is None and device in DEVICES and DEVICES[device].memory:
        return DEVICES[device].memory
    try:
        size = parse_bytes(memory) if isinstance(memory, str) else memory
    except ValueError:
        size = None
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise RematError(f'remat.fit(memory={memory!r}): write the memory of one device, memory="80GiB".')
    return size


def _stage(part: Part, chosen: StageChoice) -> StagePlan:
    blocks = {}
    for name, kind, pick in zip(part.names, part.kinds, chosen.picks, strict=True):
        plan, count = kind.choices[pick], len(kind.graph.ops)
        saved = tuple(sorted(v for v in plan.saved if v < count))
        blocks[name] = Keeps(digest(kind.graph.names), saved, plan.kept, plan.cost)
    return StagePlan(
        blocks=blocks,
        in_flight=part.pipe.layout.in_flight(part.stage),
        microbatch_bytes=chosen.kept,
        fixed=dict(part.lines),
        working_bytes=chosen.over,
        seconds=chosen.seconds,
        recompute_seconds=chosen.recompute,
    )


def _too_little(pipe: Pipe, limit: int) -> str:
    """Why no plan fits: of an even split, the stage that needs most."""
    layout, count = pipe.layout, len(pipe.traced.names)
    ends = [count * k // layout.pp for k in range(layout.pp + 1)]
    if layout.split is not None:
        ends = [0, *(sum(layout.split[: k + 1]) for k in range(layout.pp))]
    parts = [Part(pipe, k, ends[k], ends[k + 1]) for k in range(layout.pp)]
    worst = max(parts, key=Part.least)
    rows = "\n".join(f"  {name}: {format_bytes(size)}" for name, size in worst.lines.items())
    return (
        f"No plan fits into {format_bytes(limit)}: stage {worst.stage} takes {format_bytes(worst.least())} "
        f"even if its {len(worst.names)} blocks keep as little as they can. Of that is fixed:\n{rows}\n"
        "Spread the model further (dp_shard, tp, pp), make the batch smaller, or write more memory=..."
    )
