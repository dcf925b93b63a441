"""Programs by what goes into a region and what comes out: several results, of one memory, in containers,
functions of later, nothing; and by what is bound anew between calls."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from tests.bank import library
from tests.bank.library import Box, Config, Frozen, Pair, R, State
from tests.bank.program import expressions, program

expressions(
    "",
    "nests",
    no_rows="R(lambda x: torch.tanh(x @ m.w))(x[:0]).sum() + y * x",
)


@program("", "nests containers")
def results_of_many_kinds(m, x, y):
    def body(x, flag):
        h = torch.sin(x @ m.w)
        return h, {"twice": (h, h * 2), "text": "kept", "none": None, "at": h.argmax(), "flag": flag}

    h, rest = R(body)(x, True)
    assert rest["text"] == "kept" and rest["none"] is None and rest["flag"] is True
    return h * rest["twice"][1] + rest["at"] * y


@program("", "nests containers")
def arguments_returned_and_viewed(m, x, y):
    a, b, c = R(lambda x, y: (x, torch.exp(x * y), y.view(-1)))(x, y)
    return a * b + c.view(y.shape)


@program("", "nests writes containers")
def five_results_of_one_memory(m, x, y):
    h, flat, row, turned, again = R(lambda x: (h := x.tanh() @ m.w, h.view(-1), h[0], h.t(), h))(x)
    h.mul_(2)
    row.sin_()
    return flat.exp().view(h.shape) + turned.t() * again * y


@program("", "nests containers")
def results_in_parts_of_one_memory(m, x, y):
    def body(x):
        h = x @ m.w + 1
        with torch.no_grad():
            seen = h.view(-1)
        return *h.chunk(2, 1), h.detach(), h, seen

    left, right, fixed, h, seen = R(body)(x)
    return fixed * h * seen.view(h.shape) + torch.cat([left.sin(), right], 1)


@program("", "nests containers")
def overlapping_views_of_what_a_region_inside_made(m, x, y):
    inner = R(lambda x: x.sum(0, keepdim=True).sin().expand_as(x))
    first, same, rest = R(lambda x: (v := inner(x), v.view_as(v), v[..., 1:]))(x)
    return first * y + same.square() + rest.sum(-1, keepdim=True)


@program("", "nests containers")
def keyword_arguments(m, x, y):
    def body(x, *rest, scale, shift=None, **more):
        out = torch.tanh(x * scale) @ more["w"]
        return out if shift is None else out + shift * len(rest)

    return R(body)(x, 1, 2, scale=m.scale, shift=y, w=m.w)


@program("", "nests containers objects")
def registered_containers(m, x, y):
    def body(tree, state):
        h = torch.tanh(tree["pair"].first @ tree["pair"].second) * state.hidden
        return State(h, state.step + 1), Box([h.sin(), Pair(tree["list"][0].value * 2, None)])

    state, box = R(body)({"pair": Pair(x, m.w), "list": [Box(y)]}, State(y, 1))
    return state.hidden * state.step + box.value[0] * box.value[1].first


@program("", "nests")
def complex_arguments(m, x, y):
    out = R(lambda z: (h := torch.exp(z * 0.5), torch.view_as_real(h).sin(), h.abs()))(torch.complex(x, y))
    return out[0].real + out[1].sum(-1) * out[2]


@program("", "nests")
def a_weight_of_both_regions(m, x, y):
    inner = R(lambda x, w: torch.sin(F.linear(x.sin(), w)), "matmuls")
    return R(lambda x, w: inner(torch.tanh(inner(x, w)), w).cos())(x, m.w)


@program("", "nests captures")
def region_inside_captures_an_argument(m, x, y):
    return R(lambda w, x: R(lambda x: torch.tanh(x @ w), "matmuls")(x), "matmuls")(m.w, x) * y


@program("", "nests captures")
def region_inside_is_given_nothing(m, x, y):
    return R(lambda a: R(lambda: a.sin() * a)())(x) * R(lambda a, b: R(lambda b: a.cos() * b)(b))(x, y)


@program("", "nests")
def region_that_calls_itself(m, x, y):
    def halves(x):
        return x.sin() if len(x) == 1 else torch.cat([block(x[:1]), block(x[1:])]).exp()

    block = R(halves)
    return block(x) * y


@program("", "nests containers")
def frozen_dataclass_as_result(m, x, y):
    out = R(lambda x, w: Frozen(h := (x @ w).sin(), (h.cos(), w)))(x, m.w)
    return out.hidden * out.pair[0] + (y @ out.pair[1]).exp().tanh()


@program("", "nests containers")
def lambda_as_result(m, x, y):
    def body(x, w):
        h = x.exp().tanh()
        return lambda y: (y @ w) * h

    return R(body)(x, m.w)(y)


@program("", "nests containers")
def computed_later(m, x, y):
    first, second = R(
        lambda x, w: (functools.partial(torch.matmul, x), functools.partial(torch.clamp, min=w))
    )(x, m.scale.sin())
    return second(first(m.w))


@program("", "nests containers")
def nothing_as_result(m, x, y):
    given, none = R(lambda x, y: {"rows": len(x)})(x, y), R(lambda x: None)(x)
    return x * given["rows"] if none is None else y


# -- what is bound anew between calls, and between forward and pull-back -----------------------------------


@program("", "nests captures rebinds")
def late_bound_numbers_and_functions(m, x, y):
    for scale, f in ((0.5, torch.sin), (2.0, m.lin.forward), (3, lambda x: x.exp().tanh())):
        x = R(lambda x: f(x @ m.w) * scale)(x)  # noqa: B023
    return x


@program("", "nests captures rebinds")
def global_bound_anew(m, x, y):
    block = R(lambda x: torch.tanh(library.current(x)))
    for library.current in m.experts:
        x = block(x)
    library.current = None
    return x


@program("", "nests captures rebinds")
def attributes_bound_anew(m, x, y):
    held = Config(1.0, {})
    block = R(lambda x: torch.tanh(held.more(x) * held.scale))  # pyright: ignore
    for i, layer in enumerate(m.experts):
        held.scale, held.more = i + 1.0, layer
        x = block(x)
    return x


@program("", "nests captures rebinds")
def submodule_exchanged(m, x, y):
    holder: Any = torch.nn.Module()
    block = R(lambda x: torch.tanh(holder.layer(x)))
    for layer in m.experts:
        holder.layer = layer
        x = block(x)
    return x


@program("", "nests captures rebinds modules")
def evaluation_turned_on_and_off(m, x, y):
    drop = torch.nn.Sequential(torch.nn.Dropout(1.0))
    for on in (False, True, False):
        drop.train(on)
        x = R(lambda x: drop(m.lin(x)) + x)(x)
    return x


@program("", "nests captures rebinds python")
def calls_counted_by_what_a_region_captures(m, x, y):
    seen = {"calls": 0}

    def body(x):
        seen["calls"] += 1
        return torch.tanh((x @ m.w) * seen["calls"])

    block = R(body)
    return block(block(x)) * seen["calls"]


@program("", "nests captures rebinds memory")
def late_bound_layers_that_numpy_sees(m, x, y):
    for layer in m.experts:

        def body(x):
            h = torch.tanh(layer(x))  # noqa: B023
            return h + torch.from_numpy(h.detach().numpy() * 0)

        x = R(body)(x)
    return x
