"""Modules that change what they, and others, hold.

`seen` is what a look must leave as it was: modules, tensors, random streams. `others` are effects of the
user's Python, which happen once a look, as in a call; but no tensor without data may be left there.
"""

import collections
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.inside import is_fake

X = torch.randn(4, 4, requires_grad=True)
COUNT = 0
LOG = []


class Base(nn.Module):
    work: Callable[..., Any]

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.setup()

    def setup(self): ...

    def seen(self):
        return {}

    def others(self):
        return ()

    def forward(self, x):
        return torch.tanh(self.layer(self.work(x))).exp()


class Buffers(Base):
    ema: torch.Tensor
    steps: torch.Tensor
    slots: torch.Tensor
    graded: torch.Tensor

    def setup(self):
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("slots", torch.zeros(3, 4))
        self.register_buffer("graded", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)

    def work(self, x):
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        self.steps.add_(1)
        self.slots[1].copy_(x.detach()[0])
        self.slots.data[2] += 1
        self.graded = self.graded.detach() + x.sum(0)
        return self.norm(x) + self.graded

    def seen(self):
        return {
            k: (type(v), v.clone(), v._version, v.requires_grad)
            for k, v in self.state_dict(keep_vars=True).items()
        }


class InPlaceWithGrad(Base):
    """A write of something differentiated: a real buffer would hang on the trace."""

    last: torch.Tensor

    def setup(self):
        self.register_buffer("last", torch.zeros(4, 4))

    def work(self, x):
        self.last.detach_().copy_(x)
        return x + self.last

    def seen(self):
        return self.last.clone(), self.last.grad_fn, self.last._version


class Attributes(Base):
    shared, made = 0, []
    by_name: dict[str, Any]

    def setup(self):
        self.n, self.log, self.table, self.queue = 0, [], {"a": 1}, collections.deque(maxlen=2)
        self.names, self.space, self.counts = {"x"}, types.SimpleNamespace(n=0), np.zeros(2)
        self.holder, self.by_name = Holder(), collections.OrderedDict(a=[1])

    def work(self, x):
        self.n += 1
        self.log.append(x)  # (What grows in a list is another key, for keys look into short ones.)
        self.table["b"] = x
        self.table.pop("a", None)
        self.queue.append(x.mean())
        self.names.add("y")
        self.space.n += 1
        self.counts[0] += 1
        self.holder.value, self.holder.inner["k"] = x, 1
        self.by_name["a"].append(2)
        self.by_name["c"] = 3
        Attributes.shared += 1
        type(self).made.append(x)
        self.fresh = x * 2
        return x

    def seen(self):
        return self.n, hasattr(self, "fresh"), sorted(vars(self))

    def others(self):
        return (
            list(self.log), dict(self.table), list(self.queue), set(self.names), self.space.n,
            self.counts.copy(), self.holder.value, dict(self.holder.inner), list(self.by_name["a"]),
            list(self.by_name), Attributes.shared, list(Attributes.made),
        )  # fmt: skip


class Holder:
    __slots__ = ("inner", "value")

    def __init__(self):
        self.value, self.inner = None, {}


class Rotary(Base):
    """A mask and a table that are filled when they are first needed."""

    def setup(self):
        self.mask, self.cached, self.tables = None, 0, {}

    def work(self, x):
        if self.mask is None or self.cached < len(x):
            self.mask, self.cached = torch.tril(torch.ones(len(x), 4)), len(x)
        if "cos" not in self.tables:
            self.tables["cos"] = torch.arange(4.0).cos()
        self.register_buffer("late", torch.ones(4), persistent=False)
        return x * self.mask * self.tables["cos"] + self.late

    def seen(self):
        return self.mask, self.cached, "late" in self._buffers

    def others(self):
        return dict(self.tables)


@functools.lru_cache
def table(n):
    return torch.arange(float(n)).sin()


@functools.lru_cache(maxsize=2)
def empty(n):
    return torch.arange(float(n)).cos()


@functools.cache
def unbounded(n):
    return torch.arange(float(n)).exp()


class Remembered(Base):
    def setup(self):
        table.cache_clear(), unbounded.cache_clear(), empty.cache_clear()
        table(9), unbounded(7)

    @functools.cached_property
    def scale(self):
        return torch.full((4,), 2.0)

    def work(self, x):
        return x * table(4) * unbounded(4) * empty(4) * self.scale

    def seen(self):
        return vars(self).keys()

    def others(self):
        return table(4), unbounded(4), empty(4)


class Globals(Base):
    def work(self, x):
        global COUNT
        COUNT += 1
        LOG.append(x)
        return self.helper(x)

    def helper(self, x, log=[]):  # noqa: B006
        log.append(x)
        return note(x)

    def others(self):
        return COUNT, list(LOG), list(Globals.helper.__defaults__[0]), getattr(note, "calls", 0)  # pyright: ignore[reportOptionalSubscript]


def note(x):
    note.calls = getattr(note, "calls", 0) + 1
    return x


class Hooks(Base):
    """Hooks that count, and a forward that adds and removes some."""

    def setup(self):
        self.met = []
        self.layer.register_forward_hook(lambda module, args, out: self.met.append(out))
        self.handle = self.layer.register_forward_hook(lambda *_: None)

    def work(self, x):
        self.handle.remove()
        self.layer.register_forward_pre_hook(lambda *_: None)
        self.layer.weight.register_hook(lambda g: g)
        return x

    def seen(self):
        layer = self.layer
        return list(layer._forward_hooks), len(layer._forward_pre_hooks), layer.weight._backward_hooks

    def others(self):
        return list(self.met)


class Draws(Base):
    def setup(self):
        self.rng, self.np_rng = random.Random(1), np.random.default_rng(1)
        self.generator = torch.Generator().manual_seed(3)

    def work(self, x):
        scale = random.random() + np.random.rand() + self.rng.random() + self.np_rng.random()
        torch.manual_seed(1)
        return nn.functional.dropout(x) * scale + torch.rand(4, generator=self.generator)

    def seen(self):
        streams = random.getstate(), np.random.get_state()[1].copy(), self.rng.getstate()  # pyright: ignore[reportArgumentType]
        return *streams, self.np_rng.bit_generator.state, self.generator.get_state(), torch.get_rng_state()


MODULES = [Buffers, InPlaceWithGrad, Attributes, Rotary, Remembered, Globals, Hooks, Draws]


def same(a, b):
    """Equal, tensors and arrays bitwise."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b or (type(a) is type(b) and not is_fake(a) and torch.equal(a, b))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
