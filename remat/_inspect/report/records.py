"""Reports as plain data: dictionaries for JSON, columns for the page."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from remat._core import DEVICES, Device, format_shape
from remat._inspect.report.measure import Measured
from remat._inspect.report.timeline import CATEGORIES, Timeline
from remat._inspect.report.watch import PASSES
from remat._inspect.residuals import Residual

if TYPE_CHECKING:
    from remat._inspect.report.explain import Explanation

# Of the form of `to_dict`. It changes when a key goes or means something else.
VERSION = 2


def explanation_record(found: Explanation) -> dict[str, Any]:
    """All figures of an explanation, without its timeline."""
    return {
        "version": VERSION,
        "name": found.name,
        "kept_bytes": found.kept_bytes,
        "held_bytes": found.held_bytes,
        "plain_bytes": found.plain_bytes,
        "host_bytes": found.host_bytes,
        "kept": [residual_record(r) for r in found.kept],
        "now": measured_record(found.now),
        "plain": measured_record(found.plain),
        "fits": {label: spare(memory, needed(found.now)) for label, memory in cards().items()},
        "notes": list(found.notes),
        "rows": [{"policy": repr(policy)} | explanation_record(each) for policy, each in found.rows],
    }


def measured_record(measured: Measured) -> dict[str, Any]:
    """One forward and backward in figures."""
    return {
        "kept_bytes": measured.kept_bytes,
        "peak_bytes": measured.peak,
        "argument_bytes": measured.timeline.arguments,
        "work": [{"pass": at, "kind": kind, **asdict(w)} for (at, kind), w in measured.work.items()],
        "recomputed": [asdict(r) for r in measured.recomputed],
        "regions": [asdict(r) for r in measured.regions],
    }


def residual_record(r: Residual) -> dict[str, Any]:
    """A kept value, its types and op as text."""
    op = None if r.op is None else str(r.op)
    return vars(r) | {"shape": list(r.shape), "dtype": str(r.dtype), "device": str(r.device), "op": op}


def needed(measured: Measured) -> int:
    """Bytes of the step: what ops make at the peak, and the arguments and weights that they read."""
    return measured.peak + measured.timeline.arguments


def cards() -> dict[str, int]:
    """Label -> memory of the devices that have one of their own."""
    return {device.label: device.memory for device in DEVICES.values() if device.memory}


def spare(memory: int, used: int) -> dict[str, Any]:
    """Whether so much fits, and what is left; negative for what is missing."""
    return {"fits": used <= memory, "memory_bytes": memory, "spare_bytes": memory - used}


# -- columns, for the cockpit -----------------------------------------------------------------------------


# Texts by number: thousands of ops have a few names.
Words = defaultdict[str, int]


def cockpit_record(
    name: str, plain: Measured | None, choices: Sequence[tuple[str, Measured]]
) -> dict[str, Any]:
    """What the page draws: the step without remat, and what the slider switches between, the first at first.

    What a choice has in `data` is large; the page reads it when it is chosen.
    """
    words = Words()
    words.default_factory = words.__len__
    order = sorted(choices, key=lambda choice: needed(choice[1]))
    return {
        "name": name,
        "start": order.index(choices[0]),
        "choices": [_summary(*each) | {"data": _choice(each[1], words)} for each in order],
        "plain": None
        if plain is None
        else _summary("without remat", plain) | {"columns": columns(plain.timeline, words)},
        "step_ms": _milliseconds((plain or choices[0][1]).timeline, PASSES),
        "passes": PASSES,
        "categories": CATEGORIES,
        "devices": {key: asdict(device) for key, device in DEVICES.items()},
        "words": list(words),
    }


def _summary(label: str, measured: Measured) -> dict[str, Any]:
    return {
        "label": label,
        "peak": measured.peak,
        "arguments": measured.timeline.arguments,
        "kept_bytes": measured.kept_bytes,
        "host_bytes": measured.kept.host_bytes,
        "recomputed_ms": _milliseconds(measured.timeline, ("recompute",)),
    }


def _milliseconds(timeline: Timeline, passes: Sequence[str]) -> dict[str, float]:
    """For each device the time of the ops of these passes, by its roofline."""
    ops = [(ran.half, ran.flops, ran.bytes) for ran in timeline.ops if ran.when in passes]

    def total(device: Device) -> float:
        return 1e3 * sum(device.seconds(flops, moved, half) for half, flops, moved in ops)

    return {key: total(device) for key, device in DEVICES.items()}


def _choice(measured: Measured, words: Words) -> dict[str, Any]:
    timeline, kept = measured.timeline, measured.kept
    return {
        "columns": columns(timeline, words),
        # bytes, category, shape, name, and the op that made it.
        "kept": [
            [b.bytes, b.category(timeline.boundary), b.shape, b.name or "", b.made]
            for b in timeline.waiting()
        ],
        "held": [
            [r.bytes, r.why, format_shape(r.dtype, r.shape), r.path or ""]
            for r in kept
            if r.op is None and r.why in ("argument", "captured")
        ],
    }


def columns(timeline: Timeline, words: Words) -> dict[str, Any]:
    """A timeline as columns of numbers; texts are numbers of `words`."""
    ops, blocks = timeline.ops, timeline.blocks
    places = {ran.location: words[short(ran.location)] for ran in ops}
    return {
        "boundary": timeline.boundary,
        "arguments": timeline.arguments,
        "op": [words[str(ran.op)] for ran in ops],
        "at": [places[ran.location] for ran in ops],
        "pass": [PASSES.index(ran.when) for ran in ops],
        "region": [words[ran.region or ""] for ran in ops],
        "flops": [ran.flops for ran in ops],
        "moved": [ran.bytes for ran in ops],
        "half": [int(ran.half) for ran in ops],
        "made": [block.made for block in blocks],
        "freed": [len(ops) if block.freed is None else block.freed for block in blocks],
        "bytes": [block.bytes for block in blocks],
        "shape": [words[block.shape] for block in blocks],
        "category": [CATEGORIES.index(block.category(timeline.boundary)) for block in blocks],
        "owner": [words[block.region or ""] for block in blocks],
    }


def short(location: str | None) -> str:
    """A location without its folders."""
    return (location or "an unknown line").rpartition(os.sep)[2]
