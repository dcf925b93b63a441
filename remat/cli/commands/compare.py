"""`python -m remat compare MODULE:FN`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from remat._inspect.report import BUILT_IN, explain
from remat.cli.checked import writable
from remat.cli.options import StepOptions
from remat.cli.rows import parse
from remat.cli.shown import show


@dataclass(kw_only=True)
class Compare(StepOptions):
    """Run one step under several policies, and print what each keeps, recomputes and needs at most.

    The regions of the function take the policy in place of their own. A function without regions is made one.
    Without --policy: the built-in policies.
    """

    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Once for each: 'save_matmuls | save_attention', budget=0.4, plan=FILE, names=q,k, MODULE:RULE."""
    html: Path | None = None
    """Also write the comparison there: one page with a slider that switches the policy."""
    json: bool = False
    """Print one JSON object instead of the table."""

    def __call__(self) -> int:
        writable("--html", self.html)
        policies = [parse(text) for text in self.policy] or BUILT_IN
        fn, args = self.step()
        return show(explain(fn, *args, policies=policies, kwargs={}), self.json, self.html)
