"""Hugging Face causal language models with random weights, as functions of their parameters."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from remat._core import first_line, to_install
from remat.cli.errors import UsageError
from remat.cli.models.shapes import VOCAB, Model, Params, Sizes, Wrap


def build_hf(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Model:
    """The model of config type `name` (`gpt2`, `llama`, `qwen2`, ...) at these sizes, without dropout.

    Nothing is downloaded: the config class and the weights are made here.

    Raises:
        UsageError: when transformers knows no config of that name, or is not installed.
    """
    given = f"--model hf:{name}"
    torch.manual_seed(seed)
    config = config_of(name, sizes, given)
    for key in vars(config):
        # Dropout goes: rows are compared number by number, and a draw per row would differ.
        if isinstance(getattr(config, key), float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, 0.0)
    with _in(dtype), device if device.type == "meta" else contextlib.nullcontext():
        module = module_of(config, given, attn_implementation="sdpa")
    # A module of fake tensors cannot be moved at all.
    if device.type not in ("cpu", "meta"):
        module = module.to(device)
    loss = Loss(module.train())
    return Model({key: p.detach() for key, p in loss.own.items()}, loss, loss.leaves)


@contextlib.contextmanager
def _in(dtype: torch.dtype) -> Iterator[None]:
    """Weights made within have this dtype; positions and tables keep what the model gives them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def transformers_for(given: str) -> Any:
    """The package, or one line that says how to install it."""
    try:
        import transformers
    except ImportError as missing:
        raise UsageError(f"{given} needs transformers: {to_install('hf')}") from missing
    return transformers


def config_of(name: str, sizes: Sizes, given: str) -> Any:
    """The config of a type, at these sizes; `given` is what the user wrote."""
    transformers = transformers_for(given)
    if name not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(name, transformers.CONFIG_MAPPING, n=1) or ("gpt2", "llama")
        file = "" if "hf:" in given else ", or the path of a config.json"
        raise UsageError(
            f"{given}: transformers {transformers.__version__} knows no config type {name!r}. Write "
            f"{_spelled(given, *near)}{file}."
        )
    try:
        return transformers.AutoConfig.for_model(name, **settings(sizes))
    except Exception as error:
        raise UsageError(
            f"{given}: its config cannot be made at these sizes: {first_line(error)[:160]}. Write "
            f"{_spelled(given, 'gpt2', 'llama')}."
        ) from error


def module_of(config: Any, given: str, **options: Any) -> Any:
    """The causal language model of a config, with random weights; `given` is what the user wrote."""
    try:
        module = transformers_for(given).AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:
        # Whatever a model of another kind misses: sizes of its own, a decoder alone, a package.
        raise UsageError(
            f"{given} cannot be made as a causal language model of these sizes: {first_line(error)[:160]}. "
            "Write "
            f"{_spelled(given, 'gpt2', 'llama', 'qwen2', 'mistral')}."
        ) from error
    if not any(hasattr(m, "gradient_checkpointing") for m in module.modules()):
        raise UsageError(
            f"{given} has no layers that can be checkpointed. Write {_spelled(given, 'gpt2', 'llama')}."
        )
    return module


def _spelled(given: str, *names: str) -> str:
    """Names of config types as the user writes them in this place."""
    return " or ".join(f"hf:{name}" if "hf:" in given else name for name in names)


def settings(sizes: Sizes) -> dict[str, Any]:
    """Sizes by the names that configs share; a config maps them to its own where it has others."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "intermediate_size": 4 * sizes.width,
        "max_position_embeddings": sizes.seq,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


class Loss:
    """The loss of a module whose layers call `wrap` where they would call torch's checkpoint."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.own = dict(module.named_parameters())
        # The seam of transformers: layers that know how to be checkpointed.
        self.layers: list[Any] = [m for m in module.modules() if hasattr(m, "gradient_checkpointing")]
        # What `wrap` made of each layer. A new one for every call would be compiled anew for every call.
        self.wrap: Wrap | None = None
        self.wrapped: dict[Any, Any] = {}

    def leaves(self, params: Params) -> Params:
        """The module's own parameters, set to the numbers of `params`.

        Plain autograd runs the module itself: `functional_call` ends with the forward, so that what torch's
        checkpoint recomputes in the backward would be done with other parameters, silently.
        """
        for key, parameter in self.own.items():
            parameter.data = params[key]
        return dict(self.own)

    def __call__(self, params: Params, tokens: Tensor, wrap: Wrap) -> Tensor:
        # Dynamo cannot compare two partials.
        if torch.compiler.is_compiling() or wrap is not self.wrap:
            self.wrap, self.wrapped = wrap, {}
        for layer in self.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = self.checkpointed
        # A sequence without a batch dimension comes from vmap.
        rows = tokens if tokens.dim() > 1 else tokens[None]
        inputs = {"input_ids": rows[:, :-1], "use_cache": False}
        mine = all(params[key] is parameter for key, parameter in self.own.items())
        output = self.module(**inputs) if mine else functional_call(self.module, params, (), inputs)
        logits = output.logits
        return F.cross_entropy(logits.flatten(0, -2).float(), rows[:, 1:].flatten())

    def checkpointed(self, fn: functools.partial[Any], *args: Any) -> Any:
        """Calls a layer wrapped; transformers gives the layer's function with keywords of this very call."""
        assert self.wrap is not None
        if torch.compiler.is_compiling():  # one graph of all layers, made once
            return self.wrap(fn)(*args)
        layer = fn.func, *fn.args
        if layer not in self.wrapped:
            self.wrapped[layer] = self.wrap(functools.partial(*layer))
        return self.wrapped[layer](*args, **fn.keywords)
