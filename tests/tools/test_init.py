"""`remat init`: the script that it writes runs, for a config type and for a config.json."""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from tests.inside import main

pytest.importorskip("transformers")
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def made(capsys, out, *line):
    assert main(["init", *line, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["script"] == str(out)
    return out.read_text()


@pytest.mark.slow
def test_the_script_of_a_config_file_runs(capsys, tmp_path, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "intermediate_size": 32, **TINY}))
    text = made(capsys, tmp_path / "train.py", str(config), "--policy", "save_matmuls | save_attention")
    assert "policy=save_matmuls | save_attention)" in text
    assert "from remat import explain, save_attention, save_matmuls\n" in text
    monkeypatch.setattr(sys, "argv", ["train.py", "--report"])
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "loss_of under 10 policies" in said and "step 2: loss 4." in said


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_script_of_a_config_type_runs(capsys, tmp_path, monkeypatch, name):
    text = made(capsys, tmp_path / "train.py", name, "--policy", "budget=0.5")
    assert f'"{name}",\n' in text and "policy=checkpoint_policy(budget=0.5))" in text
    # As in the script, but quick.
    for key, value in {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "intermediate_size": 32,
    }.items():
        text = "".join(
            f"    {key}={value},\n" if f" {key}=" in line else line for line in text.splitlines(True)
        )
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    assert "step 2: loss 4." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["t5"], "t5 cannot be made as a causal language model"),
        (["lama"], "Write llama"),
        (["llama", "--policy", "tests.tools.test_cli_errors:rule"], "put yours into the script"),
        (["llama", "--policy", "save_matmul"], "did you mean 'save_matmuls'?"),
    ],
)
def test_what_no_script_is_written_for(capsys, tmp_path, line, told):
    out = tmp_path / "train.py"
    assert main(["init", *line, "--out", str(out)]) == 2
    said = capsys.readouterr().err.strip()
    assert told in said and not out.exists()


def test_files_that_are_no_configs_and_scripts_that_are_there(capsys, tmp_path):
    wrong, out = tmp_path / "wrong.json", tmp_path / "train.py"
    for text in ("{", "[]", '{"model_type": "nothing"}', "{}"):
        wrong.write_text(text)
        assert main(["init", str(wrong), "--out", str(out)]) == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith(f"remat init: {wrong} ") and "\n" not in said
    out.write_text("mine")
    assert main(["init", "llama", "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err and out.read_text() == "mine"
