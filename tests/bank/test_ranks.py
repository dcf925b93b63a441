"""Two processes that train one model: a program for each tag on every change, all in the slow half."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.bank import BANK, ranks
from tests.interop.ranks import spawned

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)
NAMES = list(BANK)


def once_a_tag() -> list[str]:
    """Programs, each the first with a tag that none before it has."""
    seen, chosen = set[str](), []
    for name, program in BANK.items():
        if program.tags - seen:
            chosen.append(name)
            seen |= program.tags
    return chosen


def trained(names: list[str], folder: Path, seconds: int) -> None:
    pairs = [(name, ranks.policy_of(name)) for name in names]
    spawned(ranks.work, (str(folder), pairs, seconds))
    assert not [line for rank in range(2) for line in ranks.unexpected(folder, rank, pairs)]


def test_a_program_for_each_tag(tmp_path: Path) -> None:
    trained(once_a_tag(), tmp_path, 120)


@pytest.mark.slow
def test_every_program(tmp_path: Path) -> None:
    trained(NAMES, tmp_path, 900)
