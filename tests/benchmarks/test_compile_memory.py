"""The benchmark of compiled steps runs, and tells met targets from missed ones."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common.records import Record
from benchmarks.compile_memory import MODES, CompileMemory, compile_times, inputs, targets
from tests.helpers import TORCH

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def small(**options) -> list[Record]:
    sizes = {"depth": 4, "width": 64, "rows_": 256, "compile_depth": 0, "save": False}
    return list(CompileMemory(**sizes | options).run())


def test_the_step_in_one_graph_is_measured_with_right_weights():
    none, nothing = small(models=("mlp",), modes=("step",), policies=("save_nothing",))
    assert not none.error and not nothing.error
    assert none.value and nothing.value and nothing.value < none.value


@pytest.mark.skipif(TORCH < (2, 13), reason="2.11 compiles func.grad of a checkpoint, and keeps all")
def test_where_torch_fails_its_words_are_kept_and_the_next_row_is_measured():
    options = {"models": ("mlp",), "modes": ("torch.func.grad",), "depth": 1}
    none, rival, nothing = small(policies=("torch_checkpoint", "save_nothing"), **options)
    assert "don't yet support saved tensor hooks" in rival.error and rival.value is None
    assert none.value and nothing.value


def record(mode, policy, value, metric="peak"):
    return Record("compile_memory", mode, policy, metric, "MiB", value)


def test_targets():
    records = [
        record("mlp backward", p, v) for p, v in (("none", 10), ("save_nothing", 3), ("torch_checkpoint", 2))
    ]
    records += [
        record("gpt backward", p, v) for p, v in (("none", 10), ("save_matmuls", 5), ("torch_sac", 6))
    ]
    records += [
        record("compile 24 blocks", p, v, "processor time")
        for p, v in (("none", 10), ("save_nothing", 12), ("save_matmuls", 16), ("save_nothing once", 11))
    ]
    records += [
        record("calls to compile 24 blocks", p, v, "Python calls")
        for p, v in (("none", 10), ("save_nothing", 14), ("save_matmuls", 16), ("save_nothing once", 9))
    ]
    got = {target.claim: target.met for target in targets(records)}
    assert got == {
        "mlp backward: save_nothing over none": True,
        "mlp backward: save_nothing over torch_checkpoint": False,
        "gpt backward: save_matmuls over torch_sac": True,
        "compile 24 blocks: save_nothing over none": True,
        "compile 24 blocks: save_matmuls over none": False,
        "compile 24 blocks: save_nothing once over none": False,
        "calls to compile 24 blocks: save_nothing over none": True,
        "calls to compile 24 blocks: save_matmuls over none": False,
        "calls to compile 24 blocks: save_nothing once over none": True,
    }


def test_inputs_and_modes():
    weights, x = inputs("gpt", 2, 64, 256)
    assert x.shape == (2, 128, 64) and set(weights[0]) == {"up", "down", "qkv", "proj"}
    assert set(MODES) == {"backward", "torch.func.grad", "vmap(grad)", "step"}


def test_compile_times_of_every_row():
    got = list(compile_times(1, 32, rounds=1))
    taken, counted = got[::2], got[1::2]
    names = ["none", "torch_checkpoint", "save_nothing", "save_matmuls"]
    names += ["save_nothing once", "save_matmuls once"]
    assert [r.policy for r in taken] == [r.policy for r in counted] == names
    assert all(r.value and r.p20 and r.p80 and r.p20 <= r.value <= r.p80 for r in taken)
    assert {r.metric for r in counted} == {"Python calls"} and all(r.value for r in counted)
