"""Programs with state: buffers, random streams, what a module stores, what Python counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.bank.library import SCAN, TILED, R
from tests.bank.program import expressions, program

expressions(
    "RANDOM",
    "draws",
    dropout="F.dropout(x.contiguous(), 0.5)",
    noise_like="x * torch.rand_like(x)",
    bernoulli="x * torch.bernoulli(torch.full_like(x, 0.5))",
    uniform_into_empty="x + torch.empty_like(x).uniform_(0, 1)",
    random_permutation="x[:, torch.randperm(4)]",
    normal_around="x * torch.normal(y.detach(), 0.1)",
)
expressions(
    "RANDOM",
    "draws modules",
    dropout_module="m.drop(x.contiguous()) * y",
)
expressions(
    "STATE",
    "state draws",
    own_generator="x * torch.rand(x.shape, generator=m.generator, dtype=x.dtype)",
)
expressions(
    "STATE",
    "state stores captures",
    cache_by_rows="x * m.cache.setdefault(len(x), torch.linspace(0.5, 1.5, 4, dtype=x.dtype))",
    cache_of_the_first="x * m.cache.setdefault('first', y.detach().mean(0).sin())",
)
expressions(
    "STATE",
    "state captures",
    noted_result_read="x if m.noted is None else x * m.noted.mean().tanh()",
)
expressions(
    "PYTHON",
    "python",
    python_and_numpy_random="x * random.random() + np.random.rand()",
)


@program("BUFFERS", "buffers", graphs="nothing")
def counter(m, x, y):
    m.steps.add_(1)
    return x * m.steps.clamp(max=3.0)


@program("BUFFERS", "buffers", graphs="matmuls everything")
def running_mean(m, x, y):
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - m.mean


@program("BUFFERS", "buffers", graphs="nothing")
def queue_shifted(m, x, y):
    with torch.no_grad():
        m.queue.copy_(torch.cat([x.detach()[:1], m.queue[:-1]]))
    return x * m.queue[1].sin()


@program("BUFFERS", "buffers", graphs="nothing")
def batch_norm_twice(m, x, y):
    return m.bn(m.bn(x).sin())


@program("BUFFERS", "buffers")
def counter_assigned(m, x, y):
    m.steps += 1
    return x.cos() / m.steps


@program("BUFFERS", "buffers", graphs="matmuls")
def queue_flat_view(m, x, y):
    m.queue.view(-1)[::4].add_(x.detach().mean())
    return x * m.queue[0]


@program("BUFFERS", "buffers")
def mean_read_then_halved(m, x, y):
    out = x + m.mean
    m.mean.mul_(0.5)
    return out


@program("BUFFERS", "buffers", graphs="nothing")
def queue_slice_transposed(m, x, y):
    t = m.queue[1:3]
    t.t().add_(0.25)
    return x.sin() * t.sum(0)


@program("STATE", "state draws")
def seeded_inside(m, x, y):
    torch.manual_seed(7)
    return F.dropout(x.contiguous(), 0.5)


@program("STATE", "state draws")
def forked_random_state(m, x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        t = torch.rand_like(x)
    return x * t + torch.rand(1, dtype=x.dtype)


@program("STATE", "state draws")
def random_state_put_back(m, x, y):
    t = torch.get_rng_state()
    out = F.dropout(x.contiguous(), 0.5)
    torch.set_rng_state(t)
    return out


@program("", "buffers numbers")
def ring_of_rows(m, x, y):
    at = int(m.steps)
    with torch.no_grad():
        m.queue[at : at + len(x)] = x
        m.steps.fill_((at + len(x)) % 5)
    return x.sin() * m.queue.mean(0)


@program("", "state stores draws captures")
def cache_of_a_draw_before_more_draws(m, x, y):
    if "drawn" not in m.cache:
        m.cache["drawn"] = torch.rand(4, dtype=x.dtype)
    return F.dropout(x.contiguous() * m.cache["drawn"], 0.5) + torch.rand(4, dtype=x.dtype) * y


@program("", "state stores draws captures memory")
def cache_of_a_sobol_sequence(m, x, y):
    if "drawn" not in m.cache:
        m.cache["drawn"] = torch.quasirandom.SobolEngine(4, scramble=True, seed=3).draw(1, dtype=x.dtype)[0]
    h = (x.sin() * m.cache["drawn"]).tanh()
    return h * torch.from_numpy(h.detach().numpy() * 0 + 1)


@program("STATE", "state stores")
def last_result_stored(m, x, y):
    m.last = x.sin()
    return m.last * y


@program("STATE", "state stores")
def last_mean_stored_after_use(m, x, y):
    t = m.last
    m.last = x.detach().mean(0)
    return x * t


@program("STATE", "state stores")
def noted_result(m, x, y):
    m.noted = x.sin()
    return y.cos()


@program("STATE", "state hooks")
def hook_that_scales(m, x, y):
    t = x.sin()
    if t.requires_grad:
        t.register_hook(lambda g: g * 0.5)
    return t.exp().tanh()


@program("PYTHON", "python")
def call_counter(m, x, y):
    m.calls += 1
    return x * m.calls


@program("PYTHON", "python")
def history_of_numbers(m, x, y):
    m.history.append(float(x.detach().sum()))
    return x.sin() * len(m.history)


@program("PYTHON", "python stores")
def escaped_result(m, x, y):
    m.escaped.append(x.sin() * 2)
    return x.cos()


@program("PYTHON", "python")
def factor_updated(m, x, y):
    m.factor = m.factor * 0.5 + 0.25
    return x.sin() * m.factor


@program("PYTHON", "python hooks")
def hook_that_notes(m, x, y):
    t = x.sin()
    if t.requires_grad:
        t.register_hook(lambda g: m.gradients.append(float(g.sum())))
    return t * y


@program("PYTHON", "python inner")
def accumulating_backward_inside(m, x, y):
    t = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        m.lin(t).sin().sum().backward(inputs=[t])
    return x * t.grad


@program("PYTHON", "python")
def retained_gradient(m, x, y):
    out = x.sin()
    out.retain_grad() if out.requires_grad else None
    return out


@program("PYTHON", "python")
def shared_list(m, x, y):
    t = m.shared
    t.append(len(x))
    return x * len(t)


@program("", "draws")
def draws_of_odd_numbers(m, x, y):
    """What is left of a pair of normal numbers is a part of a state."""
    for i in range(9):
        noise = torch.randn(1 + i % 5, dtype=x.dtype).sum() * torch.normal(torch.zeros(3), 1.0).sum()
        x = 0.5 * x + torch.sin(m.scale * x) * noise
    return x * y


@program("", "state draws")
def draws_between_seeds(m, x, y):
    for i in range(9):
        if i % 4 == 2:
            torch.manual_seed(i)
        x = 0.5 * x + torch.sin(m.scale * x) * torch.randn(4, dtype=x.dtype)
    return x * y


@program("", "draws")
def small_draws_and_large_ones(m, x, y):
    for i in range(6):
        x = 0.5 * x + torch.sin(m.scale * x) * torch.rand(3000 if i % 3 == 2 else 4, dtype=x.dtype)[:4]
    return x * y


@program("", "raw state draws nests memory")
def generator_in_a_region_inside_that_runs_again(m, x, y):
    x.detach().cpu().numpy()
    return R(lambda x: (x * torch.rand(4, generator=m.generator, dtype=x.dtype)).sin())(x) * x.cos()


@program("", "buffers nests", graphs="matmuls")
def queue_pushed_in_a_region_inside(m, x, y):
    def push(x):
        with torch.no_grad():
            m.queue.copy_(torch.cat([x.detach()[:1], m.queue[:-1]]))
        h = x * m.queue[1].sin()
        other = h.clone()
        other[x > 0] = h[x > 0].sin()
        return h + other

    return R(push, "everything")(x) * y


@program("", "state stores nests torch.func")
def result_kept_from_the_last_step(m, x, y):
    out = torch.func.grad(lambda t: R(lambda t: (t @ m.w).tanh())(t).sum())(x) * x
    m.last = (x * 2).exp().detach()[0] * out[0]
    return out * y


@program("", "state stores")
def result_stored_beside_scan(m, x, y):
    out = SCAN(lambda h: (h @ m.w).tanh(), x, 2, "all")
    m.last = (x * 2).exp()[0] * out[0]
    return out * y


@program("", "state stores")
def result_stored_beside_tiles(m, x, y):
    out = TILED(lambda a: (a @ m.w).tanh(), x)
    m.last = (x * 2).exp()[0] * out[0]
    return out * y
