"""`make test-product SECONDS=600`: pairs of a program and a way, with a policy and a layout, drawn at random.

`python -m tests.bank --table` runs every pair once and prints ways x tags, for docs/trust.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter

import torch

from tests.bank import BANK, Program, expected, subject
from tests.bank.library import POLICIES
from tests.helpers import forget, seed_only_what_is_there
from tests.ways import LAYOUTS, WAYS, Verdict, check

NAMES = [way for way in WAYS if way != "differences"]


def one(program: Program, way: str, policy: str, layout: str) -> tuple[str, Verdict]:
    """How the pair went: equal, refused, torch (which refuses it, too), or unexpected."""
    forget()
    steps = [{"how": way}, {"how": way, "layout": layout}, {"how": way}]
    verdict = check(subject(program, policy), steps, torch.float64)
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
        program, way = dice.choice(list(BANK.values())), dice.choice(NAMES)
        policy, layout = dice.choice(list(POLICIES)), dice.choice(LAYOUTS)
        kind, verdict = one(program, way, policy, layout)
        counts[kind] += 1
        if kind == "unexpected":
            print(program.name, way, policy, layout, verdict, flush=True)
    print(dict(counts))
    return int(counts["unexpected"] > 0)


def table() -> int:
    """Every pair once, under a policy each; ways x tags as a table: pairs that are equal (and refused)."""
    tags = sorted({tag for program in BANK.values() for tag in program.tags})
    cells: Counter[tuple[str, str, str]] = Counter()
    total: Counter[str] = Counter()
    for at, program in enumerate(BANK.values()):
        for k, way in enumerate(NAMES):
            kind, verdict = one(program, way, list(POLICIES)[(at + k) % len(POLICIES)], "contiguous")
            total[kind] += 1
            for tag in program.tags:
                cells[way, tag, kind] += 1
            if kind == "unexpected":
                print(program.name, way, verdict, file=sys.stderr, flush=True)
    print("| way | " + " | ".join(tags) + " |")
    print("|---|" + "---:|" * len(tags))
    for way in NAMES:
        row = [(cells[way, tag, "equal"], cells[way, tag, "refused"]) for tag in tags]
        said = [f"{equal}" + (f" ({refused})" if refused else "") for equal, refused in row]
        print(f"| {way} | " + " | ".join(said) + " |")
    print(f"\n{total.total()} pairs: {dict(total)}")
    return int(total["unexpected"] > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-product", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seed_only_what_is_there()
    warnings.simplefilter("ignore")
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    return table() if options.table else product(seed, options.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
