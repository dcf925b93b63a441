"""Programs that go another way in the second of three calls, by a flag of the model that is turned between
them: what a first call has taught does not hold for the next one."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F

from tests.bank.library import UNSEEN, R
from tests.bank.program import expressions, program

expressions(
    "",
    "turns",
    constant_of_another_sign="(torch.copysign(x.exp(), 0.0 if m.on0 else -0.0) * 3).sin().exp()",
    another_argument="((x if m.on0 else y) @ m.w).exp().sin() * x",
)


@program("", "turns")
def operand_that_is_absent(m, x, y):
    with torch.no_grad():
        norm = F.layer_norm(x, (4,), m.scale if m.on0 else None)
    return (norm * x).exp() * m.scale


@program("", "turns captures")
def result_in_the_place_of_a_weight(m, x, y):
    h, k = x.sin(), x.cos()
    return (h * (m.scale if m.on0 else k)).exp() * y


@program("", "turns captures")
def another_weight_of_the_same_shape(m, x, y):
    return ((x @ (m.w if m.on0 else m.lin.weight)).sin() @ m.w).exp().tanh() * m.lin.bias


@program("", "turns raw memory")
def operand_that_is_given_other_memory(m, x, y):
    with torch.no_grad():
        h = x.sin()
        if not m.on0:
            h.set_(m.table.detach().untyped_storage(), 0, (len(x), 4))
    return (h * x).exp()


@program("", "turns")
def another_path(m, x, y):
    h = torch.tanh(x @ m.w)
    return torch.exp((h * 2) @ m.w) if m.on0 else torch.sin(h @ m.w)


@program("", "turns captures nests")
def another_width_in_the_same_closure(m, x, y):
    w = m.w if m.on0 else m.w[:, :3]
    return R(lambda x: torch.tanh(x @ w).exp(), "matmuls")(x).sum(1, keepdim=True) * y


@program("", "turns")
def constant_of_another_type(m, x, y):
    """In integers the product wraps around."""
    one = 1 if m.on0 else 1.0
    return ((torch.arange(1, 5, dtype=torch.int32) * (2**30 * one) * (4 * one)) * 2.0**-32 * x).sin().exp()


@program("", "turns")
def another_value_of_the_same_op(m, x, y):
    """Also where the memory of the expected one has been used anew."""
    a = (x @ m.w).sin()
    b, _ = a.cos(), a.sin()
    a = None if m.on0 else a
    c = b.reshape(-1)[:4].exp().repeat(len(x), 1)
    return ((b if m.on0 else c) * 2).exp() * y


@program("", "turns")
def another_view_in_the_same_op(m, x, y):
    a = (x @ m.w).sin()
    b, _ = a.cos().chunk(2, 1)[1], a.sin().chunk(2, 1)[1]
    c = b.t().exp().t().contiguous().view(-1, 2)
    return ((b if m.on0 else c) * 2).exp().sum(1, keepdim=True) * y


@program("", "turns raw memory")
def value_made_out_of_sight(m, x, y):
    """It may be the very object, by its address, of a result that is gone."""
    a = (x @ m.w).sin()
    with torch.no_grad():
        b = a.cos()
    if not m.on0:
        del b
        b = torch.from_numpy(np.ones((len(x), 4)))
    return (a * b).exp()


@program("", "turns nests containers")
def result_that_has_a_history_in_some_calls(m, x, y):
    """A leaf in a model's first block, and a result in the next."""
    fn = lambda x, skip: (skip, (h := (x @ m.w).sin()), (h * 2).cos(), skip * h)  # noqa: E731
    skip, h, _, both = R(fn, "matmuls")(x, m.scale if m.on0 else m.scale * 1)
    return skip.square() * h + both


@program("", "turns nests")
def windows_of_one_tensor(m, x, y):
    """Where in it they lie is no part of a call's signature."""
    both = torch.cat([x, y.sin(), x.cos(), y])
    q, k = (both[:3], both[6:9]) if m.on0 else (both[3:6], both[5:8])
    return R(lambda q, k: ((q.T @ k.exp()) @ m.w).sin(), "matmuls")(q, k)[:1] * x


@program("", "turns nests")
def arguments_that_are_one_tensor(m, x, y):
    fn = lambda q, kv: q.sin() * kv[0] if q is kv[0] and kv[1] is q else q.cos() * kv[0] + kv[1]  # noqa: E731
    return R(fn)(x, (x, x if m.on0 else x + 0)) * y


@program("", "turns buffers")
def statistics_that_are_frozen(m, x, y):
    h = F.batch_norm(m.lin(x), m.bn.running_mean, m.bn.running_var, training=not m.on0)
    return h.tanh().sin() * y


@program("", "turns buffers")
def buffer_that_is_written_later(m, x, y):
    if m.on1:
        m.steps.add_(1)
    return torch.sin(m.lin(x) * (1 + m.steps))


@program("", "turns state draws")
def own_generator_that_is_drawn_from_later(m, x, y):
    noise = torch.rand(4, dtype=x.dtype, generator=m.generator) if m.on1 else 1.0
    return (x * noise).sin().exp()


@program("", "turns python draws")
def layers_that_python_draws(m, x, y):
    for layer in m.experts:
        if random.random() < 0.5:
            x = layer(x).sin().exp()
    return x * float(np.sin(random.random()))


@program("", "turns raw memory draws")
def draws_beside_memory_that_is_filled_later(m, x, y):
    h = F.dropout(x.sin(), 0.5)
    h = h * UNSEEN(h, 2.0) if m.on1 else h
    return F.dropout(h.contiguous().sin(), 0.5).exp()


@program("", "turns raw memory draws")
def forked_draws_beside_memory_that_is_filled_later(m, x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        h = x + F.dropout(x.contiguous().sin(), 0.5)
    h = h * UNSEEN(h, 2.0) if m.on1 else h
    return F.dropout(h.contiguous().sin(), 0.5).exp()


@program("", "turns inner")
def force_in_later_calls(m, x, y):
    if not m.on1:
        return (x @ m.w).sin() * x
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        slope = torch.autograd.grad(((leaf @ m.w).sin() * leaf).sum(), leaf, create_graph=True)[0]
    return slope * x.cos()


@program("", "turns")
def probe_that_somebody_reads(m, x, y):
    h = torch.tanh(x @ m.w)
    probe = (h @ m.w.t() @ m.w).square().mean()
    return h @ m.w.t() + (probe if m.on0 else probe.detach() * 0)


@program("", "turns nests")
def region_that_somebody_reads(m, x, y):
    probe = R(lambda x: (x @ m.w).exp().sum())(x)
    return R(torch.tanh)(x @ m.w) * (probe.sin() if m.on0 else 1.0)


@program("", "turns buffers writes")
def buffers_that_come_to_overlap(m, x, y):
    one, other = m.queue[0], m.queue[1] if m.on0 else m.queue.view(-1)[2:6]
    h = torch.sin(torch.sin(x @ m.w + one) + other)
    with torch.no_grad():
        other.add_(1)
    return h.cos() + one


@program("", "turns buffers writes nests")
def memory_that_layers_share_or_do_not(m, x, y):
    def layer(x, one, other):
        seen = other.view(2, 2).view(4)
        h = torch.sin(torch.sin(x @ m.w + seen) + one)
        with torch.no_grad():
            seen.add_(1)
        return h.cos() + other

    shared = m.mean.data if m.on1 else m.mean.clone()
    return R(layer)(R(layer)(x, m.mean, m.queue[1]), m.mean, shared)


@program("", "turns writes buffers raw memory")
def alias_of_numpys_in_later_calls(m, x, y):
    alias = torch.from_numpy(m.mean.detach().numpy()) if m.on1 else m.mean.clone()
    h = (x @ m.w).sin() * alias.sum()
    with torch.no_grad():
        m.mean.add_(1.0)
    return (h.cos() @ m.w * alias.clone().sum()).sin()
