"""One call that makes a model's step fit a peak."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from remat import nn
from remat._blocks import largest_class, listed, no_blocks
from remat._core import DEVICES, described, format_bytes, joined_keywords, keywords_apart
from remat._fit.held import HeldBytes, held_by
from remat._fit.report import Fit
from remat._fit.way import ModelStep, Way, name_of, ready_policies
from remat.plan import Chosen, CostModel, check_peak, cost_model
from remat.policies import Policy
from remat.transforms import RematError, is_tensor, tree_leaves


@keywords_apart
def fit(
    model: torch.nn.Module,
    /,
    *args: Any,
    peak: int | str | None = None,
    headroom: int | str | None = None,
    layers: nn.Layers | None = None,
    policies: Mapping[str, Policy] | Sequence[Policy] = (),
    optimizer: torch.optim.Optimizer | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    shards: int = 1,
    measure: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Fit:
    """Make the blocks of a model regions, in place, so that its training step stays within a peak.

    The whole step is planned on tensors without data: forward and backward of `model(*args, **keywords)`.
    What is outside of the blocks counts (embeddings, head, loss), and gradients as the backward makes them.
    What lives throughout counts, too: weights, buffers, the optimizer's state, the arguments. Each block gets
    the plan, or the ready policy, that is cheapest for the whole within the peak. A block that needs none
    stays as it is. One part in 100 of the step is left free for what is not counted, one in 25 where it ran
    with data. `remat.nn.remove` undoes it.

    Args:
        model: the model.
        args, keywords: what it is called with in a step.
        peak: the most bytes that may be live at once in a step, such as "20GiB".
        headroom: instead of `peak`: bytes of the device's memory that are to stay free.
        layers: the blocks, as for `remat.nn.apply`. Left out, they are found: lists of modules of one class,
            or the lists inside of those, whatever is cheaper; else the class that has most parameters.
        policies: policies of yours that compete, beside the ready ones; a dict gives them names.
        optimizer: what updates the model, or "adamw", "sgd", "momentum": its state counts.
        loss: a function of the model's result whose value is differentiated. Left out: the result's `loss`,
            where it has one, else all of the result.
        cost, device: as for `checkpoint_policy(budget=...)`.
        shards: devices over which weights, gradients and the optimizer's state are sharded, as FSDP does.
            Each has its part of them, and whole the weights of two blocks and of what is outside of blocks.
        measure: whether two real steps may be run where the model needs data (`.item()`, `nonzero`, branches
            on values). The plan is then made from what they did. Tensors, gradients, random streams and
            attributes of modules are put back; other effects of the model's Python happen.
        kwargs: keywords of the model that are named like options here.

    Returns:
        A report: the peak with and without, what is held, what binds, and the price.

    Raises:
        RematError: no blocks are found (also a ValueError), nothing has a gradient, or the peak is out of
            reach. The message says what each part takes. The model is then as it was.

    Example:
        >>> import torch, remat
        >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(16, 2) for _ in range(3)])
        >>> done = remat.fit(model, torch.randn(8, 4, 16), peak="16MiB", optimizer="adamw")
        >>> done.applied, done.held.optimizer == 2 * done.held.parameters
        ((), True)
    """
    start, given = time.perf_counter(), joined_keywords(keywords, kwargs)
    _check_module(model)
    limit = _limit(peak, headroom, (model, args, given), device)
    held = held_by(model, (args, given), optimizer, shards)
    _check_held(held, limit)
    step = ModelStep(model, args, given, loss, device, held.gradients > 0, shards, measure)
    ways = _ways(step, layers, limit - held.bytes, cost_model(cost, device), ready_policies(policies))
    fits = [way for way in ways if way.chosen is not None]
    if not fits:
        leanest = min(ways, key=lambda way: way.limit_of(way.portfolio.leanest()))
        least = leanest.limit_of(leanest.portfolio.leanest())
        raise _out_of_reach(limit, held, least, leanest.plain)
    way = min(fits, key=lambda way: way.price)
    chosen = way.chosen
    assert chosen is not None
    layers_of = {name: name_of(policy) for name, policy in way.settled().items() if policy is not None}
    return Fit(
        model=model,
        applied=tuple(layers_of),
        limit=limit,
        peak_bytes=chosen.peak + held.bytes,
        plain_bytes=way.plain.peak + held.bytes,
        held=held,
        cost=chosen.cost,
        unit=way.portfolio.model.unit,
        binds=way.step.binding(chosen.choices, way.called),
        policies=dict(Counter(layers_of.values()).most_common()),
        layers=layers_of,
        notes=tuple(way.notes()),
        seconds=time.perf_counter() - start,
        step=step,
    )


def _ways(
    step: ModelStep, layers: nn.Layers | None, limit: int, model: CostModel, ready: dict[str, Policy]
) -> list[Way]:
    """The model cut into blocks and planned, in each way that is worth a try."""
    tried: list[Way] = []
    for names in _cuts(step.model, layers, tried):
        try:
            way = Way(step, names, limit, model, ready)
        except RematError:
            if not tried:
                raise
            continue
        tried.append(way)
        if way.chosen is way.plain:
            break
    return tried


def _cuts(model: torch.nn.Module, layers: nn.Layers | None, tried: list[Way]) -> Iterator[list[str]]:
    """Blocks as they are described; else as they are found, and the largest class where nothing else fits."""
    if layers is not None:
        yield nn.fitting(model, layers, "remat.fit")
        return
    cuts = 0
    for names in listed(model):
        cuts += 1
        yield names
    if any(way.chosen is not None for way in tried) or nn.regions(model):
        return
    if names := largest_class(model):
        yield names
    elif not cuts:
        raise no_blocks(model)


def _check_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise RematError(
            f"remat.fit takes a module, got {described(model)}. For a function of regions write "
            "remat.plan_model(fn, *args, peak=...)."
        )


def _limit(peak: Any, headroom: Any, roots: Any, device: Any) -> int:
    if (peak is None) == (headroom is None):
        raise RematError(
            'remat.fit takes peak=... or headroom=..., one of them: write peak="20GiB" or headroom="2GiB".'
        )
    if peak is not None:
        return check_peak(peak)
    total = _memory(roots, device)
    free = check_peak(headroom)
    if free >= total:
        raise RematError(f"A headroom of {free:,} bytes leaves nothing of the device's {total:,} bytes.")
    return total - free


def _memory(roots: Any, device: Any) -> int:
    """Bytes of the device that the step is for."""
    if isinstance(device, str) and device in DEVICES and DEVICES[device].memory:
        return DEVICES[device].memory
    model, *given = roots
    tensors = [t for t in (*model.parameters(), *tree_leaves(given)) if is_tensor(t)]
    where = tensors[0].device if tensors else torch.device("cpu")
    kind = where.type
    if kind == "cuda":
        return torch.cuda.get_device_properties(where).total_memory
    if kind == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise RematError(f"The memory of a {kind} device is not known: write peak=... or device='h100'.")


def _check_held(held: HeldBytes, limit: int) -> None:
    if held.bytes >= limit:
        raise RematError(
            f"A peak of {format_bytes(limit)} is below what lives throughout the step, "
            f"{format_bytes(held.bytes)}: {held}. Recomputation does not make that smaller: write a "
            "higher peak, shard the model, or train fewer of its parameters."
        )


def _out_of_reach(limit: int, held: HeldBytes, step: int, plain: Chosen) -> RematError:
    least = step + held.bytes
    return RematError(
        f"A peak of {limit:,} bytes cannot be met: the lowest found is {least:,} bytes "
        f"({plain.peak + held.bytes:,} without remat). Held throughout: {held}; in the step "
        f"{step:,} bytes. Write peak={least} or more, a smaller batch, smaller blocks (layers=...), "
        "or remat.plan.plan_chain."
    )
