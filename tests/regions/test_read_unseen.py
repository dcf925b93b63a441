"""Captured tensors that no torch function is given: differentiated all the same, or refused with advice.

`autograd.Function.apply` is no torch function below functorch levels, TorchScript and extensions never are.
"""

from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from remat import RematError, remat, scan_remat
from tests.helpers import POLICIES, crossed, rand, same


def pulled(g, x, w):
    """The derivative of x w^2."""
    return g * w * w, 2 * g * x * w


class New(torch.autograd.Function):
    """x w^2, its tensors saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return pulled(g, *ctx.saved_tensors)


class OnContext(New):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.held = list(inputs)

    @staticmethod
    def backward(ctx, g):
        return pulled(g, *ctx.held)


class Nested(New):
    """Its backward applies a Function."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return New.apply(g, w), 2 * g * x * w


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w * w

    backward: Any = New.backward


class Once(Old):
    backward = staticmethod(torch.autograd.function.once_differentiable(New.backward))


@torch.library.custom_op("remat_tests::by_square", mutates_args=())
def by_square(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w * w


by_square.register_autograd(New.backward, setup_context=New.setup_context)
_library = torch.library.Library("remat_tests_unseen", "DEF")
_library.define("by_square(Tensor x, Tensor w) -> Tensor")
_library.impl("by_square", lambda x, w: x * w * w, "CPU")


class BelowAutograd(Old):
    """As extensions in C++ do: an operator whose kernel for autograd is a Function."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.remat_tests_unseen.by_square(x, w)


_library.impl("by_square", BelowAutograd.apply, "Autograd")
bound_early = New.apply
NEW = {
    "new": New.apply,
    "bound early": bound_early,
    "on the context": OnContext.apply,
    "nested": Nested.apply,
}
OLD = {
    "old": Old.apply,
    "once": Once.apply,
    "custom op": by_square,
    "operator": torch.ops.remat_tests_unseen.by_square,
}


def square(x, w):
    return x * w * w


def by_cell(op, w):
    return lambda x: op(x.sin(), w).sin()


def by_generator(op, w):
    def forever():
        while True:
            yield w

    held = forever()
    return lambda x: op(x.sin(), next(held)).sin()


def by_derived(op, w):
    double = w * 2
    return lambda x: op(x.sin(), double).sin()


def by_module(op, w):
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            return op(x.sin(), self.w).sin()

    norm = Norm()
    return lambda x: functional_call(norm, {"w": w}, (x,))


HOW = [by_cell, by_generator, by_derived, by_module]
X, W = rand(4, 3), rand(3, seed=1)
FIRST = {
    "grad": lambda f: grad(f)(W, X),
    "both": lambda f: grad(f, (0, 1))(W, X),
}
TRANSFORMS = {
    **FIRST,
    "grad grad": lambda f: grad(lambda w: grad(f)(w, X).square().sum())(W),
    "grad of x's": lambda f: grad(lambda w: grad(f, 1)(w, X).square().sum())(W),
    "vmap grad": lambda f: vmap(grad(f), (None, 0))(W, torch.stack([X, 2 * X])),
    "grad vmap": lambda f: grad(lambda w: vmap(f, (None, 0))(w, torch.stack([X, 2 * X])).sum())(W),
    "outside": lambda f: torch.autograd.grad(grad(f, 1)(w := W.clone().requires_grad_(), X).sum(), w),
}


def loss(wrap, how, op):
    return lambda w, x: wrap(how(op, w))(x).square().sum()


@pytest.mark.parametrize(("op", "how"), crossed(NEW, HOW, every=4))
def test_functions_of_the_new_style(op, how):
    for run in TRANSFORMS.values():
        for policy in ("nothing", "matmuls"):
            got = run(loss(lambda f, p=policy: remat(f, policy=POLICIES[p]), how, NEW[op]))
            same(got, run(loss(lambda f: f, how, square)))


@pytest.mark.parametrize(("op", "how"), crossed(OLD, HOW, every=2))
def test_functions_that_torch_func_alone_refuses_or_batches_not(op, how):
    for run in FIRST.values():
        same(run(loss(remat, how, OLD[op])), run(loss(lambda f: f, how, square)))


def loop(body):
    def run(x):
        h = torch.zeros(3, dtype=torch.float64)
        for row in x:
            h = body(h + row)
        return h

    return run


def scanned(body):
    start = torch.zeros(3, dtype=torch.float64)
    return lambda x: scan_remat(lambda h, row: (body(h + row), None), start, x)[0]


SCANS = {
    "scan": scanned,
    "region of a scan": lambda f: remat(scanned(f)),
    "scan of regions": lambda f: scanned(remat(f)),
}


@pytest.mark.parametrize(("scan", "op"), crossed(SCANS, NEW))
def test_in_a_scan(op, scan):
    for run in (*FIRST.values(), backward, twice):
        same(run(loss(SCANS[scan], by_derived, NEW[op])), run(loss(loop, by_derived, square)))


def backward(f):
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    return torch.autograd.grad(f(w, x), (w, x))


def twice(f):
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    first = torch.autograd.grad(f(w, x), (w, x), create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), (w, x))  # pyright: ignore[reportArgumentType, reportCallIssue]


@torch.jit.script
def scripted(x, w):
    return x * w * w


TELLS = r"as (an )?argument|must be an argument"
LEVELS = TRANSFORMS | {"jvp": lambda f: jvp(lambda w: f(w, X), (W,), (W,))}


@pytest.mark.parametrize(
    ("how", "name"), crossed([by_cell, by_generator, by_derived], ["grad", "both", "vmap grad", "jvp"])
)
def test_torchscript_that_reads_a_captured_tensor_under_one_level(how, name):
    run = LEVELS[name]
    same(run(loss(remat, how, scripted)), run(loss(lambda f: f, how, scripted)))


@pytest.mark.parametrize("how", [by_cell, by_generator, by_derived])
def test_torchscript_that_reads_a_captured_tensor_is_refused_elsewhere(how):
    for name in ("grad grad", "grad of x's"):
        with pytest.raises(RematError, match=TELLS):
            LEVELS[name](loss(remat, how, scripted))
    with pytest.raises(RematError, match=TELLS):
        LEVELS["grad"](loss(scanned, by_derived, scripted))
    # Torch differentiates its first call and loses that derivative from the second on.
    with pytest.raises(RuntimeError, match="argument|does not require grad|TorchScript"):
        LEVELS["outside"](loss(remat, how, scripted))
    with pytest.raises(RematError, match=r"reads 'w' \(\(3,\)\) from outside.*Pass it as an argument"):
        LEVELS["grad grad"](loss(remat, by_cell, scripted))


def test_torchscript_that_reads_arguments_and_constants_runs():
    constant = rand(3, seed=2)

    def run(wrap):
        region = wrap(lambda x, w: scripted(scripted(x, w), constant).sin())
        return grad(lambda w: region(X, w).sum())(W)

    same(run(remat), run(lambda f: f))


def test_captured_plain_tensor_beside_its_wrapper_is_a_constant():
    """Somebody differentiates by `W`, and the region reads `W` as it is."""

    def run(wrap, op):
        return grad(lambda w: wrap(lambda x: op(x, W) + op(x, w) + W.real.sum())(X).square().sum())(W)

    for op in (square, New.apply):
        same(run(remat, op), run(lambda f: f, square))


def test_what_a_function_saves_in_dynamos_graph():
    """Where a backend executes it, the operator for an autograd.Function keeps what is saved by itself."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, m):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[1])

        @staticmethod
        def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
            return g * ctx.saved_tensors[0], None

    def loss(wrap):
        return lambda x, m: wrap(lambda x: Scaled.apply(x.sin(), m))(x).square().sum()

    x, m = rand(3), rand(3, seed=1)
    run = torch.compile(grad(loss(remat)), backend="eager", fullgraph=True)
    same(run(x, m), grad(loss(lambda f: f))(x, m))
