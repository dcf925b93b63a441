"""JAX's own tests of jax.checkpoint with scan, cond and while_loop; see test_jax_remat.py.

lax.scan is `scan_remat`, or a Python loop; lax.cond is a Python `if`, or torch.cond; lax.while_loop is
`while_remat`.
"""

import pytest
import torch
from torch.func import grad

from remat import remat, save_everything, save_matmuls, scan_remat
from remat.interop.jax import checkpoint_name, checkpoint_policies
from remat.policies import offload, save_names
from tests.conformance.counting import BACKWARDS, check_grads, jax_sin, save_cos, save_sin, sines, smooth_sin
from tests.conformance.rows import jax
from tests.conformance.test_jax_policies import Sine, Sum
from tests.helpers import OpCounter, forget, rand

X, W, ROW = rand(3), rand(5, 5) * 0.3, rand(5)
POSITIVE = X.abs()


@pytest.fixture(autouse=True)
def unlearned():
    """Functions of one code and other closures: the first call of each would be taken for the last one's."""
    forget()


def scan(body, init, xs=None, **options):
    options.setdefault("checkpoints", "all")
    return scan_remat(body, init, xs, **options)


def three_dots(x, w):
    for _ in range(3):
        x = torch.sin(x @ w)
    return x


# -- scan ---------------------------------------------------------------------------------------------


@jax(12, "pass", "value, gradient, 3 cos for 3 steps; three schedules")
@BACKWARDS
@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 2])
def test_remat_scan(ops_of, checkpoints):
    def to_scan(c, x):
        return torch.sin(c), None

    def f(x):
        return scan(remat(to_scan), x, torch.arange(3.0), checkpoints=checkpoints)[0]

    def plain(x):
        return torch.sin(torch.sin(torch.sin(x)))

    torch.testing.assert_close(f(X), plain(X), rtol=0, atol=0)
    torch.testing.assert_close(grad(lambda x: f(x).sum())(X), grad(lambda x: plain(x).sum())(X))
    assert ops_of(f, X)["cos"] == 3


@jax(15, "pass", "a step whose y has no derivative")
def test_remat_symbolic_zeros():
    def f(d):
        start = rand(5, 3)
        move = remat(lambda r, i: (r + 0.001 * (d * r), torch.zeros(1)))
        return scan(move, start, torch.arange(2))[0][0, 0]

    d = torch.tensor(5.0, dtype=torch.float64)
    torch.testing.assert_close(grad(f)(d), rand(5, 3)[0, 0] * 0.002 * (1 + 0.001 * d))


@jax(17, "pass", "default arguments inside a loop")
def test_remat_nontrivial_env():
    @remat
    def foo(state, dt=0.5, c=1):
        u, u_t = state
        u_t = u_t + c**2 * u * dt
        return u, u_t

    def loss(u0, target, steps, dt, c=1):
        (u, _), _ = scan(lambda s, _: (foo(s, dt, c), None), (u0, torch.zeros_like(u0)), length=steps)
        return ((u - target) ** 2).mean()

    u0 = torch.ones(8, 8, dtype=torch.float64)
    dt = 1 / torch.sqrt(torch.tensor(2.0, dtype=torch.float64))
    assert loss(u0, torch.zeros_like(u0), 10, dt) == 1
    torch.testing.assert_close(grad(loss)(u0, torch.zeros_like(u0), 10, dt), 2 * u0 / u0.numel())


@jax(19, "pass", "a region around a scan of length 1")
def test_remat_scan2():
    def scanned(x, _):
        return scan(lambda x, _: (x + 1, None), x, length=1)[0], None

    one = torch.tensor(1.0, dtype=torch.float64)
    torch.testing.assert_close(grad(lambda x: remat(scanned)(x, None)[0])(one), one)


@jax(
    32,
    "pass",
    "2 sin, 3 cos, 6 dots a step (by the weight alone one less in all: the first carry is a constant)",
)
@BACKWARDS
@pytest.mark.parametrize("form", ["policy of the scan", "loop of regions"])
def test_remat_checkpoint_dots_inside_scan(ops_of, form):
    def of_scan(w, x=ROW):
        return scan(lambda x, _: (three_dots(x, w), None), x, length=2, policy=save_matmuls)[0]

    def of_loop(w, x=ROW):
        for _ in range(2):
            x = remat(three_dots, policy=save_matmuls)(x, w)
        return x

    f = of_scan if form == "policy of the scan" else of_loop
    ops = ops_of(f, W, ROW)
    assert (*sines(ops), ops.dots) == (2 * 2, 2 * 3, 2 * 6)
    assert ops_of(f, W).dots == 2 * 6 - 1
    check_grads(f, W)


def looped(w, x=ROW):
    for _ in range(2):
        x = three_dots(x, w)
    return x


@jax(
    59,
    "pass",
    "a Python loop and `scan_remat`: 3 sin, 3 cos, 6 dots a step (the last sine of all is dead, and "
    "not computed)",
)
@BACKWARDS
@pytest.mark.parametrize(
    "loop",
    [
        looped,
        lambda w, x=ROW: scan(lambda x, _: (three_dots(x, w), None), x, length=2)[0],
    ],
    ids=["python", "scan_remat"],
)
def test_remat_checkpoint_dots_outside_scan(ops_of, loop):
    ops = ops_of(remat(loop, policy=save_matmuls), W, ROW)
    assert (*sines(ops), ops.dots) == (2 * 3 - 1, 2 * 3, 2 * 6)
    check_grads(remat(loop, policy=save_matmuls), W)


def two_sines(c, _):
    return torch.sin(c), torch.sin(c)


def pair_of_sines(sine, x, **options):
    return scan(lambda c, _: (sine(c), sine(c)), x, length=3, **options)


def check_twice(fn):
    """JAX's check_grads(fn, (3.,), order=2, modes=["rev"]), of all results."""
    check_grads(fn, torch.tensor(3.0), forward=False)


@jax(52, "pass", "order 2 of all results; sines and cosines of all three steps in the backward")
@BACKWARDS
@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 2])
def test_remat_of_scan(ops_of, checkpoints):
    runs, twice = sines(ops_of(remat(lambda x: pair_of_sines(jax_sin, x, checkpoints=checkpoints)), X))
    assert runs > 0 and twice >= 2 * 3
    check_twice(remat(lambda x: pair_of_sines(smooth_sin, x, checkpoints=checkpoints)))


@jax(53, "pass")
def test_remat_of_scan_unused_extensive_output_grad():
    def step(c, a):
        b = torch.sin(a).sum() + torch.sin(c).sum()
        return torch.sin(c * b), b

    def plain(c, rows):
        for a in rows:
            c, _ = step(c, a)
        return c.sum()

    region = remat(lambda c, rows: scan(step, c, rows), policy=checkpoint_policies.nothing_saveable)
    c, rows = torch.arange(4.0).double() / 4, torch.arange(15.0).double().reshape(5, 3) / 15
    got = grad(lambda c, rows: region(c, rows)[0].sum(), (0, 1))(c, rows)
    torch.testing.assert_close(got, grad(plain, (0, 1))(c, rows))


@jax(60, "pass", "given to `scan_remat` and around it: neither sin nor cos; order 2 of all results")
@BACKWARDS
@pytest.mark.parametrize("around", [False, True])
def test_remat_of_scan_policy(ops_of, around):
    def of(sine):
        if around:
            return remat(lambda x: pair_of_sines(sine, x), policy=save_cos)
        return lambda x: pair_of_sines(sine, x, policy=save_cos)

    assert sines(ops_of(of(jax_sin), X)) == (0, 0)
    check_twice(of(smooth_sin))


@jax(56, "pass", "2 copies a step more than when kept, none recomputed")
def test_remat_offload_names_of_scan_jaxpr():
    def f(x, policy):
        def step(y, _):
            y = checkpoint_name(torch.sin(y), "y")
            z = checkpoint_name(torch.sin(y), "z")
            w = checkpoint_name(torch.sin(z), "w")
            return w, (w * z).sum()

        return scan(step, x, length=3, policy=policy)[1].sum()

    x = rand(16)
    policy = save_names("y") | offload(save_names("z", "w"))
    torch.testing.assert_close(grad(f)(x, policy), grad(f)(x, save_everything))

    def copies(policy):
        leaf = x.clone().requires_grad_()
        with OpCounter() as forward:
            out = f(leaf, policy)
        with OpCounter() as backward:
            out.backward()
        return forward["copy_"], backward["sin"]

    (kept, _), (moved, again) = copies(save_names("y", "z", "w")), copies(policy)
    assert (moved - kept, again) == (3 * 2, 0)


class Scaled(torch.autograd.Function):
    """A rule that makes a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * torch.arange(3.0, dtype=x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g * torch.arange(3.0, dtype=g.dtype)


@jax(58, "adapted", "a rule that makes a constant, in a scan")
def test_const_in_jvp_scan():
    region = remat(lambda x: scan(lambda c, _: (Scaled.apply(c), None), x, length=1)[0].sum())
    torch.testing.assert_close(grad(region)(X), torch.arange(3.0).double())


@jax(33)
@jax(34)
@jax(36)
@pytest.mark.parametrize("order", ["scan of regions", "region of scan"])
def test_remat_custom_rules_in_scan(order):
    """The second halves of JAX's custom_jvp_policy, custom_vjp_policy and custom_jvp_linear_policy."""

    def f(x):
        return Sine.apply(x @ x * 1e-3) * 3

    def of(step, x):
        if order == "region of scan":
            return remat(lambda x: scan(step, x, length=2)[0], policy=save_matmuls)(x)
        return scan(remat(step, policy=save_matmuls), x, length=2)[0]

    check_grads(lambda x: of(lambda c, _: (f(c), None), x), rand(2, 2), forward=False)
    sums = grad(lambda x: scan(remat(lambda _, row: (None, Sum.apply(row))), None, x)[1].sum())(rand(2, 3))
    torch.testing.assert_close(sums, torch.ones(2, 3).double())


def branch(f, x):
    return f(x) if x.sum() > -torch.inf else x


# -- cond ---------------------------------------------------------------------------------------------


@jax(
    63,
    "adapted",
    "Python's `if`, and `torch.cond`, which runs as one: no sin where its value is the result, one "
    "where it is read",
)
@BACKWARDS
def test_remat_of_cond(ops_of):
    def both(x):
        return two_sines(x, None) if x.sum() > 0 else (x, x)

    def deep(x):
        return torch.sin(torch.sin(x)) if x.sum() > 0 else x

    # No sine is read where it is the result; the inner one of two is.
    ops = ops_of(remat(both), POSITIVE)
    assert (ops["sin"], ops["cos"]) == (0, 2)
    ops = ops_of(remat(deep), POSITIVE)
    assert (ops["sin"], ops["cos"]) == (1, 2)
    check_grads(remat(deep), POSITIVE)
    assert ops_of(remat(deep), -POSITIVE)["sin"] == 0


@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_remat_of_torch_cond(transform):
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: (torch.sin(x),), lambda x: (torch.cos(x),), (x,))[0]

    for x, expected in ((POSITIVE, torch.cos(POSITIVE)), (-POSITIVE, torch.sin(POSITIVE))):
        if transform == "grad":
            got = grad(lambda x: remat(f)(x).sum())(x)
        else:
            leaf = x.clone().requires_grad_()
            (got,) = torch.autograd.grad(remat(f)(leaf).sum(), leaf)
        torch.testing.assert_close(got, expected)


@jax(64, "adapted")
def test_const_in_jvp_cond():
    region = remat(lambda x: (Scaled.apply(x) if x.sum() > 0 else x).sum())
    torch.testing.assert_close(grad(region)(POSITIVE), torch.arange(3.0).double())


def check_dots_and_cond(ops_of, f):
    """Five dots, since the first one's operand is a constant."""
    ops = ops_of(f, W)
    assert (*sines(ops), ops.dots) == (2, 3, 5)
    check_grads(f, W)


@jax(65, "adapted", "2 sin, 3 cos, 5 dots, with an `if`")
@BACKWARDS
def test_remat_checkpoint_dots_inside_cond(ops_of):
    inside = remat(lambda w: three_dots(ROW, w), policy=save_matmuls)
    check_dots_and_cond(ops_of, lambda w: inside(w) if ROW.sum() > -torch.inf else ROW)


@jax(66, "adapted", "the same")
@BACKWARDS
def test_remat_checkpoint_dots_outside_cond(ops_of):
    chosen = lambda w: three_dots(ROW, w) if ROW.sum() > -torch.inf else ROW  # noqa: E731
    check_dots_and_cond(ops_of, remat(chosen, policy=save_matmuls))


@jax(67, "adapted", "neither sin nor cos")
@BACKWARDS
def test_remat_of_cond_policy(ops_of):
    f = remat(lambda x: branch(jax_sin, x), policy=save_cos)
    assert sines(ops_of(f, POSITIVE)) == (0, 0)
    f = remat(lambda x: torch.sin(torch.sin(x)) if x.sum() > 0 else x, policy=save_sin)
    assert sines(ops_of(f, POSITIVE)) == (0, 2)
