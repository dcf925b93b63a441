"""Random sequences of calls of one region, between which everything changes that may: flags, modes, shapes.

A sequence runs twice, with regions and without, on equal models and random streams. After every step values,
gradients, buffers, counters and the next random number must be the same, and a region may keep no more memory
than no remat does.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import checkpoint_name, remat, save_everything, save_matmuls, save_names, save_nothing, save_ops
from tests.helpers import LiveBytes

POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "names": save_names("h"),
    "ops": save_ops(torch.ops.aten.tanh, torch.ops.aten.mul),
    "everything": save_everything,
}
WIDTH = 4


class Block(nn.Module):
    """A block with all that calls can flip: frozen statistics, a buffer that counts, a deep path, a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(2 * WIDTH), nn.Dropout(0.3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2 * WIDTH))
        self.counts = self.averages = self.deep = self.caches = self.steers = False
        self.factor, self.calls = 1.0, 0
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = checkpoint_name(self.norm(self.up(x)), "h")
        if self.counts:
            self.steps.add_(1)  # pyright: ignore
            h = h * self.steps.clamp(max=3.0)  # pyright: ignore
        if self.averages:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.float().mean(0), alpha=0.1)  # pyright: ignore
            h = h - self.mean
        if self.deep:
            h = torch.tanh(h) * self.factor
        if self.caches:
            h = h * self.cache.setdefault(h.shape[-1], torch.linspace(0.5, 1.5, h.shape[-1]))
        if self.steers and float(h.detach().float().sum()) > 0:
            h = F.gelu(h)
        return x + self.down(self.drop(h))


class Step:
    """What changes before a call, and how the call is made; drawn once, carried out on both models."""

    def __init__(self, draw: random.Random) -> None:
        self.flips = [
            name for name in ("counts", "averages", "deep", "caches", "steers") if draw.random() < 0.2
        ]
        self.factor = draw.choice([None, None, 0.0, -0.0, 1.0, 2.5])
        self.mode = draw.choice([None, None, None, "train", "eval", "freeze", "unfreeze"])
        self.hook = draw.choice([None, None, None, "add", "remove"])
        self.rows = draw.choice([3, 3, 3, 5])
        self.autocast = draw.random() < 0.15
        self.grads = draw.random() > 0.1
        self.double = draw.random() < 0.1
        self.requires = draw.random() > 0.2
        self.twice = draw.random() < 0.2
        self.retain = draw.random() < 0.2
        self.late = draw.random() < 0.2
        self.seed = draw.randrange(1 << 30)

    def prepare(self, block: Block, hooks: list[Any]) -> None:
        """Change the model."""
        for name in self.flips:
            setattr(block, name, not getattr(block, name))
        block.factor = block.factor if self.factor is None else self.factor
        if self.mode in ("train", "eval"):
            block.train(self.mode == "train")
        elif self.mode is not None:
            block.norm.train(self.mode == "unfreeze")
        if self.hook == "add":
            hooks.append(block.up.register_forward_hook(lambda module, args, out: out * 1.5))  # pyright: ignore
        elif self.hook == "remove" and hooks:
            hooks.pop().remove()

    def run(self, block: Block, fn: Callable[[Tensor], Tensor]) -> list[Any]:
        """Call the region and go backward; everything that can be seen of it."""
        x = torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(self.seed))
        x.requires_grad_(self.requires)
        parameters = list(block.parameters())
        cast = torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with torch.set_grad_enabled(self.grads), cast:
            out = fn(x)
            out = fn(out) if self.twice else out
        seen: list[Any] = [out.detach().clone()]
        if self.late:
            # What changes between forward and backward is no concern of the backward's.
            before = block.factor, block.deep
            block.factor, block.deep = 7.0, not block.deep
        if out.requires_grad:
            inputs = [t for t in (x, *parameters) if t.requires_grad]
            loss = out.float().sin().sum()
            options: Any = {"allow_unused": True, "retain_graph": self.retain or self.double}
            grads = torch.autograd.grad(loss, inputs, create_graph=self.double, **options)
            seen += [None if g is None else g.detach().clone() for g in grads]
            if self.double:
                total = sum(g.float().pow(2).sum() for g in grads if g is not None and g.requires_grad)
                if isinstance(total, Tensor):
                    seen += torch.autograd.grad(total, inputs, allow_unused=True)
            elif self.retain:
                seen += torch.autograd.grad(loss, inputs, allow_unused=True)
        if self.late:
            block.factor, block.deep = before
        seen += [buffer.clone() for buffer in block.buffers()]
        seen += [block.calls, torch.default_generator.get_state()]
        return seen

    def kept(self, block: Block, fn: Callable[[Tensor], Tensor]) -> int:
        """Bytes that a call keeps for its backward."""
        x = torch.randn(self.rows, WIDTH, requires_grad=True)
        with LiveBytes() as live:
            node = fn(x).grad_fn
            assert node is not None
            return live.bytes


def differences(seed: int, *, memory: bool = False) -> str | None:
    """What the sequence of this number shows of regions that no remat does not show; None where nothing."""
    draw = random.Random(seed)
    policy = draw.choice(list(POLICIES))
    closure = draw.random() < 0.5
    torch.manual_seed(seed)
    plain = Block()
    ours = copy.deepcopy(plain)
    # Closures of one code teach each other nothing.
    region = remat((lambda x: ours(x)) if closure else ours, policy=POLICIES[policy])
    hooks: tuple[list[Any], list[Any]] = [], []
    for at in range(draw.randrange(3, 7)):
        step = Step(draw)
        step.prepare(plain, hooks[0])
        step.prepare(ours, hooks[1])
        torch.manual_seed(seed + at)
        expected = step.run(plain, plain)
        torch.manual_seed(seed + at)
        found = step.run(ours, region)
        if (what := _compare(expected, found)) is not None:
            return f"seed {seed}, {policy}, step {at}: {what}; {vars(step)}"
        # What a region writes to is held as it was before: a few bytes that no remat has no need of.
        if memory and not (step.autocast or ours.counts or ours.averages or ours.norm.training):
            torch.manual_seed(seed)
            most = step.kept(plain, plain)
            torch.manual_seed(seed)
            if (kept := step.kept(ours, region)) > most:
                return f"seed {seed}, {policy}, step {at}: keeps {kept} bytes, no remat {most}"
    return None


def _compare(expected: list[Any], found: list[Any]) -> str | None:
    if len(expected) != len(found):
        return f"{len(found)} values for {len(expected)}"
    for at, (want, got) in enumerate(zip(expected, found, strict=True)):
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            if not torch.allclose(want, got, rtol=1e-5, atol=1e-6, equal_nan=True):
                return f"value {at} differs by {(want - got).abs().max()}"
        elif want is not got and want != got:
            return f"value {at} is {got!r}, not {want!r}"
    return None
