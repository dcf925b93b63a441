"""JAX's own tests of jax.checkpoint (tests/api_test.py, RematTest), by their names and with their numbers.

How often functions are called is in test_jax_calls.py, policies and names in test_jax_policies.py, loops and
branches in test_jax_control_flow.py, compiled code in test_jax_compiled.py. docs/measured/jax-tests.md has
the table of all 80, with what was adapted and why.
"""

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vmap

from remat import remat, save_matmuls, save_nothing
from remat.interop.jax import checkpoint
from tests.conformance.counting import BACKWARDS, check_grads
from tests.conformance.rows import jax
from tests.helpers import OpCounter, leaves_of, rand, vjp

aten = torch.ops.aten


def nothing(info):
    return False


# As in JAX: without a policy, with a callable that saves nothing, by the other name.
REMATS = pytest.mark.parametrize(
    "remat",
    [remat, lambda f: remat(f, policy=nothing), checkpoint],
    ids=["remat", "policy", "jax_names"],
)
X = rand(3)


def sin_sin(x):
    return torch.sin(torch.sin(x))


@jax(1, "pass", "value bitwise; backward 1 sin, 2 cos; a result that is not a tensor")
@REMATS
@BACKWARDS
def test_remat_basic(remat, ops_of):
    region = remat(lambda x: (sin_sin(x), 3.0))

    def f(x):
        out, number = region(x)
        assert number == 3.0
        return out

    torch.testing.assert_close(f(X), sin_sin(X), rtol=0, atol=0)
    gradient = grad(lambda x: f(x).sum())(X)
    torch.testing.assert_close(gradient, torch.cos(torch.sin(X)) * torch.cos(X))
    ops = ops_of(f, X)
    assert (ops["sin"], ops["cos"]) == (1, 2)


@jax(2, "pass", "closed-over value that depends on the input")
@REMATS
def test_remat_freevars(remat):
    def plain(x):
        y = 2 * torch.sin(x)
        return torch.cos(x) * torch.sin(y)

    def f(x):
        y = 2 * torch.sin(x)
        return remat(lambda x: torch.cos(x) * torch.sin(y))(x)

    check_grads(f, X)
    torch.testing.assert_close(grad(lambda x: f(x).sum())(X), grad(lambda x: plain(x).sum())(X))


@jax(3, "adapted", "Python may branch on a flag, and in eager code on the tensor")
@pytest.mark.parametrize("static", [True, False])
def test_remat_grad_python_control_flow_static_argnums(static):

    def branch(flag, x):
        return torch.sin(x) if (flag if static else x.sum() > 0) else torch.cos(x)

    region = remat(branch, static_argnums=(0,) if static else ())
    for flag, x in ((True, X.abs()), (False, -X.abs())):
        expected = torch.cos(x) if flag else -torch.sin(x)
        leaf = x.clone().requires_grad_()
        region(flag, leaf).sum().backward()
        torch.testing.assert_close(leaf.grad, expected)


@jax(4, "adapted", "static values need not be hashable")
def test_remat_grad_python_control_flow_unhashable_static_argnums():
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, positive):
            self.positive = positive

    region = remat(lambda a, x: torch.sin(x) if a.positive else torch.cos(x), static_argnums=0)
    for positive, expected in ((True, torch.cos(X)), (False, -torch.sin(X))):
        torch.testing.assert_close(
            grad(lambda x, positive=positive: region(Unhashable(positive), x).sum())(X), expected
        )


@jax(8, "pass", "vmap, jacfwd, jacrev; an op whose batching rule makes a constant")
@REMATS
def test_remat_vmap(remat):
    g = remat(sin_sin)
    torch.testing.assert_close(vmap(g)(X), sin_sin(X), rtol=0, atol=0)
    derivative = torch.diag(torch.cos(torch.sin(X)) * torch.cos(X))
    torch.testing.assert_close(jacfwd(g)(X), derivative)
    torch.testing.assert_close(jacrev(g)(X), derivative)


@REMATS
def test_remat_vmap_of_an_op_whose_batching_rule_makes_a_constant(remat):
    @torch.library.custom_op("remat_tests::introduce_constant", mutates_args=())
    def introduce(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @introduce.register_vmap
    def _(info, in_dims, x):
        return x + torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape), in_dims[0]

    ones = torch.ones(20, dtype=torch.float64)
    torch.testing.assert_close(vmap(remat(lambda x: introduce(x)))(ones), ones + torch.arange(20))


@jax(9, "pass", "in_dims 1, out_dims 0")
@REMATS
def test_remat_vmap_not_leading_dim(remat):
    x = rand(3, 5)
    torch.testing.assert_close(vmap(remat(sin_sin), 1, 0)(x), sin_sin(x).T, rtol=0, atol=0)


@jax(10, "pass", "grad of grad")
@REMATS
def test_remat_higher_order_autodiff(remat):
    def f(x):
        return torch.cos(torch.sin(x))

    x = torch.tensor(3.0, dtype=torch.float64)
    torch.testing.assert_close(grad(grad(remat(f)))(x), grad(grad(f))(x))


@jax(11, "adapted", "more sines at second order than without: it recomputes there, too; with a branch")
@pytest.mark.parametrize(
    "fn", [sin_sin, lambda x: sin_sin(x) if x > 0 else torch.cos(x)], ids=["basic", "cond"]
)
def test_remat_higher_order_ad_preserves_remat_primitive(fn):
    x = torch.tensor(0.3, dtype=torch.float64)

    def sines(fn):
        with OpCounter() as ops:
            derivative = grad(grad(fn))(x)
        return ops["sin"], derivative

    (plain, expected), (again, got) = sines(fn), sines(remat(fn))
    torch.testing.assert_close(got, expected)
    assert again > plain


@jax(13, "adapted", "at most one sin in the backward: the forward is run in PyTorch")
@BACKWARDS
@REMATS
def test_remat_no_redundant_flops(remat, ops_of):
    region = remat(lambda x, y: torch.sin(x) * y)
    two = torch.tensor(2.0, dtype=torch.float64)
    assert ops_of(lambda y: region(two, y), X)["sin"] <= 1


@jax(14, "pass", "value and gradient of a tree of regions")
@REMATS
def test_remat_binomial_checkpointing(remat):
    def binomial(functions):
        if len(functions) == 1:
            return functions[0]
        half = len(functions) // 2
        first, second = binomial(functions[:half]), binomial(functions[half:])
        return remat(lambda x: first(second(x)))

    f1, x = binomial([torch.sin] * 4), torch.tensor(4.0, dtype=torch.float64)
    torch.testing.assert_close(f1(x), sin_sin(sin_sin(x)))
    torch.testing.assert_close(grad(f1)(x), grad(lambda x: sin_sin(sin_sin(x)))(x))


@jax(16, "pass", "a region without arguments over a captured value")
@REMATS
def test_remat_jit2(remat):
    def f(x):
        y = 2 * x
        return remat(lambda: y)()

    torch.testing.assert_close(f(X), 2 * X)
    torch.testing.assert_close(grad(lambda x: f(x).sum())(X), torch.full_like(X, 2))
    torch.testing.assert_close(
        torch.autograd.grad(f(leaf := X.clone().requires_grad_()).sum(), leaf)[0], X * 0 + 2
    )


@jax(18, "pass", "einsum attention; an inner function called twice")
@REMATS
def test_remat_jit3(remat):
    def f(w, x):
        a = x @ w
        b = torch.einsum("btd,bTd->btT", a, a)
        return torch.einsum("btT,btd->btd", b, a).sum()

    def squared(w, x):
        a = w * x
        return (a * a).sum()

    w, x = rand(1, 1), rand(1, 1, 1)
    for fn in (f, squared):
        torch.testing.assert_close(grad(remat(fn))(w, x), grad(fn)(w, x))


@jax(21, "pass", "forward 2; backward 3, and 2 without the inner region (exp for `add_one`)")
@BACKWARDS
def test_remat_eval_counter(ops_of):
    """JAX's add_one, whose derivative reads its result, is exp here."""
    inner = remat(torch.exp)
    with OpCounter() as ops:
        remat(lambda x: torch.exp(inner(x)))(X)
    assert ops["exp"] == 2
    assert ops_of(remat(lambda x: torch.exp(inner(x))), X)["exp"] == 3
    assert ops_of(remat(lambda x: torch.exp(torch.exp(x))), X)["exp"] == 2


@jax(22, "pass", "n = 4, 8, 16: forward n, backward 2, 8, 24")
@BACKWARDS
@pytest.mark.parametrize(("n", "evaluations"), [(4, 2), (8, 8), (16, 24)])
def test_remat_recursive_checkpoint_recompute_counts(ops_of, n, evaluations):
    def recursive(functions):
        if len(functions) <= 2:
            return lambda x: functions[0](functions[1](x)) if len(functions) == 2 else functions[0](x)
        half = len(functions) // 2
        outer, inner = recursive(functions[:half]), remat(recursive(functions[half:]))
        return lambda x: outer(inner(x))

    small = rand(3) * 1e-3
    f = recursive([lambda x: torch.exp(x) - 1] * n)
    with OpCounter() as ops:
        f(small)
    assert ops["exp"] == n
    assert ops_of(f, small)["exp"] == evaluations


@jax(23, "adapted", "nothing is traced; the captured tensor is written once")
@REMATS
def test_escaped_tracer_remat(remat):
    state = [torch.zeros((), dtype=torch.float64)]

    def g(x):
        state[0].add_(1)
        return torch.sin(x) * state[0]

    leaf = X.clone().requires_grad_()
    remat(g)(leaf).sum().backward()
    assert state[0] == 1
    torch.testing.assert_close(leaf.grad, torch.cos(X))


@jax(45, "pass")
@REMATS
def test_checkpoint_dropvars(remat):
    def f(x):
        _, x = (lambda: (x, x))()
        return x

    torch.testing.assert_close(grad(lambda x: remat(f)(x).sum())(X), torch.ones_like(X))


@jax(46, "adapted", "a constant made inside survives")
def test_dce_keeps_eqns_with_used_outputs_but_no_used_inputs():
    region = remat(lambda x: torch.full((3,), 3.0, dtype=torch.float64) * x)
    torch.testing.assert_close(grad(lambda x: region(x).sum())(X), torch.full_like(X, 3))


class Rebuilt(torch.autograd.Function):
    """Answers as its gradient what its argument is worth in the backward."""

    @staticmethod
    def forward(x):
        return x.float() * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return ctx.saved_tensors[0].float() * 1.0


class Dot(torch.autograd.Function):
    """A product whose gradient is its cotangent."""

    @staticmethod
    def forward(x):
        return x @ x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g


@jax(
    73,
    "pass",
    "bfloat16: the value rebuilt in the backward is the forward's, bit for bit; compiled, by Inductor, too",
)
@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
@pytest.mark.parametrize("mode", ["backward", "vjp"])
def test_excess_precision_hell(policy, mode):
    rebuilt = []

    class Probe(Dot):
        @staticmethod
        def backward(ctx, g):  # type: ignore[override]
            rebuilt.append(g)
            return g

    x = (1 + torch.finfo(torch.bfloat16).eps) * torch.eye(2, dtype=torch.bfloat16)
    region = remat(lambda x: Rebuilt.apply(Probe.apply(x)), policy=policy)
    if mode == "vjp":
        out, pull = vjp(region, x)
        pull(torch.ones_like(out))
    else:
        (out := region(x.requires_grad_())).backward(torch.ones_like(out))
    torch.testing.assert_close(rebuilt[0].float(), out, rtol=0, atol=0)


@jax(80, "adapted", "two backwards add into `.grad`")
def test_remat_grad_accum_refs():
    region, leaf = remat(torch.sin), leaves_of((X,))[0]
    for _ in range(2):
        region(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * grad(lambda x: region(x).sum())(X))


@jax(76, "adapted", "one `remat::recompute NAME` in a profile")
def test_name_stack_annotation():
    region, leaf = remat(sin_sin, name="block"), X.clone().requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        region(leaf).sum().backward()
    labels = [event.name for event in profile.events() or () if event.name.startswith("remat::")]
    assert labels.count("remat::recompute block") == 1
