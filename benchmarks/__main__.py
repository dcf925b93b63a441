"""`python -m benchmarks run --suite quick`, `python -m benchmarks report`."""

from __future__ import annotations

from typing import Annotated

import tyro

from benchmarks.suite.report import Report
from benchmarks.suite.runs import Run

Command = Annotated[Run, tyro.conf.subcommand("run")] | Annotated[Report, tyro.conf.subcommand("report")]

if __name__ == "__main__":
    raise SystemExit(tyro.cli(Command, prog="python -m benchmarks", description=__doc__)())
