"""torch.func.vjp: the pullback outlives the forward."""

import torch
import torch.utils._pytree as pytree

from tests.helpers import (
    check,
    matrix,
    of_inexact,
    vjp,
)


def cotangents(outputs, factor=1.0):
    return tuple(torch.full_like(out, factor) for out in outputs)


def as_tuple(fn):
    """`fn` with a flat tuple of its inexact outputs."""

    def flat(*args):
        outputs = pytree.tree_leaves(fn(*args))
        return tuple(out for out in outputs if out.is_floating_point() or out.is_complex())

    return flat


@matrix("vjp")
def test_pullback_twice(name, policy):
    def run(fn, args):
        fn, args = of_inexact(as_tuple(fn), args)
        outputs, pullback = vjp(fn, *args)
        return outputs, (pullback(cotangents(outputs)), pullback(cotangents(outputs, 0.5)))

    check(name, policy, run)


@matrix("vjp", policies=("nothing", "matmuls", "rule"))
def test_pullback_after_leaving(name, policy):
    def run(fn, args):
        def forward():
            flat, inexact_args = of_inexact(as_tuple(fn), args)
            return vjp(flat, *inexact_args)

        outputs, pullback = forward()
        torch.manual_seed(1)
        other = torch.vmap(lambda x: x.sin())(torch.zeros(2))
        assert other.shape == (2,)
        return outputs, pullback(cotangents(outputs))

    check(name, policy, run)


@matrix("vjp", policies=("nothing", "matmuls"))
def test_vmapped_pullback(name, policy):
    def run(fn, args):
        flat, inexact_args = of_inexact(as_tuple(fn), args)
        outputs, pullback = vjp(flat, *inexact_args)
        basis = tuple(torch.stack([torch.ones_like(out), torch.full_like(out, 0.5)]) for out in outputs)
        return outputs, torch.vmap(pullback)(basis)

    check(name, policy, run)
