"""Mutants: small changes of functions of the library, one at a time, and the tests that notice each.

    git archive COMMIT | tar x -C COPY
    python tests/mutants.py --root COPY --seed 41 --count 80 --out benchmarks/results/mutants.csv

It draws an operator, then a place for it, in the body of a function of `transforms/` or `remat/`. Tests are
collected once. A first run has a mark in each of these places, and says which tests come by. Then each mutant
runs in a fork, which has its function's code exchanged, with the tests that come by, up to the first failure:
those of the bank, and apart from them the others. Subprocesses of tests find the mutant in the copy's file.
The last column, the verdict on a survivor, is written by hand.
Module level, defaults, annotations, messages of errors and `__repr__` are left as they are.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gc
import json
import os
import random
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

COMPARED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
TOKENS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//",
}  # fmt: skip
COMPUTED = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*"}
ROOMS = ("transforms", "remat")
MARK = "_mark_of_mutants"
# These read the sources, or build packages.
LEFT_OUT = ("tests/repo/test_house.py", "tests/repo/test_walk.py", "tests/repo/test_package.py")


@dataclass(frozen=True)
class Change:
    """`text[start:end]` of a file becomes `after`; `marked` is the same place as it is, with a mark."""

    path: str
    line: int
    function: str
    operator: str
    start: int
    end: int
    before: str
    after: str
    marked: Callable[[int], tuple[int, int, str]]


class Places(ast.NodeVisitor):
    """All changes of a file."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        lengths = [len(line.encode()) for line in text.splitlines(keepends=True)]
        self.raw = text.encode()
        self.starts = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
        self.inside: list[str] = []
        self.found: list[Change] = []
        self.visit(ast.parse(text))

    def at(self, line: int, column: int) -> int:
        return len(self.raw[: self.starts[line - 1] + column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def put(self, node: Any, operator: str, after: str, where: tuple[int, int] | None = None) -> None:
        if not self.inside:
            return
        outer = self.span(node)
        start, end = where or outer
        before = self.text[start:end]
        after += "\n" * (before.count("\n") - after.count("\n"))
        whole = self.text[outer[0] : outer[1]]

        def marked(number: int) -> tuple[int, int, str]:
            call = f"{MARK}({number})"
            return *outer, f"{call}; {whole}" if isinstance(node, ast.stmt) else f"({call}, {whole})[1]"

        name = ".".join(self.inside)
        self.found.append(Change(self.path, node.lineno, name, operator, start, end, before, after, marked))

    def between(self, node: Any, left: Any, right: Any, operator: str, old: str, new: str) -> None:
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.escape(old).replace(r"\ ", r"\s+")
        match = re.search(rf"(?<![\w<>=!/*]){gap}(?![\w<>=!/*])", self.text[start:end])
        if match is not None:
            self.put(node, operator, new, (start + match.start(), start + match.end()))

    # -- what is left as it is

    def visit_FunctionDef(self, node: Any) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self.inside.append(node.name)
        body = node.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        for statement in body:
            self.visit(statement)
        self.inside.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.inside = self.inside, []
        for statement in node.body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.inside = []
                self.visit(statement)
        self.inside = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_match_case(self, node: ast.match_case) -> None:
        for statement in node.body:
            self.visit(statement)

    # -- operators

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            old = TOKENS[type(op)]
            self.between(node, left, right, "comparison", old, COMPARED[old])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(node, left, right, "and / or", old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = self.span(node.operand)[0], self.span(node)[1]
            start = self.text.index("not", self.span(node)[0]) + 3
            self.put(node, "not left out", f"({self.text[start:end].strip()})")
        self.generic_visit(node)

    def _test(self, node: Any) -> None:
        test = node.test
        if not isinstance(test, (ast.Compare, ast.UnaryOp, ast.Constant)):
            start, end = self.span(test)
            self.put(test, "condition negated", f"(not ({self.text[start:end]}))")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _test

    def visit_BinOp(self, node: ast.BinOp) -> None:
        strings = [n for n in (node.left, node.right) if isinstance(n, ast.JoinedStr)
                   or isinstance(n, ast.Constant) and isinstance(n.value, str)]  # fmt: skip
        old = TOKENS.get(type(node.op))
        if old is not None and not strings:
            self.between(node, node.left, node.right, "arithmetic", old, COMPUTED[old])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        old = TOKENS.get(type(node.op))
        if old is not None:
            start, end = self.span(node.target)[1], self.span(node.value)[0]
            at = self.text.index(f"{old}=", start, end)
            self.put(node, "arithmetic", f"{COMPUTED[old]}=", (at, at + len(old) + 1))
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.put(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self.put(node, "constant", str(node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            start, end = self.span(node.value)
            # Names stay names of the function, so that its closure fits.
            self.put(node, "None returned", f"return None; {self.text[start:end]}")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if "warn" in ast.unparse(node.value.func):
                return
            start, end = self.span(node)
            self.put(node, "call left out", f"None if True else ({self.text[start:end]})")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self.put(node, "break / continue", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.put(node, "break / continue", "break")


def draw(root: Path, seed: int, count: int) -> list[Change]:
    """An operator, then a place for it, as often as asked for; no place twice."""
    by_operator: dict[str, list[Change]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            if (root / room / "transforms") in path.parents:
                continue  # a link
            for one in Places(str(path.relative_to(root)), path.read_text()).found:
                by_operator[one.operator].append(one)
    dice, drawn = random.Random(seed), []
    while len(drawn) < count:
        places = by_operator[dice.choice(sorted(by_operator))]
        if places and (one := places.pop(dice.randrange(len(places)))) and _compiles(root, one):
            drawn.append(one)
    return drawn


def _compiles(root: Path, one: Change) -> bool:
    try:
        compile(mutated(root, one), one.path, "exec")
    except SyntaxError:
        return False
    return True


def mutated(root: Path, one: Change) -> str:
    text = (root / one.path).read_text()
    return text[: one.start] + one.after + text[one.end :]


def marked(root: Path, drawn: list[Change], path: str) -> str:
    """The file with a mark in each place that was drawn; a place in another is marked there."""
    text = (root / path).read_text()
    marks = sorted((*one.marked(k), k) for k, one in enumerate(drawn) if one.path == path)
    pieces: list[tuple[int, int, str]] = []
    for start, end, new, k in marks:
        if pieces and start < pieces[-1][1]:  # in the one before: both count as passed
            a, b, old = pieces[-1]
            pieces[-1] = a, b, re.sub(rf"{MARK}\(", f"{MARK}({k}, ", old, count=1)
        else:
            pieces.append((start, end, new))
    for start, end, new in reversed(pieces):
        text = text[:start] + new + text[end:]
    return text


# -- exchanging code in a process that has everything imported --------------------------------------------


def codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from codes(const)


def functions() -> list[FunctionType]:
    """Those of the library that are there."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is FunctionType]
    return [fn for fn in found if re.search(r"/(remat|transforms)/", fn.__code__.co_filename)]


def exchange(there: list[FunctionType], root: Path, path: str, text: str) -> int:
    """Give the functions of this file the code of `text`; how many have changed."""
    name, changed = os.path.realpath(root / path), 0
    made: dict[str, dict[tuple[str, int], CodeType]] = {}
    for fn in there:
        old = fn.__code__
        if os.path.realpath(old.co_filename) != name:
            continue
        if old.co_filename not in made:  # a room may be imported through a link
            whole = compile(text, old.co_filename, "exec", dont_inherit=True)
            made[old.co_filename] = {(c.co_qualname, c.co_firstlineno): c for c in codes(whole)}
        code = made[old.co_filename].get((old.co_qualname, old.co_firstlineno))
        if code is not None and code.co_freevars == old.co_freevars and code != old:
            fn.__code__ = code
            changed += 1
    return changed


# -- the run ----------------------------------------------------------------------------------------------


class Run:
    """A plugin of pytest: in place of its loop."""

    def __init__(self, options: argparse.Namespace, root: Path, drawn: list[Change]) -> None:
        self.options, self.root, self.drawn = options, root, drawn
        self.reports: list[Any] = []
        self.work = Path(options.work)

    def note(self, *what: Any) -> None:
        """Pytest captures what is printed."""
        with open(self.work / "log.txt", "a") as out:
            print(*what, file=out)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)

    def pytest_runtestloop(self, session: Any) -> bool:
        self.session = session
        self.items = {i.nodeid: i for i in session.items if not i.nodeid.startswith(LEFT_OUT)}
        self.functions = functions()
        self.note(len(self.items), "tests", len(self.functions), "functions")
        gc.freeze()
        for part in ("bank", "suite"):
            passed = self._marks(part)
            killed = [
                (self._done("bank", n) or {}).get("outcome") == "killed" for n in range(len(self.drawn))
            ]
            for number, one in sorted(enumerate(self.drawn), key=lambda pair: killed[pair[0]]):
                if self._done(part, number) is None:
                    self._one(part, number, one, passed)
                self._write()
        return True

    def _done(self, part: str, number: int) -> dict[str, Any] | None:
        file = self.work / f"{part}-{number}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def _test(self, item: Any, after: Any) -> tuple[str, float]:
        """How a test ends: its outcome, seconds."""
        start = time.monotonic()
        del self.reports[:]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        bad = [r for r in self.reports if r.outcome == "failed"]
        return ("failed" if bad else "passed"), time.monotonic() - start

    def _fork(self, work: Callable[[], None], seconds: float) -> int | None:
        """The exit code of a fork that does this; None if its time was over."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            code = 0
            try:
                work()
            except BaseException as error:
                self.note("fork:", repr(error)[:300])
                code = 3
            os._exit(code)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def _marks(self, part: str) -> dict[str, Any]:
        """Which marks each test passes, and its seconds; those that fail by themselves are left out."""
        file, log = self.work / f"marks-{part}.json", self.work / f"marks-{part}.txt"
        if file.exists():
            return json.loads(file.read_text())
        done = self.work / f"marks-{part}.jsonl"
        wanted = [i for n, i in self.items.items() if n.startswith("tests/bank/") == (part == "bank")]
        if part == "suite" and self.options.first:
            wanted = list({i.nodeid.partition("[")[0]: i for i in reversed(wanted)}.values())[::-1]
        if done.exists():
            there = {json.loads(line)[0] for line in done.read_text().splitlines()}
            wanted = [i for i in wanted if i.nodeid not in there]

        def work() -> None:
            import builtins

            seen: set[tuple[str, int]] = set()

            def mark(*numbers: int) -> None:
                test = os.environ.get("MUTANTS_TEST", "")
                for number in numbers:
                    if (test, number) not in seen:
                        seen.add((test, number))
                        with open(log, "a") as out:
                            out.write(f"{number}\t{test}\n")

            import torch

            setattr(builtins, MARK, torch.compiler.assume_constant_result(mark))
            for path in sorted({one.path for one in self.drawn}):
                text = marked(self.root, self.drawn, path)
                self.note("marks", path, exchange(self.functions, self.root, path, text))
            with open(done, "a") as out:
                for item, after in zip(wanted, [*wanted[1:], None], strict=True):
                    os.environ["MUTANTS_TEST"] = item.nodeid
                    outcome, seconds = self._test(item, after)
                    out.write(json.dumps([item.nodeid, outcome, round(seconds, 3)]) + "\n")
                    out.flush()

        self.note("marks of", part, len(wanted), "tests, ended with", self._fork(work, self.options.marks))
        found: dict[str, Any] = {}
        for line in done.read_text().splitlines():
            test, outcome, seconds = json.loads(line)
            if outcome == "passed":
                found[test] = {"seconds": seconds, "marks": []}
        for line in log.read_text().splitlines() if log.exists() else ():
            number, _, test = line.partition("\t")
            if test in found:
                found[test]["marks"].append(int(number))
        file.write_text(json.dumps(found))
        return found

    def _chosen(self, passed: dict[str, Any], number: int) -> list[str]:
        """Tests that come by, the quickest of each file first, up to the seconds that are given."""
        files: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for test, one in passed.items():
            if number in one["marks"]:
                files[test.partition("::")[0]].append((one["seconds"], test))
        turns = sorted(
            (k, seconds, test) for found in files.values() for k, (seconds, test) in enumerate(sorted(found))
        )
        chosen, total = [], 0.0
        for _, seconds, test in turns:
            total += seconds
            if total > self.options.seconds:
                break
            chosen.append(test)
        order = {name: k for k, name in enumerate(dict.fromkeys(t.partition("::")[0] for t in chosen))}
        return sorted(chosen, key=lambda test: order[test.partition("::")[0]])

    def _one(self, part: str, number: int, one: Change, passed: dict[str, Any]) -> None:
        reach = [t for t, p in passed.items() if number in p["marks"]]
        chosen = self._chosen(passed, number)
        row: dict[str, Any] = {"outcome": "not reached", "test": "", "reach": len(reach), "run": len(chosen)}
        note = self.work / "note.json"
        note.unlink(missing_ok=True)
        if chosen:
            original = (self.root / one.path).read_text()
            text = mutated(self.root, one)

            def work() -> None:
                os.environ.pop("MUTANTS_TEST", None)
                changed = exchange(self.functions, self.root, one.path, text)
                for at, (test, after) in enumerate(pairwise([*chosen, None])):
                    note.write_text(json.dumps({"outcome": "ended", "test": test}))
                    if self._test(self.items[test], self.items.get(after))[0] == "failed":
                        said = next(str(r.longrepr) for r in self.reports if r.outcome == "failed")
                        end = {"outcome": "killed", "test": test, "said": said[-400:], "at": at}
                        note.write_text(json.dumps(end))
                        return
                note.write_text(json.dumps({"outcome": "survived", "test": "", "changed": changed}))

            (self.root / one.path).write_text(text)
            try:
                spent = sum(passed[t]["seconds"] for t in chosen)
                code = self._fork(work, 60 + 3 * spent)
            finally:
                (self.root / one.path).write_text(original)
            row |= json.loads(note.read_text()) if note.exists() else {"outcome": "ended"}
            if code is None:
                row["outcome"] = "timeout"
        (self.work / f"{part}-{number}.json").write_text(json.dumps(row))
        self.note(part, number, one.path, one.line, one.operator, row)

    def _write(self) -> None:
        with open(self.options.out, "w", newline="") as out:
            table = csv.writer(out, lineterminator="\n")
            table.writerow(
                "number file line function operator before after "
                "bank bank_test bank_tests suite suite_test suite_tests commit seed verdict".split()
            )
            for number, one in enumerate(self.drawn):
                row: list[Any] = [number, one.path, one.line, one.function, one.operator]
                row += [" ".join(text.split()) for text in (one.before, one.after)]
                for part in ("bank", "suite"):
                    got = self._done(part, number) or {"outcome": "not run", "test": "", "run": 0, "reach": 0}
                    row += [got["outcome"], got["test"], f"{got['run']} of {got['reach']}"]
                table.writerow([*row, self.options.commit, self.options.seed, ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="a copy of the repository, in which files are changed")
    parser.add_argument("--commit", default="", help="for the table")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=120, help="of tests for a mutant, at most")
    parser.add_argument("--marks", type=float, default=5400, help="seconds for the run with marks, at most")
    parser.add_argument(
        "--first", action="store_true", help="of each test function outside the bank one case"
    )
    parser.add_argument("--out", default="mutants.csv")
    parser.add_argument(
        "--work", default="out/mutants", help="a folder for what has run; a second run goes on"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("tests", nargs="*", default=["tests"])
    options = parser.parse_args()
    root = Path(options.root).resolve()
    options.out, options.work = os.path.abspath(options.out), os.path.abspath(options.work)
    drawn = draw(root, options.seed, options.count)
    if options.list:
        for number, one in enumerate(drawn):
            print(
                number, f"{one.path}:{one.line} {one.function} [{one.operator}]", one.before, "->", one.after
            )
        return 0
    Path(options.work).mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    sys.path[0] = str(root)
    os.environ["PYTHONPATH"] = str(root)
    import pytest

    arguments = ["-q", "-m", "not slow", "-p", "no:cacheprovider", *options.tests]
    return int(pytest.main(arguments, plugins=[Run(options, root, drawn)]))


if __name__ == "__main__":
    sys.exit(main())
