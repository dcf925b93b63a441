"""Random programs of tensor ops with regions inside regions, for `test_random_programs`.

A program is a list of steps over a growing list of values, each 4 by 4; a region among the steps is a
program with a policy of its own. The same program runs with and without remat.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remat import (
    checkpoint_name,
    checkpoint_policy,
    offload_matmuls,
    save_all_but_names,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    save_unbatched_matmuls,
)
from remat.policies import Policy

N = 4
aten = torch.ops.aten
Wrap = Callable[[Callable[..., Any], Policy], Callable[..., Any]]

POLICIES: list[Policy] = [
    save_nothing,
    save_matmuls,
    save_everything,
    save_unbatched_matmuls,
    save_ops(aten.sin, aten.native_layer_norm, aten.relu),
    save_ops(aten.t, aten.view, aten.transpose),
    save_names("first", "second"),
    save_all_but_names("first"),
    save_matmuls & ~save_names("first"),
    save_matmuls | save_names("first"),
    offload_matmuls,
    checkpoint_policy(lambda info: info.index % 2 == 0),
]


def overwrite_row(h: Tensor) -> Tensor:
    out = h.clone()
    out[0] = out[1] * 2
    return out


def fill(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:2] = h[2:]
    out[2:] = h[:2].sin()
    return out


def without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        factor = h.sin()
    return h * factor


def attention(h: Tensor) -> Tensor:
    one = h[None, None]
    return F.scaled_dot_product_attention(one, one.sin(), one)[0, 0]


class DoubleSine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin() * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0] * ctx.saved_tensors[0].cos() * 2


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda h: h,
    "sin": torch.sin,
    "relu": torch.relu,
    "softmax": lambda h: h.softmax(-1),
    "layer_norm": lambda h: F.layer_norm(h, (N,)),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "transpose": lambda h: h.t(),
    "reshape": lambda h: h.reshape(2, 2 * N).reshape(N, N),
    "rolled": lambda h: torch.cat(h.chunk(2, 0)[::-1]),
    "slices": lambda h: torch.cat([h[:, 2:], h[:, :2].sin()], 1),
    "in_place": lambda h: h.sin().mul_(2).add_(1),
    "relu_": lambda h: (h * 2).relu_(),
    "overwrite_row": overwrite_row,
    "fill": fill,
    "expand": lambda h: h.sum(0, keepdim=True).expand(N, N),
    "max": lambda h: h.max(0, keepdim=True)[0] + h,
    "topk": lambda h: h.topk(2, dim=1)[0].repeat(1, 2),
    "unbind": lambda h: torch.stack([row.sin() for row in h.unbind(0)]),
    "index": lambda h: h[torch.tensor([2, 0, 1, 1])],
    "where": lambda h: torch.where(h > 0, h, h.sin()),
    "attention": lambda h: F.scaled_dot_product_attention(h[None, None], h[None, None].sin(), h[None, None])[
        0, 0
    ],
    "bmm": lambda h: torch.bmm(h.reshape(2, 2, N), h.reshape(2, N, 2)).reshape(2, N).repeat(2, 1),
    "first": lambda h: checkpoint_name(h, "first"),
    "second": lambda h: checkpoint_name(h.cos(), "second"),
    "detached": lambda h: h * h.detach(),
    "without_gradient": without_gradient,
    "normalize": lambda h: F.normalize(h, dim=0),
    "custom": lambda h: DoubleSine.apply(h),  # type: ignore[arg-type, return-value]
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "mm": torch.mm,
    "linear": F.linear,
    "add_": lambda a, b: a.clone().add_(b),
    "addmm": lambda a, b: torch.addmm(a, b, b),
    "div": lambda a, b: a / (b.square() + 1),
}
WEIGHTED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda h, w, b: F.linear(h, w),
    "linear_bias": F.linear,
    "mm": lambda h, w, b: h @ w,
    "tied": lambda h, w, b: F.linear(h @ w, w),
    "views": lambda h, w, b: h * w.t()[0] + b.view(1, N),
}
RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "noise": lambda h: h * torch.rand_like(h),
}


@dataclass
class Step:
    """One op: of which kind, which of them, on which values; or a region."""

    kind: str
    op: str = ""
    at: tuple[int, ...] = ()
    weight: int = 0
    region: Program | None = None
    policy: Policy = save_nothing
    closure: bool = False  # whether the region captures the weights


@dataclass
class Program:
    steps: list[Step] = field(default_factory=list)
    outs: list[int] = field(default_factory=list)

    def build(self, wrap: Wrap) -> Callable[..., Any]:
        """The function (*values, (w0, w1, bias)) -> value or tuple of values, its regions made by `wrap`."""
        inner = {id(s): s.region.build(wrap) for s in self.steps if s.region is not None}
        made = {key: wrap(fn, s.policy) for s in self.steps for key, fn in inner.items() if key == id(s)}

        def run(*args: Any) -> Any:
            *values, weights = args
            for step in self.steps:
                taken = [values[i] for i in step.at]
                if step.kind == "unary":
                    values.append(UNARY[step.op](taken[0]))
                elif step.kind == "random":
                    values.append(RANDOM[step.op](taken[0]))
                elif step.kind == "binary":
                    values.append(BINARY[step.op](taken[0], taken[1]))
                elif step.kind == "weighted":
                    values.append(WEIGHTED[step.op](taken[0], weights[step.weight], weights[2]))
                else:
                    values.append(_product(_call(step, taken, weights)))
            return values[self.outs[0]] if len(self.outs) == 1 else tuple([values[i] for i in self.outs])

        def _call(step: Step, taken: list[Tensor], weights: Any) -> Any:
            if step.closure:
                body = inner[id(step)]
                return wrap(lambda *values: body(*values, weights), step.policy)(*taken)
            return made[id(step)](*taken, weights)

        return run


def _product(out: Any) -> Tensor:
    return out[0] * out[1] if isinstance(out, tuple) else out


def draw(seed: int) -> tuple[Program, bool]:
    """A program of two arguments, and whether it draws random numbers."""
    dice = random.Random(seed)
    chance = dice.random() < 0.3
    body = _program(dice, 3, 2, chance)
    # Under save_everything the whole would be no region at all.
    policy = dice.choice([p for p in POLICIES if p is not save_everything])
    whole = Step("region", at=(0, 1), region=body, policy=policy, closure=dice.random() < 0.3)
    return Program([whole], [2]), chance


WRITING = {"in_place", "relu_", "overwrite_row", "fill", "add_"}
REPEATABLE: list[Policy] = [
    save_nothing,
    save_matmuls,
    save_ops(aten.sin, aten.native_layer_norm, aten.relu),
    save_ops(aten.t, aten.view, aten.transpose),
    save_ops(aten.mul, aten.cat),
]


def draw_flat(seed: int) -> list[Program]:
    """Two regions of which later calls know what the first taught, and not which of the two it was.

    They differ in one step, which need not be seen from outside.
    """
    dice = random.Random(seed)
    body = _program(dice, 0, 2, False)
    while len(body.steps) < 6:
        body.steps.append(_step(dice, 0, 2 + len(body.steps), False))
    body.steps = [Step("unary", "sin", s.at[:1]) if s.op in WRITING else s for s in body.steps]
    body.outs = [1 + len(body.steps)]
    other = Program(list(body.steps), body.outs)
    while other == body:
        at = dice.randrange(len(body.steps))
        step = body.steps[at]
        moved = tuple(dice.randrange(2 + at) for _ in step.at)
        other.steps[at] = dataclasses.replace(step, at=moved, weight=dice.randrange(2))
    policy = dice.choice(REPEATABLE)
    return [Program([Step("region", at=(0, 1), region=p, policy=policy)], [2]) for p in (body, other)]


def _program(dice: random.Random, depth: int, count: int, chance: bool) -> Program:
    program = Program()
    for _ in range(dice.randint(1, 5)):
        program.steps.append(_step(dice, depth, count, chance))
        count += 1
    others = [dice.randrange(count)] if dice.random() < 0.25 else []
    program.outs = [count - 1, *others]
    return program


def _step(dice: random.Random, depth: int, count: int, chance: bool) -> Step:
    kind = dice.random()
    if kind < 0.25 and depth:
        at = tuple(dice.randrange(count) for _ in range(dice.randint(1, 2)))
        inner = _program(dice, depth - 1, len(at), chance)
        return Step("region", at=at, region=inner, policy=dice.choice(POLICIES), closure=dice.random() < 0.5)
    if kind < 0.5:
        return Step("weighted", dice.choice(list(WEIGHTED)), (dice.randrange(count),), dice.randrange(2))
    if kind < 0.65:
        return Step("binary", dice.choice(list(BINARY)), (dice.randrange(count), dice.randrange(count)))
    if kind < 0.7 and chance:
        return Step("random", dice.choice(list(RANDOM)), (count - 1,))
    return Step("unary", dice.choice(list(UNARY)), (dice.randrange(max(0, count - 2), count),))
