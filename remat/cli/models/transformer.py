"""Transformers written as functions of their parameters, for next-byte prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from remat.cli.errors import UsageError
from remat.cli.models.hf import build_hf
from remat.cli.models.shapes import VOCAB, Model, Params, Sizes, Wrap


def build(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Model:
    """The model called `gpt`, `llama` or `hf:NAME`, with random weights drawn from `seed`.

    Raises:
        UsageError: for any other name.
    """
    if name.startswith("hf:"):
        return build_hf(name.removeprefix("hf:"), sizes, dtype, device, seed)
    if name not in FAMILIES:
        raise UsageError(f"--model must be one of {', '.join(FAMILIES)} or hf:NAME, but got {name!r}")
    shapes, block, learned = FAMILIES[name]
    draw = partial(normal, generator=torch.Generator().manual_seed(seed), dtype=dtype, device=device)
    params = {
        "embed": draw((VOCAB, sizes.width), 0.02),
        "blocks": [{key: draw(*shape) for key, shape in shapes(sizes).items()} for _ in range(sizes.depth)],
        "head": draw((VOCAB, sizes.width), 0.02),
    }
    if learned:
        params["position"] = draw((sizes.seq, sizes.width), 0.02)
    return Model(params, partial(loss, block=partial(block, heads=sizes.heads)))


def normal(
    shape: tuple[int, ...],
    std: float | None,
    *,
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A tensor of `shape` drawn from N(0, std**2), or of ones when `std` is None."""
    drawn = torch.ones(shape) if std is None else torch.randn(shape, generator=generator) * std
    return drawn.to(device, dtype)


def loss(params: Params, tokens: Tensor, wrap: Wrap, *, block: Callable[..., Tensor]) -> Tensor:
    """Mean cross entropy of predicting tokens[..., 1:] from tokens[..., :-1]."""
    x = F.embedding(tokens[..., :-1], params["embed"])
    if "position" in params:
        x = x + params["position"]
    for layer in params["blocks"]:
        x = wrap(block)(layer, x)
    logits = F.linear(F.layer_norm(x, x.shape[-1:]), params["head"])
    return F.cross_entropy(
        rearrange(logits, "... v -> (...) v").float(), rearrange(tokens[..., 1:], "... -> (...)")
    )


def gpt_shapes(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], float | None]]:
    """Shape and standard deviation of each parameter of a GPT block; None stands for ones."""
    d, scale = sizes.width, 0.02 / math.sqrt(2 * sizes.depth)
    return {
        "norm1": ((d,), None),
        "qkv": ((3 * d, d), 0.02),
        "proj": ((d, d), scale),
        "norm2": ((d,), None),
        "up": ((4 * d, d), 0.02),
        "up_bias": ((4 * d,), 0.0),
        "down": ((d, 4 * d), scale),
        "down_bias": ((d,), 0.0),
    }


def gpt_block(p: Params, x: Tensor, heads: int) -> Tensor:
    """GPT-2's block (Radford et al. 2019): pre-norm attention, then a GELU network; x is [..., t, d]."""
    h = F.layer_norm(x, x.shape[-1:], p["norm1"])
    q, k, v = rearrange(F.linear(h, p["qkv"]), "... t (n h e) -> n ... h t e", n=3, h=heads).unbind(0)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(rearrange(attended, "... h t e -> ... t (h e)"), p["proj"])
    h = F.layer_norm(x, x.shape[-1:], p["norm2"])
    return x + F.linear(F.gelu(F.linear(h, p["up"], p["up_bias"])), p["down"], p["down_bias"])


def llama_shapes(sizes: Sizes) -> dict[str, tuple[tuple[int, ...], float | None]]:
    """Shape and standard deviation of each parameter of a Llama block; None stands for ones."""
    d, scale = sizes.width, 0.02 / math.sqrt(2 * sizes.depth)
    # Two thirds of 4 d, rounded up to a multiple of 32: as many parameters as GPT's network (Shazeer 2020).
    hidden = 32 * math.ceil(8 * d / 3 / 32)
    return {
        "norm1": ((d,), None),
        "qkv": ((3 * d, d), 0.02),
        "proj": ((d, d), scale),
        "norm2": ((d,), None),
        "gate": ((hidden, d), 0.02),
        "up": ((hidden, d), 0.02),
        "down": ((d, hidden), scale),
    }


def llama_block(p: Params, x: Tensor, heads: int) -> Tensor:
    """Llama's block (Touvron et al. 2023): RMS norm, rotary positions, SwiGLU; x is [..., t, d]."""
    h = F.rms_norm(x, x.shape[-1:], p["norm1"])
    q, k, v = rearrange(F.linear(h, p["qkv"]), "... t (n h e) -> n ... h t e", n=3, h=heads).unbind(0)
    attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = x + F.linear(rearrange(attended, "... h t e -> ... t (h e)"), p["proj"])
    h = F.rms_norm(x, x.shape[-1:], p["norm2"])
    return x + F.linear(F.silu(F.linear(h, p["gate"])) * F.linear(h, p["up"]), p["down"])


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of x [..., t, e]: pairs (i, i + e/2) turn by t * 10000**(-2i/e)."""
    t, half = x.shape[-2], x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(t, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


# Name -> (shapes of a block's parameters, the block, whether positions are learned).
FAMILIES = {"gpt": (gpt_shapes, gpt_block, True), "llama": (llama_shapes, llama_block, False)}
