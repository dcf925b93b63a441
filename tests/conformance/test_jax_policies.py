"""JAX's own tests of jax.checkpoint, continued: policies, names, what is kept; see test_jax_remat.py."""

import contextlib
import logging
import re

import pytest
import torch
from torch.func import grad, vmap

from remat import (
    remat,
    save_matmuls,
    save_nothing,
    save_ops,
    save_weight_matmuls as save_unbatched,
    saved_residuals,
)
from remat.interop.jax import checkpoint, checkpoint_name, checkpoint_policies
from tests.conformance.counting import BACKWARDS, check_grads, jax_cos, jax_sin, residuals, save_cos, sines
from tests.conformance.rows import jax
from tests.helpers import OpCounter, leaves_of, rand

aten = torch.ops.aten


X, SCALAR = rand(3), torch.tensor(1.5, dtype=torch.float64)


def sin_sin(x):
    return torch.sin(torch.sin(x))


@jax(
    26,
    "pass",
    "neither sin nor cos, both, cos alone in the backward; with `torch.sin` 0, 1, 0 sin and its 2 "
    "cos; order 2",
    name="remat_custom_policy (3)",
)
@BACKWARDS
@pytest.mark.parametrize(
    ("policy", "counts"),
    [
        (checkpoint_policies.everything_saveable, (0, 0)),
        (None, (1, 2)),
        (checkpoint_policies.save_only_these_names("sin"), (0, 2)),
    ],
    ids=["save_anything", "save_nothing", "save_sin"],
)
def test_remat_custom_policy(ops_of, policy, counts):
    """JAX's sine, and torch's own, whose backward computes the cosine under every policy."""
    for sin, expected in ((jax_sin, counts), (torch.sin, (counts[0], 2))):

        def f(x, sin=sin):
            named = lambda x: checkpoint_name(sin(x), "sin")  # noqa: E731
            return named(named(x) ** 2)

        region = checkpoint(f, policy=policy)
        assert sines(ops_of(region, X)) == expected
    check_grads(region, X)


@jax(27, "pass", "a callable that goes by the op's name: neither sin nor cos")
@BACKWARDS
def test_remat_custom_policy_save_cos(ops_of):
    f = remat(lambda x: jax_sin(jax_sin(x)), policy=lambda info: str(info.op) == "aten.cos.default")
    assert sines(ops_of(f, X)) == (0, 0)
    f = remat(sin_sin, policy=lambda info: str(info.op) == "aten.sin.default")
    assert sines(ops_of(f, X)) == (0, 2)
    check_grads(f, X)


def three_dots(dot):
    def f(x):
        for _ in range(3):
            x = torch.sin(dot(x, x) * 1e-3)
        return x

    return f


def check_three_dots(ops_of, policy, equation, shape, dots):
    f = remat(three_dots(lambda a, b: torch.einsum(equation, a, b)), policy=policy)
    ops = ops_of(f, rand(*shape))
    assert (*sines(ops), ops.dots) == (2, 3, dots)
    check_grads(f, rand(*shape))


@jax(28, "pass", "2 sin, 6 dots; order 2, both modes")
@BACKWARDS
def test_remat_checkpoint_dots(ops_of):
    check_three_dots(ops_of, checkpoint_policies.checkpoint_dots, "ij,jk->ik", (2, 2), 6)
    check_three_dots(ops_of, checkpoint_policies.checkpoint_dots, "nij,njk->nik", (3, 2, 2), 6)


unbatched_dots = checkpoint_policies.checkpoint_dots_with_no_batch_dims


@jax(29, "pass", "2 sin, 6 dots")
@BACKWARDS
def test_remat_checkpoint_dots_with_no_batch_dims(ops_of):
    check_three_dots(ops_of, unbatched_dots, "ij,jk->ik", (2, 2), 6)


@jax(30, "pass", "2 sin, 9 dots")
@BACKWARDS
def test_remat_checkpoint_dots_with_no_batch_dims2(ops_of):
    check_three_dots(ops_of, unbatched_dots, "nij,njk->nik", (3, 2, 2), 9)


class Sine(torch.autograd.Function):
    """jax.custom_jvp and jax.custom_vjp in one: rules for both, and for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g * torch.cos(ctx.saved_tensors[0])

    @staticmethod
    def jvp(ctx, t):  # type: ignore[override]
        return t * torch.cos(ctx.saved_tensors[0])


@jax(33, "adapted", "`autograd.Function` with both rules: 2 sin, 6 dots; in a scan")
@BACKWARDS
def test_remat_custom_jvp_policy(ops_of):
    def f(x):
        for _ in range(3):
            x = Sine.apply(x @ x * 1e-3)
        return x

    region = remat(f, policy=save_matmuls)
    ops = ops_of(region, rand(2, 2))
    assert (ops["sin"], ops["cos"], ops.dots) == (2, 3, 6)
    check_grads(region, rand(2, 2))


@jax(34, "adapted", "the same with two dots each: 12 dots")
@BACKWARDS
def test_remat_custom_vjp_policy(ops_of):

    def f(x):
        for _ in range(3):
            x = Sine.apply(x @ (x @ x) * 1e-3)
        return x

    ops = ops_of(remat(f, policy=save_matmuls), rand(2, 2))
    assert (ops["sin"], ops.dots) == (2, 12)
    check_grads(remat(f, policy=save_matmuls), rand(2, 2), forward=False)


@jax(35, "pass", "grad inside a region, one result unused")
@pytest.mark.parametrize("policy", [save_matmuls, save_nothing])
def test_remat_dropvar_policy(policy):
    region = remat(lambda x: grad(lambda x: ((x * x).sum(), x)[0])(x), policy=policy)
    torch.testing.assert_close(grad(lambda x: region(x).sum())(X), torch.full_like(X, 2))


class Sum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sum(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rows = len(inputs[0])

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g.expand(ctx.rows, *g.shape)

    @staticmethod
    def jvp(ctx, t):  # type: ignore[override]
        return t.sum(0)


@jax(36, "adapted", "a linear `autograd.Function` keeps nothing; in a scan")
def test_remat_custom_jvp_linear_policy():
    region = remat(lambda x: Sum.apply(x), policy=save_matmuls)
    check_grads(region, X)
    assert residuals(region, X) == []


@jax(37, "pass", "0, 0, 1 residuals")
@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: torch.einsum("ii->i", x), 0),
        (lambda x: torch.zeros_like(x) * x, 0),
        (lambda x: torch.zeros_like(x) * torch.sin(x), 1),
    ],
    ids=["einsum", "zeros", "zeros_times_sin"],
)
def test_constants_not_hoisted(fn, count):
    found = saved_residuals(remat(fn), rand(2, 2))
    assert [r.path for r in found] == ["x"] * count


def check_saveable(name):
    f = remat(lambda x: (y := name(x @ x)) @ y, policy=checkpoint_policies.save_only_these_names("foo"))
    found = residuals(f, rand(3, 3))
    assert len(found) == 2 and "from the argument x" in found[0] and "named 'foo'" in found[1]


@jax(38, "pass", "second residual \"named 'foo'\"")
def test_name_saveable_input():
    check_saveable(lambda y: checkpoint_name(y, "foo"))


@jax(39, "pass", "the same through a dict")
def test_name_pytree():
    check_saveable(lambda y: checkpoint_name({"a": y}, "foo")["a"])


def constants(x):
    two = torch.full((), 2.0, dtype=torch.float64)
    y, z, w = (checkpoint_name(torch.mul(two, 2.0), name) for name in "yzw")
    return (((x * y) * z) * w) * torch.mul(two, 2.0)


@jax(40, "pass", "0, 1, 2, 3 residuals")
@pytest.mark.parametrize("names", ["", "w", "zw", "yzw"])
def test_name_denylist(names):
    policy = checkpoint_policies.save_any_names_but_these(*names)
    assert len(saved_residuals(remat(constants, policy=policy), SCALAR)) == 3 - len(names)


@jax(41, "pass", "3, 2, 1, 0 residuals")
@pytest.mark.parametrize("names", ["", "w", "zw", "yzw"])
def test_name_allowlist(names):
    policy = checkpoint_policies.save_only_these_names(*names)
    assert len(saved_residuals(remat(constants, policy=policy), SCALAR)) == len(names)


@jax(42, "pass", "value and gradient")
def test_checkpoint_name_vmap():
    def f(x):
        return checkpoint_name(x * 2.0, "y") + 1.0

    x = rand(2, 3)
    batched = vmap(remat(f, policy=checkpoint_policies.save_only_these_names("y")))
    torch.testing.assert_close(batched(x), f(x), rtol=0, atol=0)
    torch.testing.assert_close(grad(lambda a: batched(a).sum())(x), torch.full_like(x, 2.0))


@jax(43, "pass", "6 entries; arguments first, then captured values, then ops in their order")
def test_saved_residuals_utility():
    three, weights = torch.tensor(3.0), torch.tensor([3.0])

    def f(x, y):
        x1, x2 = x
        z = checkpoint_name(torch.sin(three), "z")
        return z * ((x1 * x2) * y) * weights

    scalars = [torch.tensor(v) for v in (2.0, 3.0, 4.0)]
    found = saved_residuals(f, tuple(scalars[:2]), y=scalars[2])
    texts = [re.sub(r"^\S+ \d+ B |from \S+:\d+ \(f\)", "", str(r)) for r in found]
    assert texts == [
        "from the argument x[0]",
        "from the argument x[1]",
        "from the argument y",
        "from the captured weights",
        "named 'z', output of aten.sin ",
        "output of aten.mul ",
    ]
    assert found[3].shape == (1,) and all(found[i].shape == () for i in (0, 1, 2, 4, 5))


@jax(
    44,
    "adapted",
    "of a compiled function what its code keeps: four operands, as torch's partitioner computes the "
    "rest again",
)
def test_saved_residuals_utility_jit():
    three = torch.tensor(3.0)

    def f(x, y):
        x1, x2 = x
        z = checkpoint_name(torch.sin(three), "z")
        return z * ((x1 * x2) * y) * torch.tensor([3.0])

    scalars = [torch.tensor(v) for v in (2.0, 3.0, 4.0)]
    args = (tuple(scalars[:2]), scalars[2])
    compiled = torch.compile(f, backend="aot_eager")
    for _ in range(2):
        assert [str(r).split("B ")[1] for r in saved_residuals(compiled, *args)] == [
            "from the argument x[0]",
            "from the argument x[1]",
            "from the argument y",
            "from the captured three",
        ]


@jax(54, "pass", "a value that two functions read is one residual")
def test_remat_of_jit_residual_forwarding():
    def f(x):
        y = checkpoint_name(torch.sin(torch.ones(2, dtype=torch.float64)), "y")
        x = (lambda: x * y)()
        return (lambda: x * y)()

    region = remat(f, policy=checkpoint_policies.save_only_these_names("y"))
    assert len(saved_residuals(region, SCALAR)) == 1
    expected = 2 * torch.sin(torch.ones((), dtype=torch.float64)) ** 2
    torch.testing.assert_close(grad(lambda x: region(x).sum())(SCALAR), expected)


OFFLOAD = dict(offload_src="device", offload_dst="pinned_host")


@jax(55, "pass", "2 copies to the host, 2 back; a name in both lists is a ValueError")
def test_remat_offload_names_jaxpr():
    policy = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["y"], names_which_can_be_offloaded=["z", "w"], **OFFLOAD
    )

    def f(x):
        y = checkpoint_name(torch.sin(x), "y")
        z = checkpoint_name(torch.sin(y), "z")
        w = checkpoint_name(torch.sin(z), "w")
        return (w * z).sum()

    x = rand(16)
    torch.testing.assert_close(grad(remat(f, policy=policy))(x), grad(f)(x))
    leaf = x.clone().requires_grad_()
    with OpCounter() as to_host:
        out = remat(f, policy=policy)(leaf)
    with OpCounter() as to_device:
        out.backward()
    assert (to_host["copy_"], to_device["to"] + to_device["copy_"], to_device["sin"]) == (2, 2, 0)
    with pytest.raises(ValueError, match="The names should be exclusive and should not intersect"):
        checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["y"], names_which_can_be_offloaded=["y"], **OFFLOAD
        )


@jax(57, "pass", "only the product without batch moves")
def test_remat_offload_dot_with_no_batch_dims_jaxpr():
    policy = checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def f(x, b):
        x = torch.einsum("ij,jk->ik", x, x)
        b = torch.einsum("bij,bjk->bik", b, b)
        return torch.sin(x).sum() + torch.sin(b).sum()

    args = rand(4, 4), rand(2, 4, 4)
    leaves = leaves_of(args)
    with OpCounter() as to_host:
        out = remat(f, policy=policy)(*leaves)
    with OpCounter() as to_device:
        out.backward()
    assert (to_host["copy_"], to_device["to"] + to_device["copy_"]) == (1, 1)
    # Two for each derivative, and the batched one computed again.
    assert to_device.dots == 2 + 2 + 1
    torch.testing.assert_close(grad(remat(f, policy=policy))(*args), grad(f)(*args))
    with pytest.raises(ValueError, match="pinned host memory"):
        checkpoint_policies.offload_dot_with_no_batch_dims("device", "disk")


@jax(72, "pass", "inputs, values, both, by JAX's three policies, to Python's `logging`")
@pytest.mark.parametrize("run", ["backward", "grad"])
def test_remat_residual_logging(run):
    """Inputs, intermediates, or both, by JAX's three policies. The two exponentials are ours: a region that
    could save next to nothing keeps all."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())

    def f(x):
        return jax_cos(jax_sin(x).exp().exp().sum())

    @contextlib.contextmanager
    def listening(name, level):
        log, messages[:] = logging.getLogger(name), []
        before = log.level
        log.addHandler(handler)
        log.setLevel(level)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(before)

    def logged(policy):
        region = remat(f, policy=policy, name="block")
        with listening("remat", "DEBUG"):
            grad(region)(X) if run == "grad" else region(X.clone().requires_grad_()).backward()
        (message,) = messages
        assert message.startswith("region 'block' saving ")
        return message

    inputs, everything, some = logged(save_nothing), logged(lambda info: True), logged(save_cos)
    # One line for the argument, which autograd holds, too.
    assert inputs.endswith("saving inputs with shapes:\n  float64[3], 24 bytes, argument")
    assert "saving these intermediates:" in everything and "saving inputs" not in everything
    assert "aten.sin.default" in everything and "aten.cos.default" in everything
    assert "intermediates" not in inputs
    assert "saving inputs" in some and "and saving these intermediates:" in some
    assert "aten.cos.default" in some and "aten.sin" not in some and "aten.exp" not in some
    # Without a listener nothing is said, and a debugger of something else is none.
    with listening(None, "DEBUG"):
        grad(remat(f))(X)
    assert not messages


def test_outer_policy_wins():
    """JAX's rule is the outermost policy. Here a value that any enclosing region saves is not recomputed."""

    def sines(outer, inner):
        region = remat(remat(lambda x: sin_sin(sin_sin(x)), policy=inner), policy=outer)
        leaf = X.clone().requires_grad_()
        loss = region(leaf).sum()
        with OpCounter() as ops:
            loss.backward()
        return ops["sin"]

    keep = save_ops(aten.sin)
    assert sines(keep, save_nothing) == sines(save_nothing, keep) == 0
    assert sines(save_nothing, save_nothing) >= 3


def test_policy_sees_the_op_the_user_wrote():
    """In JAX vmap turns a dot into a batched dot before the policy runs (maxtext issue 971). Not here."""

    def f(x):
        return torch.sin(x @ x) @ x

    def dots(transform):
        with OpCounter() as ops:
            transform(remat(f, policy=save_unbatched))
        return ops.dots

    x = rand(2, 3, 3)
    inside = dots(lambda f: vmap(grad(lambda x: f(x).sum()))(x))
    outside = dots(lambda f: grad(lambda x: vmap(f)(x).sum())(x))
    assert inside == outside == 2 + 4
