"""`compare`: one function under several policies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat._core import format_bytes, joined_keywords, keywords_apart
from remat._inspect.report.cockpit import save_cockpit
from remat._inspect.report.each import BUILT_IN, under_each
from remat._inspect.report.explain import Explanation, name_of, notes, si
from remat._inspect.report.measure import Measured, measure
from remat._inspect.report.records import VERSION, cockpit_record, measured_record
from remat._inspect.report.tables import Page, Shown, Table
from remat.policies import Policy, PolicyLike, as_policy, several_given
from remat.transforms import RematError


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """A function under several policies. It prints as a table; `save` writes an HTML file with a slider.

    Attributes:
        name: the function's name.
        plain: without remat.
        rows: for each policy its `Explanation`, in the order given.
    """

    name: str
    plain: Measured
    rows: tuple[tuple[Policy, Explanation], ...]

    def __getitem__(self, policy: Any) -> Explanation:
        """The explanation under one of the policies."""
        return dict(self.rows)[as_policy(policy)]

    def save(self, path: str | Path) -> None:
        """Write the cockpit of `Explanation.save`, with a slider that switches between the policies."""
        choices = [(repr(policy), found.now) for policy, found in self.rows]
        save_cockpit(self.page(), cockpit_record(self.name, self.plain, choices), path)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data, those of each policy as `Explanation.to_dict` has them."""
        rows = [{"policy": repr(policy)} | found.to_dict() for policy, found in self.rows]
        return {"version": VERSION, "name": self.name, "plain": measured_record(self.plain), "rows": rows}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def page(self) -> Page:
        away = any(found.host_bytes for _, found in self.rows)
        host = (">offloaded",) if away else ()
        recomputed = (">recomputed ops", ">FLOPs", ">more")
        columns = ("policy", ">kept", ">share", *host, ">held", ">peak", *recomputed)
        plain, blank = self.plain, ("",) * away
        kept, held = format_bytes(plain.kept_bytes), format_bytes(plain.kept.held_bytes)
        first = ("no remat", kept, "", *blank, held, format_bytes(plain.peak), "", "", "")
        table = Table("policies", columns, (first, *self._rows(away)))
        return Page((f"{self.name} under {len(self.rows)} policies",), (table,))

    def _rows(self, away: bool) -> Iterator[tuple[str, ...]]:
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
def compare(
    fn: Callable[..., Any],
    /,
    *args: Any,
    policies: Sequence[PolicyLike] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Comparison:
    """`fn(*args, **keywords)` under each of several policies: kept bytes, peak, and what runs again.

    If `fn` has regions in it, each takes the policy in place of its own; otherwise `fn` is made one region.

    Args:
        fn: a function or module.
        args, keywords: its arguments.
        policies: policies, or what `remat(policy=...)` accepts as one. By default the built-in ones.
        kwargs: keywords of `fn` that are named like options here, such as `kwargs={"policies": 3}`. An option
            that `fn` also takes is refused where there is no `kwargs`, as it may be meant for either.

    Returns:
        A `Comparison`, which prints as a table; `comparison[policy]` is the `Explanation` under that policy.

    Raises:
        RematError: as `explain`; or `policies` is empty.

    Example:
        >>> import torch
        >>> from remat import compare, save_everything, save_nothing
        >>> fn = lambda x: x.sin().exp().sin()
        >>> found = compare(fn, torch.ones(8), policies=[save_nothing, save_everything])
        >>> [(policy, each.kept_bytes, each.recomputed.ops) for policy, each in found.rows]
        [(save_nothing, 0, 2), (save_everything, 32, 0)]
    """
    chosen = BUILT_IN if policies is None else several_given("compare", policies)
    if not chosen:
        raise RematError("compare(fn, policies=[]): give at least one policy, such as save_matmuls.")
    given = joined_keywords(keywords, kwargs)
    plain, name = measure(fn, args, given, regions=False), name_of(fn)
    rows = [
        (policy, Explanation(name, now, plain, tuple(notes(now, plain))))
        for policy, now in under_each(fn, args, given, chosen)
    ]
    return Comparison(name, plain, tuple(rows))
