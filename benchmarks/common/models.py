"""The models that all peers run: functions of their parameters, in sizes for a CPU and for a GPU.

Each is a frozen dataclass of its sizes; `problem` draws weights and a batch from a seed, and `Problem.bind`
puts a peer's functions in their places.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from remat._scan import scan_layers
from remat.cli.models import VOCAB, Params, Sizes, Wrap, fresh, normal, rotate

Shapes = dict[str, tuple[tuple[int, ...], float | None]]
Part = Callable[[str, Callable[..., Tensor]], Callable[..., Tensor]]
Loss = Callable[[Any, Tensor], Tensor]
# What `.backward()` leaves gradients on, made of parameters.
Leaves = Callable[[Any], Any]


def plain(name: str, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The part of most peers: names say nothing to them."""
    return fn


@dataclass(frozen=True)
class Around:
    """What a peer puts into a model, which computes the same with it as without.

    Attributes:
        wrap: stands around every block.
        part: `part(name, fn)` stands around every named step in a block, for peers that choose by place.
        scan: where layers are stacked: options of `remat.scan_layers`, None for a loop over the layers.
    """

    wrap: Wrap
    part: Part = plain
    scan: dict[str, Any] | None = None


@dataclass(frozen=True)
class Problem:
    """One model with its numbers: parameters and a batch, the same for all peers.

    `bind(around)` gives `loss(params, batch)`, and what makes of `params` the leaves that `.backward()` is to
    leave gradients on.
    """

    params: Params
    batch: Tensor
    bind: Callable[[Around], tuple[Loss, Leaves]]


class Model(Protocol):
    """What a benchmark asks of a model. `dataclasses.replace(model, batch=2)` is another one."""

    @property
    def name(self) -> str: ...

    def problem(self, device: torch.device, dtype: torch.dtype, seed: int, stacked: bool = False) -> Problem:
        """Weights and a batch drawn from `seed`; with `stacked`, of all layers along a first axis."""
        ...


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight if bias is None else x @ weight + bias


def attend(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    q, k, v = rearrange(qkv, "... t (n h e) -> n ... h t e", n=3, h=heads).unbind(0)
    return rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=causal), "... h t e -> ... t (h e)")


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """Causal attention of `heads` queries to `groups` keys and values (Ainslie et al. 2023), rotary."""
    q = rearrange(q, "... t (h e) -> ... h t e", h=heads)
    k, v = (rearrange(z, "... t (g e) -> ... g t e", g=groups) for z in (k, v))
    out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
    return rearrange(out, "... h t e -> ... t (h e)")


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@dataclass(frozen=True)
class Transformer:
    """The sizes that every transformer here has; `depth` counts its blocks."""

    name: str
    depth: int
    width: int
    heads: int
    seq: int
    batch: int


@dataclass(frozen=True)
class Stack(Transformer):
    """Blocks one after another on [..., seq, width]; the loss is the mean square of what comes out."""

    def shapes(self) -> Shapes:
        """Of one block's parameters: a shape, and a standard deviation or None for ones."""
        raise NotImplementedError

    def block(self, p: Params, x: Tensor, part: Part) -> Tensor:
        raise NotImplementedError

    def problem(self, device: torch.device, dtype: torch.dtype, seed: int, stacked: bool = False) -> Problem:
        first = drawn(tuple(self.shapes().items()), dtype, seed)
        # Turned weights of the first block: other numbers, without minutes of drawing for 10 GB.
        blocks: Any = [
            {key: w.to(device, copy=True).roll(17 * layer, -1) for key, w in first.items()}
            for layer in range(self.depth)
        ]
        if stacked:
            blocks = {key: torch.stack([layer[key] for layer in blocks]) for key in first}
        draw = torch.Generator().manual_seed(seed + 1)
        x = torch.randn(self.batch, self.seq, self.width, generator=draw).to(device, dtype)
        return Problem({"blocks": blocks}, x, self.bind)

    def bind(self, around: Around) -> tuple[Loss, Leaves]:
        block = partial(self.block, part=around.part)
        region, scan = around.wrap(block), around.scan

        def loss(params: Params, x: Tensor) -> Tensor:
            blocks = params["blocks"]
            stacked = isinstance(blocks, dict)
            if stacked and scan is not None:
                return scan_layers(block, blocks, x, **scan).float().square().mean()
            for layer in layers(blocks) if stacked else blocks:
                x = region(layer, x)
            return x.float().square().mean()

        return loss, fresh

    def deviation(self) -> float:
        """Of weights behind which nothing normalizes: the sum over the blocks stays of order one."""
        return 0.02 / math.sqrt(2 * self.depth)


@lru_cache(maxsize=1)
def drawn(shapes: tuple[tuple[str, Any], ...], dtype: torch.dtype, seed: int) -> Params:
    """Weights of one block, drawn on the CPU: the same numbers on every device and at every batch."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(normal, generator=generator, dtype=dtype, device=torch.device("cpu"))
    return {key: draw(*shape) for key, shape in shapes}


def layers(stacked: Params) -> list[Params]:
    """The parameters of each layer, as views of the stack."""
    slices = {key: stack.unbind(0) for key, stack in stacked.items()}
    return [dict(zip(slices, layer, strict=True)) for layer in zip(*slices.values(), strict=True)]


@dataclass(frozen=True)
class GPT(Stack):
    """GPT-2's block (Radford et al. 2019); with `causal=False`, that of a vision transformer."""

    causal: bool = True

    def shapes(self) -> Shapes:
        d, small = self.width, self.deviation()
        norms: Shapes = {f"{norm}_{kind}": ((d,), std) for norm in NORMS for kind, std in SCALED}
        return norms | {
            "qkv": ((d, 3 * d), 0.02),
            "qkv_bias": ((3 * d,), 0.0),
            "proj": ((d, d), small),
            "proj_bias": ((d,), 0.0),
            "up": ((d, 4 * d), 0.02),
            "up_bias": ((4 * d,), 0.0),
            "down": ((4 * d, d), small),
            "down_bias": ((d,), 0.0),
        }

    def block(self, p: Params, x: Tensor, part: Part) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:], p["norm1_scale"], p["norm1_shift"])
        h = part("qkv", affine)(h, p["qkv"], p["qkv_bias"])
        h = part("attention", partial(attend, heads=self.heads, causal=self.causal))(h)
        x = part("add1", torch.add)(x, part("proj", affine)(h, p["proj"], p["proj_bias"]))
        return part("add2", torch.add)(x, self.mlp(p, x, part))

    def mlp(self, p: Params, x: Tensor, part: Part) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:], p["norm2_scale"], p["norm2_shift"])
        h = part("gelu", F.gelu)(part("up", affine)(h, p["up"], p["up_bias"]))
        return part("down", affine)(h, p["down"], p["down_bias"])


NORMS = ("norm1", "norm2")
SCALED = (("scale", None), ("shift", 0.0))


@dataclass(frozen=True)
class Llama(Stack):
    """Llama's block (Touvron et al. 2023): RMS norm, rotary grouped-query attention, SwiGLU."""

    groups: int
    hidden: int

    def shapes(self) -> Shapes:
        d, inner, small = self.width, self.width // self.heads * self.groups, self.deviation()
        return {
            "norm1": ((d,), None),
            "q": ((d, d), 0.02),
            "k": ((d, inner), 0.02),
            "v": ((d, inner), 0.02),
            "proj": ((d, d), small),
            "norm2": ((d,), None),
            "gate": ((d, self.hidden), 0.02),
            "up": ((d, self.hidden), 0.02),
            "down": ((self.hidden, d), small),
        }

    def block(self, p: Params, x: Tensor, part: Part) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], p["norm1"], 1e-5)
        q, k, v = (part(name, affine)(h, p[name]) for name in "qkv")
        h = part("attention", partial(attend_grouped, heads=self.heads, groups=self.groups))(q, k, v)
        x = part("add1", torch.add)(x, part("proj", affine)(h, p["proj"]))
        h = F.rms_norm(x, x.shape[-1:], p["norm2"], 1e-5)
        h = part("gated", gated)(part("gate", affine)(h, p["gate"]), part("up", affine)(h, p["up"]))
        return part("add2", torch.add)(x, part("down", affine)(h, p["down"]))


@dataclass(frozen=True)
class MoE(GPT):
    """A GPT block whose network is of experts, each of which takes its best tokens (Zhou et al. 2022)."""

    experts: int = 8
    chosen: int = 2

    def shapes(self) -> Shapes:
        d, e, small = self.width, self.experts, self.deviation()
        dense = {
            key: shape for key, shape in super().shapes().items() if "up" not in key and "down" not in key
        }
        return dense | {
            "router": ((d, e), 0.02),
            "first": ((e, d, 4 * d), 0.02),
            "second": ((e, 4 * d, d), small),
        }

    def mlp(self, p: Params, x: Tensor, part: Part) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:], p["norm2_scale"], p["norm2_shift"])
        tokens = rearrange(h, "... d -> (...) d")
        capacity = self.chosen * len(tokens) // self.experts
        scores = rearrange((tokens @ p["router"]).softmax(-1), "t e -> e t")
        weight, taken = scores.topk(capacity, -1)
        inner = torch.bmm(tokens[taken], p["first"])
        made = torch.bmm(F.gelu(inner), p["second"]) * weight[..., None]
        out = torch.zeros_like(tokens).index_add(0, taken.flatten(), rearrange(made, "e c d -> (e c) d"))
        return out.view(x.shape)


@dataclass(frozen=True)
class UNet:
    """A U-Net of residual blocks (Ho et al. 2020, without attention); `seq` is the side of the image."""

    name: str
    depth: int
    width: int
    seq: int
    batch: int
    FACTORS: ClassVar = (1, 2, 4, 4)

    def pairs(self) -> list[tuple[int, int]]:
        """Channels in and out of each residual block: down, middle, up."""
        sizes = [factor * self.width for factor in self.FACTORS[: self.depth]]
        down = list(zip([self.width, *sizes], sizes, strict=False))
        up = [(a + b, b) for a, b in zip([sizes[-1], *sizes[:0:-1]], sizes[::-1], strict=True)]
        return [*down, (sizes[-1], sizes[-1]), *up]

    def problem(self, device: torch.device, dtype: torch.dtype, seed: int, stacked: bool = False) -> Problem:
        draw = partial(normal, generator=torch.Generator().manual_seed(seed), dtype=dtype, device=device)

        def conv(a: int, b: int, side: int) -> Tensor:
            return draw((b, a, side, side), 1 / math.sqrt(a * side * side))

        residual = [
            {"norm1": draw((a,), None), "conv1": conv(a, b, 3), "skip": conv(a, b, 1)}
            | {"norm2": draw((b,), None), "conv2": conv(b, b, 3)}
            for a, b in self.pairs()
        ]
        params = {"stem": conv(4, self.width, 3), "blocks": residual}
        return Problem(params, draw((self.batch, 4, self.seq, self.seq), 1.0), self.bind)

    def bind(self, around: Around) -> tuple[Loss, Leaves]:
        region, depth = around.wrap(residual), self.depth

        def loss(params: Params, x: Tensor) -> Tensor:
            x, skips, blocks = F.conv2d(x, params["stem"], padding=1), [], params["blocks"]
            for layer in blocks[:depth]:
                skips.append(region(layer, x))
                x = F.avg_pool2d(skips[-1], 2)
            x = region(blocks[depth], x)
            for layer in blocks[depth + 1 :]:
                x = region(layer, torch.cat((F.interpolate(x, scale_factor=2.0), skips.pop()), -3))
            return x.float().square().mean()

        return loss, fresh


def residual(p: Params, x: Tensor) -> Tensor:
    """Two convolutions with group norms and SiLU."""
    h = F.conv2d(F.silu(F.group_norm(x, 8, p["norm1"])), p["conv1"], padding=1)
    h = F.conv2d(F.silu(F.group_norm(h, 8, p["norm2"])), p["conv2"], padding=1)
    return F.conv2d(x, p["skip"]) + h


@dataclass(frozen=True)
class HuggingFace(Transformer):
    """A causal language model of transformers by the name of its config, with random weights."""

    def problem(self, device: torch.device, dtype: torch.dtype, seed: int, stacked: bool = False) -> Problem:
        from remat.cli.models import Loss as ModuleLoss, build_hf

        sizes = Sizes(self.depth, self.width, self.heads, self.seq)
        model = build_hf(self.name.removeprefix("hf-"), sizes, dtype, device, seed)
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, (self.batch, self.seq + 1), generator=draw).to(device)
        module = getattr(model.loss, "module")  # noqa: B009

        def bind(around: Around) -> tuple[Loss, Leaves]:
            # A module of its own for each peer, which sets attributes of its layers; the tensors are shared.
            shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
            own = ModuleLoss(copy.deepcopy(module, shared))
            return partial(own, wrap=around.wrap), own.leaves

        return Problem(model.params, tokens, bind)


def size(depth: int, width: int, heads: int, seq: int, batch: int) -> dict[str, int]:
    return {"depth": depth, "width": width, "heads": heads, "seq": seq, "batch": batch}


LLAMA = {"groups": 8, "hidden": 14_336}
SMALL = {"groups": 2, "hidden": 896}
VIT = partial(GPT, causal=False)
Sized = Callable[..., Model]
# Name -> (sizes for a GPU, sizes for a CPU). Those for a GPU are the published ones.
SIZES: dict[str, tuple[Sized, dict[str, int], dict[str, int]]] = {
    "gpt2-medium": (GPT, size(24, 1024, 16, 1024, 8), size(4, 256, 4, 256, 4)),
    "gpt2-xl": (GPT, size(8, 1600, 25, 1024, 8), size(2, 400, 5, 128, 4)),
    "llama3-8b": (Llama, LLAMA | size(4, 4096, 32, 8192, 1), SMALL | size(4, 256, 8, 256, 4)),
    "llama-32k": (Llama, LLAMA | size(2, 4096, 32, 32_768, 1), SMALL | size(2, 128, 4, 2048, 1)),
    "llama-128k": (Llama, LLAMA | size(1, 4096, 32, 131_072, 1), SMALL | size(1, 128, 4, 8192, 1)),
    "moe": (MoE, size(8, 1024, 16, 2048, 8), size(2, 128, 4, 128, 4)),
    "vit-l": (VIT, size(24, 1024, 16, 256, 64), size(4, 256, 4, 64, 8)),
    "hf-llama": (HuggingFace, size(8, 2048, 16, 2048, 4), size(4, 128, 4, 128, 4)),
    "hf-gpt2": (HuggingFace, size(12, 768, 12, 1024, 8), size(4, 128, 4, 128, 4)),
    "unet": (
        UNet,
        {"depth": 4, "width": 128, "seq": 64, "batch": 32},
        {"depth": 3, "width": 32, "seq": 32, "batch": 4},
    ),
}


def named(name: str, device: str = "cpu", **sizes: int) -> Model:
    """The model called `name` in its size for the device; `sizes` (depth, batch, ...) replace its own."""
    kind, large, small = SIZES[name]
    return kind(name=name, **(small if device == "cpu" else large) | sizes)
