"""How far one call walks through the library: functions and files entered by a region of two ops.

    python -m benchmarks.walk
    python -m benchmarks.walk --files

What counts is every Python function of `transforms/` and `remat/` that is called at least once in forward and
backward, and the files they stand in. Imports and other things that happen once a process are not counted: a
twin of the region, another function with the same two ops, has made the same walk before.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from remat import remat, scan_remat

ROOT = Path(__file__).resolve().parents[1]
# Parts of a function, not functions of their own.
_PARTS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")


@dataclass
class Walk:
    """What a call entered."""

    codes: set[CodeType] = field(default_factory=set)
    calls: int = 0

    @property
    def files(self) -> dict[str, list[str]]:
        """The functions entered, by file, the file as a path below the root of the repository."""
        found: dict[str, list[str]] = {}
        for code in self.codes:
            found.setdefault(_place(code.co_filename), []).append(code.co_qualname)
        return {file: sorted(found[file]) for file in sorted(found)}


def _place(file: str) -> str:
    """The path below the root, "" for code of others; the link remat/transforms counts as transforms."""
    path = Path(file).resolve()
    if not path.is_relative_to(ROOT):
        return ""
    place = path.relative_to(ROOT)
    return str(place) if place.parts[0] in ("remat", "transforms") else ""


@contextlib.contextmanager
def walking() -> Iterator[Walk]:
    """Note what is entered meanwhile, on this thread and on those that begin meanwhile."""
    walk = Walk()
    ours: dict[CodeType, bool] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_name not in _PARTS and bool(_place(code.co_filename))
        if ours[code]:
            walk.codes.add(code)
            walk.calls += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _operand() -> torch.Tensor:
    return torch.linspace(0.1, 1.0, 4).requires_grad_()


def eager() -> Walk:
    """A second call in plain autograd, forward and backward."""
    region, x = remat(lambda x: x.sin().exp()), _operand()
    region(x).sum().backward()
    with walking() as walk:
        region(x).sum().backward()
    return walk


def func_grad() -> Walk:
    """A second call under `torch.func.grad`."""
    region, x = remat(lambda x: x.sin().exp()), _operand().detach()
    gradient = torch.func.grad(lambda x: region(x).sum())
    gradient(x)
    with walking() as walk:
        gradient(x)
    return walk


def compiled() -> Walk:
    """The call of a compiled function that traces the region, and its backward."""
    torch._dynamo.reset()
    region, x = remat(lambda x: x.sin().exp()), _operand()
    step = torch.compile(lambda x: region(x).sum(), backend="aot_eager", fullgraph=True)
    with walking() as walk:
        step(x).backward()
    return walk


def scan() -> Walk:
    """A first scan of four steps of the same two ops, forward and backward."""
    x, xs = _operand(), torch.ones(4, 4)
    with walking() as walk:
        last, _ = scan_remat(lambda carry, x: ((carry * x).sin().exp(), None), x, xs)
        last.sum().backward()
    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "eager, second call": eager,
    "torch.func.grad, second call": func_grad,
    "torch.compile, tracing": compiled,
    "scan": scan,
}
# The most files that each may enter.
LIMITS = {
    "eager, second call": 9,
    "torch.func.grad, second call": 14,
    "torch.compile, tracing": 20,
    "scan": 17,
}


# The most calls of Python functions.
CALLS = {"eager, second call": 80, "torch.func.grad, second call": 80}


def walk(name: str) -> Walk:
    """What a call enters once everything that happens once a process has happened."""
    WALKS[name]()
    return WALKS[name]()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("--files", action="store_true", help="name the files and the functions in them")
    options = parser.parse_args()
    print(f"{'walk':32}{'files':>6}{'limit':>7}{'functions':>11}{'calls':>7}")
    for name in WALKS:
        taken = walk(name)
        files = taken.files
        print(f"{name:32}{len(files):6}{LIMITS[name]:7}{len(taken.codes):11}{taken.calls:7}")
        if options.files:
            for file, functions in files.items():
                print(f"    {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
