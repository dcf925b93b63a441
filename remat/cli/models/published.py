"""Published models by name, and any other by its config: built without weights, with the inputs of a step."""

from __future__ import annotations

import difflib
import importlib
import json
from pathlib import Path
from typing import Any

import torch

from remat._core import first_line, to_install
from remat.cli.errors import UsageError
from remat.cli.models.hf import transformers_for

_MIXTRAL = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
_MIXTRAL |= {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_LLAMA = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_WHISPER = {"vocab_size": 51866, "d_model": 1280, "num_mel_bins": 128, "max_target_positions": 448}
_WHISPER |= {f"{half}_layers": 32 for half in ("encoder", "decoder")}
_WHISPER |= {f"{half}_attention_heads": 20 for half in ("encoder", "decoder")}
_WHISPER |= {f"{half}_ffn_dim": 5120 for half in ("encoder", "decoder")}
_VIT = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120}
_VIT |= {"image_size": 224, "patch_size": 14}
# Name -> (class of transformers, type of config, fields of the published config.json).
PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-3-8b": ("LlamaForCausalLM", "llama", _LLAMA | _8B),
    "llama-3-70b": ("LlamaForCausalLM", "llama", _LLAMA | _70B),
    "mixtral-8x7b": ("MixtralForCausalLM", "mixtral", _MIXTRAL),
    # The class's own defaults are those of the 671B model.
    "deepseek-v3": ("DeepseekV3ForCausalLM", "deepseek_v3", {}),
    # What one of 32 ranks that share the experts has of it. Its eight experts take every token of this rank,
    # which are as many as an even router sends them from all ranks.
    "deepseek-v3-ep32": (
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {"n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    ),
    "whisper-large-v3": ("WhisperForConditionalGeneration", "whisper", _WHISPER),
    "vit-h-14": ("ViTForImageClassification", "vit", _VIT),
}

# The fields of SDXL's config.json that are not those of the class.
_SDXL: dict[str, Any] = {"sample_size": 128, "block_out_channels": (320, 640, 1280)}
_SDXL |= {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")}
_SDXL |= {"up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")}
_SDXL |= {"transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20)}
_SDXL |= {"cross_attention_dim": 2048, "use_linear_projection": True, "addition_embed_type": "text_time"}
_SDXL |= {"addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}
UNET = "sdxl-unet"


def published(name: str, dtype: torch.dtype, batch: int, seq: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model on the meta device, and the keywords of a step of it.

    Args:
        name: one of `PUBLISHED`, `UNET`, a `config.json` or the folder of one, or a type of config with its
            defaults.
        dtype: of the parameters.
        batch, seq: sizes of the inputs; of images and sounds the config says the rest.

    Raises:
        UsageError: transformers is missing, or makes no such model.
    """
    given = f"hf:{name}"
    if name == UNET:
        return _unet(dtype, batch)
    transformers = transformers_for(given)
    try:
        kind, config = _config(transformers, name)
        config.use_cache = False
        with torch.device("meta"):
            model = kind._from_config(config, attn_implementation="sdpa", dtype=dtype)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{given} cannot be built: {first_line(error)[:200]}. Write a config.json of a transformers "
            f"model, or one of {', '.join((*PUBLISHED, UNET))}."
        ) from error
    return model.train(), _inputs(model, config, dtype, batch, seq)


def check_published(name: str) -> None:
    """Raise a UsageError where `published` knows no such model; nothing is built."""
    if name != UNET:
        _config(transformers_for(f"hf:{name}"), name)


def _unet(dtype: torch.dtype, batch: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """SDXL's U-Net at 1024 x 1024 pixels, by diffusers."""
    try:
        diffusers: Any = importlib.import_module("diffusers")
    except ImportError as missing:
        raise UsageError(f"hf:{UNET} needs diffusers: {to_install('hf')}") from missing
    with torch.device("meta"):
        model: Any = diffusers.UNet2DConditionModel(**_SDXL)
        # As a module: the class's own method warns that some checkpoints have weights of two dtypes.
        torch.nn.Module.to(model, dtype)
        given = {"text_embeds": torch.empty(batch, 1280), "time_ids": torch.empty(batch, 6)}
        return model.train(), {
            "sample": torch.empty(batch, 4, 128, 128, dtype=dtype),
            "timestep": torch.zeros(batch, dtype=torch.long),
            "encoder_hidden_states": torch.empty(batch, 77, 2048, dtype=dtype),
            "added_cond_kwargs": {key: tensor.to(dtype) for key, tensor in given.items()},
        }


def _config(transformers: Any, name: str) -> tuple[Any, Any]:
    """The class of a model, and its config."""
    path = Path(name)
    if name in PUBLISHED:
        kind, model_type, fields = PUBLISHED[name]
    elif path.exists():
        fields = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        model_type, kind = fields.pop("model_type", ""), (fields.get("architectures") or [""])[0]
    else:
        kind, model_type, fields = "", name, {}
    known = transformers.CONFIG_MAPPING
    if model_type not in known and path.exists():
        said = f"the type {model_type!r}, which transformers does not know" if model_type else "no model_type"
        raise UsageError(f"hf:{name}: the config names {said}. Write one with a model_type, such as llama.")
    if model_type not in known:
        near = difflib.get_close_matches(name, (*PUBLISHED, UNET, *known), n=1)
        meant = f"Did you mean hf:{near[0]}? " if near else ""
        raise UsageError(
            f"hf:{name} is no published model known here, no file, and no type of config. {meant}Write "
            f"one of {', '.join((*PUBLISHED, UNET))}, a path to a config.json, or a type such as llama."
        )
    if hasattr(transformers, kind):
        return getattr(transformers, kind), known[model_type](**fields)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    if model_type not in names:
        raise UsageError(
            f'hf:{name}: the config names no "architectures", and {model_type} is no language model.'
        )
    return getattr(transformers, names[model_type]), known[model_type](**fields)


def _inputs(model: Any, config: Any, dtype: torch.dtype, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """The keywords of a step: what the model's forward takes first, and labels."""

    def tokens(count: int) -> torch.Tensor:
        return torch.zeros(batch, count, dtype=torch.long, device="meta")

    first = model.main_input_name
    if first == "pixel_values":
        sides = (
            config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        )
        images = torch.empty(batch, config.num_channels, *sides, dtype=dtype, device="meta")
        return {first: images, "labels": tokens(1)[:, 0]}
    if first == "input_features":
        sound = 2 * config.max_source_positions
        features = torch.empty(batch, config.num_mel_bins, sound, dtype=dtype, device="meta")
        length = min(seq, config.max_target_positions)
        return {first: features, "decoder_input_ids": tokens(length), "labels": tokens(length)}
    return {first: tokens(seq), "labels": tokens(seq)}
