"""Options that several commands have, and the step that they name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro

from remat._api import remat
from remat.cli.checked import device_of
from remat.cli.errors import UsageError
from remat.cli.models import FAMILIES, Model, Sizes, batches, build
from remat.cli.target import load

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FN")]


@dataclass(kw_only=True)
class ModelOptions:
    """The sizes of a transformer with random weights, and its batch."""

    depth: int = 4
    """Blocks of a built-in model."""
    width: int = 256
    """Width of its residual stream."""
    heads: int = 4
    """Its attention heads."""
    seq: int = 256
    """Bytes in a sequence."""
    batch: int = 8
    """Sequences in a batch."""
    seed: int = 0
    """Seed of weights and batches."""

    def build(self, name: str, dtype: torch.dtype, device: torch.device) -> Model:
        """The model called `gpt`, `llama` or `hf:NAME` at these sizes."""
        if self.batch < 1:
            raise UsageError(f"--batch {self.batch} must be positive. Write --batch 8.")
        sizes = Sizes(self.depth, self.width, self.heads, self.seq)
        return build(name, sizes, dtype, device, self.seed)


@dataclass(kw_only=True)
class StepOptions(ModelOptions):
    """What is to be run: a function of the user's, or a built-in model."""

    target: Target
    """A function of tensors, or one of no arguments that returns (fn, *args); or gpt, llama, hf:NAME."""
    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A tensor argument, as 4x128x256; once for each."""
    dtype: str = "float32"
    """Of the inputs, or of the model."""
    device: str = "cpu"
    """Where the inputs are made: cpu, cuda, cuda:1, mps."""

    def step(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function, and its arguments."""
        device = device_of(self.device)
        if self.target in FAMILIES or self.target.startswith("hf:"):
            return self._model_step(device)
        if ":" not in self.target and (near := difflib.get_close_matches(self.target, FAMILIES, n=1)):
            raise UsageError(f"there is no model {self.target!r}; did you mean {near[0]}, or MODULE:FN?")
        return load(self.target, self.input, self.dtype, self.device)

    def _model_step(self, device: torch.device) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.input:
            raise UsageError(f"{self.target} makes its own tokens: write --batch and --seq, not --input.")
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype} is not a dtype of a model. Write {', '.join(DTYPES)}.")
        model = self.build(self.target, DTYPES[self.dtype], device)
        params = model.leaves(model.params)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            return model.loss(params, tokens, remat)

        step.__name__ = self.target
        return step, (next(batches(self.batch, self.seq, self.seed)).to(device),)
