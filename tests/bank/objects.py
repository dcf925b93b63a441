"""Programs with objects of the user's: what is looked into, and what must be left alone."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import Any

import torch

from tests.bank.library import Config, Irreps, Lazy, R, Refuses, State
from tests.bank.program import expressions, program

expressions(
    "OBJECTS",
    "objects",
    settings_in_slots="torch.tanh(x @ m.w) * m.config.scale ** m.config.more['power']",
)
expressions(
    "OBJECTS",
    "objects nests",
    namespace_as_argument="R(lambda n: torch.tanh(n.x @ m.w) * n.y)(types.SimpleNamespace(x=x, y=y))",
)
expressions(
    "OBJECTS",
    "objects modules",
    scripted_module="m.scripted(x) * y",
)


@program("OBJECTS", "objects")
def attributes_that_hold_themselves_and_have_no_length(m, x, y):
    return (x @ m.w).sin() * m.tree[1][0] * tuple.__getitem__(m.irreps, 1)


@program("OBJECTS", "objects")
def attributes_not_to_be_iterated_or_compared(m, x, y):
    return (x @ m.w).sin() * m.lazy["scale"] * (2.0 if type(m.refuses) is Refuses else 1.0)


@program("OBJECTS", "objects nests")
def arguments_that_are_not_looked_into(m, x, y):
    tree: list[Any] = [2.0]
    tree.append(tree)
    scaled = lambda x, c, i, d, o, t: x * c.scale * d["scale"] * tuple.__getitem__(i, 1) * t[1][0]  # noqa: E731
    return R(scaled)(x @ m.w, Config(0.5, {}), Irreps((1, 3)), Lazy(scale=0.5), Refuses(), tree).tanh()


@program("OBJECTS", "objects nests")
def ordered_and_default_dictionaries(m, x, y):
    given = collections.OrderedDict(a=x), collections.defaultdict(list, b=[y])
    out = R(lambda o, d: collections.OrderedDict(c=o["a"].sin() * d["b"][0].exp()))(*given)
    return out["c"]


@program("OBJECTS", "objects nests")
def dataclass_replaced(m, x, y):
    out = R(lambda s: dataclasses.replace(s, hidden=s.hidden.sin()))(State(x, 3))
    return out.hidden * y


@program("OBJECTS", "objects nests captures")
def tensors_in_what_a_function_is_bound_to(m, x, y):
    def body(scale, x, w=m.w):
        return torch.addmm(scale, x, w)

    return R(functools.partial(body, m.scale))(x).tanh()


@program("OBJECTS", "objects nests captures")
def tensors_in_a_closure_of_containers_and_objects(m, x, y):
    held = {"w": [m.w.sin()], "y": (y, None), "n": types.SimpleNamespace(w=m.w.cos(), log=[])}
    return R(lambda x: torch.tanh(x @ held["w"][0]) @ held["n"].w * held["y"][0])(x)


@program("OBJECTS", "objects modules")
def parametrization_cached(m, x, y):
    with torch.nn.utils.parametrize.cached():
        out = m.parametrized(x) + m.parametrized(y.sin())
    return out


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
