"""What users get wrong on the command line is told in one line that says what to write; JSON and policies."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

import remat
from remat import Decision, checkpoint_name, checkpoint_policy, save_names
from tests.tools.inside import COMMANDS, UsageError, checked, command_of, main, parse

ME = __name__
SMALL = "--depth 1 --width 16 --heads 2 --seq 16 --batch 2 --steps 1"
PAIR = f"{ME}:block --input 4x8 --input 8x8"
TINY, TWO = SMALL.split(), ["--input", "4x8", "--input", "8x8"]


def block(x, w):
    return torch.tanh(checkpoint_name(x @ w, "h")).sin()


def rule(info):
    return Decision.SAVE if info.bytes < 1024 else Decision.RECOMPUTE


def wrong(x):
    return x @ x.new_ones(3, 5)


def factory():
    return torch.nn.Linear(8, 8)


def made_of(x):
    return factory()


def nothing():
    return ()


# What somebody writes, and what the one line of the answer says.
MISTAKES = {
    "explain torch:sin --input 4 --device cuda": "no CUDA device. Write --device cpu.",
    "explain torch:sin --input 4 --device mps": "no MPS device. Write --device cpu.",
    "explain torch:sin --input 4 --device tpu": "is no device. Write --device cpu, cuda",
    "explain torch:sin --input 4 --device meta --check": "nothing can run there. Write --device",
    "explain torch:argmax --input 4": "no backward to look at",
    "explain torch:tanhh --input 4": "torch has no 'tanhh' (nearest: 'tanh').",
    "explain torch:pi --input 4": "torch:pi is no function or module but 3.14",
    "explain torch:tanh --input 4xb": "--input 4xb --dtype float32 --device cpu is no tensor",
    "explain nowhere:fn": "cannot be loaded: No module named 'nowhere'",
    "explain torch": "'torch' names no function: write MODULE:FN, as in torch:block",
    "explain ./models/a.py:fn": "names no function: write MODULE:FN, as in models.a:fn",
    "explain :fn": "':fn' names no function",
    "explain remat/nn.py:apply": "Write remat.nn:apply.",
    f"explain {ME}:nothing": "must return (fn, *args), got ()",
    f"explain {ME}:block": "takes arguments",
    f"explain {ME}:block --input 4x8": "Give one --input SIZES for each argument",
    f"explain {PAIR} --policy save_all": "there is no policy",
    f"explain {PAIR} --policy plan=nowhere.json": "nowhere.json: No such file",
    f"explain {PAIR} --policy plan={__file__}": "is not a plan",
    f"explain {PAIR} --policy budget=much": "'much' is not a budget",
    f"explain {PAIR} --policy {ME}:rul": "nearest: 'rule'",
    f"explain {PAIR} --policy {ME}:ME": "is no policy and no rule",
    f"explain {PAIR} --policy \"save_every_nth('a', 'b', 'c')\"": "is no policy; write",
    "explain gtp": "did you mean gpt, or MODULE:FN?",
    "explain gpt --input 4x8": "write --batch and --seq, not --input",
    "explain gpt --dtype int8": "is not a dtype of a model. Write float64",
    "explain gpt --device cuda": "no CUDA device. Write --device cpu.",
    "explain": "Missing from remat explain: MODULE:FN A function of tensors",
    f"sweep {SMALL} --device cuda": "no CUDA device. Write --device cpu.",
    f"sweep {SMALL} --policy save_matmul": "did you mean 'save_matmuls'?",
    f"sweep {SMALL} --policy '1 + 1'": "is no policy",
    f"sweep {SMALL} --policy \"__import__('os')\"": "there is no policy '__import__'",
    f"sweep {SMALL} --model gtp": "gpt, llama or hf:NAME",
    f"sweep {SMALL} --steps 0": "must be positive",
    f"sweep {SMALL} --heads 3": "multiple of 2 * heads",
    "sweep --batch 0": "--batch 0 must be positive. Write --batch 8.",
    "sweep --steps x": "Error parsing --steps: invalid literal for int()",
    "sweep --stepz 3": "Unrecognized options: --stepz, 3. Perhaps you meant: --steps INT",
    "sweep --mode backwards": "Expected one of ('backward', 'func', 'vmap')",
    "sweep --device h100 --mode vmap": "--mode",
    f"plan {PAIR} --input 3": "too many positional arguments. Give one --input",
    f"plan {ME}:factory --input 4x8": "If it makes a module, give that a name in its file",
    f"plan {ME}:made_of --input 4x8": "makes a module returns none: plan what it made",
    f"plan {ME}:block": "give each as --input 4x128x256",
    f"plan {PAIR} --device tpu9": "No speeds for device 'tpu9': write one of a100",
    f"plan {PAIR} --budget lots": "'lots' is not a budget. Write budget=0.4",
    f"plan {PAIR} --out plan.json": "write --budget too",
    f"plan {ME}:block --input": "Missing value for argument '--input'",
    "init": "Missing from remat init: CONFIG",
    "init nowhere/config.json": "there is no file nowhere/config.json. Write a config type",
    "schedule --length 0": "a scan has at least one step",
    f"gpu {PAIR} --input 8,8": "Write sizes as 4x128x256",
    f"gpu {PAIR} --device h900": "h900",
    f"gpu {ME}:blok --input 8x8": "nearest: 'block'",
    f"gpu {PAIR} --policy save_matmul": "save_matmul",
}
# Of configs and models of transformers.
OF_CONFIGS = {
    "init nope": "knows no config type 'nope'",
    "init lama": "Write llama, or the path of a config.json",
    "plan hf:lama-3-8b --peak 80GB": "Did you mean hf:llama-3-8b?",
    "plan hf:nope --peak 80GB": "write one of llama-3-8b",
    "plan hf:nope": "write one of llama-3-8b",
    "plan hf:lama-3-8b": "Did you mean hf:llama-3-8b?",
    "plan hf:llama-3-8b": "write --peak 80GB",
    "plan hf:. --peak 80GB": "the config names no model_type",
    f"sweep {SMALL} --model hf:t5": "hf:gpt",
    f"sweep {SMALL} --model hf:vit": "hf:gpt",
    f"sweep {SMALL} --model hf:gtp2": "hf:gpt",
}


@pytest.mark.parametrize("line", [*MISTAKES, *OF_CONFIGS])
def test_one_line_says_what_to_write(capsys, tmp_path, monkeypatch, line):
    if line in OF_CONFIGS:
        pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    command, *rest = shlex.split(line)
    try:
        code = main([command, *rest])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err.strip()
    assert code == 2 and said.startswith(f"remat {command}: ") and "\n" not in said
    assert (MISTAKES | OF_CONFIGS)[line].lower() in said.lower()


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "remat", "env"]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 1 and not done.stderr


@pytest.mark.parametrize(
    "line",
    [
        ["sweep", *TINY, "--out"],
        ["explain", f"{ME}:block", *TWO, "--html"],
        ["init", "gpt2", "--out"],
        ["plan", f"{ME}:block", *TWO, "--budget", "0.5", "--out"],
        ["plan", f"{ME}:block", *TWO, "--csv"],
    ],
)
def test_outputs_are_checked_before_the_work(capsys, tmp_path, line):
    (tmp_path / "file").write_text("")
    assert main([*line, str(tmp_path / "file" / "deeper")]) == 2
    said = capsys.readouterr()
    assert "\n" not in said.err.strip() and line[-1] in said.err and not said.out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_of_all_commands(capsys, shell):
    with pytest.raises(SystemExit) as left:
        main(["--tyro-print-completion", shell])
    script = capsys.readouterr().out
    assert not left.value.code
    assert all(name in script for name in COMMANDS) and "--policy" in script


def test_bash_completes(capsys, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    with pytest.raises(SystemExit):
        main(["--tyro-print-completion", "bash"])
    (tmp_path / "remat.sh").write_text(capsys.readouterr().out)
    ask = """
    source remat.sh
    f=$(complete -p remat | sed -E 's/.*-F ([^ ]+) .*/\\1/')
    COMP_WORDS=(remat expl); COMP_CWORD=1; $f; echo "${COMPREPLY[@]}"
    COMP_WORDS=(remat sweep --mode ""); COMP_CWORD=3; $f; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["explain", "backward", "func", "vmap"], done.stderr


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UsageError, match="is a folder: write the name of a file in it"):
        checked.writable("--csv", tmp_path)
    checked.writable("--csv", tmp_path / "new.csv")
    checked.writable("--csv", None)
    assert not (tmp_path / "new.csv").exists()


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
    for name in COMMANDS.keys() - {"run"}:  # what it prints is the program's
        fields = dataclasses.fields(command_of(name))
        assert {f.name: f.type for f in fields}["json"] == "bool"


@pytest.mark.slow
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


def test_explain_is_of_the_policy_of_the_line(capsys, tmp_path):
    html = tmp_path / "report.html"
    line = ["explain", f"{ME}:block", *TWO, "--json", "--policy"]
    assert main([*line, "names=h", "--html", str(html)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["name"], r["bytes"]) for r in found["kept"] if r["why"] == "policy"] == [("h", 4 * 4 * 8)]
    assert "save_names('h')" in html.read_text()
    assert main([*line, "save_nothing"]) == 0
    assert json.loads(capsys.readouterr().out)["kept_bytes"] < found["kept_bytes"]


def test_a_plan_is_a_policy_of_a_line(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    assert main(["plan", f"{ME}:block", *TWO, "--budget", "0.9", "--out", str(plan), "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)["kept"]
    assert main(["explain", f"{ME}:block", *TWO, "--policy", f"plan={plan}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept_bytes"] == sum(value["bytes"] for value in kept if value["op"] != "input")


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_compare_of_a_built_in_model(capsys, tmp_path, model):
    html = tmp_path / "report.html"
    line = ["explain", model, *TINY[:-2], "--policy", "save_nothing", "--policy", "budget=0.5"]
    assert main([*line, "--json", "--html", str(html)]) == 0
    nothing, half = json.loads(capsys.readouterr().out)["rows"]
    assert nothing["kept_bytes"] < half["kept_bytes"] < half["plain_bytes"]
    assert 'id="cockpit-choice-1"' in html.read_text()


def test_what_a_line_can_say():
    assert parse("names=q, k") == save_names("q", "k")
    assert parse("budget=2GiB") == checkpoint_policy(budget="2GiB")
    assert parse("checkpoint_policy(budget=0.4)") == checkpoint_policy(budget=0.4)
    assert parse("peak=20GiB") == checkpoint_policy(peak="20GiB")


def test_a_plan_and_its_frontier_are_written_together(capsys, tmp_path):
    table, out = tmp_path / "f.csv", tmp_path / "plan.json"
    line = [
        "plan",
        f"{ME}:block",
        *TWO,
        "--budget",
        "free",
        "--points",
        "3",
        "--csv",
        str(table),
        "--out",
        str(out),
    ]
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    assert table.read_text().startswith("planner,")
    assert main(["plan", f"{ME}:block", *TWO, "--points", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"]


def test_a_schedule_as_data(capsys):
    assert main("schedule --length 4 --slots 2 --json".split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kept_in_forward"] == [0, 1] and [a["action"] for a in told["actions"]].count("reverse") == 4
