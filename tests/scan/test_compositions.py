"""Scans together with remat, policies, random numbers, odd operands and errors, under every transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import checkpoint_name, remat, scan_remat, while_remat
from remat.policies import save_matmuls, save_names
from remat.schedules import Multilevel
from tests.helpers import crossed, loop

W = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
H, XS = (
    torch.linspace(-1, 1, 3, dtype=torch.float64),
    torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3),
)
BATCH = torch.stack([H, 2 * H])

TRANSFORMS: dict[str, Any] = {
    "grad": lambda f: grad(f)(H),
    "vjp": lambda f: vjp(f, H)[1](torch.tensor(2.0, dtype=torch.float64)),
    "jvp": lambda f: jvp(f, (H,), (H,)),
    "vmap": lambda f: vmap(f)(BATCH),
    "vmap grad": lambda f: vmap(grad(f))(BATCH),
    "grad vmap": lambda f: grad(lambda b: vmap(f)(b).sum())(BATCH),
    "jacrev": lambda f: jacrev(grad(f))(H),
    "jacfwd": lambda f: jacfwd(grad(f))(H),
    "hessian": lambda f: hessian(f)(H),
    "vmap hessian": lambda f: vmap(hessian(f))(BATCH),
    "third": lambda f: grad(lambda h: grad(lambda h: grad(f)(h).pow(2).sum())(h).pow(2).sum())(H),
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


FORMS: dict[str, Any] = {
    "remat outside": remat(value(scanned(checkpoints=2))),
    "remat outside with a policy": remat(value(scanned(checkpoints="sqrt")), policy=save_matmuls),
    "remat inside": value(scanned(checkpoints=2), remat(step)),
    "remat inside with names": value(scanned(checkpoints=2), remat(step, policy=save_names("product"))),
    "names in all": value(scanned(checkpoints="all", policy=save_names("product"))),
    "names in segments": value(scanned(checkpoints="sqrt", policy=save_names("product"))),
    "all": value(scanned(checkpoints="all")),
    "offloaded": value(scanned(checkpoints=2, offload=True)),
    "two levels of memory": value(scanned(checkpoints=Multilevel(device=1, host=2))),
}


@pytest.mark.parametrize(("transform", "form"), crossed(TRANSFORMS, FORMS, every=4))
def test_forms_under_transforms(form, transform):
    apply = TRANSFORMS[transform]
    torch.testing.assert_close(apply(FORMS[form]), apply(value(loop)))


@pytest.mark.parametrize("transform", ["grad", "vmap grad", "jvp", "hessian"])
def test_a_loop_inside_a_scan_and_a_scan_inside_a_loop(transform):
    def halve(h, x):
        # Three steps, whatever the values: a loop whose length is not known in advance.
        end = while_remat(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1], x)[0]), (0, h), checkpoints=2)
        return end[1], end[1]

    def three(h, x):
        for _ in range(3):
            h = step(h, x)[0]
        return h, h

    apply = TRANSFORMS[transform]
    expected = apply(value(loop, three))
    torch.testing.assert_close(apply(value(scanned(checkpoints=2), halve)), expected)

    def nested(h):
        end = while_remat(
            lambda c: c[0] < 2,
            lambda c: (c[0] + 1, scan_remat(step, c[1], XS, checkpoints=2)[0]),
            (0, h),
            checkpoints=1,
        )
        return end[1].pow(2).sum()

    def twice(h):
        return loop(step, loop(step, h, XS)[0], XS)[0].pow(2).sum()

    torch.testing.assert_close(apply(nested), apply(twice))


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


def test_a_region_of_two_arguments_one_with_a_tangent_and_one_differentiated():
    def f(h, x):
        return torch.tanh(h @ W + x).sum()

    def mixed(f):
        return jacfwd(grad(f), argnums=1)(H, XS[1])

    torch.testing.assert_close(mixed(remat(f)), mixed(f))


def test_the_derivative_of_a_scan_that_does_not_depend_on_the_input_is_zero():
    # jax #1907: a step whose output has no tangent.
    def f(h):
        return scan_remat(lambda c, x: (torch.ones(3, dtype=torch.float64), c), h, XS)[0].sum()

    assert torch.equal(grad(f)(H), torch.zeros_like(H))
    assert torch.equal(jvp(f, (H,), (H,))[1], torch.zeros((), dtype=torch.float64))


def test_ys_that_nobody_reads():
    # jax: test_remat_of_scan_unused_extensive_output_grad.
    def f(scan, h):
        return scan(step, h, XS)[0].sum()

    found = grad(lambda h: f(remat(scanned(checkpoints=2)), h))(H)
    torch.testing.assert_close(found, grad(lambda h: f(loop, h))(H))


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
