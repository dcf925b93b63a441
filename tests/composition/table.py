"""One table of functions and one of policies, for reports and graphs; the bank has more functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from remat import checkpoint_name, checkpoint_policy
from remat.policies import (
    offload,
    save_attention,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    save_weight_matmuls,
)

aten = torch.ops.aten
# Where arguments are: REMAT_TEST_DEVICE=cuda runs the table on a card.
DEVICE = torch.device(os.environ.get("REMAT_TEST_DEVICE", "cpu"))


def every_second(info: Any) -> bool:
    return info.index % 2 == 0


POLICIES = {
    "nothing": save_nothing,
    "everything": save_everything,
    "matmuls": save_matmuls,
    "unbatched": save_weight_matmuls,
    "attention": save_attention,
    "ops": save_ops(aten.sin, aten.tanh, aten.exp, aten.native_dropout),
    "rule": checkpoint_policy(every_second),
    "names": save_names("hidden"),
    "offload": offload(save_matmuls) | offload(save_names("hidden")),
    "algebra": (save_matmuls | save_attention) & ~save_ops(aten.bmm),
}
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Build = Callable[[Wrap], tuple[Callable[..., Any], tuple[Tensor, ...]]]


@dataclasses.dataclass(frozen=True)
class Case:
    """`build(wrap)` gives a function of tensors, which calls `wrap(region)`, and arguments."""

    build: Build


CASES: dict[str, Case] = {}


def case(build: Build) -> Build:
    CASES[build.__name__] = Case(build)
    return build


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Numbers that depend on the shape and the seed alone, never on the global generator."""
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).to(DEVICE)


# -- the functions ------------------------------------------------------------------------------------


@case
def mlp(wrap):
    def block(params, x):
        h = checkpoint_name(F.gelu(F.linear(F.layer_norm(x, (4,)), params["w1"], params["b1"])), "hidden")
        return x + F.linear(h, params["w2"])

    def fn(x, w1, b1, w2):
        return wrap(block)({"w1": w1, "b1": b1, "w2": w2}, x)

    return fn, (rand(3, 4), rand(6, 4), rand(6), rand(4, 6))


@case
def attention_fused(wrap):
    def block(x, w):
        q, k, v = (x @ w).view(1, 3, 2, 12).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(3, 8) + x

    return lambda x, w: wrap(block)(x, w), (rand(3, 8), rand(8, 24))


@case
def dropout(wrap):
    def block(x, w):
        h = F.dropout(torch.tanh(x @ w), 0.5)
        return F.dropout(h * torch.rand_like(h), 0.25) @ w

    return lambda x, w: wrap(block)(x, w), (rand(3, 4), rand(4, 4))


@case
def views_and_in_place(wrap):
    def block(x, y):
        h = x.clone()
        h[0].mul_(2)
        h.view(-1).add_(1).sin_()
        h.t()[1].copy_(y[:, 0])
        return h.narrow(0, 0, 2).exp(), h.relu_()

    return lambda x, y: wrap(block)(x, y), (rand(3, 2), rand(3, 2, seed=1))


@case
def many_outputs(wrap):
    def block(x, unused, flag):
        h = torch.sin(x)
        return h, {
            "twice": (h, h * 2),
            "text": "kept",
            "none": None,
            "number": 3,
            "index": h.argmax(),
            "flag": flag,
        }

    def fn(x, unused):
        h, rest = wrap(block)(x, unused, True)
        assert (
            rest["text"] == "kept" and rest["none"] is None and rest["number"] == 3 and rest["flag"] is True
        )
        return h, rest["twice"][0], rest["twice"][1], rest["index"].double()

    return fn, (rand(3), rand(2))


@case
def results_in_parts_of_one_memory(wrap):
    def block(x, w):
        h = x @ w + 1
        with torch.no_grad():
            seen = h.view(-1)
        return *h.chunk(2), h.detach(), h, seen, h.real

    def fn(x, w):
        top, bottom, fixed, h, seen, real = wrap(block)(x, w)
        return top.sin() * bottom, fixed * h, seen * h.view(-1), real.exp()

    return fn, (rand(4, 2), rand(2, 2, seed=1))


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class State:
    hidden: Tensor
    step: int


pytree.register_dataclass(State)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(Box, lambda b: ([b.value], None), lambda v, _: Box(*v))


@case
def structures(wrap):
    def block(tree, state):
        h = torch.tanh(tree["w"].left @ tree["w"].right) * state.hidden
        return State(h, state.step + 1), Box([h.sin(), (tree["list"][0].value * 2,)])

    def fn(a, b, h):
        state, box = wrap(block)({"w": Pair(a, b), "list": [Box(a)]}, State(h, 1))
        assert isinstance(state, State) and state.step == 2 and isinstance(box, Box)
        return state.hidden, box.value

    return fn, (rand(2, 3), rand(3, 2), rand(2, 2))


@case
def integers(wrap):
    def block(ids, table, w):
        h = F.embedding(ids, table)
        return torch.sigmoid(h @ w).gather(1, ids[:, None]), ids + 1

    return lambda ids, table, w: wrap(block)(ids, table, w)[0], (
        torch.tensor([0, 2, 1], device=DEVICE),
        rand(3, 4),
        rand(4, 3),
    )


@case
def complex_numbers(wrap):
    def block(z, w):
        h = torch.exp(z @ w * 0.5)
        return h, torch.view_as_real(h).sin(), h.abs()

    args = (rand(2, 2, dtype=torch.complex128), rand(2, 2, dtype=torch.complex128, seed=1))
    return lambda z, w: wrap(block)(z, w), args


# A weight used twice is cast once or twice as autocast's cache likes; its gradients add up in one precision
# or the other (test_backward.py looks at that). Here every weight is used once.
SINGLE = tuple(rand(*shape, dtype=torch.float32) for shape in ((3, 4), (4, 4), (2, 4)))


@case
def autocast_inside(wrap):
    def block(x, w, w2):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(F.linear(torch.tanh(F.linear(x, w)), w2))

    return lambda *args: wrap(block)(*args), SINGLE


@case
def closure(wrap):
    def fn(x, w, b):
        weights = {"w": [w], "b": b * 2}
        return wrap(lambda x: torch.tanh(x @ weights["w"][0]) + weights["b"])(x)

    return fn, (rand(3, 4), rand(4, 4), rand(4))


class Block(torch.nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap = wrap
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wrap(self.inner)(x)


@case
def functional_call(wrap):
    inside, outside = Block(wrap), torch.nn.Linear(4, 4).double()

    def fn(x, w, b):
        h = torch.func.functional_call(inside, {"inner.0.weight": w, "inner.0.bias": b}, (x,))
        params = {"weight": w, "bias": b}
        return wrap(lambda p, x: torch.sin(torch.func.functional_call(outside, p, (x,))))(params, h)

    return fn, (rand(3, 4), rand(4, 4), rand(4))


@case
def nested(wrap):
    def fn(x, w):
        inner = wrap(lambda x: torch.sin(x @ w))
        return wrap(lambda x, w: inner(torch.tanh(inner(x)) @ w))(x, w)

    return fn, (rand(2, 3), rand(3, 3))


@case
def inner_transforms(wrap):
    def block(x, w):
        energy = lambda x, w: (torch.tanh(x @ w) ** 2).sum()  # noqa: E731
        return torch.func.grad(energy)(x, w) + torch.vmap(torch.sin)(x)

    return lambda x, w: wrap(block)(x, w), (rand(2, 3), rand(3, 3))
