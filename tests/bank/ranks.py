"""Programs of the bank on two processes that train one model: each rank sees what it sees without regions."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import torch

from tests.bank import BANK, expected, subject
from tests.bank.library import POLICIES
from tests.helpers import forget, seed_only_what_is_there
from tests.interop.ranks import group_of
from tests.ways import check, shows_looks


def policy_of(name: str) -> str:
    """Neighbours in the bank have others. A plan is one more call, which lists of the user's show."""
    policy = list(POLICIES)[list(BANK).index(name) % len(POLICIES)]
    return "nothing" if shows_looks(subject(BANK[name], policy).text) else policy


def work(rank: int, folder: str, pairs: list[tuple[str, str]], seconds: int) -> None:
    """What each pair of a program and a policy comes to on this rank, as lines of a file."""
    warnings.simplefilter("ignore")
    seed_only_what_is_there()
    with group_of(rank, f"{folder}/store", seconds=seconds), open(f"{folder}/{rank}.jsonl", "w") as out:
        for name, policy in pairs:
            forget()
            start = time.monotonic()
            verdict = check(subject(BANK[name], policy), [{"how": "two_ranks"}] * 2, torch.float64)
            line = [name, policy, verdict.kind, verdict.what, time.monotonic() - start]
            print(json.dumps(line), file=out, flush=True)


def unexpected(folder: Path, rank: int, pairs: list[tuple[str, str]]) -> list[str]:
    """The pairs that went otherwise than the bank expects, or did not run at all."""
    lines = [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
    wrong = [f"rank {rank}: {name} {policy} did not end" for name, policy in pairs[len(lines) :]]
    for name, policy, kind, what, _ in lines:
        wanted = expected.of(BANK[name], "two_ranks")
        kinds = {"same", "memory"} if wanted.kind == "same" else set(wanted.kind.split())
        if kind not in kinds:
            wrong.append(f"rank {rank}: {name} {policy}: {kind}, {what}")
    return wrong
