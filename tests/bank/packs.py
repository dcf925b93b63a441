"""Programs whose later calls are not followed to their end: what such a call packs for hooks of the user's is
what one packs that is recorded from its start."""

from __future__ import annotations

import torch

from tests.bank.library import R
from tests.bank.program import program

COUNTED = "counted/nothing counted/everything counted/but_names"
AROUND = f"{COUNTED} in_checkpoint/matmuls in_checkpoint/but_names"


def constant(x):
    return torch.linspace(0, 1, 4, dtype=x.dtype)


def slope(h, power=2):
    with torch.enable_grad():
        h = h if h.requires_grad else h.detach().requires_grad_()
        return torch.autograd.grad(h.sin().pow(power).sum(), h, create_graph=True)[0]


@program("", "python", found=COUNTED)
def factor_that_counts(m, x, y):
    """What autograd saves is smaller than what is read and kept, but not smaller than what is read."""
    m.calls += 1
    return (x.sum(0, keepdim=True) @ m.w * m.calls).sin().exp()


@program("", "python", found=COUNTED)
def temperature_that_counts(m, x, y):
    m.calls += 1
    return torch.softmax(x.sum(0, keepdim=True) @ m.w / (1 + m.calls), -1).tanh()


@program("", "python", found=COUNTED)
def power_that_counts(m, x, y):
    m.calls += 1
    return ((x.sum(0, keepdim=True) @ m.w) ** m.calls).tanh() + y.mean()


@program("", "python nests", found=COUNTED)
def factor_of_a_region_inside_that_counts(m, x, y):
    m.calls += 1
    at = m.calls
    return (R(lambda a: (a[0] * at).sin().exp())(x.cos()) * y[0]).sin()


@program("", "python", found=COUNTED)
def factor_in_another_dtype_that_counts(m, x, y):
    m.calls += 1
    return ((x @ m.w).half() * (m.calls / 4)).float().sigmoid().mul(2).sin().mean().to(x.dtype)


@program("", "nests", found=AROUND)
def kept_beside_what_is_dead(m, x, y):
    """What regions inside keep lies as what is read for the first time later."""
    kept = R(lambda a, b: (a @ m.w).tanh() * b.sin().exp())(x, x.cos())
    _unused = kept.relu() - y
    return kept * constant(x).sigmoid()


@program("", "nests", found=AROUND)
def alias_kept_beside_what_is_dead(m, x, y):
    def turned(a):
        h = a.sin()
        alias = h.detach()
        alias.t_()
        return h * h.exp() * alias.t()

    _unused = y.exp() + R(turned)(x)
    return (R(turned)(x) + 1).clamp_(-1, 2).sin() * constant(x).sigmoid()


@program("", "nests", found=AROUND)
def two_regions_beside_what_is_dead(m, x, y):
    h = R(lambda a: (a * 2).sin().exp())(x.tanh())
    k = R(lambda a, b: (a * b).tanh())(h, y)
    _unused = torch.softmax(k, -1) + 1
    return (k * constant(x)).sin() * constant(x).exp()


@program("", "nests inner", found=AROUND)
def force_of_a_region_inside(m, x, y):
    return R(lambda a, b: slope(a.tanh().exp()) * b)(x @ m.w, y).sin()


@program("", "nests inner", found=AROUND)
def force_of_a_stack(m, x, y):
    def part(a, b):
        v = torch.stack([row.exp() for row in a.tanh().unbind(1)], 1)
        return slope(v) * b, a

    h = (x @ m.w).tanh()
    g, a = R(part)(h, h)
    return (g * 1.5 + a).sin() * y


@program("", "nests inner", found=AROUND)
def penalty_two_regions_inside(m, x, y):
    score = lambda a: slope((a @ m.w).sigmoid().exp(), 3).pow(2).sum(-1, keepdim=True)  # noqa: E731
    return R(lambda a: R(score)(a.cos()) + 1)(x).log() * y
