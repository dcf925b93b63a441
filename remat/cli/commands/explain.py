"""`python -m remat explain MODULE:FN`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from remat._inspect.report import explain
from remat.cli.checked import writable
from remat.cli.errors import UsageError
from remat.cli.options import StepOptions
from remat.cli.rows import parse
from remat.cli.shown import show


@dataclass(kw_only=True)
class Explain(StepOptions):
    """Say what a function keeps for its backward, what it recomputes, and what that costs.

    The function is run forward and backward, on random inputs where sizes are given.
    """

    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Under this policy: 'save_matmuls | save_attention', budget=0.4, plan=FILE, names=q,k, MODULE:RULE."""
    html: Path | None = None
    """Also write the report there: one page, with pictures, that needs no network."""
    frontier: bool = True
    """With --html: run the built-in policies and a few budgets too, for the page's slider."""
    json: bool = False
    """Print one JSON object instead of the report."""

    def __call__(self) -> int:
        writable("--html", self.html)
        if len(self.policy) > 1:
            raise UsageError(f"explain is of one policy: write remat compare {self.target} for several.")
        policies = [parse(text) for text in self.policy]
        fn, args = self.step()
        every = self.frontier and self.html is not None
        if not policies:
            found = explain(fn, *args, policies=every, kwargs={})
            # Other policies are for the page's slider.
            show(replace(found, rows=()), self.json)
        else:
            found = explain(fn, *args, policies=policies, kwargs={})
            ((policy, one),) = found.rows
            show(one, self.json)
            others = explain(fn, *args, policies=True, kwargs={}).rows if every else ()
            found = replace(found, rows=(*found.rows, *[row for row in others if row[0] != policy]))
        if self.html is not None:
            found.save(self.html)
        return 0
