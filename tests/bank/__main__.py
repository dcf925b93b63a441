"""`make test-product SECONDS=600`: pairs of a program and a way, with a policy and a layout, drawn at random.

`python -m tests.bank --table` runs every pair once and prints ways x tags, for docs/measured/trust.md. With
`--kept FILE` it writes down how each program went, and a second run goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from tests.bank import BANK, Program, expected, ranks, subject
from tests.bank.library import POLICIES
from tests.helpers import forget, seed_only_what_is_there
from tests.interop.ranks import spawned
from tests.ways import IN_ONE_PROCESS, LAYOUTS, Verdict, check


def one(program: Program, way: str, policy: str, layout: str) -> tuple[str, Verdict]:
    """How the pair went: equal, refused, torch (which refuses it, too), or unexpected."""
    if (program.name, way) in expected.ENDS:
        return "torch", Verdict("invalid", "it ends the process, without regions too")
    forget()
    verdict = check(subject(program, policy), program.steps(way, layout), torch.float64)
    wanted = expected.of(program, way)
    if verdict.kind in ("same", "memory") and wanted.kind != "invalid":
        return "equal", verdict
    if verdict.kind == "invalid":
        return "torch", verdict
    return ("refused" if verdict.kind in wanted.kind.split() else "unexpected"), verdict


def product(seed: int, seconds: float) -> int:
    """Draw pairs until the time is over; the exit code."""
    dice, end, counts = random.Random(seed), time.monotonic() + seconds, Counter[str]()
    print(f"seed {seed}", flush=True)
    while time.monotonic() < end:
        program, way = dice.choice(list(BANK.values())), dice.choice(IN_ONE_PROCESS)
        policy, layout = dice.choice(list(POLICIES)), dice.choice(LAYOUTS)
        kind, verdict = one(program, way, policy, layout)
        counts[kind] += 1
        if kind == "unexpected":
            print(program.name, way, policy, layout, verdict, flush=True)
    print(dict(counts))
    return int(counts["unexpected"] > 0)


def in_a_fork(program: Program, pairs: list[tuple[str, str]]) -> list[str]:
    """How the program went in each pair of a way and a policy, up to one that ends the process."""
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        for way, policy in pairs:
            kind, verdict = one(program, way, policy, "contiguous")
            if kind == "unexpected":
                print(program.name, way, policy, verdict, file=sys.stderr, flush=True)
            theirs.send(kind)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    theirs.close()
    kinds = []
    with contextlib.suppress(EOFError):
        while len(kinds) < len(pairs):
            kinds.append(ours.recv())
    process.join()
    return kinds


def every_way(at: int, program: Program) -> list[tuple[str, str]]:
    """Each way in one process and how it went, under a policy each."""
    pairs = [(way, list(POLICIES)[(at + k) % len(POLICIES)]) for k, way in enumerate(IN_ONE_PROCESS)]
    kinds: list[str] = []
    while len(kinds) < len(pairs):
        kinds += in_a_fork(program, pairs[len(kinds) :])
        if len(kinds) < len(pairs):
            print(program.name, *pairs[len(kinds)], "ended the process", file=sys.stderr, flush=True)
            kinds.append("unexpected")
    return [(way, kind) for (way, _), kind in zip(pairs, kinds, strict=True)]


def on_two_ranks() -> dict[str, str]:
    """How each program went on two ranks, which differ in nothing but their inputs."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(name, ranks.policy_of(name)) for name in BANK]
        spawned(ranks.work, (folder, pairs, 3600))
        wrong = {line.split()[2] for k in range(2) for line in ranks.unexpected(Path(folder), k, pairs)}
        lines = [json.loads(line) for line in (Path(folder) / "0.jsonl").read_text().splitlines()]
    kinds = {"same": "equal", "memory": "equal", "invalid": "torch"}
    return {
        name: "unexpected" if name in wrong else kinds.get(kind, "refused") for name, _, kind, *_ in lines
    }


def how_each_went(kept: Path | None) -> dict[str, list[tuple[str, str]]]:
    """Each program's ways and how they went; those that `kept` tells of do not run again."""
    went: dict[str, list[tuple[str, str]]] = {}
    if kept is not None and kept.exists():
        went = dict(map(json.loads, kept.read_text().splitlines()))
    for at, program in enumerate(BANK.values()):
        if program.name not in went:
            went[program.name] = every_way(at, program)
            if kept is not None:
                with kept.open("a") as out:
                    print(json.dumps([program.name, went[program.name]]), file=out)
    return went


def table(kept: Path | None) -> int:
    """Every program in every way once; ways x tags as a table: programs that are equal (and refused)."""
    tags = sorted({tag for program in BANK.values() for tag in program.tags})
    cells: Counter[tuple[str, str, str]] = Counter()
    total: Counter[str] = Counter()
    together, went = on_two_ranks(), how_each_went(kept)
    for program in BANK.values():
        for way, kind in [*went[program.name], ("two_ranks", together[program.name])]:
            total[kind] += 1
            for tag in program.tags:
                cells[way, tag, kind] += 1
    print("| way | " + " | ".join(tags) + " |")
    print("|---|" + "---:|" * len(tags))
    for way in [*IN_ONE_PROCESS, "two_ranks"]:
        row = [(cells[way, tag, "equal"], cells[way, tag, "refused"]) for tag in tags]
        said = [f"{equal}" + (f" ({refused})" if refused else "") for equal, refused in row]
        print(f"| {way} | " + " | ".join(said) + " |")
    names = {
        "equal": "equal",
        "refused": "refused",
        "torch": "refused by torch without regions",
        "unexpected": "not as expected",
    }
    said = [f"{total[kind]:,} {name}" for kind, name in names.items()]
    print(f"\n{total.total():,} pairs of {len(BANK)} programs: {', '.join(said)}.")
    return int(total["unexpected"] > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-product", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--kept", type=Path, default=None)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seed_only_what_is_there()
    warnings.simplefilter("ignore")
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    return table(options.kept) if options.table else product(seed, options.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
