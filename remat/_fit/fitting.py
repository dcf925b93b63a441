"""One call that makes a model's step fit into memory."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, overload

import torch

from remat import nn
from remat._blocks import LayerError, largest_class, listed, no_blocks
from remat._core import DEVICES, check_callable, format_bytes, joined_keywords, keywords_apart
from remat._fit.held import HeldBytes, held_by
from remat._fit.report import Fit
from remat._fit.way import ModelStep, Way, as_region, name_of, ready_policies
from remat.plan import (
    ChainPlan,
    CostModel,
    Layout,
    MeshPlan,
    ModelPlan,
    check_budget,
    check_peak,
    cost_model,
    plan_mesh,
    plan_regions,
    plan_stages,
)
from remat.policies import Policy
from remat.transforms import RematError, is_tensor, tree_leaves


@overload
def fit(
    model: torch.nn.Module,
    /,
    *args: Any,
    mesh: Layout,
    memory: int | str | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> MeshPlan: ...
@overload
def fit(
    model: torch.nn.Module,
    /,
    *args: Any,
    peak: int | str | None = None,
    budget: float | int | str | None = None,
    headroom: int | str | None = None,
    layers: nn.Layers | None = None,
    policies: Mapping[str, Policy] | Sequence[Policy] | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    shards: int | None = None,
    measure: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Fit: ...
@overload
def fit(
    model: Sequence[Callable[..., Any]],
    /,
    *args: Any,
    peak: int | str,
    cost: str | CostModel = "roofline",
    device: Any = None,
    compiled: bool = False,
    accumulating: bool = False,
) -> ChainPlan: ...
@overload
def fit(
    model: Callable[..., Any],
    /,
    *args: Any,
    peak: int | str | None = None,
    budget: float | int | str | None = None,
    link: str | float | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> ModelPlan: ...
@partial(keywords_apart, of_several=True)
def fit(
    model: Any,
    /,
    *args: Any,
    peak: int | str | None = None,
    budget: float | int | str | None = None,
    headroom: int | str | None = None,
    layers: nn.Layers | None = None,
    policies: Mapping[str, Policy] | Sequence[Policy] | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    shards: int | None = None,
    measure: bool = False,
    link: str | float | None = None,
    mesh: Layout | None = None,
    memory: int | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Any:
    """Make a model's step fit into memory, by a plan of what each of its regions keeps.

    A module: its blocks become regions, in place, and the result is a report (`Fit`). The whole step is
    planned on tensors without data: forward and backward of `model(*args, **keywords)`. What is outside of
    the blocks counts (embeddings, head, loss), and gradients as the backward makes them. What lives
    throughout counts, too: weights, buffers, the optimizer's state, the arguments. Each block gets the plan,
    or the ready policy, that is cheapest for the whole. A block that needs none stays as it is. Of a peak one
    part in 100 of the step is left free for what is not counted, one in 25 where it ran with data. The
    caller is taken to hold the model's result through the backward. Where nothing else fits, decisions run
    again (`keep_decisions=False`). `remat.remove` undoes it.

    A function (a loss, a step): the regions that it calls, wrapped as `remat(block,
    policy=checkpoint_policy(budget=...))`, share one budget or peak in place of their own. The result
    (`ModelPlan`) is a function like it that carries the plan out.

    A list of stages, called one after another as `x = stage(x, *args)` with `args[0]` as the first `x`:
    regions of one stage, of pairs, and of longer runs that hold others, so that inner stages run more than
    twice. That reaches lower peaks than any plan that recomputes every op at most once. The result
    (`ChainPlan`) is a function of `args`.

    Args:
        model: a module, a function that calls regions, or a list of stages.
        args, keywords: what it is called with in a step.
        peak: the most bytes that may be live at once in a step, such as "20GiB". Of a function or of stages
            only what the step adds counts: not parameters, nor what lives before.
        budget: instead of `peak`: what the regions may keep between forward and backward. A share of what
            they keep without remat, bytes, or "free" (the least at which no matmul runs again).
        headroom: of a module, instead of `peak`: bytes of the device's memory that are to stay free.
        layers: of a module, the blocks, as for `remat.apply`. Left out, they are found: lists of modules of
            one class, or the lists inside of those, whatever is cheaper; else the class that has most
            parameters.
        policies: of a module, policies of yours that compete, beside the ready ones; a dict gives them names.
        optimizer: of a module, what updates it, or "adamw", "sgd", "momentum": its state counts.
        loss: of a module, a function of its result whose value is differentiated. Left out: the result's
            `loss`, where it has one, else all of the result.
        cost, device: as for `checkpoint_policy(budget=...)`.
        shards: of a module, devices over which weights, gradients and the optimizer's state are sharded, as
            FSDP does. Each has its part of them, and whole the weights of two blocks and of what is outside
            of blocks.
        measure: of a module, whether two real steps may be run where it needs data (`.item()`, `nonzero`,
            branches on values). The plan is then made from what they did. Tensors, gradients, random streams
            and attributes of modules are put back; other effects of the model's Python happen.
        link: of a function with a budget, values may also go to the host, over a link of this speed: "pcie4",
            "pcie5", "gh200", or bytes per second in one direction. Only what is copied behind the compute
            goes, so `cost` must be in seconds.
        mesh: of a module, how a job spreads it over devices. It may be on the meta device, and `args` are one
            microbatch of one rank; nothing is computed, and no process group is needed. The result is a
            `MeshPlan`, a plan for every rank: for each stage of the pipeline what fixed bytes leave of
            `memory`.
        memory: with `mesh`, bytes of one device; None means those of `device`.
        kwargs: keywords of the model that are named like options here.

    Of stages also `compiled=True`, where a backward under `torch.compile` runs again right before its first
    reader, and `accumulating=True`, where parameters have their `.grad` before the step.

    Returns:
        Of a module a `Fit`: the peak with and without, what is held, what binds, and the price; else a plan
        that is called in place of the function, as said above.

    Raises:
        RematError: no blocks or regions are found (of a module that does not fit as it is, also a
            ValueError), nothing has a gradient, an option is not for what is given, or the peak or budget
            is out of reach. The message says what each part takes. The model is then as it was.

    Example:
        >>> import torch, remat
        >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(16, 2) for _ in range(3)])
        >>> done = remat.fit(model, torch.randn(8, 4, 16), peak="16MiB", optimizer="adamw")
        >>> done.applied, done.held.optimizer == 2 * done.held.parameters
        ((), True)

        Of a function with regions, and of stages:

        >>> block = remat.remat(lambda x: torch.tanh(x @ x).exp(), policy=remat.checkpoint_policy(budget=0.5))
        >>> x = torch.eye(4, requires_grad=True)
        >>> planned = remat.fit(lambda x: block(block(x)).sum(), x, budget=0.6)
        >>> planned(x).backward()
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
        >>> remat.fit(layers, torch.ones(256, 64), peak="400KiB").peak_bytes <= 400 * 2**10
        True
    """
    common: dict[str, Any] = {"cost": cost, "device": device}
    within = {"peak": peak, "budget": budget}
    of_modules = {"headroom": headroom, "layers": layers, "policies": policies, "optimizer": optimizer}
    of_modules |= {"loss": loss, "shards": shards, "measure": measure or None}
    spread, of_functions = {"mesh": mesh, "memory": memory}, {"link": link}
    if isinstance(model, (list, tuple)):
        _only("a list of stages", budget=budget, kwargs=kwargs, **of_modules, **spread, **of_functions)
        for stage in model:
            check_callable("fit", (stage,))
        return plan_stages(model, *args, peak=peak, **common, **keywords)
    if not isinstance(model, torch.nn.Module):
        _only("a function", **of_modules, **spread)
        return plan_regions(model, *args, **within, link=link, **common, kwargs=kwargs or {}, **keywords)
    given = joined_keywords(keywords, kwargs)
    _only("a module", **of_functions)
    if mesh is not None or memory is not None:
        _only("mesh=Layout(...)", **within, **of_modules)
        if mesh is None:
            raise RematError("remat.fit(memory=...) is for mesh=Layout(...); for one device write peak=...")
        return plan_mesh(model, args, given, mesh, memory, cost, device, as_region)
    job = _Job(model, args, given, device, optimizer, shards or 1)
    limit = job.limit(peak, budget, headroom)
    step = ModelStep(model, args, given, loss, device, job.held.gradients > 0, shards or 1, measure)
    return _fitted(
        job,
        step,
        limit,
        budget,
        layers,
        cost_model(cost, device),
        ready_policies(() if policies is None else policies),
    )


@dataclass(frozen=True)
class _Job:
    """A model, what a step gives it, and what updates it."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: Any
    optimizer: Any
    shards: int

    @cached_property
    def held(self) -> HeldBytes:
        """Bytes that live throughout a step."""
        return held_by(self.model, (self.args, self.kwargs), self.optimizer, self.shards)

    def limit(self, peak: Any, budget: Any, headroom: Any) -> int | None:
        """Bytes that a step may have at once, all told; None where a budget says what is kept."""
        if [peak, budget, headroom].count(None) != 2:
            raise RematError(
                'remat.fit takes peak=..., budget=... or headroom=..., one of them: write peak="20GiB", '
                'budget=0.4 or headroom="2GiB".'
            )
        if budget is not None:
            check_budget(budget)
            return None
        return check_peak(peak) if peak is not None else self._beside(check_peak(headroom))

    def _beside(self, free: int) -> int:
        total = _memory((self.model, self.args, self.kwargs), self.device)
        if free >= total:
            raise RematError(f"A headroom of {free:,} bytes leaves nothing of the device's {total:,} bytes.")
        return total - free


def _fitted(
    job: _Job,
    step: ModelStep,
    limit: int | None,
    budget: Any,
    layers: nn.Layers | None,
    model: CostModel,
    ready: dict[str, Policy],
) -> Fit:
    """The module with its blocks made regions, within a limit or a budget."""
    start, held = time.perf_counter(), job.held
    allowed = None if limit is None else limit - held.bytes
    ways = _ways(step, layers, lambda names: Way(step, names, allowed, model, ready, budget))
    fits = [way for way in ways if way.chosen is not None]
    if not fits:
        assert limit is not None
        if not ways[0].names:
            least = ways[0].limit_of(ways[0].plain)
            raise LayerError(
                f"{no_blocks(job.model)} A peak of {limit:,} bytes is below what it takes as it is, "
                f"{least + held.bytes:,} bytes. Held throughout: {held}; in the step {least:,} bytes. Write "
                f"peak={least + held.bytes} or more, or a smaller batch."
            )
        leanest = min(ways, key=lambda way: way.limit_of(way.portfolio.leanest()))
        least = leanest.limit_of(leanest.portfolio.leanest())
        raise _out_of_reach(limit, held, least, leanest)
    way = min(fits, key=lambda way: way.price)
    chosen = way.chosen
    assert chosen is not None
    layers_of = {name: name_of(policy) for name, policy in way.settled().items() if policy is not None}
    return Fit(
        model=job.model,
        applied=tuple(layers_of),
        limit=limit if limit is not None else way.budget,
        peak_bytes=chosen.peak + held.bytes,
        plain_bytes=way.plain.peak + held.bytes,
        kept_bytes=way.portfolio.kept(chosen),
        default_bytes=way.portfolio.kept(way.plain),
        held=held,
        cost=chosen.cost,
        unit=way.portfolio.model.unit,
        binds=way.step.binding(chosen.choices, way.called),
        policies=dict(Counter(layers_of.values()).most_common()),
        layers=layers_of,
        by_budget=limit is None,
        notes=tuple(way.notes()),
        seconds=time.perf_counter() - start,
        step=step,
    )


def _only(what: str, **others: Any) -> None:
    """Raise where an option is given that is not for what is planned."""
    if wrong := [name for name, value in others.items() if value is not None]:
        raise RematError(
            f"remat.fit({wrong[0]}=...) is not for {what}. A module takes peak=, budget= or headroom=, or "
            "mesh=Layout(...) and memory=; a function of regions peak= or budget=, and link= with it; a list "
            "of stages peak=."
        )


def _ways(step: ModelStep, layers: nn.Layers | None, made: Callable[[list[str]], Way]) -> list[Way]:
    """The model cut into blocks and planned, in each way that is worth a try."""
    tried: list[Way] = []
    for names in _cuts(step.model, layers, tried):
        try:
            way = made(names)
        except RematError:
            if not tried:
                raise
            continue
        tried.append(way)
        if way.chosen is way.plain:
            break
    if any(way.chosen is not None for way in tried):
        return tried
    return [*tried, *filter(None, [way.deciding_again() for way in tried])]


def _cuts(model: torch.nn.Module, layers: nn.Layers | None, tried: list[Way]) -> Iterator[list[str]]:
    """Blocks as they are described; else as they are found, and the largest class where nothing else fits."""
    if layers is not None:
        yield nn.fitting(model, layers, "remat.fit")
        return
    yield from (cuts := [*listed(model)])
    if any(way.chosen is not None for way in tried) or nn.regions(model):
        return
    names = largest_class(model)
    if names and names not in cuts:
        yield names
    elif not cuts:
        # It may fit as it is.
        yield []


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


def _out_of_reach(limit: int, held: HeldBytes, step: int, way: Way) -> RematError:
    least = step + held.bytes
    if held.bytes >= limit:
        return RematError(
            f"A peak of {format_bytes(limit)} is below what lives throughout the step, "
            f"{format_bytes(held.bytes)}: {held}. Recomputation does not make that smaller: shard the model, "
            f"train fewer of its parameters, or write peak={least}, the lowest found ({step:,} bytes more)."
        )
    return RematError(
        f"A peak of {limit:,} bytes cannot be met: the lowest found is {least:,} bytes "
        f"({way.plain.peak + held.bytes:,} without remat). Held throughout: {held}; in the step "
        f"{step:,} bytes. Write peak={least} or more, a smaller batch, smaller blocks (layers=...), "
        f"or remat.fit([stage1, stage2], x, peak=...). {way.theirs}".rstrip()
    )
