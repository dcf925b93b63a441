"""Policies that narrow others down: by a predicate, by position, by size, by cost."""

# What users pass is checked, whatever its type was said to be.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat._core import Decision, OpInfo, parse_bytes
from remat.policies._base import Combined, Numbered, Policy, PolicyError, as_policy, check_verdict
from remat.policies._ready import save_everything
from remat.transforms.offload import INPUT

# Copies below it take longer to begin than to be made.
LEAST_BYTES = 1 << 20


@dataclass(frozen=True, repr=False)
class HostInputs(Combined):
    """The verdicts of a policy, and OFFLOAD for a region's arguments from `LEAST_BYTES` on."""

    policy: Policy

    def __call__(self, info: OpInfo) -> Decision:
        if info.name == INPUT:
            return Decision.OFFLOAD if info.bytes >= LEAST_BYTES else Decision.RECOMPUTE
        return check_verdict(self.policy, info, self.policy(info))

    def decide_by_op(self, op: Any) -> Decision | None:
        return self.policy.decide_by_op(op)

    def __repr__(self) -> str:
        return repr(self.policy)


class Narrowed(Combined):
    """Keeps of what `policy` keeps a part; what that recomputes, this recomputes."""

    policy: Policy

    def decide_by_op(self, op: Any) -> Decision | None:
        return Decision.RECOMPUTE if self.policy.decide_by_op(op) is Decision.RECOMPUTE else None


@dataclass(frozen=True, repr=False)
class Where(Narrowed):
    """The verdicts of `policy` where `predicate` holds, RECOMPUTE elsewhere."""

    predicate: Callable[[OpInfo], bool]
    policy: Policy
    # What the predicate reads cannot be known, so it is given all there is.
    needs_calls = True  # type: ignore[assignment]

    def __call__(self, info: OpInfo) -> Decision:
        holds = self.predicate(info)
        if not isinstance(holds, bool):
            raise PolicyError(
                f"The predicate of {self!r} answered {holds!r} of type {type(holds).__name__} for {info.op}: "
                "answer True or False. For a function that answers Decisions write checkpoint_policy(fn)."
            )
        return check_verdict(self.policy, info, self.policy(info)) if holds else Decision.RECOMPUTE

    def __repr__(self) -> str:
        predicate = getattr(self.predicate, "__qualname__", None) or repr(self.predicate)
        return f"where({predicate}{'' if self.policy == save_everything else f', {self.policy!r}'})"


def where(predicate: Callable[[OpInfo], bool], policy: Any = save_everything) -> Where:
    """Save where `predicate(info)` is true; of those values, only what `policy` saves.

    Args:
        predicate: a function of an `OpInfo` (op, shapes, name, index, region, bytes, FLOPs ...) to a bool.
        policy: whose verdicts hold there; anything that `remat(policy=...)` accepts.

    Raises:
        RematError: `predicate` cannot be called (also a TypeError); later, if it answers with no bool.

    Example:
        >>> from remat import save_matmuls
        >>> from remat.policies import where
        >>> def early(info):
        ...     return info.index < 100
        >>> where(early, save_matmuls)
        where(early, save_matmuls)
    """
    if isinstance(predicate, Policy) or not callable(predicate):
        raise PolicyError(
            f"where got {predicate!r} of type {type(predicate).__name__} for a predicate: write a function "
            "from OpInfo to bool; two policies are combined with `&`."
        )
    return Where(predicate, as_policy(policy))


@dataclass(frozen=True, repr=False)
class SaveEvery(Narrowed):
    """The verdicts of `policy` for every `n`-th value that it keeps, RECOMPUTE for the others."""

    n: int
    policy: Policy
    # The ops counted in this forward (one whose result is named later is judged twice). No part of the value:
    # `fresh` gives every forward its own.
    seen: dict[int, int] = dataclasses.field(default_factory=dict[int, int], compare=False)
    counts = True  # type: ignore[assignment]

    def __call__(self, info: OpInfo) -> Decision:
        verdict = check_verdict(self.policy, info, self.policy(info))
        if verdict is Decision.RECOMPUTE:
            return verdict
        position = self.seen.setdefault(info.index, len(self.seen))
        return verdict if position % self.n == 0 else Decision.RECOMPUTE

    def fresh(self) -> Policy:
        return dataclasses.replace(self, policy=self.policy.fresh(), seen={})

    def __repr__(self) -> str:
        return f"save_every_nth({self.n}, {self.policy!r})"


def save_every_nth(n: int, policy: Any) -> SaveEvery:
    """Of the values that `policy` keeps, keep the first of every `n`, in the order they are made.

    `save_every_nth(2, save_matmuls)` is torchtitan's selective checkpointing: every second matmul runs again.

    Args:
        n: 1 keeps all of them.
        policy: anything that `remat(policy=...)` accepts.

    Raises:
        RematError: `n` is not a positive integer (also a TypeError).

    Example:
        >>> from remat import save_matmuls
        >>> from remat import save_every_nth
        >>> save_every_nth(2, save_matmuls)
        save_every_nth(2, save_matmuls)
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise PolicyError(
            f"save_every_nth(n, policy): n must be a positive integer, got {n!r}; 2 keeps every second value."
        )
    return SaveEvery(n, as_policy(policy))


@dataclass(frozen=True, repr=False)
class SaveLarger(Policy):
    """Saves results of more than so many bytes."""

    bytes: int

    def __call__(self, info: OpInfo) -> Decision:
        return Decision.SAVE if info.bytes > self.bytes else Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"save_larger_than({self.bytes})"


def save_larger_than(bytes: int | str) -> SaveLarger:
    """Save the results of ops that make more than `bytes` bytes; recompute the smaller ones.

    Sizes are those in memory: under `vmap` of the whole batch. `~save_larger_than("1MiB")` saves the small.

    Args:
        bytes: an int, or a text such as "512KiB".

    Raises:
        RematError: it is neither (also a TypeError).

    Example:
        >>> from remat.policies import save_larger_than, save_matmuls
        >>> save_matmuls & ~save_larger_than("1MiB")
        save_matmuls & ~save_larger_than(1048576)
    """
    if isinstance(bytes, str):
        try:
            bytes = parse_bytes(bytes)
        except ValueError as error:
            raise PolicyError(f"save_larger_than: {error}") from None
    if not isinstance(bytes, int) or isinstance(bytes, bool) or bytes < 0:
        raise PolicyError(
            f"save_larger_than(bytes): got {bytes!r}; write a number of bytes, or a text such as '1MiB'."
        )
    return SaveLarger(bytes)


@dataclass(frozen=True, repr=False)
class SaveCheaper(Numbered):
    """Saves results that spare more than so many FLOPs for a byte kept."""

    flops_per_byte: float

    def __call__(self, info: OpInfo) -> Decision:
        return Decision.SAVE if info.flops > self.flops_per_byte * info.bytes else Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"save_costlier_than({self.flops_per_byte:g})"


def save_costlier_than(flops_per_byte: float) -> SaveCheaper:
    """Save a result where keeping it is cheaper than computing it again, if a byte is worth so many FLOPs.

    A matmul with contraction length `k` and float32 results costs `2 * k / 4` FLOPs for a byte of its result.
    So `save_costlier_than(256)` saves those with `k > 512`. FLOPs are torch's formulas (`OpInfo.flops`); ops
    that have none are recomputed. The ratio is the same for one example and for a batch under `vmap`.

    Args:
        flops_per_byte: what a byte is worth, in floating point operations; 0 saves all that has FLOPs at all.

    Raises:
        RematError: it is not a number, or negative (also a TypeError).

    Example:
        >>> from remat import save_costlier_than
        >>> save_costlier_than(256)
        save_costlier_than(256)
    """
    if (
        not isinstance(flops_per_byte, (int, float))
        or isinstance(flops_per_byte, bool)
        or not flops_per_byte >= 0
    ):
        raise PolicyError(
            f"save_costlier_than(flops_per_byte): got {flops_per_byte!r}; write a number such as 256."
        )
    return SaveCheaper(float(flops_per_byte))


@dataclass(frozen=True, repr=False)
class Offload(Combined):
    """Keeps in host memory what `policy` saves."""

    policy: Policy

    def __call__(self, info: OpInfo) -> Decision:
        return check_verdict(self.policy, info, self.policy(info)) & Decision.OFFLOAD

    def decide_by_op(self, op: Any) -> Decision | None:
        verdict = self.policy.decide_by_op(op)
        return None if verdict is None else verdict & Decision.OFFLOAD

    def __repr__(self) -> str:
        return f"offload({self.policy!r})"


def offload(policy: Any) -> Offload:
    """Keep in host memory, between forward and backward, what `policy` saves.

    Args:
        policy: anything that `remat(policy=...)` accepts.

    Example:
        >>> from remat import save_attention, save_weight_matmuls
        >>> from remat.policies import offload
        >>> save_attention | offload(save_weight_matmuls)
        save_attention | offload(save_weight_matmuls)
    """
    return Offload(as_policy(policy))
