"""`python -m remat gpu` and `sweep --device h100`: rows, charts, and one line for what cannot be compiled."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat, scan_remat
from remat.gpu import GpuGraph, GpuReport, Kernel
from tests.tools.inside import main

ME = "tests.tools.test_gpu_cli"


def block(x: Tensor) -> Tensor:
    return x + F.gelu(x @ x.T) @ x


def step(x: Tensor) -> Tensor:
    for _ in range(2):
        x = remat(block)(x)
    return x.square().mean()


WEIGHTS = torch.zeros(4, 512, 512, requires_grad=True)


def scanned(x: Tensor) -> Tensor:
    out, _ = scan_remat(lambda x, w: (x + F.gelu(x @ w), None), x, WEIGHTS, checkpoints="all")
    return out.square().mean()


def reads(x: Tensor) -> Tensor:
    return torch.full((4,), float(x.sum())) + x.sum()


def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).sum()


@torch.library.custom_op("remat_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.clone()


def no_fake(x: Tensor) -> Tensor:
    return x.sum() + without_fake(x.detach()).sum()


@torch.library.custom_op("remat_tests::on_cpus", mutates_args=(), device_types="cpu")
def on_cpus(x: Tensor) -> Tensor:
    return x.clone()


@on_cpus.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def for_cpus(x: Tensor) -> Tensor:
    return x.sum() + on_cpus(x.detach()).sum()


@pytest.fixture
def no_compiler(monkeypatch):
    """Reports of a step that was not compiled: what is shown of them is the same."""
    mm = Kernel("aten.mm", "extern", 4096, 2048, 65536, 1e-6, 2048, spills=2)
    step = GpuGraph("", (mm,), peak=2048)
    report = GpuReport("h100", None, None, step, kept=7, held=4096, memory=79 << 30, regions=())
    monkeypatch.setattr("remat.cli.commands.gpu.compile_for", lambda *_, **__: report)
    monkeypatch.setattr("remat.cli.commands.sweep.compile_for", lambda *_, **__: report)


def test_a_table_and_a_chart(capsys, tmp_path, no_compiler):
    line = ["gpu", f"{ME}:step", "--input", "8x8", "--policy", "none", "--policy", "budget=0.4"]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert "for h100: compiled for, not run on" in said and "none" in said and "budget=0.4" in said
    assert (
        main(["sweep", "--device", "b200", "--out", str(tmp_path), "--policy", "save_matmuls", "--json"]) == 0
    )
    assert ">save_matmuls</text>" in (tmp_path / "sweep.svg").read_text()
    told = json.loads(capsys.readouterr().out)
    assert told["device"] == "b200" and told["rows"][0]["peak"] == 2048 and told["rows"][0]["spills"] == 2


def test_what_keeps_a_step_out_of_cuda_graphs_is_told(capsys, monkeypatch):
    graph = GpuGraph("", (), 0, "aten.index_put_.default, at m.py:3")
    report = GpuReport("h100", graph, GpuGraph("", (), 0), None, 0, 0, 79 << 30, ())
    monkeypatch.setattr("remat.cli.commands.gpu.compile_for", lambda *_, **__: report)
    line = ["gpu", f"{ME}:step", "--input", "8x8", "--policy", "none", "--policy", "save_matmuls"]
    main(line)
    said = capsys.readouterr().out
    assert "CUDA graph" in said and " no\n" in said
    assert "none, save_matmuls: not in a CUDA graph, forward: aten.index_put_.default, at m.py:3" in said
    main([*line, "--json"])
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["not_capturable"] == "forward: aten.index_put_.default, at m.py:3"


def test_without_triton_one_line_says_which(capsys, monkeypatch):
    monkeypatch.setattr("remat.gpu.compile.triton_wanted", lambda: "triton==3.7.0")
    assert main(["gpu", f"{ME}:step", "--input", "8x8"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install triton==3.7.0" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    "name, told",
    [
        ("reads", "reads a number from a tensor (`.item()`, `float(t)`)"),
        ("conditional", "what torch.cond runs depends on numbers"),
        ("for_cpus", "remat_tests.on_cpus.default was made for CPUs alone"),
        ("no_fake", "There was no fake impl registered"),
    ],
)
def test_what_cannot_be_compiled_is_one_line_with_the_op_and_the_place(capsys, name, told):
    pytest.importorskip("triton", reason="Triton compiles for GPUs: pip install 'remat[gpu]'")
    line = ["gpu", f"{ME}:{name}", "--input", "16x16", "--dtype", "float32"]
    assert main([*line, "--policy", "none", "--policy", "save_nothing"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in said and "test_gpu_cli.py:" in said and said.startswith("remat gpu: ")


@pytest.mark.slow
def test_a_step_and_a_model_are_compiled(capsys, tmp_path):
    pytest.importorskip("triton", reason="Triton compiles for GPUs: pip install 'remat[gpu]'")
    line = ["gpu", f"{ME}:step", "--input", "64x64", "--dtype", "float32", "--json", "--code"]
    assert main([*line, "--policy", "none", "--policy", "save_nothing"]) == 0
    none, nothing = json.loads(capsys.readouterr().out)["rows"]
    assert nothing["kept"] < none["kept"] and nothing["flops"] > none["flops"] and nothing["survived"]
    line = ["gpu", f"{ME}:scanned", "--input", "512x512", "--dtype", "float32", "--json"]
    assert main([*line, "--policy", "save_nothing", "--policy", "save_matmuls"]) == 0
    nothing, products = json.loads(capsys.readouterr().out)["rows"]
    assert products["kept"] - nothing["kept"] == 4 * 512 * 512 * 4 and products["flops"] < nothing["flops"]
    sizes = ["--depth", "1", "--width", "64", "--heads", "2", "--seq", "32", "--batch", "1"]
    line = ["sweep", "--device", "h100", *sizes, "--policy", "save_nothing", "--policy", "torch_checkpoint"]
    assert main([*line, "--out", str(tmp_path)]) == 0
    assert "torch_checkpoint" in capsys.readouterr().out and (tmp_path / "sweep.svg").exists()
