"""What generated programs call: regions, Functions old and new, operators, a base for their models."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat import (
    Decision,
    checkpoint_name,
    checkpoint_policy,
    offload,
    remat,
    save_all_but_names,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    scan_remat,
    tiled,
    while_remat,
)
from tests.helpers import unseen as UNSEEN

__all__ = [
    "Accumulates", "Attribute", "Base", "ByFunc", "COND", "Config", "Dirty", "Doubled", "Early", "F",
    "Irreps", "LOOP", "Lazy", "Old", "Pair", "Partly", "R", "RawFill", "Refuses", "Reversible", "SCAN",
    "SavesOutput", "State", "TILED", "Twin", "UNSEEN", "add", "checkpoint", "checkpoint_name",
    "collections", "dataclasses", "functools", "grid", "lookup", "nn", "np", "parametrized", "quantized",
    "random", "run_chain", "torch", "types",
]  # fmt: skip

aten = torch.ops.aten
POLICIES: dict[str, Any] = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "names": save_names("h"),
    "but_names": save_all_but_names("h"),
    "ops": save_ops(aten.tanh, aten.mul, aten.sin),
    "views": save_ops(aten.t, aten.view, aten.transpose, aten.slice, aten.select),
    "no_names": save_matmuls & ~save_names("h"),
    "offload": offload(save_matmuls),
    "odd": checkpoint_policy(lambda info: info.index % 2 == 0),
    "everything": save_everything,
    "none": None,
    "rule": lambda info: info.bytes < 96,
    "modules": checkpoint_policy(lambda info: len(info.module) % 2 == 0, modules=True),
}
# Not drawn: what a program was found with alone.
ALONE: dict[str, Any] = {"away": checkpoint_policy(lambda _: Decision.OFFLOAD)}
PLANNED = {
    "half": checkpoint_policy(budget=0.5, cost="flops"),
    "bytes": checkpoint_policy(budget="1MiB", cost="flops"),
    "peak": checkpoint_policy(peak="16MiB", cost="flops"),  # unseen memory takes eight
}
POLICIES |= PLANNED
Pair = namedtuple("Pair", ["first", "second"])
# Whether `R` makes regions, or leaves functions as they are.
on = [True]
# Where models, inputs and whatever programs make are; random streams are this device's.
device = [torch.device("cpu")]


def R(fn: Callable[..., Any], policy: str = "nothing") -> Callable[..., Any]:
    """A region, or the function as it is in the run without remat."""
    return remat(fn, policy=(POLICIES | ALONE)[policy]) if on[0] else fn


def SCAN(
    body: Callable[[Tensor], Tensor], x: Tensor, length: int, checkpoints: Any, policy: str = "nothing"
) -> Tensor:
    """`body` repeated, as a scan."""
    if on[0]:
        step = lambda h, _: (body(h), None)  # noqa: E731
        return scan_remat(step, x, length=length, checkpoints=checkpoints, policy=POLICIES[policy])[0]
    for _ in range(length):
        x = body(x)
    return x


def TILED(fn: Callable[..., Tensor], *args: Tensor, tiles: int = 2, **shared: Tensor) -> Tensor:
    """`fn` of rows, a tile of them at a time."""
    return (tiled(fn, tiles=tiles) if on[0] else fn)(*args, **shared)


def COND(
    at: Tensor, true: Callable[[Tensor], Tensor], false: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """The one or the other by a number; torch alone differentiates `cond` in few ways."""
    return torch.cond(at, true, false, (x,)) if on[0] else torch.where(at, true(x), false(x))


def LOOP(body: Callable[[Tensor], Tensor], x: Tensor, length: int) -> Tensor:
    """`body` repeated, as a loop of unknown length."""
    if on[0]:
        more, step = (lambda c: c[1] < length), (lambda c: (body(c[0]), c[1] + 1))
        return while_remat(more, step, (x, torch.tensor(0)), checkpoints=2, max_steps=5)[0]
    for _ in range(length):
        x = body(x)
    return x


class Base(nn.Module):
    """What every model of a program has: Python state, and flags that steps flip."""

    w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.on0, self.on1, self.on2 = True, False, False
        self.calls, self.factor = 0, 1.0
        self.history: list[float] = []
        self.gradients: list[float] = []
        self.shared: list[int] = []
        self.cache: dict[Any, Tensor] = {}
        self.escaped: list[Tensor] = []
        self.last = torch.full((4,), 0.5)
        self.noted: Tensor | None = None  # a result that other parts of the same call read
        self.generator = torch.Generator(device[0]).manual_seed(5)


@dataclass(slots=True)
class Config:
    """Settings, in slots that no weak reference finds."""

    scale: float
    more: dict[str, int]


@dataclass
class State:
    """A result that is no pytree."""

    hidden: Tensor
    step: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """Another, which cannot be changed."""

    hidden: Tensor
    pair: tuple[Tensor, Tensor]


class Box:
    """A container that torch's pytrees know."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(Box, lambda b: ([b.value], None), lambda v, _: Box(*v))
# What a program reads as a name of a module, and binds anew.
current: Any = None


class Irreps(tuple[int, ...]):
    """A tuple whose length means something else."""

    def __len__(self) -> int:
        raise NotImplementedError


class Lazy(dict[str, Any]):
    """A dictionary that is not to be iterated."""

    def values(self) -> Any:
        raise RuntimeError("not loaded")

    items = __iter__ = values


class Early(Exception):
    """Ends a forward, with what was made until then."""


class Refuses:
    """An object that answers nothing."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")


def run_chain(functions: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for function in functions:
        x = function(x)
    return x


def add(parts: Any) -> Tensor:
    return parts[0] * 1.5 + parts[1]


def grid(rows: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(rows, dtype=dtype)[:, None] / 4


@functools.cache
def lookup(width: int) -> Tensor:
    return torch.linspace(0.5, 1.0, width).cos()


class Squash(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def parametrized(module: nn.Module) -> nn.Module:
    nn.utils.parametrize.register_parametrization(module, "weight", Squash())
    return module


def quantized() -> nn.Module:
    linear = nn.Sequential(nn.Linear(4, 4))
    return torch.ao.quantization.quantize_dynamic(linear, {nn.Linear}, dtype=torch.qint8)


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin() * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0] * ctx.saved_tensors[0].cos() * 2

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * ctx.saved_tensors[0].cos() * 2


class SavesOutput(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0] * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0] * (1 - ctx.saved_tensors[0] ** 2)


class Twin(torch.autograd.Function):
    """Two results, the second of which nobody differentiates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y.sin(), (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, y = ctx.saved_tensors
        return cotangents[0] * y.sin(), cotangents[0] * x * y.cos()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, y = ctx.saved_tensors
        return tangents[0] * y.sin() + tangents[1] * x * y.cos(), None


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        h = x.exp().tanh()
        ctx.save_for_backward(x, h)
        return h * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, h = ctx.saved_tensors
        return cotangents[0] * 2 * (1 - h**2) * x.exp()


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0] * 3


class Attribute(torch.autograd.Function):
    """Keeps a tensor as an attribute of its context, which no hook sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.factor = y.detach().sin()
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0] * ctx.factor, None


class Partly(torch.autograd.Function):
    """Saves what its inputs need, and nothing for gradients that are not there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y if ctx.needs_input_grad[0] else None, x if ctx.needs_input_grad[1] else None)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        product, total = cotangents
        y, x = ctx.saved_tensors
        grads = []
        for at, other in enumerate((y, x)):
            parts = [] if product is None or other is None else [product * other]
            parts += [] if total is None else [total]
            grads.append(sum(parts) if parts and ctx.needs_input_grad[at] else None)
        return tuple(grads)


class Accumulates(torch.autograd.Function):
    """Calls a function without a graph, and again in its backward, which goes backward inside: gradients of
    weights are accumulated there."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # pyright: ignore
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.fn(x)
        torch.autograd.backward(out, cotangents[0])
        return None, x.grad


class Reversible(torch.autograd.Function):
    """A reversible pair: its backward computes the inputs from the results, and goes backward inside."""

    @staticmethod
    def forward(ctx: Any, f: Any, g: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        ctx.f, ctx.g = f, g
        first = x + f(y)
        second = y + g(first)
        ctx.save_for_backward(first.detach(), second.detach())
        return first, second

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        first, second = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            moved = ctx.g(first)
        torch.autograd.backward(moved, cotangents[1])
        down = cotangents[0] + first.grad
        y = (second - moved).detach().requires_grad_()
        with torch.enable_grad():
            moved = ctx.f(y)
        torch.autograd.backward(moved, down)
        return None, None, down, cotangents[1] + y.grad


class ByFunc(torch.autograd.Function):
    """Its backward is a transform of torch.func, as a scan's is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.sin() * x

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return torch.func.vjp(lambda x: x.sin() * x, ctx.saved_tensors[0])[1](cotangents[0])[0]  # type: ignore


class RawFill(torch.autograd.Function):
    """A kernel that torch does not see fills what `empty` made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = torch.empty_like(x)
        np.sin(x.detach().numpy(), out=out.numpy())
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, out = ctx.saved_tensors
        return cotangents[0] * x.cos() + 0 * out


@torch.library.custom_op("remat_fuzz::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return torch.from_numpy(np.sin(x.detach().numpy()) * factor)


scaled.register_fake(lambda x, factor: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0].cos() * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "factor", inputs[1]),
    ),
)


@torch.library.custom_op("remat_fuzz::new_like", mutates_args=())
def new_like(x: Tensor) -> Tensor:
    return x.cos() + 1


new_like.register_fake(lambda x: torch.empty_like(x))
new_like.register_autograd(
    lambda ctx, grad: -grad * ctx.saved_tensors[0].sin(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("remat_fuzz::bump", mutates_args=("counter",))
def bump(counter: Tensor) -> None:
    counter.add_(1)


bump.register_fake(lambda counter: None)


# What a model has, by the names that its source reads.
FEATURES = {
    "w": "self.w = nn.Parameter(torch.randn(4, 4) / 2)",
    "scale": "self.scale = nn.Parameter(torch.rand(4) + 0.5)",
    "offset": "self.offset = nn.Parameter(torch.zeros(()))",
    "table": "self.table = nn.Parameter(torch.randn(5, 4) / 2)",
    "lin": "self.lin = nn.Linear(4, 4)",
    "mlp": "self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))",
    "tied": "self.lin = nn.Linear(4, 4)\n"
    "self.tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())\n"
    "self.tied[0].weight = self.lin.weight",
    "bn": "self.bn = nn.BatchNorm1d(4)",
    "drop": "self.drop = nn.Dropout(0.4)",
    "steps": 'self.register_buffer("steps", torch.zeros(()))',
    "mean": 'self.register_buffer("mean", torch.full((4,), 0.5))',
    "queue": 'self.register_buffer("queue", torch.linspace(-1, 1, 32).view(8, 4))',
    "spectral": "self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
    "weighted": "self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
    "parametrized": "self.parametrized = parametrized(nn.Linear(4, 4))",
    "instance": "self.instance = nn.InstanceNorm1d(4, track_running_stats=True)",
    "renorm": "self.renorm = nn.Embedding(5, 4, max_norm=0.5)",
    "attention": "self.attention = nn.MultiheadAttention(4, 2, batch_first=True)",
    "gru": "self.gru = nn.GRU(4, 4, batch_first=True)",
    "adjacency": "self.adjacency = (torch.eye(4, dtype=DTYPE) + torch.ones(4, 4, dtype=DTYPE).tril())"
    ".to_sparse()",
    "quantized": "self.quantized = quantized()",
    "conv": "self.conv = nn.Conv2d(2, 2, 3, padding=1)",
    "bn2": "self.bn2 = nn.BatchNorm2d(2)",
    "group": "self.group = nn.GroupNorm(2, 2)",
    "lstm": "self.lstm = nn.LSTM(4, 4, batch_first=True)",
    "encoder": "self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)",
    "experts": "self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))",
    "named": "self.named = nn.ParameterDict({'up': nn.Parameter(torch.randn(4, 6) / 2), "
    "'down': nn.Parameter(torch.randn(6, 4) / 2)})",
    "frozen": "self.frozen = nn.Linear(4, 4).requires_grad_(False)",
    "scripted": "self.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double())",
    "config": "self.config = Config(0.5, {'power': 2})",
    "irreps": "self.irreps = Irreps((1, 3))",
    "lazy": "self.lazy = Lazy(scale=2.0)",
    "tree": "self.tree = [1.5]\nself.tree.append(self.tree)",
    "refuses": "self.refuses = Refuses()",
}
