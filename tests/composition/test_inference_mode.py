"""Transforms of torch.func inside `torch.inference_mode()`, and tensors that were made there."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import checkpoint_policy, remat, save_matmuls, save_nothing, save_ops, scan_remat, while_remat
from tests.helpers import crossed, rand, sparse

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


@pytest.mark.parametrize(("way", "made_inside", "policy"), crossed(WAYS, [False, True], POLICIES))
def test_inside_inference_mode(way, made_inside, policy):
    region, run, x = remat(field, policy=policy), WAYS[way], rand(3)
    with torch.inference_mode():
        x = x * 1.0 if made_inside else x
        want = run(field, x)
        for _ in range(2):
            torch.testing.assert_close(run(region, x), want)
        torch.testing.assert_close(run(lambda x: remat(lambda x: region(x))(x), x), want)


@pytest.mark.parametrize(("way", "policy"), crossed(WAYS, POLICIES, every=2))
def test_an_inference_tensor_as_operand(way, policy):
    """Features of a frozen encoder, captured and passed."""
    with torch.inference_mode():
        feature, captured = rand(3, 3, seed=2) * 1.0, rand(3, 3, seed=3) * 1.0

    def head(p, z):
        return ((p @ z).tanh() @ captured).sin()

    region, run, x = remat(head, policy=policy), WAYS[way], rand(3)
    want = run(lambda p: head(p, feature), x)
    for _ in range(2):
        torch.testing.assert_close(run(lambda p: region(p, feature), x), want)


def test_a_pull_on_the_other_side():
    region, x = remat(field), rand(3)
    want = pulled(field, x)
    with torch.inference_mode():
        out, pull = vjp(region, x)  # pyright: ignore[reportAssignmentType]
    torch.testing.assert_close(pull(out)[0], want)
    out, pull = vjp(region, x)  # pyright: ignore[reportAssignmentType]
    with torch.inference_mode():
        torch.testing.assert_close(pull(out)[0], want)


def test_a_module_with_dropout_and_its_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 3)).double()
    region, x = remat(model), rand(2, 3)

    def run(fn):
        torch.manual_seed(0)
        return grad(lambda p: functional_call(fn, p, (x,)).square().sum())(dict(model.named_parameters()))

    with torch.inference_mode():
        torch.testing.assert_close(run(region), run(model))


def test_a_scan():
    x = rand(3)
    # Elements and a captured tensor that were made there, outside of it.
    with torch.inference_mode():
        w, xs = W * 1.0, rand(4, 3, seed=4) * 1.0

    def given(c, x):
        return (c @ w + x).tanh(), c.sin()

    def plain(c):
        ys = []
        for x in xs:
            c, y = given(c, x)
            ys.append(y)
        return c + torch.stack(ys).sum(0)

    def scanned_over(c):
        c, ys = scan_remat(given, c, xs)
        return c + ys.sum(0)

    for run in (WAYS["grad"], WAYS["vjp"], WAYS["jacrev"], WAYS["vmap(grad)"]):
        torch.testing.assert_close(run(scanned_over, x), run(plain, x))


def looped(fn, x):
    for _ in range(3):
        x = fn(x)
    return x


def over(fn, x):
    return scan_remat(lambda c, _: (fn(c), None), x, length=3, checkpoints=2)[0]


def while_over(fn, x):
    step = lambda c: (fn(c[0]), c[1] + 1)  # noqa: E731
    return while_remat(lambda c: c[1] < 3, step, (x, torch.tensor(0)), checkpoints=2, max_steps=4)[0]


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("scan", [over, while_over])
@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"vmap(grad)", "grad(vmap)"}))
def test_scans_of_weights_that_require_gradients(way, scan, made_inside):
    """Plain autograd records no op below the levels, and no Function either."""
    w = W.clone().requires_grad_()
    step, run = (lambda c: (c @ w).tanh()), WAYS[way]
    with torch.inference_mode():
        x = rand(3) * 1.0 if made_inside else rand(3)
        want = run(lambda x: looped(step, x), x)
        for scanned in (lambda x: scan(step, x), lambda x: remat(lambda x: scan(step, x))(x)):
            torch.testing.assert_close(run(scanned, x), want)


def two_products(x, w):
    return torch.nn.functional.linear(torch.nn.functional.linear(x, w).sin(), w, w[0]).cos()


@pytest.mark.filterwarnings("ignore:The cost of", "ignore:A budget")
@pytest.mark.parametrize(
    "policy", [checkpoint_policy(budget=0.5), save_matmuls, save_ops(torch.ops.aten.add)]
)
@pytest.mark.parametrize("way", WAYS)
def test_policies_on_what_was_made_inside(way, policy):
    region, run = remat(two_products, policy=policy), WAYS[way]
    with torch.inference_mode():
        x, w = rand(3) * 1.0, rand(3, 3, seed=5) * 1.0
        want = run(lambda x: two_products(x, w), x)
        for _ in range(2):
            torch.testing.assert_close(run(lambda x: region(x, w), x), want)


def test_a_scan_whose_results_are_not_read_in_parts():
    """A step of which nothing has a cotangent has nothing to pull back."""

    def loss(x):
        end, ys = scan_remat(lambda c, _: (c.detach().sin(), (c * 2).cos()), x, length=3, checkpoints=1)
        return ys[0].sum()

    with torch.inference_mode():
        x = rand(3) * 1.0
        torch.testing.assert_close(grad(loss)(x), grad(lambda x: (x * 2).cos().sum())(x))


NESTS = {
    "scan in scan": (lambda step, x: over(lambda c: over(step, c), x), 9),
    "region in scan": (lambda step, x: over(remat(step), x), 3),
    "scan in region": (lambda step, x: remat(lambda x: over(step, x))(x), 3),
    "region in region": (lambda step, x: remat(lambda x: remat(step)(x))(x), 1),
    # Of what the inner one returns nothing is read.
    "dead region in region": (lambda step, x: remat(lambda x: (remat(step)(x), x.sin())[1])(x), 0),
    "gradient in region": (lambda step, x: remat(grad(lambda x: remat(step)(x).sum()))(x), -1),
}
THIRD = {"third": lambda fn, x: grad(lambda x: hessian(energy(fn))(x).square().sum())(x)}


def without(times, step, x):
    if times < 0:
        return grad(lambda x: step(x).sum())(x)
    for _ in range(times):
        x = step(x)
    return x if times else x.sin()


@pytest.mark.parametrize(("nest", "way", "made_inside"), sparse(crossed(NESTS, WAYS | THIRD, [False, True])))
def test_nests_over_weights_that_require_gradients(nest, way, made_inside):
    """Below the levels plain autograd records nothing, however deep."""
    w, (nested, times), run = W.clone().requires_grad_(), NESTS[nest], (WAYS | THIRD)[way]
    x, other = rand(3), rand(3, seed=6)
    with torch.inference_mode():
        x, other = (t * 1.0 if made_inside else t for t in (x, other))
        step = lambda c: (c @ w).tanh() * (other @ w)  # noqa: E731
        want = run(lambda x: without(times, step, x), x)
        for _ in range(2):
            torch.testing.assert_close(run(lambda x: nested(step, x), x), want)


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
