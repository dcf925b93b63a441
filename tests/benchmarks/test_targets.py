"""The benchmarks run, their memory targets hold at a smaller size, and a missed target is told."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree

from benchmarks.common.records import Record, Target, ratio, save, told
from benchmarks.functional import LIMITS, POLICIES as FUNCTIONAL, Functional
from benchmarks.memory import MODES, Memory, targets as memory_targets
from benchmarks.offload import Offload, targets as offload_targets
from benchmarks.overhead import KINDS, Overhead, function_block
from benchmarks.tiles import CARD, Tiles, targets as tiles_targets
from remat import remat

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def records() -> list[Record]:
    # The shape of the full benchmark at a quarter of its width and batch: bytes scale, ratios stay.
    return Memory(width=64, batch=512).run()


def test_memory_targets_are_met(records: list[Record]) -> None:
    missed = [told(target) for target in memory_targets(records) if not target.met]
    assert not missed


def test_memory_of_every_mode_and_policy_is_measured_with_right_gradients(records: list[Record]) -> None:
    assert {record.mode for record in records} == {*MODES, "PINN", "pyramid"}
    failed = {(r.mode, r.policy): r.error for r in records if r.error}
    assert set(failed) <= {("torch.func.grad", "torch_checkpoint"), ("grad(grad)", "torch_checkpoint")}


def test_save_matmuls_lies_between_nothing_and_all(records: list[Record]) -> None:
    peak = {(r.mode, r.policy): r.value for r in records}
    for mode in MODES:
        nothing, matmuls, none = (peak[mode, p] for p in ("save_nothing", "save_matmuls", "none"))
        assert nothing and matmuls and none and nothing < matmuls < none, mode


def test_every_byte_of_an_offload_is_accounted_for() -> None:
    records = Offload(depth=3, width=64, seq=64).run()
    found = {target.claim: (target.value, target.limit) for target in offload_targets(records, 3)}
    # Not less either: that would be a byte that the ledger has not seen.
    assert all(value == limit for value, limit in found.values()), found


def test_every_row_of_the_overhead_computes_the_same_gradient() -> None:
    benchmark, gradients = Overhead(depth=2), dict[str, torch.Tensor]()
    assert {kind for kind, _ in benchmark.rows()} == {"backward", *KINDS}
    for kind, row in benchmark.rows():
        model = benchmark.model(kind, row)
        torch.manual_seed(0)
        x = torch.randn(2, 8, 16, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, gradients.setdefault(kind, x.grad))


def test_every_row_under_torch_func_computes_the_same() -> None:
    benchmark = Functional(depth=1)
    for way in LIMITS:
        want = pytree.tree_leaves(benchmark.step(way, function_block)())
        for policy in FUNCTIONAL.values():
            same = pytree.tree_leaves(benchmark.step(way, remat(function_block, policy=policy))())
            # Second derivatives add up in another order: 5e-16 apart in float64.
            bound = 1e-4 if way == "grad(grad)" else None
            torch.testing.assert_close(same, want, rtol=bound, atol=bound)


def test_records_carry_machine_versions_and_commit(tmp_path: Path) -> None:
    path = save("name", [Record("b", "m", "p", "peak", "MiB", 1.5)], tmp_path)
    with path.open() as file:
        (record,) = csv.DictReader(file)
    assert record["torch"] == torch.__version__ and record["value"] == "1.5"
    assert all(record[key] for key in ("hardware", "cpu_count", "threads", "commit"))


def test_lines_of_other_measurements_and_versions_stay_where_asked(tmp_path: Path) -> None:
    first, second = (Record("b", mode, "p", "peak", "MiB", 1.0) for mode in ("one", "two"))
    path = save("name", [first, second], tmp_path)
    path.write_text(path.read_text() + path.read_text().splitlines()[1].replace(torch.__version__, "1.0"))
    save("name", [replace(second, value=2.0)], tmp_path, beside=True)
    with path.open() as file:
        got = [(row["torch"], row["mode"], row["value"]) for row in csv.DictReader(file)]
    here = torch.__version__
    assert got == [("1.0", "one", "1.0"), (here, "one", "1.0"), (here, "two", "2.0")]


def test_a_missed_or_unmeasured_target_is_told() -> None:
    assert not Target("claim", 1.2, 1.1).met and "missed" in told(Target("claim", 1.2, 1.1))
    assert not Target("claim", None, 1.1).met and "not measured" in told(Target("claim", None, 1.1))
    assert Target("claim", 1.1, 1.1).met and "met" in told(Target("claim", 1.1, 1.1))
    measured = [Record("b", "m", "a", "peak", "MiB", 3.0), Record("b", "m", "b", "peak", "MiB", 2.0)]
    assert ratio(measured, "m", "a", "b") == 1.5 and ratio(measured, "m", "a", "c") is None


def test_the_loss_head_of_a_card_fits_and_is_no_slower_than_claimed() -> None:
    pytest.importorskip("triton", reason="Triton compiles for GPUs: pip install 'remat[gpu]'")
    found = [target for target in tiles_targets(Tiles().simulated()) if target.claim.startswith(CARD)]
    assert len(found) == 2 and all(target.met for target in found), list(map(told, found))
