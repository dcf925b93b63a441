"""Hugging Face's architectures as tiny models: with remat bit for bit what they are without.

`python -m benchmarks.architectures [NAMES]` builds what a tiny configuration can, applies remat layer by
layer, and compares loss and gradients of two steps. Nothing is downloaded. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import warnings
from typing import Any

import torch

from remat import RematError, nn as remat_nn, save_matmuls, save_nothing

SIZES = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "d_inner": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What an architecture needs besides: sizes that must agree with each other.
OWN = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"),
        {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "state_size": 8, "chunk_size": 4},
}
POLICIES = {"nothing": save_nothing, "matmuls": save_matmuls}


class Untried(Exception):
    """Why an architecture is not compared."""


def build(kind: str) -> Any:
    """A tiny model of an architecture, the same each time."""
    import transformers

    try:
        config: Any = transformers.AutoConfig.for_model(kind)
        for name, value in (SIZES | OWN.get(kind, {})).items():
            with contextlib.suppress(Exception):
                if hasattr(config, name):
                    setattr(config, name, value)
        config.use_cache = False
        with torch.device("meta"):
            count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if count > 5_000_000:
            raise Untried(f"{count / 1e6:.0f} million parameters: it has sizes of its own")
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).train()
    except Untried:
        raise
    except Exception as error:
        raise Untried(f"no tiny configuration: {type(error).__name__}: {error}") from error


def steps(model: Any) -> list[torch.Tensor]:
    """Loss and gradients of two steps: a first call and a second."""
    tokens = torch.tensor([[1, 4, 2, 7, 3, 9, 11, 5], [5, 5, 6, 9, 10, 8, 4, 3]])
    found: list[torch.Tensor] = []
    torch.manual_seed(1)
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    return found


def apply(model: Any, policy: Any) -> None:
    """Every layer a region, wherever this architecture has its layers."""
    for layers in ("*.layers.*", "*.h.*", "*.layer.*", "*.blocks.*"):
        with contextlib.suppress(RematError):
            remat_nn.apply(model, policy=policy, layers=layers)
            return
    remat_nn.apply(model, policy=policy)


def verdict(kind: str, policy: str) -> str:
    """What comes out for one architecture: bitwise, refused, WRONG, untried, and why."""
    try:
        plain = build(kind)
    except Untried as why:
        return f"untried: {why}"
    try:
        expected = steps(plain)
        again = steps(build(kind))
    except Exception as error:
        return f"untried: without remat it fails: {type(error).__name__}: {error}"
    if not all(map(torch.equal, expected, again)):
        return "untried: two runs without remat differ"
    try:
        model = build(kind)
        apply(model, POLICIES[policy])
        got = steps(model)
    except RematError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"
    if len(got) == len(expected) and all(map(torch.equal, got, expected)):
        return "bitwise"
    worst = max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=False))
    return f"WRONG: by {worst:.3g}"


def main() -> int:
    """Print a line for each architecture and the sums; 1 where one is wrong."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all of them by default")
    parser.add_argument("--policy", choices=POLICIES, default="nothing")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    sums: dict[str, int] = {}
    for kind in given.names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.redirect_stderr(io.StringIO()):
            text = " ".join(verdict(kind, given.policy).split())
        print(f"{kind}: {text[:160]}", flush=True)
        sums[text.split(":")[0]] = sums.get(text.split(":")[0], 0) + 1
    print(", ".join(f"{count} {what}" for what, count in sums.items()))
    return int(any(what in sums for what in ("WRONG", "FAILED")))


if __name__ == "__main__":
    sys.exit(main())
