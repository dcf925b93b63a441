"""Axolotl's own command on a tiny Llama: its plugin as the page has it, and `remat run`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.repo.house import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("axolotl") is None, reason="needs axolotl")

# Base model, tokenizer and rows, all made here.
FILES = """
import json, tokenizers, torch, transformers
words = {word: at for at, word in enumerate("<pad> <eos> <unk> a b c d e f g h".split())}
made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained("model")
torch.manual_seed(0)
config = transformers.LlamaConfig(
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    intermediate_size=32, vocab_size=len(words), hidden_size=16, use_cache=False, eos_token_id=1,
)
transformers.LlamaForCausalLM(config).save_pretrained("model")
with open("rows.jsonl", "w") as file:
    for text in ("a b c d", "e f g h", "a c e g h", "b d f") * 8:
        file.write(json.dumps({"text": text}) + chr(10))
"""

CONFIG = {
    "base_model": "./model",
    "datasets": [{"path": "./rows.jsonl", "ds_type": "json", "type": "completion", "field": "text"}],
    "dataset_prepared_path": "./prepared",
    "sequence_len": 16,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 2,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "learning_rate": 0.01,
    "lr_scheduler": "constant",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "attn_implementation": "sdpa",
    "logging_steps": 1,
    "save_strategy": "no",
    "val_set_size": 0,
    "dataloader_num_workers": 0,
    "dataset_num_proc": 1,
}

# Axolotl's command as it is, the products of its steps counted. (Its workers import this file.)
COUNTED = """
import json, runpy
from tests.helpers import OpCounter

if __name__ == "__main__":
    with OpCounter() as counter:
        runpy.run_module("axolotl.cli.train", run_name="__main__")
    with open("dots.json", "w") as file:
        json.dump(counter.dots, file)
"""


class Axolotl:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        page = (ROOT / "docs" / "huggingface.md").read_text()
        plugin = re.search(r'title="Needs axolotl: remat_plugin.py"\n(.*?)```', page, re.DOTALL)
        assert plugin is not None
        (folder / "remat_plugin.py").write_text(plugin[1])
        (folder / "counted.py").write_text(COUNTED)
        self._run("-c", FILES)

    def _run(self, *command: str) -> str:
        path = os.pathsep.join([str(self.folder), str(ROOT), *sys.path])
        quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        where = {**os.environ, **quiet, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=where, capture_output=True, text=True
        )
        assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def trained(self, *command: str, **options: Any) -> tuple[list[str], bytes, int]:
        """Losses, weights, and products of two steps."""
        (self.folder / "config.yml").write_text(json.dumps({**CONFIG, "output_dir": "./out", **options}))
        said = self._run(*command, "counted.py", "config.yml")
        weights = (self.folder / "out" / "model.safetensors").read_bytes()
        dots = json.loads((self.folder / "dots.json").read_text())
        return re.findall(r"'loss': '?([\d.]+)", said), weights, dots


@pytest.mark.slow
def test_axolotl_trains_with_regions(tmp_path: Path) -> None:
    axolotl = Axolotl(tmp_path)
    losses, weights, dots = axolotl.trained()
    assert len(losses) == 2
    plugged = axolotl.trained(plugins=["remat_plugin.Regions"], gradient_checkpointing=False)
    assert plugged == (losses, weights, dots), "the plugin's policy keeps products"
    run = "-m", "remat", "run", "--policy", "save_nothing"
    again = axolotl.trained(*run, gradient_checkpointing=True)
    assert again[:2] == (losses, weights) and again[2] > dots
