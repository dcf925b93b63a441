"""`python -m remat explain MODULE:FN`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from remat._inspect.report import BUILT_IN, diagnose, explain
from remat.cli.checked import writable
from remat.cli.options import StepOptions
from remat.cli.rows import parse
from remat.policies import Policy

ALL = "all"


@dataclass(kw_only=True)
class Explain(StepOptions):
    """Say what a function keeps for its backward, what it recomputes, and what that costs.

    The function is run forward and backward, on random inputs where sizes are given. Under policies its
    regions take each in place of their own; a function without regions is made one.
    """

    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Once for each: 'save_matmuls | save_attention', budget=0.4, plan=FILE, names=q,k, MODULE:RULE, all."""
    html: Path | None = None
    """Also write the report there: one page, with pictures, that needs no network."""
    check: bool = False
    """Say what defeats the regions of a step, which may run its backward itself; exit with 1 for anything."""
    json: bool = False
    """Print one JSON object instead of the report."""

    def __call__(self) -> int:
        writable("--html", self.html)
        policies: list[Policy] = []
        for text in self.policy:
            policies += BUILT_IN if text == ALL else [parse(text)]
        fn, args = self.step()
        if self.check:
            checked = diagnose(fn, *args)
            print(json.dumps(checked.to_dict(), indent=2) if self.json else checked)
            return int(bool(checked.findings))
        # Of none or one the page's slider has others, too.
        found = explain(fn, *args, policies=policies or self.html is not None, kwargs={})
        shown = found if len(policies) > 1 else found.rows[0][1] if policies else replace(found, rows=())
        print(shown.to_json(indent=2) if self.json else shown)
        if self.html is not None:
            if len(policies) == 1:
                others = explain(fn, *args, policies=True, kwargs={}).rows
                found = replace(found, rows=(*found.rows, *[row for row in others if row[0] != policies[0]]))
            found.save(self.html)
        return 0
