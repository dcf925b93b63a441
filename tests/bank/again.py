"""Programs whose functions run again as a whole, or begin again amid a call: what a second run meets is not
what the first one did."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, vmap

from tests.bank.library import COND, LOOP, SCAN, UNSEEN, Early, R
from tests.bank.program import program


@program("", "nests state draws torch.func")
def seeds_and_states_beside_a_transform(m, x, y):
    def drawn(x):
        before = m.generator.get_state()
        m.generator.manual_seed(3)
        mask = torch.rand(4, generator=m.generator, dtype=x.dtype)
        m.generator.set_state(before)
        noise = torch.rand(4, generator=m.generator, dtype=x.dtype)
        return (x * mask + noise) * grad(lambda a: a.sin().sum())(x)

    return R(drawn)(x) * y


@program("", "nests scans stores", found="double/nothing")
def step_that_stores_its_result(m, x, y):
    def step(a):
        m.noted = (a @ m.w).tanh()
        return m.noted * 2

    return SCAN(step, x, 2, 1) * y


@program("", "nests torch.func captures", found="vmap_grad/nothing")
def forces_that_capture_an_argument(m, x, y):
    forces = lambda b: grad(lambda a: a.tanh().sum())(b.sin() * x) * b  # noqa: E731
    return R(lambda y: R(forces)(y) * x, "matmuls")(y)


@program("", "nests hooks draws torch.func")
def hooks_before_a_transform(m, x, y):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        part = R(torch.sin)(x)
    return grad(lambda x: (x.sin() * x).sum())(x) * part * torch.rand_like(x)


@program("", "nests captures torch.func", found="vjp/nothing")
def region_in_a_vmapped_one(m, x, y):
    """The pull-back of `vjp` is called when the level that the inner region captures from is gone."""
    around = R(lambda a, b: R(lambda a: x.sin() * 2)(a) * b.cos())
    return vmap(around)(torch.stack([y, x]), torch.stack([x, x])).sum(0)


@program("", "nests python", found="grad_grad/nothing third/matmuls")
def ends_by_an_exception(m, x, y):
    """What leaves with it has derivatives."""

    def ends(x):
        raise Early((x * 2).sin().exp())

    try:
        return R(ends)(x)
    except Early as early:
        return early.args[0].cos() * x * y


@program("", "nests state stores torch.func")
def table_that_a_region_inside_has_made(m, x, y):
    """Regions inside take aliases of what they read; a third, which uses torch.func, holds a result."""

    def scaled(x):
        return m.cache.setdefault(len(x), torch.arange(4.0).cos()).to(x.dtype) * x

    def last(a):
        return grad(lambda t: m.lin(t).sum())(a).mul(a) * 0 + twice

    twice = R(scaled)(R(scaled)(x))
    return R(last)(x) * y


@program("", "nests state stores", found="jvp_grad/nothing")
def table_in_the_wrapper_of_a_level_that_is_gone(m, x, y):
    table = {}
    made = R(lambda a, b: a * table.setdefault(1, torch.arange(4.0, dtype=x.dtype).cos()) * b)(y, x)
    return R(lambda b: b.sin() * len(table))(y) + x.sin() + made * 0


@program("", "nests scans captures", found="hessian/nothing")
def views_of_the_result_of_a_scan(m, x, y):
    """No torch function has made it: a look at its base is none of the function around."""

    def halves(h):
        made = SCAN(lambda h: h.sin() * m.scale, h, 2, 1)
        return made[:, :2], made[:, 2:]

    return SCAN(lambda h: torch.cat(R(halves)(h), 1).cos(), x, 2, 1) * y


@program("", "raw memory torch.func")
def forward_derivative_beside_unseen_memory(m, x, y):
    tangent = torch.func.jvp(lambda t: t.sin() * x, (x,), (y,))[1]
    return torch.addmm(m.scale, (tangent * UNSEEN(tangent, 0.5)).cos(), m.w)


@program("", "nests inner", found="plain_over_grad/nothing grad/nothing")
def dual_level_inside(m, x, y):
    def push(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward_ad.make_dual(x, x.sin()).exp()).tangent

    return R(push)(x) * y


@program("", "hooks", found="grad_grad/nothing plain_over_grad/nothing double/nothing third/nothing")
def hook_that_bends(m, x, y):
    """In the pass of its level alone."""
    h = torch.tanh(x)
    if h.requires_grad:
        h.register_hook(lambda g: (g * 2).sin())
    return h.sin() * y


@program("", "hooks nests captures", found="grad/nothing vmap_grad/nothing")
def hooks_that_read_what_no_op_saves(m, x, y):
    def hooked(x, y):
        h, scale = x.sin(), y.cos()
        if h.requires_grad:
            h.register_hook(lambda g: g * y)
            h.register_hook(lambda g: g * scale)
        return h * 1

    return R(lambda x: R(hooked)(x, m.scale))(x) + R(hooked)(x, y)


@program("", "torch.func", found="result_written/everything result_written/ops")
def result_beside_a_transform(m, x, y):
    return grad(lambda t: t.sin().square().sum())(x) * x * y


@program("", "raw memory", found="result_written/everything result_written/ops")
def result_beside_unseen_memory(m, x, y):
    return (x + UNSEEN(x, 0.5)).sin() * x * y


@program("", "nests draws modules", found="backward/nothing")
def one_activation_on_two_layouts(m, x, y):
    act = R(lambda h: F.dropout(F.gelu(h), 0.3) * h)
    x = x + act(m.lin(x))
    return x + act((x.mT @ x).mT)[:1] * y


@program("", "nests scans decisions modes", found="backward/nothing vjp/matmuls jvp/nothing")
def step_under_autocast(m, x, y):
    def step(a):
        R(lambda t: a)(a)
        return y.sin()[a.detach()[:, 0].argsort()].exp()

    with torch.autocast("cpu", torch.bfloat16):
        return LOOP(step, x, 2) * x


@program("", "nests names", found="grad_grad/ops mixed/ops")
def results_that_depend_on_less_than_is_given(m, x, y):
    first, second = R(lambda p, q: (q.detach(), q), "ops")(x, y)
    inner = first * 1.5 + second
    return inner * (inner > 0).to(x.dtype) * x


@program("", "raw memory state stores")
def result_stored_by_a_function_that_runs_again(m, x, y):
    """After a backward it is of the last call, not of the one that ran again last."""

    def body(x):
        m.last = x.sin()[0]
        return (m.last * UNSEEN(x, 2.0)).exp()

    return R(body)(R(body)(x).tanh()) * y


@program("", "raw memory nests torch.func")
def transform_met_in_a_second_run(m, x, y):
    """A recomputation of a first call goes the way of that call."""

    def outer(a):
        v = a.sin() * (a + UNSEEN(a, 0.5)).tanh()

        def inner(b):
            replaced = v * 2
            replaced.data = replaced.data.sin()
            return replaced * b * grad(lambda t: (t.exp() * y).sum())(b) * b

        return R(inner)(a) + R(inner)(a)

    return R(outer)(x)


@program("", "objects draws", found="grad_grad/but_names")
def kept_draws_of_a_generator_made_inside(m, x, y):
    g = torch.Generator().manual_seed(3)
    drawn = torch.multinomial(torch.ones(4), 4, generator=g).to(x.dtype)
    drawn = drawn + torch.bernoulli(torch.full((4,), 0.5, dtype=x.dtype), generator=g)
    drawn = drawn * torch.normal(torch.zeros(4, dtype=x.dtype) + 1, 0.5, generator=g)
    return (x.sin() * drawn).exp() * torch.rand(4, generator=g, dtype=x.dtype)


@program("", "nests state draws", found="backward/odd backward/rule backward/everything")
def kept_dropouts_of_nested_regions(m, x, y):
    drop = lambda x: x * torch.bernoulli(torch.full((4,), 0.5, dtype=x.dtype), generator=m.generator)  # noqa: E731
    inner = R(lambda x: F.dropout(drop(x.sin()).exp().contiguous(), 0.5) * x, "everything")
    return R(lambda x: inner(x.cos()).sin(), "odd")(x) * y


@program("", "nests captures", found="grad/nothing hessian/names")
def branches_by_torch_cond(m, x, y):
    def positive(x):
        return torch.sin(torch.sin(x) @ m.w).sin()

    return torch.tanh(COND(x.sum() > 0, positive, lambda x: torch.cos(x @ m.w.sin()).exp(), x)) * y


@program("", "nests captures", found="grad/nothing backward/matmuls")
def torch_cond_in_torch_cond(m, x, y):
    inner = R(lambda x: torch.sin(torch.sin(x) @ m.w), "matmuls")
    deep = lambda x: COND(x.sum() > 5, lambda x: x.exp(), inner, x).cos()  # noqa: E731
    return COND(x.sum() > -99, deep, torch.tanh, x) * y


STATES = "buffers/nothing buffers_vmap/nothing buffers_hessian/nothing buffers_grad/nothing"


@program("", "nests buffers modules", found=STATES)
def two_batch_norms_in_regions(m, x, y):
    h = R(lambda x: x + m.bn(m.lin(x)).tanh())(x)
    return R(lambda x: x + m.bn(m.lin(x)).tanh())(h) * y


@program("", "nests buffers", found=STATES, graphs="nothing")
def mean_read_written_and_read(m, x, y):
    def ema(x):
        before = x * m.mean.clone()
        with torch.no_grad():
            m.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return before + x.sin() * m.mean.clone()

    return R(ema)(R(ema)(x @ m.w).tanh()) * y


@program("", "nests buffers", found=STATES)
def counter_that_scales_in_regions(m, x, y):
    def scaled(x):
        m.steps += 1
        return x * x * m.steps.clone()

    return R(lambda x: R(scaled)(x @ m.w).sin())(x) * y


@program("", "nests buffers writes", found=STATES, graphs="nothing")
def state_among_the_arguments(m, x, y):
    """Read, written whole and in part, and read again."""

    def running(x, mean, count):
        first = x * mean.clone()
        with torch.no_grad():
            mean.lerp_(x.mean(0), 0.1)
            mean[:2].mul_(2)
            count += 1
        return first.sin() + (x * mean.clone()).tanh() / count.clone()

    return R(running)(R(running)(x @ m.w, m.mean, m.steps), m.mean, m.steps) * y * m.mean.clone()


@program("", "nests buffers writes", found=STATES, graphs="matmuls")
def parts_of_a_state_among_the_arguments(m, x, y):
    def layer(x, part, mean):
        with torch.no_grad():
            part.add_(x.mean())
        return x.sin() * mean.clone() * part.clone().sum()

    return R(lambda x, mean: R(layer)(x, mean[1:], mean) * 1.5)(x @ m.w, m.mean) * y


@program("", "nests buffers writes", found="backward/nothing buffers/nothing")
def state_that_carries_a_derivative(m, x, y):
    def weighted(x, mean):
        first = x * mean.clone()
        mean.copy_(0.9 * mean + x.mean(0))
        return first.sin() + (x * mean.clone()).tanh()

    return R(weighted)(x, m.mean.clone()) * y


@program("", "turns nests writes", found="backward/nothing")
def arguments_that_share_memory_in_some_calls(m, x, y):
    def step(x, a, b):
        with torch.no_grad():
            a.mul_(2)
        return x.sin() * b.clone()

    a = m.scale.detach().clone()
    return R(step)(x, a, a[:] if m.on1 else a.clone()) * y


@program("", "raw memory nests buffers writes", found="backward/nothing backward/matmuls")
def queue_that_is_pushed_around_a_region_inside(m, x, y):
    """The outer one runs again, where a copy stands in for the queue, which is written to later."""

    def push(h):
        with torch.no_grad():
            m.queue.copy_(torch.cat([h.detach()[:1], m.queue[:-1]]))
        return h

    def outer(h):
        h = push(h + torch.from_numpy(m.queue[0].numpy().copy()))
        return push(R(lambda h: h + h * m.queue[1].sin())(h)).sin()

    return R(outer)(x) * y


@program("", "raw memory", found="backward/nothing")
def bits_of_a_value_by_numpy(m, x, y):
    h = x.detach().exp()
    bits = torch.from_numpy(h.numpy().view("int64"))
    return x.sin() * (bits > 0).to(x.dtype) * h


@program("", "raw memory", found="backward/nothing")
def more_memory_filled_than_a_region_holds(m, x, y):
    for value in (0.5, 1.5, 2.5):
        made = torch.empty(75_000, dtype=x.dtype)
        made.numpy().fill(value)
        x = (x * made[:4]).sin()
    return x * y


@program("", "nests scans modes", found="backward/nothing")
def scan_that_captures_an_inference_tensor(m, x, y):
    with torch.inference_mode():
        t = y.detach().sin()
    return SCAN(lambda h: torch.tanh(h @ m.w + t), x, 2, 1)


@program("", "nests scans numbers draws", found="backward/nothing")
def scan_whose_later_steps_draw(m, x, y):
    step = lambda h: h.sin() - 2 if float(h.detach().sum()) > 0 else F.dropout(h, 0.5) + h  # noqa: E731
    return SCAN(step, x.abs().contiguous() + 1, 3, "all") * y
