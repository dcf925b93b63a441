"""Programs with objects of the user's: what is looked into, and what must be left alone."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any

import torch

from tests.bank.library import Config, Irreps, Lazy, Pair, R, Refuses, State
from tests.bank.program import program


@program("OBJECTS", "objects")
def settings_in_slots(m, x, y):
    return torch.tanh(x @ m.w) * m.config.scale ** m.config.more["power"]


@program("OBJECTS", "objects")
def tuple_without_a_length(m, x, y):
    return (x @ m.w).sin() * tuple.__getitem__(m.irreps, 1)


@program("OBJECTS", "objects")
def dictionary_not_to_be_iterated(m, x, y):
    return (x @ m.w).sin() * m.lazy["scale"]


@program("OBJECTS", "objects")
def list_that_holds_itself(m, x, y):
    return (x @ m.w).sin() * m.tree[1][0]


@program("OBJECTS", "objects")
def object_that_answers_nothing(m, x, y):
    return (x @ m.w).sin() * (2.0 if type(m.refuses) is Refuses else 1.0)


@program("OBJECTS", "objects nests")
def argument_in_slots(m, x, y):
    return R(lambda x, c: torch.tanh(x @ m.w) * c.scale)(x, Config(0.5, {}))


@program("OBJECTS", "objects nests")
def argument_without_a_length(m, x, y):
    return R(lambda x, i: torch.tanh(x @ m.w) * tuple.__getitem__(i, 1))(x, Irreps((1, 3)))


@program("OBJECTS", "objects nests")
def argument_not_to_be_iterated(m, x, y):
    return R(lambda x, d: torch.tanh(x @ m.w) * d["scale"])(x, Lazy(scale=0.5))


@program("OBJECTS", "objects nests")
def argument_that_answers_nothing(m, x, y):
    return R(lambda x, o: torch.tanh(x @ m.w))(x, Refuses())


@program("OBJECTS", "objects nests")
def argument_that_holds_itself(m, x, y):
    tree: list[Any] = [2.0]
    tree.append(tree)
    return R(lambda x, t: torch.tanh(x @ m.w) * t[1][0])(x, tree)


@program("OBJECTS", "objects nests")
def named_tuple_as_argument_and_result(m, x, y):
    out = R(lambda p: Pair((p.first @ m.w).sin(), p.second))(Pair(x, y))
    return out.first * out.second


@program("OBJECTS", "objects nests")
def ordered_and_default_dictionaries(m, x, y):
    given = collections.OrderedDict(a=x), collections.defaultdict(list, b=[y])
    out = R(lambda o, d: collections.OrderedDict(c=o["a"].sin() * d["b"][0].exp()))(*given)
    return out["c"]


@program("OBJECTS", "objects nests")
def namespace_as_argument(m, x, y):
    return R(lambda n: torch.tanh(n.x @ m.w) * n.y)(types.SimpleNamespace(x=x, y=y))


@program("OBJECTS", "objects nests")
def dataclass_as_argument(m, x, y):
    return R(lambda s: torch.tanh(s.hidden @ m.w) * s.step)(State(x, 2))


@program("OBJECTS", "objects nests")
def dataclass_as_result(m, x, y):
    out = R(lambda x: State(torch.tanh(x @ m.w), 3))(x)
    return out.hidden * out.step


@program("OBJECTS", "objects nests")
def dataclass_replaced(m, x, y):
    out = R(lambda s: dataclasses.replace(s, hidden=s.hidden.sin()))(State(x, 3))
    return out.hidden * y


@program("OBJECTS", "objects nests")
def function_as_result(m, x, y):
    later = R(lambda x: functools.partial(torch.mul, x.sin()))(x)
    return later(y)


@program("OBJECTS", "objects nests")
def partial_with_a_tensor(m, x, y):
    return R(functools.partial(torch.addmm, m.scale))(x, m.w).tanh()


@program("OBJECTS", "objects nests captures")
def tensors_in_a_closure_of_containers(m, x, y):
    held = {"w": [m.w.sin()], "y": (y, None)}
    return R(lambda x: torch.tanh(x @ held["w"][0]) * held["y"][0])(x)


@program("OBJECTS", "objects nests captures")
def tensors_in_an_object(m, x, y):
    class Holder:
        def __init__(self, w):
            self.w, self.log = w, []

    holder = Holder(m.w.cos())
    return R(lambda x: torch.tanh(x @ holder.w))(x)


@program("OBJECTS", "objects nests captures")
def default_argument_holds_a_tensor(m, x, y):
    def body(x, w=m.w):
        return torch.tanh(x @ w)

    return R(body)(x)


@program("OBJECTS", "objects modules")
def scripted_module(m, x, y):
    return m.scripted(x) * y


@program("OBJECTS", "objects modules")
def parametrization_cached(m, x, y):
    with torch.nn.utils.parametrize.cached():
        out = m.parametrized(x) + m.parametrized(y.sin())
    return out


@program("GENERATORS", "objects draws")
def generator_made_inside(m, x, y):
    generator = torch.Generator().manual_seed(1)
    return torch.tanh(x @ m.w) * torch.rand(4, generator=generator, dtype=x.dtype)


@program("", "objects draws decisions")
def rows_chosen_by_a_generator(m, x, y):
    generator = torch.Generator()
    generator.manual_seed(len(x))
    torch.rand(3, generator=generator)
    rows = torch.multinomial(torch.ones(len(x)), 1, generator=generator)
    return (x[rows] * x[rows].exp()).sum(0) + x.cos()


@program("", "objects draws")
def generator_seeded_again(m, x, y):
    generator = torch.Generator().manual_seed(4)
    first = torch.rand(4, generator=generator, dtype=x.dtype)
    generator.manual_seed(4)
    mask = torch.empty(x.shape, dtype=x.dtype).bernoulli_(0.5, generator=generator)
    return (x * first).exp() * torch.randperm(4, generator=generator) + y * mask


@program("", "objects draws nests")
def generators_in_regions_inside(m, x, y):
    def noisy(x, seed):
        noise = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
        return x.sin() * noise

    block = R(noisy)
    return block(x, 1) * block(y * x, 2)


@program("OBJECTS", "objects stores")
def fresh_object_in_every_call(m, x, y):
    m.factor = m.factor + 0.0
    m.noted_by = Config(float(m.factor), {})
    return torch.tanh(x @ m.w) * m.noted_by.scale


@program("GENERATORS", "objects draws")
def noise_of_a_generator_made_inside(m, x, y):
    generator = torch.Generator(x.device).manual_seed(len(x))
    noise = torch.empty(x.shape, dtype=x.dtype).normal_(generator=generator)
    return (x @ m.w + noise).sin() * torch.randperm(4, generator=generator)
