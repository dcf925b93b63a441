"""`python -m remat init CONFIG`: a script to start from."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from remat._core import first_line
from remat.cli.checked import writable
from remat.cli.errors import UsageError
from remat.cli.models import Sizes, config_of, module_of, settings, transformers_for
from remat.cli.rows import parse

SCRIPT = '''"""Trains {what} with recomputation; `--report` compares policies first."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from remat import {names}
from remat.interop import huggingface

STEPS, BATCH, SEQ = 3, 2, {seq}
device = "cuda" if torch.cuda.is_available() else "cpu"

{config}
# A cache of keys and values is of no use in training, and would live as long as the layers' results.
config.use_cache = False
model = AutoModelForCausalLM.from_config(config).to(device).train()
# Each layer is a region: it keeps what the policy says, and recomputes the rest in the backward.
huggingface.enable(model, policy={policy})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def batch():
    return torch.randint(config.vocab_size, (BATCH, SEQ), device=device)  # your tokens go here


def loss_of(tokens):
    return model(input_ids=tokens, labels=tokens).loss


if "--report" in sys.argv:
    print(explain(loss_of, batch(), policies=True))
for step in range(STEPS):
    loss = loss_of(batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {{step}}: loss {{loss.item():.3f}}")
'''

SMALL = Sizes(depth=4, width=256, heads=4, seq=512)


@dataclass
class Init:
    """Write a script that trains a Hugging Face model of a config with recomputation.

    Nothing is downloaded, and no weights are made.
    """

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """A config type (llama, gpt2, qwen2, ...), whose script has small sizes to change; or a config.json."""
    policy: str = "save_matmuls | save_attention"
    """What each layer keeps: a policy as in Python, budget=0.4, or names=q,k."""
    out: Path = Path("train.py")
    """The script; a file that is there is left alone."""
    json: bool = False
    """Print one JSON object instead of a line."""

    def __call__(self) -> int:
        if self.out.exists():
            raise UsageError(f"--out {self.out} is there already: name another file.")
        writable("--out", self.out)
        text = script(self.config, self.policy)
        self.out.write_text(text, encoding="utf-8")
        facts = {"script": str(self.out), "config": self.config, "policy": self.policy}
        print(
            json.dumps(facts, indent=2) if self.json else f"wrote {self.out}. Run: python {self.out} --report"
        )
        return 0


def script(given: str, policy: str) -> str:
    """The script for a config type or a config.json, and a policy."""
    text = repr(parse(policy))
    try:
        parse(text)
    except UsageError:
        raise UsageError(
            f"--policy {policy}: a script can have a policy of remat's own. Write save_matmuls, budget=0.4 "
            "or names=q,k, and put yours into the script."
        ) from None
    config, lines = from_file(given) if is_path(given) else from_name(given)
    with torch.device("meta"):
        module_of(config, given)
    names = {"explain", *re.findall(r"\b(?:save_|offload|checkpoint_policy)\w*", text)}
    seq = min(128, getattr(config, "max_position_embeddings", None) or 128)
    what = f"a {config.model_type} model"
    return SCRIPT.format(what=what, names=", ".join(sorted(names)), config=lines, policy=text, seq=seq)


def is_path(given: str) -> bool:
    """Whether a file or folder is meant, not a config type."""
    return given.endswith(".json") or "/" in given or Path(given).exists()


def from_file(given: str) -> tuple[Any, str]:
    """The config in a file or folder, and the lines that read it."""
    path = Path(given)
    found = path / "config.json" if path.is_dir() else path
    if not found.is_file():
        raise UsageError(f"{given}: there is no file {found}. Write a config type such as llama, or a file.")
    try:
        config = transformers_for(given).AutoConfig.from_pretrained(str(found))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{given} is no config of transformers: {first_line(error)}. Write one with a model_type."
        ) from error
    return config, f"config = AutoConfig.from_pretrained({json.dumps(str(found))})"


def from_name(given: str) -> tuple[Any, str]:
    """The config of a type at small sizes, and the lines that make it."""
    sizes = {key: value for key, value in settings(SMALL).items() if value is not None}
    lines = "".join(f"    {key}={value},\n" for key, value in (sizes | {"vocab_size": 32000}).items())
    made = f"""\
# Small sizes, to try it anywhere: without them it is the type's own size.
config = AutoConfig.for_model(
    {json.dumps(given)},
{lines})"""
    return config_of(given, SMALL, given), made
