"""Custom ops whose names or tags say something else than what they do."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from remat import remat, save_everything, save_nothing, save_ops
from tests.compiled import compiled
from tests.helpers import crossed, forget, same


def tanh(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


def mask(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x).round()


def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, dtype=x.dtype)


def custom(name, kernel):
    op = torch.library.custom_op(f"remat_named::{name}", kernel, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_vmap(lambda info, dims, x: (op(x), dims[0]))
    return op


# Factories of torch with such names read no numbers of their operand; these do.
READING = [custom(name, tanh) for name in ("new_tanh", "tanh_like", "empty_tanh", "zeros_like", "rand_like")]
# And these draw without the tag that says so.
DRAWING = [custom("mask", mask), custom("new_noise", noise), custom("mask_like", mask)]


class Through(torch.autograd.Function):
    """`op`, with the derivative of tanh: it is there under torch.func, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, op):
        out = op(x)
        return out, out.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * (1 - ctx.saved_tensors[0] ** 2), None


def plain(op):
    return lambda x: Through.apply(x.sin() * 2 + 1, op)[0].exp()


def with_writes(op):
    def fn(x):
        h = x.sin() + 2
        made = Through.apply(h, op)[0]
        h.mul_(3)
        made[0] = 1.0
        made.mul_(h)
        return made.exp() * made

    return fn


def before_a_draw(op):
    """What is drawn after the op is drawn from the state that it left."""
    return lambda x: F.dropout(Through.apply(F.dropout(x.sin()) + 2, op)[0].exp(), 0.5).sin().exp()


def backward(fn, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x).sum(), x)


def by_grad(fn, x):
    return grad(lambda x: fn(x).sum())(x)


def by_vmap(fn, x):
    return vmap(grad(lambda x: fn(x).sum()), randomness="different")(torch.stack([x, x + 1]))


def by_compile(fn, x):
    return backward(compiled(fn), x)


def check(run, fn, op, policies=None, nestings=(False, True), calls=2):
    x = torch.linspace(0.2, 1.5, 6, dtype=torch.float64)
    for policy, nested in itertools.product(
        policies or [save_nothing, save_ops(op), save_everything], nestings
    ):
        forget()
        inner = remat(fn, policy=policy)
        region, want = (remat(lambda x: inner(x).sin()), lambda x: fn(x).sin()) if nested else (inner, fn)  # noqa: B023
        for _ in range(calls):
            found = []
            for one in (want, region):
                torch._dynamo.reset()
                torch.manual_seed(0)
                found.append((run(one, x), torch.rand(1)))
            same(found[1], found[0])


@pytest.mark.parametrize(
    ("op", "make", "run"),
    crossed([*READING, *DRAWING], [plain, with_writes, before_a_draw], [backward, by_grad, by_vmap], every=6),
)
def test_it_is_as_without_remat(op, make, run):
    check(run, make(op), op)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "make"), list(zip(READING, itertools.cycle([plain, with_writes]))))
def test_it_is_so_in_compiled_code(op, make):
    check(by_compile, make(op), op, calls=1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, with_writes])
@pytest.mark.parametrize("op", DRAWING)
def test_a_kept_draw_is_so_in_compiled_code(op, make):
    """One that is recomputed needs the tag (docs/limits.md): compilers trace an op by its shapes."""
    check(by_compile, make(op), op, [save_ops(op), save_everything], (False,), calls=1)


@pytest.mark.slow
def test_a_draw_with_the_tag_is_recomputed_as_it_was_in_compiled_code():
    tagged = torch.library.custom_op(
        "remat_named::tagged", mask, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    tagged.register_fake(torch.empty_like)
    check(by_compile, plain(tagged), tagged)
