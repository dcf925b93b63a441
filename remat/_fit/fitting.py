"""One call that makes a model's step fit a peak."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from remat import nn
from remat._core import DEVICES, format_bytes, joined_keywords, keywords_apart
from remat._fit.blocks import blocks_of
from remat._fit.held import HeldBytes, held_by
from remat._fit.policy import Fitted
from remat._fit.report import Fit
from remat.plan import (
    READY,
    BudgetPolicy,
    Chosen,
    CostModel,
    Graph,
    Plan,
    Portfolio,
    WholeStep,
    check_peak,
    cost_model,
    plans_by_budget,
    step_of,
)
from remat.policies import Policy, policy_given
from remat.transforms import RematError, tree_leaves


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
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Fit:
    """Make the blocks of a model regions, in place, so that its training step stays within a peak.

    The whole step is planned on tensors without data: forward and backward of `model(*args, **keywords)`.
    What is outside of the blocks counts (embeddings, head, loss), and gradients as the backward makes them.
    What lives throughout counts, too: weights, buffers, the optimizer's state, the arguments. Each block gets
    the plan, or the ready policy, that is cheapest for the whole within the peak. A block that needs none
    stays as it is. `remat.nn.remove` undoes it.

    Args:
        model: the model.
        args, keywords: what it is called with in a step.
        peak: the most bytes that may be live at once in a step, such as "20GiB".
        headroom: instead of `peak`: bytes of the device's memory that are to stay free.
        layers: the blocks, as for `remat.nn.apply`; left out, they are found: lists of modules of one class.
        policies: policies of yours that compete, beside the ready ones; a dict gives them names.
        optimizer: what updates the model, or "adamw", "sgd", "momentum": its state counts.
        loss: a function of the model's result whose value is differentiated. Left out: the result's `loss`,
            where it has one, else all of the result.
        cost, device: as for `checkpoint_policy(budget=...)`.
        shards: devices over which weights, gradients and the optimizer's state are sharded, as FSDP does.
            Each has its part of them, and whole the weights of two blocks and of what is outside of blocks.
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
    names, modules = _blocks(model, layers)
    accumulating = held.gradients > 0
    # Regions of the user's come back where nothing is applied, and where something raises.
    with _regions(list(modules)) as settle:
        step = step_of(
            _step(model, loss),
            args,
            given,
            wanted=plans_by_budget,
            device=device,
            accumulating=accumulating,
            shards=shards,
        )
        _check_differentiated(model, step)
        portfolio = Portfolio(step, cost_model(cost, device), _ready(policies))
        plain = portfolio.plain()
        chosen = plain if plain.peak + held.bytes <= limit else portfolio.within(limit - held.bytes)
        if chosen is None:
            raise _out_of_reach(limit, held, portfolio.leanest(), plain)
        policy_of = _policies(portfolio, chosen)
        settle(policy_of)
    applied = [name for name, module in zip(names, modules, strict=True) if policy_of.get(module) is not None]
    return Fit(
        model=model,
        applied=tuple(applied),
        limit=limit,
        peak_bytes=chosen.peak + held.bytes,
        plain_bytes=plain.peak + held.bytes,
        held=held,
        cost=chosen.cost,
        unit=portfolio.model.unit,
        binds=step.binding(chosen.choices),
        policies=dict(Counter([_named(p) for p in policy_of.values() if p is not None]).most_common()),
        seconds=time.perf_counter() - start,
    )


def _step(model: torch.nn.Module, loss: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """The model with what is differentiated in front; the caller holds the rest of its result."""

    def step(*args: Any, **kwargs: Any) -> Any:
        out = model(*args, **kwargs)
        found = getattr(out, "loss", None) if loss is None else loss(out)
        if loss is not None:
            _check_loss(found, out)
        if found is None:
            return out
        rest = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t is not found]
        return found, [t.detach() for t in rest]

    step.__name__ = type(model).__name__
    return step


def _check_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise RematError(
            f"remat.fit takes a module, got {model!r} of type {type(model).__name__}. For a function of "
            "regions write remat.plan_model(fn, *args, peak=...)."
        )


def _blocks(model: torch.nn.Module, layers: nn.Layers | None) -> tuple[list[str], list[torch.nn.Module]]:
    found = blocks_of(model) if layers is None else nn.fitting(model, layers)
    modules = dict(model.named_modules())
    return found, [modules[name] for name in found]


@contextmanager
def _regions(modules: list[torch.nn.Module]) -> Iterator[Callable[[dict[Any, Policy | None]], None]]:
    """Blocks as regions that can be met; what is settled on stays, else what was there before comes back."""
    before = [(module, nn.settings_of(module)) for module in modules]
    settled: list[dict[Any, Policy | None]] = []
    try:
        for module in modules:
            nn.apply_to(module, policy=BudgetPolicy(1.0))
        yield settled.append
    finally:
        for module, settings in before:
            nn.remove_from(module)
            if settled and (policy := settled[0].get(module)) is not None:
                nn.apply_to(module, **{**(settings or {}), "policy": policy})
            elif not settled and settings is not None:
                nn.apply_to(module, **settings)


def _policies(portfolio: Portfolio, chosen: Chosen) -> dict[Any, Policy | None]:
    """The policy of each block; one that is called several times keeps what its leanest call keeps."""
    step, found = portfolio.step, {}
    for name, graph, owner, choice in zip(step.names, step.graphs, step.owners, chosen.choices, strict=True):
        before = found.get(owner)
        if before is None or choice.kept < before[0].kept:
            found[owner] = choice, graph, name
    policies: dict[Any, Policy | None] = {}
    made: dict[Any, Policy | None] = {}
    for owner, (choice, graph, name) in found.items():
        key = id(graph), choice
        if key not in made:
            way = portfolio.carrier(graph, choice, name)
            made[key] = _fitted(way, portfolio.model, graph) if isinstance(way, Plan) else way
        policies[owner] = made[key]
    return policies


def _fitted(plan: Plan, model: CostModel, graph: Graph) -> Fitted:
    share = min(1.0, plan.kept_bytes / max(plan.default_bytes, 1))
    return Fitted(share, model, plan_made=plan, sizes=graph.joint.storages)


def _ready(policies: Mapping[str, Policy] | Sequence[Policy]) -> dict[str, Policy]:
    given = policies if isinstance(policies, Mapping) else {_named(p): p for p in policies}
    return {**READY, **{name: policy_given(policy) for name, policy in given.items()}}


def _named(policy: Policy) -> str:
    return next((name for name, ready in READY.items() if ready is policy), repr(policy))


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
    tensors = [t for t in (*model.parameters(), *tree_leaves(given)) if isinstance(t, torch.Tensor)]
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


def _check_differentiated(model: torch.nn.Module, step: WholeStep) -> None:
    if step.outside.differentiated or any(graph.joint.differentiated for graph in step.graphs):
        return
    raise RematError(
        f"Nothing in this step of {type(model).__name__} has a gradient: no parameter and no argument "
        "requires one, or gradients are off. Write model.requires_grad_() or x.requires_grad_(), outside of "
        "torch.inference_mode()."
    )


def _check_loss(found: Any, out: Any) -> None:
    if not any(map(_has_gradient, tree_leaves(found))) and any(map(_has_gradient, tree_leaves(out))):
        kind = "a tensor without a gradient" if isinstance(found, torch.Tensor) else type(found).__name__
        raise RematError(
            f"remat.fit: loss gave {kind}, so nothing in the step would be differentiated. Let it return a "
            "tensor that is computed from the model's result, such as lambda out: out.square().mean()."
        )


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _out_of_reach(limit: int, held: HeldBytes, leanest: Chosen, plain: Chosen) -> RematError:
    least = leanest.peak + held.bytes
    return RematError(
        f"A peak of {limit:,} bytes cannot be met: the lowest found is {least:,} bytes "
        f"({plain.peak + held.bytes:,} without remat). Held throughout: {held}; in the step "
        f"{leanest.peak:,} bytes. Write peak={least} or more, a smaller batch, smaller blocks (layers=...), "
        "or remat.plan.plan_chain."
    )
