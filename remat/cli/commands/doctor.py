"""`python -m remat doctor MODULE:STEP`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from remat._inspect.report import diagnose
from remat.cli.options import StepOptions


@dataclass(kw_only=True)
class Doctor(StepOptions):
    """Run one step with its regions and without; say whether they save anything, and what defeats them.

    Exits with 1 when something was found.
    """

    json: bool = False
    """Print one JSON object instead of the text."""

    def __call__(self) -> int:
        fn, args = self.step()
        found = diagnose(fn, *args)
        print(json.dumps(found.to_dict(), indent=2) if self.json else found)
        return int(bool(found.findings))
