"""`python -m remat doctor MODULE:STEP`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from remat._inspect.report import diagnose
from remat.cli.checked import device_of
from remat.cli.target import load


@dataclass
class Doctor:
    """Run one step with its regions and without; say whether they save anything, and what defeats them.

    Exits with 1 when something was found.
    """

    target: Annotated[str, tyro.conf.Positional]
    """MODULE:STEP, STEP a function or module of tensors, or one of no arguments that returns (fn, *args)."""
    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A tensor argument, as 4x128x256; once for each."""
    dtype: str = "float32"
    """Of the inputs."""
    device: str = "cpu"
    """Where the inputs are made: cpu, cuda, cuda:1, mps."""
    json: bool = False
    """Print one JSON object instead of the text."""

    def __call__(self) -> int:
        device_of(self.device)
        fn, args = load(self.target, self.input, self.dtype, self.device)
        found = diagnose(fn, *args)
        print(json.dumps(found.to_dict(), indent=2) if self.json else found)
        return int(bool(found.findings))
