"""scan_remat under every transform equals the hand-written loop under the same transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import remat, scan_remat
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


def nested(scan: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def loss(w: torch.Tensor, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        def inner(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(h @ w + x)
            return h, h * x

        last, ys = scan(lambda h, row: scan(inner, h, row), h, torch.stack([xs[:3], xs[3:6]]))
        return last.sum() + (ys**2).sum()

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
COMPOSITIONS: dict[str, Callable[[Callable[..., Any], tuple[torch.Tensor, ...]], Any]] = {
    "grad": lambda f, a: grad(f, argnums=ALL)(*a),
    "vjp": lambda f, a: vjp(f, *a)[1](torch.tensor(2.0, dtype=torch.float64)),
    "jvp": lambda f, a: jvp(f, a, a),
    "vmap carry": lambda f, a: vmap(f, (None, 0, None))(a[0], three(a[1]), a[2]),
    "vmap xs": lambda f, a: vmap(f, (None, None, 0))(a[0], a[1], three(a[2])),
    "vmap xs, axis 1": lambda f, a: vmap(f, (None, None, 1))(a[0], a[1], three(a[2]).movedim(0, 1)),
    "vmap both": lambda f, a: vmap(f, (None, 0, 0))(a[0], three(a[1]), three(a[2])),
    "vmap captured": lambda f, a: vmap(f, (0, None, None))(three(a[0]), a[1], a[2]),
    "vmap grad": lambda f, a: vmap(grad(f, argnums=ALL), (None, 0, None))(a[0], three(a[1]), a[2]),
    "grad vmap": lambda f, a: grad(lambda *b: vmap(f, (None, 0, None))(*b).sum(), argnums=ALL)(
        a[0], three(a[1]), a[2]
    ),
    "grad grad": lambda f, a: grad(lambda w: (grad(f, argnums=1)(w, a[1], a[2]) ** 2).sum())(a[0]),
    "jacrev": lambda f, a: jacrev(grad(f, argnums=1), argnums=ALL)(*a),
    "jacfwd": lambda f, a: jacfwd(f, argnums=ALL)(*a),
    "hessian": lambda f, a: hessian(f, argnums=(1, 2))(*a),
    "jvp grad": lambda f, a: jvp(grad(f), a, a),
    "grad jvp": lambda f, a: grad(lambda *b: jvp(f, b, a)[1], argnums=ALL)(*a),
}


@pytest.mark.parametrize(
    ("composition", "model", "checkpoints"), crossed(COMPOSITIONS, [rnn, nested, mapped], [2, "sqrt"])
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


class Stepper(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(D, D, dtype=torch.float64)

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.linear(h) + x)
        return h, h


class Unroll(torch.nn.Module):
    def __init__(self, scan: Callable[..., Any]) -> None:
        super().__init__()
        self.step, self.scan = Stepper(), scan

    def forward(self, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        last, ys = self.scan(self.step, h, xs)
        return last.sum() + (ys**2).sum()


@pytest.mark.parametrize("checkpoints", ["all", 2], ids=repr)
def test_modules_and_functional_call(checkpoints, args):
    _, h, xs = args
    ours, reference = Unroll(with_schedule(checkpoints)), Unroll(loop)
    reference.load_state_dict(ours.state_dict())
    ours(h, xs).backward()
    reference(h, xs).backward()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    # The module holds these tensors only while functional_call runs; the backward comes later.
    other = {name: torch.randn_like(p) for name, p in ours.named_parameters()}
    wanted = grad(lambda p: functional_call(reference, p, (h, xs)))(other)
    torch.testing.assert_close(grad(lambda p: functional_call(ours, p, (h, xs)))(other), wanted)
    leaves = {name: p.clone().requires_grad_() for name, p in other.items()}
    plain = torch.autograd.grad(functional_call(ours, leaves, (h, xs)), tuple(leaves.values()))
    torch.testing.assert_close(plain, tuple(wanted.values()))


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


@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 1])
def test_jacobian_of_one_number_through_a_region(checkpoints):
    """A batch of one: what stands for a batched weight is a view of it, not a copy."""
    w, x = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def looped(w):
        h = x
        for _ in range(3):
            h = torch.sin(h * w)
        return h.sum()

    def scanned(w):
        return scan_remat(lambda h, _: (torch.sin(h * w), None), x, length=3, checkpoints=checkpoints)[0]

    region = remat(scanned)
    torch.testing.assert_close(jacrev(lambda w: region(w).sum())(w), jacrev(looped)(w))
    torch.testing.assert_close(hessian(lambda w: region(w).sum())(w), hessian(looped)(w))


@pytest.mark.parametrize(
    ("policy", "checkpoints"), crossed([save_nothing, save_matmuls, save_everything], ["all", "sqrt", 1])
)
def test_region_around_a_scan_that_captures_what_is_not_differentiated(policy, checkpoints):
    """No operand of the scan, so that nobody hears of it, and yet its steps read it again."""
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)

    def looped(w, x):
        for _ in range(3):
            x = torch.sin(torch.tanh(x @ w) @ w)
        return x.sum()

    def scanned(w, x):
        body = lambda h, _: (torch.sin(torch.tanh(h @ w) @ w), None)  # noqa: E731
        return scan_remat(body, x, length=3, checkpoints=checkpoints)[0].sum()

    region = remat(scanned, policy=policy)
    for transform in (vmap(grad(region, 1), (None, 0)), vmap(jacrev(region, 1), (None, 0)), grad(region, 1)):
        expected = vmap(grad(looped, 1), (None, 0))(w, x)
        torch.testing.assert_close(transform(w, x), expected)


@pytest.mark.parametrize(("policy", "checkpoints"), crossed([save_nothing, save_matmuls], ["all", "sqrt", 1]))
def test_levels_that_differentiate_different_operands_of_a_region_around_a_scan(policy, checkpoints):
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def looped(w, x):
        for _ in range(3):
            x = torch.tanh(x @ w)
        return x.sum()

    def scanned(w, x):
        return scan_remat(lambda h, _: (torch.tanh(h @ w), None), x, length=3, checkpoints=checkpoints)[
            0
        ].sum()

    def mixed(f):
        return grad(lambda x: grad(f)(w, x).pow(2).sum())(x)

    torch.testing.assert_close(mixed(remat(scanned, policy=policy)), mixed(looped))
