"""`explain`: what a function keeps, what it runs again, and what that costs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat import debug
from remat._core import Page, Shown, Table, format_bytes, joined_keywords, keywords_apart, name_of, warn_user
from remat._inspect.report.causes import Witness, causes, taken_apart
from remat._inspect.report.cockpit import save_cockpit
from remat._inspect.report.each import each_of
from remat._inspect.report.measure import Measured, RegionUse, Work, measure
from remat._inspect.report.records import cockpit_record, explanation_record, short
from remat._inspect.report.watch import KINDS, PASSES, TRANSFER
from remat._inspect.residuals import Residual, Residuals
from remat._overrides import policies_by
from remat.policies import Policy, PolicyLike, as_policy

_WHOLE, _LITTLE = 0.9, 0.02
# Causes that the notes say in words of their own, from figures that all calls have.
_SAID = ("no region", "save_everything", "attention in parts", "too small", "whole step")


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """What `explain` found. It prints as text, and as HTML in notebooks; `save` writes an HTML file.

    Under several policies it prints one table, a row for each; `found[policy]` tells all of one.

    Attributes:
        name: the function's name.
        now: one forward and backward as the function is.
        plain: the same with its regions as plain functions: no remat at all.
        notes: where remat does not help, what defeats it, and what to try.
        rows: policies, and the explanation under each, where `explain(policies=...)` asked.
    """

    name: str
    now: Measured
    plain: Measured
    notes: tuple[str, ...]
    rows: tuple[tuple[Policy, Explanation], ...] = ()

    def __getitem__(self, policy: Any) -> Explanation:
        """The explanation under one of the policies."""
        return dict(self.rows)[as_policy(policy)]

    @property
    def kept(self) -> Residuals:
        """Every tensor that waits for the backward, arguments and captured tensors included."""
        return self.now.kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations that stay on their device between forward and backward."""
        return self.now.kept_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of arguments and captured tensors (weights) that the backward reads."""
        return self.now.kept.held_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that policies offload."""
        return self.now.kept.host_bytes

    @property
    def plain_bytes(self) -> int:
        """Bytes of activations that would be kept without remat."""
        return self.plain.kept_bytes

    @property
    def recomputed(self) -> Work:
        """The work of everything that runs again."""
        return self.now.total("recompute")

    def save(self, path: str | Path) -> None:
        """Write the cockpit as one HTML file that needs no network.

        It shows live bytes through forward and backward, with and without remat, and what fits which device.
        Kept values with prices follow, and the report with all rows. Under several policies a slider switches
        between them.
        """
        choices = [(repr(policy), found.now) for policy, found in self.rows]
        if self.now.regions or not choices:
            choices.insert(0, ("as it is", self.now))
        plain = self.plain if self.now.regions or self.rows else None
        save_cockpit(self.page(), cockpit_record(self.name, plain, choices), path)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data: bytes, FLOPs and counts; devices and dtypes as text."""
        return explanation_record(self)

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def page(self) -> Page:
        if self.rows:
            return Page((f"{self.name} under {len(self.rows)} policies",), (self._policy_table(),))
        tables = [_kept_table(self.now.kept), _work_table(self.now)]
        if self.now.recomputed:
            tables.insert(1, _recomputed_table(self.now))
        if self.now.regions:
            tables.append(_region_table(self.now))
        return Page(tuple(self._headline()), tuple(tables), self.notes)

    def _headline(self) -> Iterator[str]:
        kept, plain = self.kept_bytes, self.plain_bytes
        of = f" of {format_bytes(plain)} without remat ({_percent(kept, plain)})" if self.now.regions else ""
        host = f", and {format_bytes(self.host_bytes)} in host memory" if self.host_bytes else ""
        yield f"{self.name} keeps {format_bytes(kept)}{of} for its backward{host}"
        yield f"arguments and weights that the backward reads: {format_bytes(self.held_bytes)}"
        peaks = f", {format_bytes(self.plain.peak)} without remat" if self.now.regions else ""
        yield f"peak: {format_bytes(self.now.peak)}{peaks}"
        forward, again, backward = (self.now.total(when).flops for when in PASSES)
        share = f" (+{_percent(again, self.plain.flops)})" if again else ""
        yield f"FLOPs: {si(forward)} forward, {si(again)} recomputed{share}, {si(backward)} backward"

    def _policy_table(self) -> Table:
        away = any(found.host_bytes for _, found in self.rows)
        host = (">offloaded",) if away else ()
        recomputed = (">recomputed ops", ">FLOPs", ">more")
        columns = ("policy", ">kept", ">share", *host, ">held", ">peak", *recomputed)
        plain, blank = self.plain, ("",) * away
        kept, held = format_bytes(plain.kept_bytes), format_bytes(plain.kept.held_bytes)
        first = ("no remat", kept, "", *blank, held, format_bytes(plain.peak), "", "", "")
        return Table("policies", columns, (first, *self._policy_rows(away)))

    def _policy_rows(self, away: bool) -> Iterator[tuple[str, ...]]:
        before = max(self.plain.kept_bytes, 1)
        for policy, found in self.rows:
            again = found.recomputed
            yield (
                repr(policy),
                format_bytes(found.kept_bytes),
                f"{found.kept_bytes / before:.0%}",
                *([format_bytes(found.host_bytes) if found.host_bytes else ""] if away else []),
                format_bytes(found.held_bytes),
                format_bytes(found.now.peak),
                f"{again.ops}",
                si(again.flops),
                f"+{again.flops / max(self.plain.flops, 1):.0%}",
            )


@keywords_apart
def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    policies: bool | Sequence[PolicyLike] | None = None,
    frontier: bool | Sequence[PolicyLike] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Explanation:
    """What `fn(*args, **keywords)` keeps, recomputes and costs; it runs, and what its Python does happens.

    Runs `fn` forward and backward, and forward once more to see what is kept; if it has regions, the same
    without them. Isolated are modules, parameters, buffers, gradients, storages, and generators: they are
    afterwards as they were. No hook of a parameter is called. Other effects of `fn`, such as a counter in a
    plain object, happen in each of these runs, as in a call. If nothing that requires grad takes part, every
    floating point argument is differentiated.

    Args:
        fn: a function or module, with or without regions and `torch.func` transforms inside. Of the result of
            `torch.compile` the eager function is measured, and notes say what the compiled graphs recompute.
        args, keywords: its arguments.
        policies: policies to compare, or what `remat(policy=...)` accepts as one. True means the built-in
            ones and a few budgets. Regions in `fn` take each in place of their own; without regions `fn` is
            made one. `fn` runs forward and backward once more for each.
        frontier: deprecated: the older name of `policies`.
        kwargs: keywords of `fn` that are named like options here, such as `kwargs={"policies": 3}`. An option
            that `fn` also takes is refused where there is no `kwargs`, as it may be meant for either.

    Returns:
        An `Explanation`. It has kept values with bytes and reasons, recomputed ops, and FLOPs and bytes moved
        by class of op and pass. Notes say where a remat does not help, what defeats it, and what to try.
        `print` it, show it in a notebook, or `.save("report.html")`. With `policies` it prints as a table of
        them, and `found[policy]` is the explanation under one.

    Raises:
        RematError: under a transform of `torch.func` (it may be inside), with nothing to differentiate, or
            `policies` is empty.

    Bytes moved are those of each op's operands and results, as if nothing were fused. The peak is of what ops
    make, by storages alive after each op; it leaves out what lives before, and an op's inner workspace.

    Example:
        >>> import torch
        >>> from remat import explain, remat
        >>> found = explain(remat(lambda x: x.sin().exp().sin()), torch.ones(8))
        >>> found.kept_bytes, found.plain_bytes, found.recomputed.ops
        (0, 32, 2)

        Several policies:

        >>> from remat import save_everything, save_nothing
        >>> fn = lambda x: x.sin().exp().sin()
        >>> found = explain(fn, torch.ones(8), policies=[save_nothing, save_everything])
        >>> [(policy, each.kept_bytes, each.recomputed.ops) for policy, each in found.rows]
        [(save_nothing, 0, 2), (save_everything, 32, 0)]
    """
    if frontier is not None:
        policies = frontier
        warn_user("explain(frontier=...) is deprecated: write explain(policies=...).", DeprecationWarning)
    inner, given = debug.uncompiled(fn), joined_keywords(keywords, kwargs)
    others = each_of(inner, args, given, policies)
    witness = Witness()
    with policies_by(witness):
        now = measure(inner, args, given)
    plain = measure(inner, args, given, regions=False) if now.regions else now
    found = [*notes(now, plain)]
    defeated = causes(witness.regions, now, plain)
    found += [f"{one.said} Try: {one.advice}" for one in defeated if one.cause not in _SAID]
    if inner is not fn:
        found += [f"compiled, {region}" for region in debug.recomputed(fn, *args, **given)]
    name = name_of(inner)
    rows = [(policy, Explanation(name, under, plain, tuple(notes(under, plain)))) for policy, under in others]
    return Explanation(name, now, plain, tuple(found), tuple(rows))


def notes(now: Measured, plain: Measured) -> Iterator[str]:
    """Where remat does not help, and what would."""
    if not now.regions:
        yield (
            "nothing is recomputed: wrap the parts of the function, such as each block, in remat(...), with "
            "another policy than save_everything"
        )
        return
    yield from taken_apart(now)
    kept, before = now.kept_bytes, plain.kept_bytes
    if kept >= before:
        size = format_bytes(before)
        yield f"the regions keep as much as no remat does ({size}): they cost and save nothing"
    elif kept > (1 - _LITTLE) * before:
        yield f"the regions save next to nothing: {format_bytes(before - kept)} of {format_bytes(before)}"
    for region in now.regions:
        yield from _region_notes(region, now, plain)


def _region_notes(region: RegionUse, now: Measured, plain: Measured) -> Iterator[str]:
    if region.calls and not region.recomputed.ops:
        yield f"region {region.name!r} recomputes nothing: its backward reads nothing but what it keeps"
    if region.calls == 1 and region.share >= _WHOLE and not region.holds_regions and region.recomputed.ops:
        yield (
            f"region {region.name!r} is the whole differentiated function: its recomputation brings back "
            f"everything at once, so the peak is {format_bytes(now.peak)} against {format_bytes(plain.peak)} "
            "without remat. Wrap its parts, such as each block (as one of several regions of something "
            "larger it helps)"
        )


# -- tables -------------------------------------------------------------------------------------------


def _kept_table(kept: Residuals) -> Table:
    groups = Counter(kept)
    # Of a `DTensor` it is the local part that is shown.
    spread = any(r.placements for r in kept)
    rows = [
        (
            format_bytes(r.bytes * times),
            f"{times}" if times > 1 else "",
            _why(r),
            str(r).split(" ")[0],
            *([r.placements or ""] if spread else []),
            _source(r),
        )
        for r, times in sorted(groups.items(), key=lambda pair: pair[0].bytes * pair[1], reverse=True)
    ]
    placed = ("placements",) if spread else ()
    return Table(kept.totals(), (">bytes", ">times", "why", "each", *placed, "from"), tuple(rows))


def _why(residual: Residual) -> str:
    if residual.host:
        return "offloaded by policy"
    return "saved by policy" if residual.why == "policy" else residual.why


def _source(residual: Residual) -> str:
    name = f"{residual.name!r}, " if residual.name else ""
    if residual.op is None:
        return f"{name}{residual.path or ''}"
    op = getattr(residual.op, "overloadpacket", residual.op)
    return f"{name}{op} at {short(residual.location)}"


def _recomputed_table(now: Measured) -> Table:
    several = len(now.regions) > 1
    rows = [
        (
            f"{r.work.ops}",
            si(r.work.flops),
            format_bytes(r.work.bytes),
            r.op.rpartition(".")[0] or r.op,  # operators on functions have no overload
            short(r.location) + (f" in {r.region}" if several else ""),
        )
        for r in now.recomputed
    ]
    total = now.total("recompute")
    title = f"recomputed: {total.ops} ops, {si(total.flops)} FLOPs, {format_bytes(total.bytes)} moved"
    return Table(title, (">times", ">FLOPs", ">moved", "op", "from"), tuple(rows))


def _work_table(now: Measured) -> Table:
    again = (">recomputed", ">backward")
    columns = ("class of ops", ">FLOPs forward", *again, ">bytes forward", *again)
    kinds = [kind for kind in KINDS if any((when, kind) in now.work for when in PASSES)]
    rows = [(kind, *_cells([now.work.get((when, kind), Work()) for when in PASSES])) for kind in kinds]
    rows.append(("all", *_cells([now.total(when) for when in PASSES])))
    if now.kept.host_bytes:
        moved = [now.work.get((when, TRANSFER), Work()) for when in PASSES]
        rows.append(("to the host and back", *_cells(moved)))
    return Table("FLOPs, and bytes moved", columns, tuple(rows))


def _cells(works: list[Work]) -> Iterator[str]:
    yield from (si(work.flops) if work.flops else "" for work in works)
    yield from (format_bytes(work.bytes) if work.bytes else "" for work in works)


def _region_table(now: Measured) -> Table:
    away = any(r.offloaded for r in now.regions)
    rows = [
        (
            r.name,
            f"{r.calls}" if r.calls else "inner",
            f"{r.forward.ops}",
            f"{r.recomputed.ops}",
            si(r.recomputed.flops),
            format_bytes(r.saved),
            *([format_bytes(r.offloaded)] if away else []),
            format_bytes(r.inputs),
        )
        for r in now.regions
    ]
    offloaded = (">offloaded",) if away else ()
    columns = ("region", ">calls", ">ops", ">recomputed ops", ">recomputed FLOPs", ">saved by policy")
    return Table("regions", (*columns, *offloaded, ">held"), tuple(rows))


def si(count: float) -> str:
    """A number with a decimal prefix: 1234567 is `1.23 M`."""
    for prefix in ("", " K", " M", " G", " T"):
        if abs(count) < 1000:
            return f"{count:.3g}{prefix}"
        count /= 1000
    return f"{count:.3g} P"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "100%"
