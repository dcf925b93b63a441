"""What users get wrong on the command line is told in one line that says what to write; JSON and policies."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import remat
from remat import Decision, checkpoint_name, checkpoint_policy, save_names
from remat.cli import checked
from remat.cli.errors import UsageError
from remat.cli.main import COMMANDS, command_of, main
from remat.cli.rows import parse

ME = __name__
TINY = "--depth 1 --width 16 --heads 2 --seq 16 --batch 2 --steps 1".split()
TWO = ["--input", "4x8", "--input", "8x8"]


def block(x, w):
    return torch.tanh(checkpoint_name(x @ w, "h")).sin()


def rule(info):
    return Decision.SAVE if info.bytes < 1024 else Decision.RECOMPUTE


def wrong(x):
    return x @ x.new_ones(3, 5)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["explain", "torch:sin", "--input", "4", "--device", "cuda"], "no CUDA device. Write --device cpu."),
        (["explain", "torch:sin", "--input", "4", "--device", "mps"], "no MPS device. Write --device cpu."),
        (
            ["explain", "torch:sin", "--input", "4", "--device", "tpu"],
            "is no device. Write --device cpu, cuda",
        ),
        (
            ["doctor", "torch:sin", "--input", "4", "--device", "meta"],
            "nothing can run there. Write --device",
        ),
        (["sweep", *TINY, "--device", "cuda"], "no CUDA device. Write --device cpu."),
        (["explain", f"{ME}:block", "--input", "4x8"], "Give one --input SIZES for each argument"),
        (["plan", f"{ME}:block", *TWO, "--input", "3"], "too many positional arguments. Give one --input"),
        (["plan", f"{ME}:block"], "give each as --input 4x128x256"),
        (["plan", f"{ME}:block", *TWO, "--device", "tpu9"], "No speeds for device 'tpu9': write one of a100"),
        (["plan", f"{ME}:block", *TWO, "--budget", "lots"], "'lots' is not a budget. Write budget=0.4"),
        (["plan", f"{ME}:block", *TWO, "--out", "plan.json"], "write --budget too"),
        (["explain", f"{ME}:block", *TWO, "--policy", "budget=much"], "'much' is not a budget"),
        (["explain", f"{ME}:block", *TWO, "--policy", f"{ME}:rul"], "nearest: 'rule'"),
        (["explain", f"{ME}:block", *TWO, "--policy", f"{ME}:ME"], "is no policy and no rule"),
        (["explain", f"{ME}:block", *TWO, "--policy", "save_every('a', 'b', 'c')"], "is no policy; write"),
        (["schedule", "--length", "0"], "a scan has at least one step"),
    ],
)
def test_one_line_says_what_to_write(capsys, line, told):
    assert main(line) == 2
    said = capsys.readouterr().err.strip()
    assert told in said and "\n" not in said and said.startswith(f"remat {line[0]}: ")


@pytest.mark.parametrize("name", ["t5", "vit", "gtp2"])
def test_models_that_cannot_be_made(capsys, tmp_path, name):
    pytest.importorskip("transformers")
    assert main(["sweep", *TINY, "--model", f"hf:{name}", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip()
    assert f"--model hf:{name}" in said and "hf:gpt" in said and "\n" not in said


@pytest.mark.parametrize(
    "line",
    [
        ["sweep", *TINY, "--out"],
        ["explain", f"{ME}:block", *TWO, "--html"],
        ["plan", f"{ME}:block", *TWO, "--budget", "0.5", "--out"],
        ["plan", f"{ME}:block", *TWO, "--png"],
        ["plan", f"{ME}:block", *TWO, "--csv"],
        ["schedule", "--png"],
    ],
)
def test_outputs_are_checked_before_the_work(capsys, tmp_path, line):
    (tmp_path / "file").write_text("")
    assert main([*line, str(tmp_path / "file" / "deeper")]) == 2
    said = capsys.readouterr()
    assert "\n" not in said.err.strip() and line[-1] in said.err and not said.out


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="is a folder: write the name of a file in it"):
        checked.writable("--png", tmp_path)
    checked.writable("--png", tmp_path / "new.png")
    checked.writable("--png", None)
    assert not (tmp_path / "new.png").exists()


def test_an_error_of_the_users_function_is_one_line(capsys, monkeypatch):
    line = wrong.__code__.co_firstlineno + 1
    assert main(["explain", f"{ME}:wrong", "--input", "4x8"]) == 1
    said = capsys.readouterr().err.strip()
    assert f"RuntimeError at test_cli_errors.py:{line} (wrong)" in said and "\n" not in said
    monkeypatch.setenv("REMAT_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["explain", f"{ME}:wrong", "--input", "4x8"])


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"remat {remat.__version__}, torch {torch.__version__}"


def test_every_command_has_json():
    for name in COMMANDS:
        fields = dataclasses.fields(command_of(name))
        assert {f.name: f.type for f in fields}["json"] == "bool"


def test_budgets_names_and_rules_are_policies_of_a_line(capsys, tmp_path):
    policies = ["budget=0.9", "names=h", f"{ME}:rule", "save_names('h', strict=True)"]
    options = [option for policy in policies for option in ("--policy", policy)]
    assert main(["explain", f"{ME}:block", *TWO, *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows][:2] == ["checkpoint_policy(budget=0.9)", "save_names('h')"]
    assert "rule" in rows[2]["policy"] and rows[3]["kept_bytes"] == rows[1]["kept_bytes"]
    assert main(["sweep", *TINY, "--policy", "budget=0.5", "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["none", "checkpoint_policy(budget=0.5)"]
    assert rows[1]["kept_bytes"] < rows[0]["kept_bytes"]


def test_what_a_line_can_say():
    assert parse("names=q, k") == save_names("q", "k")
    assert parse("budget=2GiB") == checkpoint_policy(budget="2GiB")
    assert parse("checkpoint_policy(budget=0.4)") == checkpoint_policy(budget=0.4)
    assert parse("peak=20GiB") == checkpoint_policy(peak="20GiB")


def test_a_plan_and_its_frontier_are_written_together(capsys, tmp_path):
    png, out = tmp_path / "f.png", tmp_path / "plan.json"
    line = [
        "plan",
        f"{ME}:block",
        *TWO,
        "--budget",
        "free",
        "--points",
        "3",
        "--png",
        str(png),
        "--out",
        str(out),
    ]
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", f"{ME}:block", *TWO, "--points", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"]


def test_a_schedule_as_data(capsys):
    assert main("schedule --length 4 --slots 2 --json".split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kept_in_forward"] == [0, 1] and [a["action"] for a in told["actions"]].count("reverse") == 4
