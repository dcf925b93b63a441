"""Jacobians through scans: a vmap over cotangents or tangents batches those alone, and no step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import remat, scan_remat, while_remat
from remat.policies import save_matmuls
from tests.helpers import crossed
from tests.scan.inside import is_batched

W = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
H, XS = (
    torch.linspace(-1, 1, 3, dtype=torch.float64),
    torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3),
)


class Twice(torch.autograd.Function):
    """Its second result has no derivative, which torch's own rule for vmap over jvp cannot do."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2, (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, ct, _):
        return ct * 2

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 2, None


def branches(h, x, w):
    """Reads a number, which a vmapped step could not."""
    return torch.tanh(h @ w + x) if h.sum().item() > 0 else (h @ w).sin() * x


def writes(h, x, w):
    """Writes results of what is differentiated into memory that is not."""
    out = torch.zeros_like(x)
    out[:2] = (h @ w)[:2].sin()
    out[2:].add_(h[:1] * w[0, 0])
    return out


def scatters(h, x, w):
    return x.clone().scatter_add_(0, torch.tensor([0, 2, 2]), (h @ w).sin())


def expands(h, x, w):
    return (h @ w).sum(0, keepdim=True).sin().expand_as(h)


def transposes(h, x, w):
    return ((h @ w).view(1, 3) * h.view(3, 1)).t().sin().contiguous().t()[1] * x


def functions(h, x, w):
    return Twice.apply(h @ w)[0].sin() * x


BODIES = [branches, writes, scatters, expands, transposes, functions]
FORMS: dict[str, Any] = {
    "one state": lambda step, h, xs: scan_remat(step, h, xs, checkpoints=1),
    "segments": lambda step, h, xs: scan_remat(step, h, xs, checkpoints="sqrt", reverse=True),
    "all, with a policy": lambda step, h, xs: scan_remat(step, h, xs, checkpoints="all", policy=save_matmuls),
    "a region in it": lambda step, h, xs: scan_remat(remat(step), h, xs, checkpoints=2),
    "loop": lambda step, h, xs: _loop(step, h, xs),
}
TRANSFORMS: dict[str, Any] = {
    "jacrev": lambda f: jacrev(f, (0, 1, 2))(H, XS, W),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, 2))(H, XS, W),
    "vmap vjp": lambda f: vmap(vjp(f, H, XS, W)[1])(torch.eye(3, dtype=torch.float64)),
    "jvp jacrev": lambda f: jvp(lambda h: jacrev(f, (1, 2))(h, XS, W), (H,), (H.cos(),)),
    "grad jacrev": lambda f: grad(lambda h: jacrev(f, 2)(h, XS, W).pow(2).sum())(H),
    "jacrev grad": lambda f: jacrev(grad(lambda *a: f(*a).pow(2).sum(), (0, 1)))(H, XS, W),
    "jacfwd": lambda f: jacfwd(f, (0, 1, 2))(H, XS, W),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f), 2)(H, XS, W),
    "jacrev jacfwd": lambda f: jacrev(jacfwd(f, 2), (0, 1))(H, XS, W),
    "hessian": lambda f: hessian(f)(H, XS, W),
    "hessian of weights": lambda f: hessian(lambda w: f(H, XS, w).sum())(W),
}


def _loop(step: Any, h: Any, xs: Any) -> Any:
    def body(carry):
        h, k = carry
        return step(h, xs[k])[0], k + 1

    h, _ = while_remat(lambda carry: carry[1] < len(xs), body, (h, 0), checkpoints=2, max_steps=9)
    return h, None


def unrolled(step: Any, h: Any, xs: Any) -> Any:
    for x in xs:
        h, _ = step(h, x)
    return h, None


def value(scan: Any, body: Any) -> Any:
    def f(h, xs, w):
        return scan(lambda h, x: (body(h, x, w), None), h, xs)[0].exp()

    return f


def check(differentiate: Any, form: str, body: Any) -> None:
    plain = unrolled if form != "segments" else lambda step, h, xs: unrolled(step, h, xs.flip(0))
    found, expected = (differentiate(value(scan, body)) for scan in (FORMS[form], plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("body", "form", "transform"), crossed(BODIES, FORMS, TRANSFORMS, every=9))
def test_steps_are_evaluated_outside_of_a_vmap_over_derivatives(form, transform, body):
    check(TRANSFORMS[transform], form, body)


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_no_step_is_vmapped_nor_evaluated_more_often_than_for_one_derivative(transform):
    calls, batched = [], set()

    def step(h, x):
        calls.append(1)
        values = torch.func.jvp(lambda h: h, (h,), (h,))[0]
        batched.add(is_batched(values))
        return torch.tanh(h @ W + x), None

    def counted(differentiate: Any) -> int:
        calls.clear()
        differentiate(lambda h: scan_remat(step, h, XS, checkpoints=1)[0])
        return len(calls)

    one = (lambda f: vjp(f, H)[1](H)) if transform is jacrev else (lambda f: jvp(f, (H,), (H,)))
    assert counted(lambda f: transform(f)(H)) == counted(one) >= len(XS)
    assert batched == {False}


OLD_VMAP = {
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(
        f, x, vectorize=True, strategy="forward-mode"
    ),
    "hessian": lambda f, x: torch.autograd.functional.hessian(
        lambda x: f(x).sum(), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}


# Not the Hessian of scans in scans: torch cannot detach what it batches there, and says so.
@pytest.mark.parametrize(
    ("way", "inner"), [*[("jacobian", i) for i in ("steps", "regions", "scans")], ("hessian", "regions")]
)
def test_tangents_that_the_vmap_from_before_functorch_batches(way, inner):
    """`torch.autograd.functional` has no level that could be asked."""
    step = lambda h: (h * 2).sin() * h  # noqa: E731
    inside = {
        "steps": step,
        "regions": remat(step),
        "scans": lambda h: scan_remat(lambda c, _: (step(c), None), h, length=1)[0],
    }[inner]
    scanned = lambda x: scan_remat(lambda c, _: (inside(c), None), x, length=2)[0]  # noqa: E731
    torch.testing.assert_close(OLD_VMAP[way](scanned, H), OLD_VMAP[way](lambda x: step(step(x)), H))
