"""`remat run`: somebody else's training program, with regions in the model that it makes."""

import json

import pytest

from tests.inside import main

PROGRAM = """
import json, sys, warnings
import torch, transformers
from remat import nn
from tests.helpers import OpCounter

warnings.simplefilter("ignore")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    intermediate_size=32, vocab_size=11, hidden_size=16, use_cache=False,
)
model = transformers.LlamaForCausalLM(config)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 11, (4, 8))]
given = transformers.TrainingArguments(
    output_dir="out", max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
    save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    gradient_checkpointing="--checkpointing" in sys.argv,
)
with OpCounter() as counter:
    transformers.Trainer(model=model, args=given, train_dataset=rows).train()
total = sum(p.sum().item() for p in model.parameters())
found = {"dots": counter.dots, "regions": nn.regions(model), "sum": total}
with open(sys.argv[sys.argv.index("--to") + 1], "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "theirs.py").write_text(PROGRAM)

    def run(*options, program="theirs.py", own=()):
        assert main(["run", *options, program, "--to", "found.json", *own]) == 0
        return json.loads((tmp_path / "found.json").read_text())

    return run


@pytest.mark.parametrize("own", [(), ("--checkpointing",)], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("program", ["theirs.py", "theirs"])
@pytest.mark.parametrize("layers", [(), ("--layers", "*.layers.*")], ids=["hook", "layers"])
def test_a_program_trains_with_regions(trained, capsys, own, program, layers):
    """The products are not run again under save_matmuls, whatever the program says of checkpointing."""
    every = trained("--policy", "save_everything", program=program)
    some = trained("--policy=save_matmuls", *layers, program=program, own=own)
    least = trained("--policy", "save_nothing", *layers, program=program, own=own)
    assert "under save_matmuls" in capsys.readouterr().err
    assert len(some["regions"]) == (2 if layers else 0)
    assert every["dots"] == some["dots"] < least["dots"]
    assert every["sum"] == some["sum"] == least["sum"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["run"], "a program is missing"),
        (["run", "nowhere.py"], "there is no file nowhere.py"),
        (["run", "nowhere.at.all"], "there is no module nowhere.at.all"),
        (["run", "--policy", "save_matmul", "this"], "save_matmul"),
        (["run", "empty.py", "--policy", "x"], "made no transformers.Trainer"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, line, said):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("")
    assert main(line) == 2
    assert said in capsys.readouterr().err
