"""Scans together with remat, policies, random numbers, odd operands and errors, under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

from remat import checkpoint_name, scan_remat, while_remat
from remat.policies import save_matmuls
from tests.helpers import loop

W = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
H, XS = (
    torch.linspace(-1, 1, 3, dtype=torch.float64),
    torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3),
)
BATCH = torch.stack([H, 2 * H])

TRANSFORMS: dict[str, Any] = {
    "grad": lambda f: grad(f)(H),
    "jvp": lambda f: jvp(f, (H,), (H,)),
    "vmap grad": lambda f: vmap(grad(f))(BATCH),
}


def step(h, x):
    h = torch.tanh(checkpoint_name(h @ W, "product") + x)
    return h, h.sin()


def value(scan: Any, body: Any = step) -> Any:
    def f(h):
        end, ys = scan(body, h, XS)
        return end.pow(2).sum() + ys.pow(3).sum()

    return f


def scanned(**options: Any) -> Any:
    return lambda body, h, xs: scan_remat(body, h, xs, **options)


def test_a_carry_of_mixed_dtypes_and_complex_numbers():
    def body(carry, x):
        z, small, count = carry
        z = z * torch.exp(1j * x.sum()) + small.double().sum()
        return (z, torch.tanh(small * z.real.mean().float()), count + 1), z.abs()

    def f(scan, h):
        start = torch.complex(h, h), torch.ones(2, dtype=torch.float32), torch.tensor(0)
        (z, small, count), ys = scan(body, start, XS)
        return z.abs().sum() + small.sum() + ys.sum() + count

    for transform in ("grad", "jvp", "vmap grad"):
        apply = TRANSFORMS[transform]
        found = apply(lambda h: f(scanned(checkpoints=2), h))
        torch.testing.assert_close(found, apply(lambda h: f(loop, h)))


def test_the_derivative_of_a_scan_that_does_not_depend_on_the_input_is_zero():
    # jax #1907: a step whose output has no tangent.
    def f(h):
        return scan_remat(lambda c, x: (torch.ones(3, dtype=torch.float64), c), h, XS)[0].sum()

    assert torch.equal(grad(f)(H), torch.zeros_like(H))
    assert torch.equal(jvp(f, (H,), (H,))[1], torch.zeros((), dtype=torch.float64))


# -- bad input ---------------------------------------------------------------------------------------------


def fails(times):
    """A body that raises at its `times`-th evaluation."""
    count = 0

    def body(h, x):
        nonlocal count
        count += 1
        if count == times:
            raise ArithmeticError("boo")
        return torch.tanh(h + x), None

    return body


@pytest.mark.parametrize("under", ["plain", "grad", "vmap", "all with a policy", "while"])
def test_an_exception_in_the_forward_says_the_step(under):
    def f(h, **options):
        return scan_remat(fails(3), h, XS, **options)[0].sum()

    calls = {
        "plain": lambda: f(H),
        "grad": lambda: grad(f)(H),
        "vmap": lambda: vmap(f)(BATCH),
        "all with a policy": lambda: f(H, policy=save_matmuls, checkpoints="all"),
        "while": lambda: while_remat(
            lambda h: True, lambda h: fails_once(h), torch.zeros(()), checkpoints=2, max_steps=9
        ),
    }
    inner = fails(3)

    def fails_once(h):
        return inner(h, 1.0)[0]

    with pytest.raises(ArithmeticError) as caught:
        calls[under]()
    assert any("in step 2 of" in note for note in caught.value.__notes__)
    # A failure leaves no trace: the next call works.
    torch.testing.assert_close(grad(value(scanned()))(H), grad(value(loop))(H))


@pytest.mark.parametrize("times, step", [(5, 2), (6, 3), (7, 2), (8, 0), (9, 1), (10, 0)])
def test_an_exception_in_the_recomputation_says_the_step(times, step):
    # Four evaluations forward. The states before steps 0 and 2 are kept: 3 is reversed from 2, 2 from its
    # own, 1 from 0 and 0 from its own.
    h = H.clone().requires_grad_()
    end, _ = scan_remat(fails(times), h, XS, checkpoints=2)
    with pytest.raises(ArithmeticError) as caught:
        end.sum().backward()
    assert [note for note in caught.value.__notes__ if f"in step {step} of" in note]


def test_a_container_in_the_carry_may_be_written():
    # The body gets a fresh dict each time; only tensors are shared.
    def body(carry, x):
        carry["h"] = torch.tanh(carry["h"] + x)
        return carry, None

    start = {"h": H}
    end, _ = scan_remat(body, start, XS, checkpoints=1)
    assert start["h"] is H and not torch.equal(end["h"], H)
    torch.testing.assert_close(
        grad(lambda h: scan_remat(body, {"h": h}, XS, checkpoints=1)[0]["h"].sum())(H),
        grad(lambda h: loop(lambda h, x: (torch.tanh(h + x), h), h, XS)[0].sum())(H),
    )
