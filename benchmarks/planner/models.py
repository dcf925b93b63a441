"""The planner's benchmark set: models built on fake tensors, so that no size costs memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from remat.plan.joint import Joint, record
from remat.transforms.compat import fake_mode

Attention = Callable[..., torch.Tensor]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """The CUDA flash kernel, by name: fake tensors know its metadata on any machine."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """The cuDNN kernel, which torch's planner takes for a cheap op."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[0]


@torch.library.custom_op("remat_bench::attention", mutates_args=())
def _custom(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@torch.library.custom_op("remat_bench::attention_backward", mutates_args=())
def _custom_backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_custom.register_fake(lambda q, k, v: torch.empty_like(q))
_custom_backward.register_fake(
    lambda g, q, k, v, out: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)
_custom.register_autograd(
    lambda ctx, g: torch.ops.remat_bench.attention_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


def custom(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Attention as a library's custom op."""
    return torch.ops.remat_bench.attention(q, k, v)


class GPTBlock(nn.Module):
    """Pre-norm attention and GELU MLP."""

    def __init__(self, width: int, heads: int, attention: Attention = flash, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed(self.attend(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (z.view(batch, length, self.heads, -1).transpose(1, 2) for z in (q, k, v))
        return x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(batch, length, width))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm2(x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class LlamaBlock(nn.Module):
    """RMS norm, rotary grouped-query attention, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = (linear(width, groups * self.head) for _ in range(2))
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    @staticmethod
    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * scale

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.feed(self.attend(x, cos, sin), cos, sin)

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm(x, self.norm1)
        q, k, v = (f(y).view(batch, length, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        repeats = q.shape[1] // k.shape[1]
        k, v = (z[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(q.shape) for z in (k, v))
        return x + self.out(flash(q, k, v, True).transpose(1, 2).reshape(batch, length, width))

    def feed(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class MoEBlock(GPTBlock):
    """A GPT block whose MLP routes each token to two of eight experts, by capacity."""

    def __init__(self, width: int, heads: int, experts: int = 8) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.router = nn.Linear(width, experts, bias=False)
        self.first = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.second = nn.Parameter(torch.empty(experts, 4 * width, width))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(tokens).softmax(-1).transpose(0, 1).topk(tokens.shape[0] // 4, -1)
        taken = tokens[chosen.reshape(-1)].view(*chosen.shape, -1)
        made = torch.bmm(F.gelu(torch.bmm(taken, self.first)), self.second) * weight[..., None]
        out = torch.zeros_like(tokens).index_add(0, chosen.reshape(-1), made.reshape(-1, x.shape[-1]))
        return out.view(x.shape)


class LoRA(nn.Module):
    """A frozen linear map with a trainable one of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


class Residual(nn.Module):
    """Two convolutions with group norms and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1, self.conv2 = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Four levels, two residual blocks each way, skips by concatenation."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 4 * width]
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.ModuleList([Residual(a, b), Residual(b, b)])
            for a, b in zip([width, *sizes], sizes, strict=False)
        )
        self.middle = Residual(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(
            nn.ModuleList([Residual(a + b, b), Residual(b, b)])
            for a, b in zip([sizes[-1], *sizes[:0:-1]], sizes[::-1], strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(x), []
        for first, second in self.down:  # type: ignore[misc]
            x = second(first(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for first, second in self.up:  # type: ignore[misc]
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = second(first(torch.cat((x, skips.pop()), 1)))
        return x


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, make: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *shared)
        return x


def llama(depth: int, width: int = 1024, length: int = 2048, linear: Any = None, batch: int = 1) -> Any:
    plain = linear or (lambda a, b: nn.Linear(a, b, bias=False))
    heads = width // 128
    model = Stack(lambda: LlamaBlock(width, heads, max(heads // 4, 1), 7 * width // 2, plain), depth)
    return model, [(batch, length, width)], [(length, 64), (length, 64)]


def gpt(
    depth: int, width: int = 1024, length: int = 2048, attention: Attention = flash, batch: int = 4
) -> Any:
    return Stack(lambda: GPTBlock(width, width // 64, attention), depth), [(batch, length, width)], []


MODELS: dict[str, Callable[[], Any]] = {
    "GPT 1": lambda: gpt(1, width=4096, batch=1),
    "GPT 12": lambda: gpt(12),
    "GPT 24": lambda: gpt(24),
    "Llama 1": lambda: llama(1, width=4096),
    "Llama 16": lambda: llama(16),
    "Llama 32": lambda: llama(32),
    "MoE 12": lambda: (Stack(lambda: MoEBlock(1024, 16), 12), [(4, 2048, 1024)], []),
    "ViT 24": lambda: gpt(24, length=256, batch=64),
    "U-Net": lambda: (UNet(), [(8, 4, 64, 64)], []),
    "LoRA 4": lambda: llama(4, width=4096, linear=LoRA),
    "32k custom": lambda: gpt(1, length=32768, attention=custom, batch=1),
    "32k cuDNN": lambda: gpt(1, length=32768, attention=cudnn, batch=1),
}


def built(name: str) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """A model of the set in bfloat16 on fake tensors, its inputs and its constants.

    It is one in the middle of a network: x is no leaf.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with fake_mode([]):
            model, data, shared = MODELS[name]()
            inputs = [torch.empty(*shape, requires_grad=True) * 1 for shape in data]
            return model, inputs, [torch.empty(*shape) for shape in shared]
    finally:
        torch.set_default_dtype(before)


def joint(name: str) -> Joint:
    """The joint graph of a model of the set."""
    model, inputs, constants = built(name)
    return record(model, (*inputs, *constants))
