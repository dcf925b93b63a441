"""Code whose result a function drops (a probe for a log): its values are not kept, its ops not run again."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from remat import checkpoint_policy, remat, save_everything, save_matmuls, save_nothing, saved_residuals
from tests.helpers import LiveBytes, OpCounter, crossed, rand

N, WIDE = 8, 32
POLICIES = {
    "save_nothing": save_nothing,
    "save_matmuls": save_matmuls,
    "save_everything": save_everything,
    "budget": checkpoint_policy(budget=0.5),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def products(x, w, log):
    h = torch.tanh(x @ w)
    log((h @ w.t() @ w).square().mean())
    return h @ w.t()


def draws(x, w, log):
    h = F.dropout(torch.tanh(x @ w), 0.5)
    log(F.dropout(h, 0.5).exp().sum())
    return h @ w.t()


def own_rule(x, w, log):
    log(Twice.apply((x @ w).exp()).sum())
    return x @ w


def reduction(x, w, log):
    """Autograd saves less than the arguments are, but for what the probe saves."""
    log(x.exp().exp().sum())
    return x.sum(0).exp() * w.sum(0).exp().sum()


def with_region(x, w, log):
    log(remat(lambda x: (x @ w).exp().sum())(x))
    return remat(torch.tanh)(x @ w) @ w.t()


def with_backward_inside(x, w, log):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((y @ w).sin().sum(), y)
    log((slope @ w).sin().sum() + (x @ w).sin().sum())
    return torch.tanh(x * slope) @ w


def whole(x, w, log):
    """It runs again as a whole: the memory of a value is looked at."""
    h = torch.tanh(x @ w)
    log(float(h.detach().numpy().mean()) * (h @ w.t()).exp().sum())
    return (h * 2).exp()


PROGRAMS = {
    f.__name__: f for f in (products, draws, own_rule, reduction, with_region, with_backward_inside, whole)
}


def given():
    return rand(N, N).requires_grad_(), rand(N, WIDE).requires_grad_()


def gradients(fn, x, w, seed=0):
    torch.manual_seed(seed)
    return torch.autograd.grad(fn(x, w).square().sum(), (x, w))


def count(fn):
    with OpCounter() as ops:
        fn()
    return ops["mm"]


@pytest.mark.filterwarnings("ignore:.*budget of:UserWarning", "ignore:.*cannot be planned:UserWarning")
@pytest.mark.parametrize(("program", "policy"), crossed(PROGRAMS, POLICIES, every=2))
def test_no_more_is_kept_than_without_a_region(program, policy):
    def plain(x, w):
        return PROGRAMS[program](x, w, lambda value: value.item())

    x, w = given()
    region = remat(plain, policy=POLICIES[policy])
    # (Of a run as a whole, and of a backward inside, a policy may keep what autograd does not.)
    if program not in ("whole", "with_backward_inside"):
        kept = [r for r in saved_residuals(region, x, w) if r.why not in ("argument", "captured")]
        # (A draw takes 5 KB beside, whatever its size.)
        numbers = sum(r.bytes for r in kept if r.why != "random")
        assert numbers <= saved_residuals(plain, x, w).kept_bytes
    for seed in range(3):
        torch.testing.assert_close(gradients(region, x, w, seed), gradients(plain, x, w, seed))


@pytest.mark.parametrize("policy, again", [("save_nothing", 1), ("save_matmuls", 0), ("save_everything", 0)])
def test_products_that_are_only_logged_do_not_run_again(policy, again):
    def plain(x, w):
        return products(x, w, lambda value: value.item())

    x, w = given()
    region = remat(plain, policy=POLICIES[policy])
    base = count(lambda: gradients(plain, x, w))
    assert [count(lambda: gradients(region, x, w)) - base for _ in range(3)] == [again] * 3


def test_what_only_dead_code_reads_is_not_held():
    x, probe = rand(N, N).requires_grad_(), rand(N, 4 * N)

    def fn(x):
        (x.sin() @ probe).exp().mean().item()
        return x.sin().exp()

    region = remat(fn)
    for _ in range(2):
        assert [r.shape for r in saved_residuals(region, x)] == [x.shape]
    out = region(x)
    probe.mul_(2)  # nobody reads it any more
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], x.cos() * x.sin().exp())


def test_a_captured_value_is_weighed_as_an_argument_is():
    """Under autocast autograd saves copies of half the bytes, and what they were cast of goes."""
    x, w = torch.rand(N, N).requires_grad_(), torch.rand(N, N).requires_grad_()

    def kept(wrap, by_argument):
        with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16):
            h, table = x.sin(), w.cos()
            args = (h, table) if by_argument else (h,)
            out = wrap(lambda h, given=table: torch.tanh(h @ given))(*args)
            del h, table, args
        return live.bytes, torch.autograd.grad(out.float().sum(), (x, w))

    for by_argument in (True, False):
        most, want = kept(lambda f: f, by_argument)
        for _ in range(2):
            found, grads = kept(remat, by_argument)
            assert found <= most
            torch.testing.assert_close(grads, want)


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_function_does_not_read_has_no_gradient_at_two_levels(inference):
    """A gradient of zeros would go on to where zero times infinity is no number."""

    def twice(wrap):
        def loss(x):
            unread = F.normalize(torch.zeros(2, 3) * x.sin(), dim=1, eps=1e-3)
            return wrap(lambda a, b: b.cos().sum())(unread, y)

        return grad(lambda x: grad(loss)(x).square().sum())(x)

    x, y = rand(3).float(), rand(3, seed=1)
    with torch.inference_mode(inference):
        torch.testing.assert_close(twice(remat), twice(lambda f: f))
