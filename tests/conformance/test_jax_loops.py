"""JAX's own tests of jax.checkpoint with rules in loops and branches, and of while; see test_jax_remat.py."""

import warnings

import pytest
import torch
from torch.func import grad

from remat import remat, save_nothing, while_remat
from tests.conformance.counting import BACKWARDS, FUNKY, check_grads, jax_sin, sines, smooth_sin
from tests.conformance.rows import jax
from tests.conformance.test_jax_control_flow import POSITIVE, Sine, X, branch, check_twice, scan
from tests.helpers import LiveBytes, jvp

# -- functions with rules of their own, in loops and branches ----------------------------------------


def once(f, x):
    return scan(lambda c, _: (f(c), None), x, length=1)[0]


def twice_smooth(apply):
    return lambda x: apply(Sine.apply, apply(Sine.apply, x))


@jax(
    61,
    "adapted",
    "JAX's counts for three policies, order 2. Under nothing 1 and 1 as in JAX. Twice: 3 and 2 for "
    "its 2 and 2, since a loop in a region is a region itself. Under torch.func 2 and 2, twice 4 and "
    "4",
)
@jax(62, "adapted", "the same with a loop inside the rule", name="remat_of_scan_funky_custom_jvp2")
@BACKWARDS
@FUNKY
@pytest.mark.parametrize("depth", [1, 2], ids=["", "2"])
def test_remat_of_scan_funky_custom_jvp(ops_of, policy, left, depth):
    """A rule that computes its cosine plainly, and one that does in a loop, as JAX's second test has it.

    JAX counts one and one under nothing, and two and two for a loop of a loop. Here a loop is a region, too:
    what is around it runs its step for the carry, and it runs the step again. So a loop of a loop costs a
    sine more.
    """
    apply = {} if depth == 1 else {"apply": once}

    def of(sine):
        return remat(lambda x: once(lambda x: sine(x, **apply), x), policy=policy)

    def of_two(sine):
        step = lambda x: sine(x, **apply)  # noqa: E731
        return remat(lambda x: once(step, once(step, x)), policy=policy)

    nothing = policy == save_nothing
    assert sines(ops_of(of(jax_sin), POSITIVE)) == ((1, 1) if nothing else left)
    if nothing:
        assert sines(ops_of(of_two(jax_sin), POSITIVE)) == (3, 2)
    check_twice(of(smooth_sin))
    check_twice(of_two(smooth_sin))


@jax(68, "adapted", "JAX's counts for the four policies, once, and twice under nothing")
@jax(69, "adapted", "the same with a branch inside the branch", name="remat_of_cond_funky_custom_jvp2")
@BACKWARDS
@FUNKY
@pytest.mark.parametrize("depth", [1, 2], ids=["", "2"])
def test_remat_of_cond_funky_custom_jvp(ops_of, policy, left, depth):

    def sin(x):
        return jax_sin(x) if depth == 1 else branch(jax_sin, x)

    f = remat(lambda x: branch(sin, x), policy=policy)
    assert sines(ops_of(f, POSITIVE)) == left
    if policy == save_nothing:
        g = remat(lambda x: branch(sin, branch(sin, x)), policy=policy)
        assert sines(ops_of(g, POSITIVE)) == (1, 2)
    check_grads(remat(twice_smooth(branch), policy=policy), POSITIVE, forward=False)


# -- while --------------------------------------------------------------------------------------------


@jax(
    70,
    "pass",
    "`torch.func.linearize`, bitwise; and `while_remat` has a reverse derivative, with sin and cos in it",
)
@BACKWARDS
def test_remat_of_while_loop(ops_of):
    """Linearized, as JAX has it. lax.while_loop has no reverse derivative; while_remat has."""

    def steps(x, sine=torch.sin):
        return while_remat(lambda c: c[0] < 3, lambda c: (c[0] + 1, sine(c[1])), (0, x), checkpoints=3)[1]

    def plain(x):
        return torch.sin(torch.sin(torch.sin(x)))

    ones = torch.ones_like(X)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attempted to insert a get_attr Node")
        value, linear = torch.func.linearize(remat(steps), X)
    torch.testing.assert_close((value, linear(ones)), jvp(plain, (X,), (ones,)), rtol=0, atol=0)
    for fn in (steps, remat(steps)):
        torch.testing.assert_close(grad(lambda x, fn=fn: fn(x).sum())(X), grad(lambda x: plain(x).sum())(X))
    sin, cos = sines(ops_of(remat(lambda x: steps(x, jax_sin)), X))
    assert sin > 0 and cos >= 3


@jax(71, "adapted", "keeps as many carries as it was told, however long the loop is")
def test_remat_of_while_loop_policy():
    def kept(steps, checkpoints):
        def f(x):
            return while_remat(
                lambda c: c[0] < steps, lambda c: (c[0] + 1, torch.sin(c[1])), (0, x), checkpoints=checkpoints
            )[1]

        with LiveBytes() as live:
            out = f(X.clone().requires_grad_())
            return live.bytes - out.nbytes

    # The carries, and the first one once more, as the operand that it is.
    assert kept(20, 4) == kept(10, 4) <= 5 * X.nbytes
    assert kept(20, 6) > kept(20, 4)
