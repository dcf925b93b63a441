"""Transforms of torch.func inside `torch.inference_mode()`, and tensors that were made there."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from remat import RematError, remat, save_matmuls, save_nothing, scan_remat, while_remat
from tests.helpers import crossed, rand

POLICIES = [save_nothing, save_matmuls]


def sines():
    with torch.inference_mode():
        return grad(torch.sin)(torch.ones(()))


pytestmark = pytest.mark.skipif(bool(sines() == 0), reason="torch.func gives zeros in inference mode (2.11)")
W = rand(3, 3, seed=1)


def field(x):
    return (x @ W).sin() @ W


def energy(fn):
    return lambda x: fn(x).square().sum()


def pulled(fn, x):
    out, pull = vjp(fn, x)  # pyright: ignore[reportAssignmentType]
    return pull(out)[0]


WAYS = {
    "grad": lambda fn, x: grad(energy(fn))(x),
    "grad of grad": lambda fn, x: grad(lambda x: grad(energy(fn))(x).sum())(x),
    "vjp": pulled,
    "jacrev": lambda fn, x: jacrev(fn)(x),
    "jacfwd": lambda fn, x: jacfwd(fn)(x),
    "hessian": lambda fn, x: hessian(energy(fn))(x),
    "jvp": lambda fn, x: jvp(fn, (x,), (x,))[1],
    "jvp of grad": lambda fn, x: jvp(grad(energy(fn)), (x,), (x,))[1],
    "vmap(grad)": lambda fn, x: vmap(grad(energy(fn)))(torch.stack([x, 2 * x])),
    "grad(vmap)": lambda fn, x: grad(lambda t: vmap(fn)(t).square().sum())(torch.stack([x, 2 * x])),
}


@pytest.mark.parametrize(("way", "policy"), crossed(WAYS, POLICIES, every=2))
def test_an_inference_tensor_as_operand(way, policy):
    """Features of a frozen encoder, captured and passed."""
    with torch.inference_mode():
        feature, captured = rand(3, 3, seed=2) * 1.0, rand(3, 3, seed=3) * 1.0
        frozen, trained = (torch.nn.Parameter(rand(3, seed=4), requires_grad=flag) for flag in (False, True))

    def head(p, z, w=frozen):
        return ((p @ z).tanh() @ captured * w).sin()

    region, run, x = remat(head, policy=policy), WAYS[way], rand(3)
    want = run(lambda p: head(p, feature), x)
    for _ in range(2):
        torch.testing.assert_close(run(lambda p: region(p, feature), x), want)
    with pytest.raises(RematError, match="made in inference mode"):
        run(lambda p: region(p, feature, trained), x)
    with torch.inference_mode():
        want = run(lambda p: head(p, feature, trained), x)
        torch.testing.assert_close(run(lambda p: region(p, feature, trained), x), want)


def test_an_inference_tensor_of_a_class_of_its_own_comes_as_such():
    class Feature(torch.Tensor):
        pass

    with torch.inference_mode():
        feature = rand(3).as_subclass(Feature)
    seen = []
    region = remat(lambda x, z: (seen.append(type(z)), ((x + z).sin() * x).sum())[1])
    grad(region)(rand(3), feature)
    assert set(seen) == {Feature}


def test_a_pull_on_the_other_side():
    region, x = remat(field), rand(3)
    want = pulled(field, x)
    with torch.inference_mode():
        out, pull = vjp(region, x)  # pyright: ignore[reportAssignmentType]
    torch.testing.assert_close(pull(out)[0], want)
    out, pull = vjp(region, x)  # pyright: ignore[reportAssignmentType]
    with torch.inference_mode():
        torch.testing.assert_close(pull(out)[0], want)


def looped(fn, x):
    for _ in range(3):
        x = fn(x)
    return x


def over(fn, x):
    return scan_remat(lambda c, _: (fn(c), None), x, length=3, checkpoints=2)[0]


def while_over(fn, x):
    step = lambda c: (fn(c[0]), c[1] + 1)  # noqa: E731
    return while_remat(lambda c: c[1] < 3, step, (x, torch.tensor(0)), checkpoints=2, max_steps=4)[0]


@pytest.mark.parametrize("scan", [over, while_over])
@pytest.mark.parametrize("way", ["grad", "grad of grad", "jvp of grad", "hessian"])
def test_what_a_region_in_a_step_captures(way, scan):
    """Weights that a level differentiates meet a tensor made there, which the region is not given."""
    run, params = WAYS[way], rand(3, 3, seed=7)
    with torch.inference_mode():
        x, y = rand(3) * 1.0, rand(3, seed=8) * 1.0

        def loss(region, loop):
            def step(w, c):
                inner = region(lambda c: (y @ w).sin() + c.cos())
                return region(lambda c: inner(inner(c)))(c)

            return lambda w: loop(lambda c: step(w, c), x)

        want = run(loss(lambda fn: fn, looped), params)
        torch.testing.assert_close(run(loss(remat, scan), params), want)


def twice(fn, x):
    return while_remat(
        lambda c: c[1] < 2, lambda c: (fn(c[0]), c[1] + 1), (x, 0), checkpoints=2, max_steps=3
    )[0]


TRACED = {
    "region": lambda x, z: remat(field)(x) * z,
    "of what is captured": lambda x, z: x * grad(energy(remat(lambda t: (t @ z).sin())))(z),
    "loop": lambda x, z: x * twice(remat(lambda t: t * z), z),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("kind", TRACED)
def test_linearized_with_an_inference_tensor(kind):
    """No graph of torch has a place for storages, by which a region has such a tensor as an ordinary one."""
    x, fn = rand(3), TRACED[kind]
    with torch.inference_mode():
        z = rand(3, 3, seed=2) * 1.0
        linearize(lambda x: fn(x, z), x)  # (Here torch's own graph gives zeros, 2.13.)
    out, push = linearize(lambda x: fn(x, z), x)
    torch.testing.assert_close((out, push(x)), jvp(lambda x: fn(x, z.clone()), (x,), (x,)))
