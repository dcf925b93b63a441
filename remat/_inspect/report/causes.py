"""What defeats regions: one function for each cause that the notes of `explain` know."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from remat._core import format_bytes
from remat._inspect.report.measure import Measured, RegionUse
from remat._inspect.report.records import short
from remat.policies import Policy, UnmatchedName, save_everything
from remat.transforms.compat import in_transform

# Shares of what no remat keeps: less is nothing, and a view that shows less of its block is a small one.
_LITTLE, _HALF = 0.02, 0.5
# Only `scaled_dot_product_attention` calls it, where it has no fused kernel.
_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
# Ops of a call: fewer can hardly save more than they keep.
_FEW = 3


@dataclass(frozen=True)
class Finding:
    """Something that defeats a region.

    Attributes:
        cause: in one word or two, such as "view" or "too small".
        region: the region's name, or "".
        said: what was found.
        advice: what to try.
    """

    cause: str
    region: str
    said: str
    advice: str


@dataclass
class SeenRegion:
    """What was seen of a region's calls."""

    policy: Policy
    caches: set[str] = field(default_factory=set)
    eager: str = ""


class Witness:
    """Asked for the policy of every call of a region: it notes the call, and changes nothing."""

    def __init__(self) -> None:
        self.regions: dict[str, SeenRegion] = {}
        self.as_it_is = True

    def __call__(self, label: str, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        seen = self.regions.setdefault(label, SeenRegion(policy))
        seen.caches |= {type(v).__name__ for v in (*args, *kwargs.values()) if _is_cache(v)}
        if self.as_it_is and _inside_compiled():
            seen.eager = "transform" if in_transform() else "graph break"
        return policy


def causes(
    seen: dict[str, SeenRegion],
    now: Measured,
    plain: Measured,
    told: Iterable[warnings.WarningMessage] = (),
) -> Iterator[Finding]:
    """All findings, the most telling first."""
    uses = {region.name: region for region in now.regions}
    if not seen and not uses:
        yield Finding(
            "no region",
            "",
            "the step calls no region.",
            "wrap its parts, such as each block, in remat(...), or remat.apply(model, layers=...).",
        )
    yield from _names(told)
    yield from eager(seen)
    yield from _caches(seen)
    yield from _without_grad(seen, uses)
    yield from _budgets(seen, uses, now)
    yield from _views(now, plain)
    yield from _captured(now)
    yield from _nested(uses)
    for said in taken_apart(now):
        yield Finding(
            "attention in parts",
            "",
            said,
            "dropout=0.0 in attention, and operands of four dimensions: (batch, heads, length, width).",
        )
    yield from _small(seen, uses, now, plain)


def taken_apart(now: Measured) -> Iterator[str]:
    """Attention that torch computes by products and a softmax, with all of the scores."""
    parts = {ran.location for ran in now.timeline.ops if ran.when == "forward" and ran.op is _SAFE_SOFTMAX}
    for location in sorted(parts):
        yield (
            f"the attention at {short(location)} is computed by products and a softmax, which keep all "
            "scores: torch has no fused kernel for it (on a CPU: dropout, or not four dimensions). "
            "save_attention keeps nothing of it"
        )


def _names(told: Iterable[warnings.WarningMessage]) -> Iterator[Finding]:
    for text in dict.fromkeys(str(w.message) for w in told if issubclass(w.category, UnmatchedName)):
        yield Finding(
            "unused name", "", text, "give a value of the region that name by checkpoint_name(value, name)."
        )


def eager(seen: dict[str, Any]) -> Iterator[Finding]:
    """Regions that run in eager mode though the user compiles."""
    for name, region in seen.items():
        if region.eager == "transform":
            yield Finding(
                "transform of compiled",
                name,
                f"region {name!r} runs in eager mode: torch does not compile under its own transforms, so "
                "torch.func.grad(torch.compile(f)) runs f as it is.",
                "compile the outside: torch.compile(torch.func.grad(f)).",
            )
        elif region.eager:
            yield Finding(
                "eager inside compile",
                name,
                f"region {name!r} runs in eager mode inside a compiled function: its graph breaks there.",
                "torch.compile(..., fullgraph=True), which names the line that breaks it.",
            )


def _caches(seen: dict[str, Any]) -> Iterator[Finding]:
    for name, region in seen.items():
        if region.caches:
            yield Finding(
                "use_cache",
                name,
                f"region {name!r} is given a {', '.join(sorted(region.caches))}: the keys and values of "
                "every layer stay in it, whatever the region keeps.",
                "model(..., use_cache=False), or model.config.use_cache = False, for training.",
            )


def no_gradient(said: str) -> Finding:
    """A step that nobody can differentiate."""
    advice = "let parameters require grad (model.requires_grad_(True)), and look for no_grad and detach()."
    return Finding("no requires_grad", "", f"{said} Nothing is kept, with or without remat.", advice)


def _without_grad(seen: dict[str, Any], uses: dict[str, RegionUse]) -> Iterator[Finding]:
    for name, region in seen.items():
        ordinary = region.policy != save_everything and not _budget(region.policy)
        if name not in uses and ordinary and not region.eager:
            yield Finding(
                "no requires_grad",
                name,
                f"region {name!r} is called without gradients: nothing that reaches it "
                "requires grad, so it has nothing to recompute.",
                "let its parameters or inputs require grad, and look for no_grad and detach() before it.",
            )


def _budget(policy: Any) -> Any:
    budget = getattr(policy, "budget", None)
    return budget if budget is not None else getattr(policy, "peak", None)


def _budgets(seen: dict[str, Any], uses: dict[str, RegionUse], now: Measured) -> Iterator[Finding]:
    for name, region in seen.items():
        idle = name not in uses or not uses[name].recomputed.ops
        if idle and _budget(region.policy):
            yield Finding(
                "budget",
                name,
                f"region {name!r} recomputes nothing: {region.policy!r} is as much as it needs, and the "
                f"whole step keeps {format_bytes(now.waiting_bytes)}.",
                "a smaller budget, such as budget=0.5; `python -m remat plan` shows the frontier.",
            )
        elif region.policy == save_everything:
            yield Finding(
                "save_everything",
                name,
                f"region {name!r} has the policy save_everything, which recomputes nothing.",
                "save_matmuls, or save_nothing.",
            )


def _views(now: Measured, plain: Measured) -> Iterator[Finding]:
    least = _LITTLE * max(plain.waiting_bytes, 1)
    for block in now.timeline.waiting():
        if block.why and 0 < block.seen < _HALF * block.bytes and block.bytes - block.seen > least:
            named = f"{block.name!r}, " if block.name else ""
            yield Finding(
                "view",
                block.region or "",
                f"region {block.region!r} keeps {named}a view of {format_bytes(block.seen)} in a block of "
                f"{format_bytes(block.bytes)} ({_maker(now, block)}): the whole block stays.",
                "a copy in place of the view: value.clone() or value.contiguous(), before checkpoint_name.",
            )
    for kept in now.kept:
        shown = math.prod(kept.shape) * kept.dtype.itemsize
        if kept.why == "argument" and kept.bytes - shown > least and shown < _HALF * kept.bytes:
            yield Finding(
                "view",
                "",
                f"the argument {kept.path} is a view of {format_bytes(shown)} in a block of "
                f"{format_bytes(kept.bytes)}, which lives as long as the view is kept.",
                f"{kept.path}.clone(), if nothing else needs the block.",
            )


def _captured(now: Measured) -> Iterator[Finding]:
    for block in now.timeline.waiting():
        if block.copied and block.why in ("captured", "argument"):
            yield Finding(
                "captured copy",
                block.region or "",
                f"region {block.region!r} keeps {format_bytes(block.bytes)} that are made of one weight "
                f"alone, outside of the region ({_maker(now, block)}).",
                "make it inside the region from the weight, which lives anyway.",
            )


def _nested(uses: dict[str, RegionUse]) -> Iterator[Finding]:
    outer = [region.name for region in uses.values() if region.holds_regions]
    for region in uses.values():
        if not region.calls:
            yield Finding(
                "nested",
                region.name,
                f"region {region.name!r} is called inside {' or '.join(map(repr, outer))} alone, which "
                "computes it again anyway: it may run once more for each region around it.",
                "one region in place of two: the inner, or the outer with a policy. (remat.fit of a list of "
                "stages nests on purpose, for a lower peak.)",
            )


def _small(
    seen: dict[str, Any], uses: dict[str, RegionUse], now: Measured, plain: Measured
) -> Iterator[Finding]:
    saves = plain.waiting_bytes - now.waiting_bytes > _LITTLE * plain.waiting_bytes
    for region in uses.values():
        policy = seen[region.name].policy if region.name in seen else None
        few = region.calls and region.forward.ops <= _FEW * region.calls
        idle = not region.recomputed.ops and not _budget(policy)
        if region.calls and (idle or (few and not saves)):
            yield Finding(
                "too small",
                region.name,
                f"region {region.name!r} has {region.forward.ops / region.calls:.0f} ops a call, and "
                f"recomputes {region.recomputed.ops / region.calls:.0f}: its inputs are as large as what it "
                "would save.",
                "a larger part as a region, such as a whole block.",
            )
        elif region.calls == 1 and region.share >= 0.9 and not region.holds_regions:
            yield Finding(
                "whole step",
                region.name,
                f"region {region.name!r} is the whole step: it brings everything back at once.",
                "its parts as regions, such as each block.",
            )


def _maker(now: Measured, block: Any) -> str:
    ran = now.timeline.ops[min(block.made, len(now.timeline.ops) - 1)]
    return f"{ran.op} at {short(ran.location)}"


_COMPILED = os.path.join("_dynamo", "eval_frame.py")


def _inside_compiled() -> bool:
    """Whether a function that was compiled is being called, and this code runs in Python all the same."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith(_COMPILED):
            return True
        frame = frame.f_back
    return False


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache") and hasattr(value, "update")
