"""`compare`: one function under several policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from remat._api import remat
from remat._core import format_bytes
from remat._inspect.report.explain import Explanation, name_of, notes, si
from remat._inspect.report.measure import Measured, measure
from remat._inspect.report.tables import Page, Shown, Table
from remat._region import under_policy
from remat.policies import (
    Policy,
    as_policy,
    save_attention,
    save_everything,
    save_matmuls,
    save_nothing,
    save_unbatched_matmuls,
)
from remat.transforms import RematError

DEFAULT: tuple[Policy, ...] = (
    save_nothing,
    save_matmuls,
    save_unbatched_matmuls,
    save_attention,
    save_everything,
)


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """A function under several policies. It prints as a table; `save` writes an HTML file.

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

    def page(self) -> Page:
        away = any(found.host_bytes for _, found in self.rows)
        host = (">host",) if away else ()
        columns = ("policy", ">kept", ">share", *host, ">peak", ">ops again", ">FLOPs again", ">more")
        plain, blank = self.plain, ("",) * away
        first = ("no remat", format_bytes(plain.kept_bytes), "", *blank, format_bytes(plain.peak), "", "", "")
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
                format_bytes(found.now.peak),
                f"{again.ops}",
                si(again.flops),
                f"+{again.flops / max(self.plain.flops, 1):.0%}",
            )


def compare(
    fn: Callable[..., Any], *args: Any, policies: Sequence[Any] | None = None, **kwargs: Any
) -> Comparison:
    """`fn(*args, **kwargs)` under each of several policies: kept bytes, peak, and what runs again.

    If `fn` has regions in it, each takes the policy in place of its own; otherwise `fn` is made one region.

    Args:
        fn: a function or module.
        args, kwargs: its arguments.
        policies: policies, or what `remat(policy=...)` accepts as one. By default the ready ones.

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
        [(save_nothing, 32, 2), (save_everything, 64, 0)]
    """
    chosen = DEFAULT if policies is None else tuple(map(as_policy, policies))
    if not chosen:
        raise RematError("compare(fn, policies=[]): give at least one policy, such as save_matmuls.")
    plain = measure(fn, args, kwargs, regions=False)
    with under_policy(save_nothing):
        # Whatever their own policies are: one that keeps everything is no region to the engine.
        has_regions = bool(measure(fn, args, kwargs).regions)
    rows = []
    for policy in chosen:
        if has_regions:
            with under_policy(policy):
                now = measure(fn, args, kwargs)
        else:
            now = measure(remat(fn, policy=policy), args, kwargs)
        rows.append((policy, Explanation(name_of(fn), now, plain, tuple(notes(now, plain)))))
    return Comparison(name_of(fn), plain, tuple(rows))
