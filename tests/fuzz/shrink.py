"""A failing program made smaller while it still fails, and written down as a script that runs by itself."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.program import Program, Statement
from tests.fuzz.run import check
from tests.ways import DEFAULTS, Verdict


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """The smallest program found that still fails."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                break
            if fails(smaller):
                program, progress = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for at in range(len(program.steps)):
        if len(program.steps) > 1:
            yield _changed(program, steps=program.steps[:at] + program.steps[at + 1 :])
    count = sum(1 for _ in program.statements())
    for at in range(count):
        # Statements come the innermost first; whole regions are tried before what is in them.
        yield from _without(program, count - 1 - at)
    for at, step in enumerate(program.steps):
        for key in step:
            if key != "how":
                rest = {k: v for k, v in step.items() if k != key}
                yield _changed(program, steps=[*program.steps[:at], rest, *program.steps[at + 1 :]])
        if step["how"] != "backward":
            plain = step | {"how": "backward"}
            yield _changed(program, steps=[*program.steps[:at], plain, *program.steps[at + 1 :]])
    for at in range(count):
        for change in ({"policy": "nothing"}, {"call": "plain"}, {"returns": "single"}, {"method": False}):
            yield from _region_changed(program, at, change)
    if program.dtype != "float64":
        yield _changed(program, dtype="float64")


def _without(program: Program, at: int) -> Iterator[Program]:
    """Without one statement: its first operand stands for its value, or what was inside it remains."""
    for way in ("replaced", "second", "opened"):
        smaller = copy.deepcopy(program)
        body, index = list(smaller.statements())[at]
        statement = body[index]
        if way == "opened":
            if not statement.body:
                continue
            own = {f"a{statement.out[1:]}": statement.ins[0], f"b{statement.out[1:]}": statement.ins[1]}
            # What is inside reads what the region was called with.
            for name, value in own.items():
                _rename(statement.body, name, value)
            result = own.get(statement.results[0], statement.results[0])
            body[index : index + 1] = statement.body
            _substitute(smaller, statement.out, result)
        else:
            del body[index]
            _substitute(smaller, statement.out, statement.ins[way == "second"])
        yield smaller


def _region_changed(program: Program, at: int, change: dict[str, Any]) -> Iterator[Program]:
    smaller = copy.deepcopy(program)
    body, index = list(smaller.statements())[at]
    ((name, value),) = change.items()
    if body[index].kind == "region" and getattr(body[index], name) != value:
        setattr(body[index], name, value)
        yield smaller


def _substitute(program: Program, old: str, new: str) -> None:
    program.result = new if program.result == old else program.result
    _rename(program.body, old, new)


def _rename(body: list[Statement], old: str, new: str) -> None:
    for statement in body:
        statement.ins = tuple(new if name == old else name for name in statement.ins)  # type: ignore
        statement.results = tuple(new if name == old else name for name in statement.results)  # type: ignore
        _rename(statement.body, old, new)


def _changed(program: Program, **changes: Any) -> Program:
    smaller = copy.deepcopy(program)
    for name, value in changes.items():
        setattr(smaller, name, value)
    return smaller


def like(verdict: Verdict) -> str:
    """What two failures of one kind have in common."""
    return re.sub(r"0x\w+|-?\d[\d.e+-]*|region\w+|\bstep \d+|tensor\(.*", "", verdict.what, flags=re.DOTALL)[
        :60
    ]


def shrink(program: Program, verdict: Verdict, backend: str | None = None) -> Program:
    """Smaller, and failing likewise."""

    def fails(smaller: Program) -> bool:
        try:
            found = check(smaller, smaller.steps, smaller.dtype, backend=backend)
        except Exception:
            return False  # no longer a program
        return found.kind == verdict.kind and like(found) == like(verdict)

    return shrunk(program, fails)


SCRIPT = '''"""{title}"""

import sys

sys.path.insert(0, ".")  # run it from the root of the repository
from tests.fuzz.run import check  # noqa: E402

SOURCE = """
{source}"""
STEPS = {steps}

if __name__ == "__main__":
    print(check(SOURCE, STEPS, "{dtype}", backend={backend!r}))
'''


def script(program: Program, verdict: Verdict, backend: str | None) -> str:
    """A script that runs the program and says what differs."""
    steps = [{k: v for k, v in step.items() if k == "how" or v != DEFAULTS.get(k)} for step in program.steps]
    title = f"{program.flavour} {program.seed}: {verdict.what[:200]}".replace("\\", "/").replace('"', "'")
    return SCRIPT.format(
        title=title, source=program.source(), steps=steps, dtype=program.dtype, backend=backend
    )


def save(folder: Path, program: Program, verdict: Verdict, backend: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program.flavour}_{program.seed}{'_' + backend if backend else ''}.py"
    path.write_text(script(program, verdict, backend))
    return path
