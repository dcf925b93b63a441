"""`make fuzz`: programs drawn at random, with regions and without; what fails is made small and saved.

make fuzz ARGS='--seeds 0:1000 --modes eager,func,aot_eager,inductor --out out/fuzz --device cuda'
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.bank import library
from tests.fuzz.program import draw
from tests.fuzz.run import check
from tests.fuzz.shrink import save, shrink
from tests.helpers import seed_only_what_is_there
from tests.ways import Verdict

MODES = {
    "eager": ("eager", None),
    "func": ("func", None),
    "aot_eager": ("compile", "aot_eager"),
    "inductor": ("compile", "inductor"),
}

SECONDS = 900  # for one program, made small


def short(message: str) -> str:
    """A message without names and numbers, to count by."""
    return re.sub(r"'[^']*'|\d+", "_", message.split("\n")[0])[:110]


def one(seed: int, mode: str) -> Verdict:
    flavour, backend = MODES[mode]
    program = draw(seed, flavour)
    if backend is not None:
        torch._dynamo.reset()
    verdict = check(program, program.steps, program.dtype, backend=backend)
    if verdict.kind == "failed" and "at most bytes" in verdict.what:
        return Verdict("memory", verdict.what)
    return verdict


def in_processes(seeds: range, mode: str, options: argparse.Namespace) -> Iterator[tuple[int, Verdict]]:
    """Each program's verdict. They run in one process, and in a new one after a program that ends it."""
    while seeds:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        arguments = seeds, mode, options, theirs
        process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
        process.start()
        theirs.close()
        what = f"not done in {SECONDS} s"
        try:
            while seeds and ours.poll(SECONDS):
                yield ours.recv()
                seeds = seeds[1:]
        except EOFError:
            process.join()
            what = f"the process ended with {process.exitcode}"
        finally:
            if seeds:
                process.kill()
            process.join()
        if seeds:
            path = save(options.out, draw(seeds[0], MODES[mode][0]), Verdict("ended", what), MODES[mode][1])
            print(path, what, flush=True)
            yield seeds[0], Verdict("ended", what)
            seeds = seeds[1:]


def work(seeds: range, mode: str, options: argparse.Namespace, pipe: Any) -> None:
    flavour, backend = MODES[mode]
    for seed in seeds:
        verdict = one(seed, mode)
        if verdict.kind in ("failed", "memory") or (options.refused and verdict.kind == "refused"):
            program = draw(seed, flavour)
            if not options.no_shrink:
                program = shrink(program, verdict, backend)
            print(save(options.out, program, verdict, backend), verdict.what[:200], flush=True)
        pipe.send((seed, verdict))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="first:last")
    parser.add_argument("--modes", default="eager,func", help=f"of {', '.join(MODES)}")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), help="where failing programs are saved")
    parser.add_argument("--device", default="cpu", help="where programs run: cpu, cuda")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop each mode after so many")
    parser.add_argument("--no-shrink", action="store_true", help="save them as they were drawn")
    parser.add_argument("--refused", action="store_true", help="save and shrink what is refused, too")
    options = parser.parse_args(arguments)
    first, last = map(int, options.seeds.split(":"))
    torch.set_num_threads(1)
    seed_only_what_is_there()
    library.device[0] = torch.device(options.device)
    if options.device != "cpu":
        torch.set_default_device(options.device)  # what programs make without a word of where
    failed = 0
    for mode in options.modes.split(","):
        kinds: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        start = time.monotonic()
        for _, verdict in in_processes(range(first, last), mode, options):
            kinds[verdict.kind] += 1
            if verdict.kind == "refused":
                refused[short(verdict.what)] += 1
            if time.monotonic() - start > options.seconds:
                break
        each = 1e3 * (time.monotonic() - start) / max(1, kinds.total())
        print(f"{mode}: {dict(kinds)}, {each:.0f} ms each")
        for message, count in refused.most_common():
            print(f"  refused {count}: {message}")
        failed += kinds["failed"] + kinds["ended"]
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
