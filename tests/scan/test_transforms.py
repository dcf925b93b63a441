"""scan_remat under every transform equals the hand-written loop under the same transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap

from remat import scan_remat
from remat.policies import save_everything, save_matmuls, save_nothing
from remat.schedules import Multilevel, Revolve, Segmented
from tests.helpers import crossed, loop

SCHEDULES = ["all", "sqrt", 1, 2, 3, 50, Segmented(2), Segmented(3, Revolve(2)), Multilevel(device=1, host=1)]
N, D = 7, 3


def with_schedule(checkpoints: Any, **options: Any) -> Callable[..., Any]:
    return lambda body, carry, xs: scan_remat(body, carry, xs, checkpoints=checkpoints, **options)


def rnn(scan: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def loss(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        def body(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(h @ w + x)
            return h, h.sin() * x

        last, ys = scan(body, h, xs)
        return (last**2).sum() + (ys**3).sum()

    return loss


def mapped(scan: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Without a carry: rows are mapped, as by `jax.lax.map`."""

    def loss(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        _, ys = scan(lambda none, x: (none, torch.tanh(x @ w + h) * x), None, xs)
        return (ys**3).sum()

    return loss


@pytest.fixture
def args() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in ((D, D), (D,), (N, D)))


def three(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, 2 * t, t - 1])


ALL = (0, 1, 2)
# What the bank's ways are not: batches of operands along other axes, and of some of them.
COMPOSITIONS: dict[str, Callable[[Callable[..., Any], tuple[torch.Tensor, ...]], Any]] = {
    "vmap xs": lambda f, a: vmap(f, (None, None, 0))(a[0], a[1], three(a[2])),
    "vmap xs, axis 1": lambda f, a: vmap(f, (None, None, 1))(a[0], a[1], three(a[2]).movedim(0, 1)),
    "vmap both": lambda f, a: vmap(f, (None, 0, 0))(a[0], three(a[1]), three(a[2])),
    "vmap captured": lambda f, a: vmap(f, (0, None, None))(three(a[0]), a[1], a[2]),
    "grad vmap": lambda f, a: grad(lambda *b: vmap(f, (None, 0, None))(*b).sum(), argnums=ALL)(
        a[0], three(a[1]), a[2]
    ),
    "jacrev": lambda f, a: jacrev(grad(f, argnums=1), argnums=ALL)(*a),
    "grad jvp": lambda f, a: grad(lambda *b: jvp(f, b, a)[1], argnums=ALL)(*a),
}


@pytest.mark.parametrize(
    ("composition", "model", "checkpoints"), crossed(COMPOSITIONS, [rnn, mapped], [2, "sqrt"], every=2)
)
def test_composition(composition, model, checkpoints, args):
    transform = COMPOSITIONS[composition]
    found = transform(model(with_schedule(checkpoints)), args)
    torch.testing.assert_close(found, transform(model(loop), args))


@pytest.mark.parametrize(
    ("checkpoints", "policy", "reverse"),
    crossed(SCHEDULES, [save_matmuls, save_nothing, save_everything], [False, True]),
)
def test_backward(checkpoints, policy, reverse, args):
    args = tuple(a.requires_grad_() for a in args)

    def reference(*a):
        return loop(*a, reverse=reverse)

    ours = rnn(with_schedule(checkpoints, policy=policy, reverse=reverse))
    expected = torch.autograd.grad(rnn(reference)(*args), args)
    torch.testing.assert_close(torch.autograd.grad(ours(*args), args), expected)
    torch.testing.assert_close(grad(ours, argnums=ALL)(*args), expected)


def test_batched_cotangents_of_a_step_that_draws(args):
    """Torch lets no op draw below them; the steps that run again are no part of the batch."""
    w, h, xs = (a.requires_grad_() for a in args)

    def gradients(scan):
        torch.manual_seed(0)
        body = lambda h, x: (torch.dropout(torch.tanh(h @ w + x), 0.5, True), x)  # noqa: E731
        eye = torch.eye(D, dtype=torch.float64)
        return torch.autograd.grad(scan(body, h, xs)[0], (w, h, xs), eye, is_grads_batched=True)

    torch.testing.assert_close(gradients(with_schedule(2)), gradients(loop))


def test_hooks_of_captured_parameters_run_once(args):
    w, h, xs = args
    w.requires_grad_()
    calls = []
    w.register_hook(lambda g: calls.append(1) or g * 2)
    ours, expected = (rnn(scan)(w, h, xs) for scan in (with_schedule(2), loop))
    torch.testing.assert_close(torch.autograd.grad(ours, w), torch.autograd.grad(expected, w))
    assert len(calls) == 2


def test_saved_tensor_hooks_see_the_kept_carries(args):
    w, h, xs = (a.requires_grad_() for a in args)
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        value = rnn(with_schedule(3))(w, h, xs)
    # Three operands; of the carries 0, i, j and the one in hand the first is an operand. The losses pack too.
    assert packed.count(torch.Size([D])) >= 4
    expected = torch.autograd.grad(rnn(loop)(w, h, xs), (w, h, xs))
    torch.testing.assert_close(torch.autograd.grad(value, (w, h, xs)), expected)
