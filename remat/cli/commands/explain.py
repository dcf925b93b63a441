"""`python -m remat explain MODULE:FN`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from remat._inspect.report import compare, explain
from remat.cli.checked import device_of, writable
from remat.cli.rows import parse
from remat.cli.target import load


@dataclass
class Explain:
    """Say what a function keeps for its backward, what it recomputes, and what that costs.

    The function is run forward and backward, on random inputs where sizes are given.
    """

    target: Annotated[str, tyro.conf.Positional]
    """MODULE:FN, FN a function or module of tensors, or one of no arguments that returns (fn, *args)."""
    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A tensor argument, as 4x128x256; once for each."""
    dtype: str = "float32"
    """Of the inputs."""
    device: str = "cpu"
    """Where the inputs are made: cpu, cuda, cuda:1, mps."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Compare policies: 'save_matmuls | save_attention', budget=0.4, names=q,k, MODULE:RULE."""
    html: Path | None = None
    """Also write the report there: one page, with pictures, that needs no network."""
    json: bool = False
    """Print one JSON object instead of the report."""

    def __call__(self) -> int:
        from rich.console import Console

        writable("--html", self.html)
        device_of(self.device)
        fn, args = load(self.target, self.input, self.dtype, self.device)
        if self.policy:
            found = compare(fn, *args, policies=[parse(text) for text in self.policy])
        else:
            found = explain(fn, *args)
        if self.json:
            print(found.to_json(indent=2))
        else:
            Console(highlight=False).print(found)
        if self.html:
            found.save(self.html)
        return 0
