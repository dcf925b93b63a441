"""A drawn program as the subject of the checker."""

from __future__ import annotations

import linecache
from typing import Any

import torch

from tests import ways
from tests.bank import Subject, library
from tests.bank.library import Base
from tests.fuzz.program import Program
from tests.ways import Verdict


def build(source: str, dtype: torch.dtype) -> type[Base]:
    """The class that a program's source defines, with lines that tracebacks and Dynamo find."""
    name = f"<program {hash(source) & 0xFFFFFFFF:x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {name: getattr(library, name) for name in library.__all__} | {"DTYPE": dtype}
    exec(compile(source, name, "exec"), space)
    return space["Model"]


def check(program: Program | str, steps: list[dict[str, Any]], dtype: str, **options: Any) -> Verdict:
    """Run a program both ways, step by step, up to the first that differs or cannot be run."""
    source = program if isinstance(program, str) else program.source()
    numbers: torch.dtype = getattr(torch, dtype)
    return ways.check(Subject(lambda: build(source, numbers)(), source), steps, numbers, **options)
