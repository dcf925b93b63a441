"""torch_remat's own tests, continued: calls, containers, arguments, writes; see test_torch_remat.py."""

import queue
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from remat import RematError, is_recomputing, remat, save_everything, saved_residuals
from tests.conformance.rows import row
from tests.conformance.test_torch_remat import SavesOutput, Square, Triple, region, saved
from tests.helpers import unseen


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


# -- calls: checkpoint_test, op_basics_test ------------------------------------------------------------


def test_checkpoint_options_do_not_collide_with_user_kwargs():
    def fn(x, *, name, policy):
        assert (name, policy) == ("user.kwarg", 2)
        return x * policy

    x = leaf(3.0)
    remat(fn, name="checkpoint.region")(x, name="user.kwarg", policy=2).sum().backward()
    assert x.grad == 2


def test_checkpoint_forward_exception_unwinds_remat_state():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            raise ValueError("intentional forward failure")

    for fails in (remat(Fails.apply), remat(saved(Fails.apply))):
        with pytest.raises(ValueError, match="intentional"):
            fails(leaf(1.0))
    x = leaf(2.0)
    remat(saved(Square.apply))(x).sum().backward()
    assert x.grad == 4 and not is_recomputing()


@row("adapted", "Python runs once")
def test_checkpoint_forces_recompute_before_inner_custom_backward():
    events = []

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            events.append("forward")
            ctx.save_for_backward(x + 1)
            return x * 3

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            events.append("before")
            (value,) = ctx.saved_tensors
            events.append("after")
            return grad * value

    x = leaf(1.0, 2.0)
    remat(lambda x: Inner.apply(x.sin()))(x).sum().backward()
    assert events == ["forward", "before", "after"]
    torch.testing.assert_close(x.grad, (x.sin() + 1) * x.cos())


class Pair(NamedTuple):
    double: Tensor
    triple: Tensor


class TensorTuple(tuple):
    __slots__ = ()


# Under its test: what a region may return. torch_remat has one hop of tuples and lists.
RETURNED = {
    "test_checkpoint_boundary_supports_one_hop_builtin_containers": lambda x: [x * 2, x * 3],
    "test_checkpoint_boundary_rejects_dict": lambda x: {"left": x * 2, "right": x * 3},
    "test_checkpoint_boundary_rejects_deeply_nested_containers": lambda x: [x * 2, (x * 3,)],
    "test_checkpoint_boundary_rejects_non_tensor_leaf": lambda x: (x * 5, None),
    "test_checkpoint_boundary_collapses_tuple_subclass": lambda x: TensorTuple((x * 5,)),
    "test_save_op_returns_list_output": lambda x: [x * 2, x * 3],
    "test_save_op_returns_namedtuple_output": lambda x: Pair(x * 2, x * 3),
}


@row(
    "adapted",
    "returned",
    name="""
        test_checkpoint_boundary_rejects_dict test_checkpoint_boundary_rejects_deeply_nested_containers
        test_checkpoint_boundary_rejects_non_tensor_leaf""",
)
@row("adapted", "returned as it is", name="test_checkpoint_boundary_collapses_tuple_subclass")
@pytest.mark.parametrize("name", RETURNED)
def test_returned(name):
    for around in (lambda fn: fn, saved):
        x = leaf(2.0)
        out = remat(around(RETURNED[name]))(x)
        assert type(out) is type(RETURNED[name](x))
        leaves = pytree.tree_leaves(list(out) if isinstance(out, TensorTuple) else out)
        torch.stack([t.sum() for t in leaves if t is not None]).sum().backward()
        assert x.grad == 5


@row("adapted", "where the function runs again")
def test_phase_helpers_report_forward_and_recompute():
    phases = queue.SimpleQueue()  # in a list only what the forward has put there would stay

    def fn(x):
        phases.put(is_recomputing())
        return (x + unseen(x)).exp()

    remat(fn)(leaf(1.0)).sum().backward()
    assert [phases.get_nowait(), phases.get_nowait()] == [False, True] and phases.empty()


def test_op_outside_checkpoint_supports_kwargs():
    assert saved(lambda x, *, factor: x * factor)(torch.tensor([2.0]), factor=3.0) == 6

    def fail():
        raise ValueError("intentional failure")

    with pytest.raises(ValueError, match="intentional"):
        saved(fail)()


@row("adapted", "a name is not needed")
def test_op_rejects_non_callable_and_missing_name():
    with pytest.raises((RematError, TypeError), match="must be callable"):
        remat("context.style")  # type: ignore[call-overload]


@row("adapted", "`saved_residuals`")
def test_recompute_false_produces_save_record():
    kept = [str(r) for r in saved_residuals(remat(saved(torch.exp)), leaf(1.0, 2.0))]
    assert any("exp" in line for line in kept)


@row("adapted", "the forward's stands")
def test_recompute_setting_must_match_forward():
    x = leaf(1.0, 2.0)
    remat(lambda x: region(torch.exp, is_recomputing())(x.sin()))(x).sum().backward()
    torch.testing.assert_close(x.grad, x.sin().exp() * x.cos())


@row("adapted", "names need not be unique")
def test_duplicate_op_name_errors_in_forward():
    x = leaf(2.0)
    twice = remat(Square.apply, policy=save_everything, name="duplicate")
    remat(lambda x: twice(twice(x)))(x).sum().backward()
    assert x.grad == 4 * 8


@row("adapted", "a leaf, as without regions")
def test_leaf_requires_grad_output_from_remat_op_errors():
    for around in (lambda fn: fn, saved):
        out = remat(around(lambda t: torch.full_like(t, 2.0).requires_grad_(True)))(leaf(1.0))
        assert out.is_leaf and out.requires_grad
        out.sum().backward()
        assert out.grad == 1


# -- arguments: input_liveness_test --------------------------------------------------------------------

# Calls of `call(fn, x)`, in which `fn` is a region or not.
ARGUMENTS = {
    "test_numerics_save_only": lambda call, x: call(lambda x: saved(SavesOutput.apply)(x), x * 3),
    "test_numerics_save_input_stub": lambda call, x: call(lambda x: saved(Square.apply)(x), x * 3),
    "test_numerics_recompute_consumer": lambda call, x: call(lambda x: region(Triple.apply, True)(x), x * 3),
    "test_numerics_recompute_needs_tensor": lambda call, x: call(lambda x: x * 2, x * 3),
    "test_numerics_kwargs_input": lambda call, x: call(lambda *, inp: saved(Square.apply)(inp), inp=x * 3),
    "test_numerics_list_input": lambda call, x: call(lambda xs: saved(Square.apply)(xs[0]), [x * 3]),
    "test_numerics_mixed_multi_input": lambda call, x: call(
        lambda a, b, scale: saved(SavesOutput.apply)(a) + region(Triple.apply, True)(b) * scale,
        x * 3,
        x * 5,
        2.0,
    ),
    "test_requires_grad_leaf_input_kept_and_correct": lambda call, x: call(saved(Square.apply), x),
}


@row("pass", name="test_retain_graph_double_backward test_determinism_check_default")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name):
    """With and without test_determinism_check_default, and test_retain_graph_double_backward."""
    x = torch.linspace(-1, 1, 16, requires_grad=True)
    plain = ARGUMENTS[name](lambda fn, *args, **kwargs: fn(*args, **kwargs), x)
    (want,) = torch.autograd.grad(plain.sum(), x)
    checks: tuple[Any, ...] = ("metadata", "exact")
    for check in checks:
        out = ARGUMENTS[name](
            lambda fn, *args, check=check, **kwargs: remat(fn, determinism_check=check)(*args, **kwargs), x
        )
        for retain in (True, False):
            (got,) = torch.autograd.grad(out.sum(), x, retain_graph=retain)
            torch.testing.assert_close(got, want, rtol=0, atol=0)


# -- writes: save_region_test --------------------------------------------------------------------------


@row("pass", "was silently wrong here, and is mended")
def test_save_op_detects_in_place_mutation_of_saved_tensor():
    left = []

    class KeepsSlope(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            left.append(x * 2)
            ctx.save_for_backward(left[-1])
            return x * x

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return grad * ctx.saved_tensors[0]

    out = remat(saved(KeepsSlope.apply))(leaf(2.0, 3.0))
    with torch.no_grad():
        left[0].mul_(5.0)
    with pytest.raises(RuntimeError, match="in place|in-place|inplace"):
        out.sum().backward()


@row("adapted", "a region may not write to its argument; around both it is right")
def test_save_op_saving_input_mutated_in_place_is_retained():

    class InplaceExp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.exp_()
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return grad * ctx.saved_tensors[0]

    x = leaf(0.5, -1.0)
    with pytest.raises(RematError, match="argument"):
        remat(lambda x: saved(InplaceExp.apply)(x * 1.0) * 1.0)(x)
    for around in (lambda fn: fn, saved):
        out = remat(around(lambda x: InplaceExp.apply(x * 1.0) * 1.0))(x)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], x.exp())
