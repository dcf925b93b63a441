"""`remat run`: somebody else's training program, with regions in the model that it makes."""

import json
import os
import subprocess
import sys

import pytest

from tests.inside import main
from tests.repo.house import ROOT

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


# TRL's trainer turns gradient checkpointing on by itself.
SFT = """
import json, sys, warnings
import datasets, tokenizers, torch, transformers, trl
from tests.helpers import OpCounter

warnings.simplefilter("ignore")
words = {word: at for at, word in enumerate("<pad> <eos> a b c d e f g h".split())}
made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    intermediate_size=32, vocab_size=len(words), hidden_size=16, use_cache=False, eos_token_id=1,
)
model = transformers.LlamaForCausalLM(config)
rows = [{"text": text} for text in ("a b c d", "e f g h", "a c e g h", "b d f")]
given = trl.SFTConfig(
    output_dir="out", max_steps=2, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[],
    save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, logging_steps=1,
)
assert given.gradient_checkpointing
trainer = trl.SFTTrainer(
    model, args=given, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
)
with OpCounter() as counter:
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
total = sum(p.sum().item() for p in model.parameters())
with open(sys.argv[sys.argv.index("--to") + 1], "w") as file:
    json.dump({"dots": counter.dots, "losses": losses, "sum": total}, file)
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "theirs.py").write_text(PROGRAM)
    (tmp_path / "sft.py").write_text(SFT)

    def found():
        return json.loads((tmp_path / "found.json").read_text())

    def run(*options, program="theirs.py", own=()):
        assert main(["run", *options, program, "--to", "found.json", *own]) == 0
        return found()

    def without(program):
        where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        subprocess.run([sys.executable, program, "--to", "found.json"], check=True, env=where)
        return found()

    run.without = without
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


def test_trl_trains_with_regions(trained):
    """Losses and weights are those without; products run again as the policy says."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    every = trained("--policy", "save_everything", program="sft.py")
    some = trained("--policy", "save_matmuls", program="sft.py")
    least = trained("--policy", "save_nothing", program="sft.py")
    assert every["dots"] == some["dots"] < least["dots"]
    plain = trained.without("sft.py")
    assert len(plain["losses"]) == 2
    for one in (every, some, least):
        assert one["losses"] == plain["losses"] and one["sum"] == plain["sum"]


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
