"""How often each op runs and how many bytes are kept, exactly."""

import pytest
import torch
from torch.func import grad, hessian, vmap

from remat import checkpoint_name, remat
from remat.policies import (
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    save_weight_matmuls,
)
from tests.helpers import LiveBytes, OpCounter, leaves_of, rand, vjp

aten = torch.ops.aten


def backward_ops(fn, *args):
    out = fn(*leaves_of(args))
    loss = out.sum()
    with OpCounter() as ops:
        loss.backward()
    return ops


def pullback_ops(fn, *args):
    out, pullback = vjp(fn, *args)
    with OpCounter() as ops:
        pullback(torch.ones_like(out))
    return ops


BACKWARDS = pytest.mark.parametrize("ops_of", [backward_ops, pullback_ops])


# -- JAX's numbers (tests/api_test.py, RematTest) -----------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["backward", "grad", "hessian", "grad of grad"])
def test_nested_regions_run_the_inner_function_once_more_each(depth, mode):
    runs = []

    def inner(x):
        runs.append(1)
        return x.sin().exp()

    region = inner
    for _ in range(depth):
        region = remat(region)
    loss = lambda x: region(x).sum()  # noqa: E731
    if mode == "backward":
        loss(rand(3).requires_grad_()).backward()
    elif mode == "grad of grad":
        grad(lambda x: grad(loss)(x).sum())(rand(3))
    else:
        (grad if mode == "grad" else hessian)(loss)(rand(3))
    # The tape runs again, not the function, but where two levels differentiate in reverse.
    assert len(runs) == ((1 + depth) * (2 + depth) // 2 if mode == "grad of grad" else 1)


# -- dead recomputation -------------------------------------------------------------------------------


@BACKWARDS
@pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_ops(aten.sin)])
def test_ops_whose_value_nobody_reads_are_not_recomputed(ops_of, policy):
    """A logarithm's derivative reads its argument: its value is dead wherever it stands."""

    def region(x):
        head = torch.log(x)
        middle_argument = torch.exp(x)
        middle = torch.log2(middle_argument)
        last_argument = torch.sigmoid(middle_argument.tan())
        return head + middle + torch.log1p(last_argument)

    ops = ops_of(remat(region, policy=policy), rand(3).abs() + 1)
    assert (ops["log"], ops["log2"], ops["log1p"]) == (0, 0, 0)
    assert (ops["exp"], ops["tan"], ops["sigmoid"]) == (1, 1, 1)


@BACKWARDS
def test_what_only_an_unused_output_needs_is_not_recomputed(ops_of):
    region = remat(lambda x: (torch.exp(x), torch.exp(torch.tan(x))))
    ops = ops_of(lambda x: region(x)[0], rand(3))
    assert (ops["exp"], ops["tan"]) == (1, 0)


@BACKWARDS
def test_a_region_that_counts_for_nothing_is_not_recomputed(ops_of):
    """Another one captures its result, and uses it for nothing."""

    def f(x):
        made = remat(lambda x: x.exp().tan())(x)
        return remat(lambda x: (made * 2, x.sin())[1])(x)

    ops = ops_of(f, rand(3))
    assert (ops["exp"], ops["tan"]) == (0, 0)


@BACKWARDS
def test_chain_of_additions_needs_nothing(ops_of):
    ops = ops_of(remat(lambda x: (x + 1) * 3 - x.sum() + torch.zeros(3)), rand(3))
    assert ops["add"] + ops["sub"] + ops["zeros"] <= 1  # the one sums two gradients


def test_second_backward_recomputes_again_and_once():
    x = rand(3).requires_grad_()
    out = remat(lambda x: torch.exp(torch.exp(x)))(x).sum()
    out.backward(retain_graph=True)
    with OpCounter() as ops:
        out.backward()
    assert ops["exp"] <= 2


def test_a_saved_value_whose_gradient_is_set_is_not_run_again():
    """Setting an attribute shows nobody the memory, as `numpy()` does."""

    def fn(x, w):
        h = torch.tanh(x @ w)
        h.grad = None
        return (h @ w).sin()

    x = torch.randn(4, 4, requires_grad=True)
    out = remat(fn, policy=save_ops(aten.tanh))(x, x.detach())
    with OpCounter() as ops:
        out.sum().backward()
    assert ops["tanh"] == 0


# -- verdicts under vmap ------------------------------------------------------------------------------


def attention(x, wq, wk):
    q, k = x @ wq, x @ wk
    return torch.tanh(torch.einsum("htd,hsd->hts", q, k).softmax(-1) @ torch.sin(x @ wk))


@pytest.mark.parametrize(
    ("policy", "again"), [(save_weight_matmuls, 2), (save_matmuls, 0), (save_nothing, 5)]
)
@pytest.mark.parametrize("batched_weights", [False, True])
def test_verdicts_do_not_change_under_vmap(policy, again, batched_weights):
    """Three weight products and two of batches: the same ones run again, in either order of vmap and grad."""
    args = rand(2, 3, 4), rand(4, 4), rand(4, 4, seed=1)
    region = remat(attention, policy=policy)
    axes = (0, 0, 0) if batched_weights else (0, None, None)
    stacked = tuple(torch.stack([a, 2 * a]) if axis == 0 else a for a, axis in zip(args, axes, strict=True))

    def dots(run, fn):
        with OpCounter() as ops:
            run(fn)
        return ops.dots

    def vmap_grad(fn):
        return vmap(grad(lambda *a: fn(*a).sum(), (0, 1, 2)), axes)(*stacked)

    def grad_vmap(fn):
        return grad(lambda *a: vmap(fn, axes)(*a).sum(), (0, 1, 2))(*stacked)

    def alone(fn):
        return grad(lambda *a: fn(*a).sum(), (0, 1, 2))(*args)

    # the last product of a region is read by tanh through its value, so none is dead
    for run in (alone, vmap_grad, grad_vmap):
        assert dots(run, region) - dots(run, attention) == again, run.__name__


# -- bytes --------------------------------------------------------------------------------------------


def kept_by_autograd(fn, *args):
    leaves = leaves_of(args)
    with LiveBytes() as live:
        out = fn(*leaves)
        return live.bytes - out.nbytes


def kept_by_vjp(fn, *args):
    with LiveBytes() as live:
        out, pullback = vjp(fn, *args)
        kept = live.bytes - out.nbytes
    del pullback
    return kept


KEPT = pytest.mark.parametrize("kept", [kept_by_autograd, kept_by_vjp])


def block(x, w):
    return torch.sin(torch.tanh(x @ w) @ w) @ w + x


HIDDEN = 8 * 5 * 5  # bytes of one 5 by 5 tensor of float64


@KEPT
@pytest.mark.parametrize(
    ("policy", "values"),
    [
        (save_nothing, 0),
        # The last product is only added to: the backward does not read it.
        (save_matmuls, 2),
        (save_weight_matmuls, 2),
        (save_ops(aten.sin, aten.tanh), 2),
        (save_ops(aten.add), 0),
    ],
)
def test_bytes_kept_are_those_saved_and_needed(kept, policy, values):
    assert kept(remat(block, policy=policy), rand(5, 5), rand(5, 5, seed=1)) == values * HIDDEN


@KEPT
def test_never_more_than_without_remat(kept):
    args = rand(5, 5), rand(5, 5, seed=1)
    assert kept(remat(block, policy=save_everything), *args) <= kept(block, *args) == 3 * HIDDEN


@KEPT
def test_values_saved_that_are_also_outputs_are_kept_once(kept):
    fn = remat(lambda x: torch.tanh(x.sin()), policy=save_ops(aten.tanh))
    assert kept(fn, rand(5, 5)) == 0


@pytest.mark.parametrize("policy", [save_names("h"), save_everything, save_ops(aten.sin)])
@pytest.mark.parametrize("mode", ["backward", "vjp"])
def test_saved_values_that_are_outputs_or_inputs_are_held_once(mode, policy):
    """A named input, and a named output that is read through a view: exactly the results' bytes are alive."""

    def fn(x):
        y = checkpoint_name(torch.sin(checkpoint_name(x, "h")), "h")
        return y, y.view(-1).cos()

    (leaf,) = leaves_of((rand(5, 5),))
    with LiveBytes() as live:
        region = remat(fn, policy=policy)
        outs, _pull = (region(leaf), None) if mode == "backward" else vjp(region, leaf.detach())
        assert live.bytes == sum(t.nbytes for t in outs)


@KEPT
def test_view_of_a_saved_value_costs_nothing(kept):
    fn = remat(lambda x, w: torch.sin((x @ w).view(-1)[5:]).cos(), policy=save_matmuls)
    assert kept(fn, rand(5, 5), rand(5, 5, seed=1)) == HIDDEN


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_everything])
def test_backward_frees_what_was_kept(policy):
    leaves = leaves_of((rand(5, 5), rand(5, 5, seed=1)))
    with LiveBytes() as live:
        out = remat(block, policy=policy)(*leaves)
        out.sum().backward()
        assert live.bytes == out.nbytes + sum(leaf.grad.nbytes for leaf in leaves)  # type: ignore[union-attr]
        del out
        assert live.bytes == 2 * HIDDEN


def test_graph_that_is_dropped_frees_what_was_kept():
    with LiveBytes() as live:
        out = remat(block, policy=save_everything)(*leaves_of((rand(5, 5), rand(5, 5, seed=1))))
        del out
        assert live.bytes <= 2 * HIDDEN


def test_nothing_is_kept_where_nothing_is_differentiated():
    with LiveBytes() as live, torch.no_grad():
        out = remat(block, policy=save_everything)(*leaves_of((rand(5, 5), rand(5, 5, seed=1))))
        assert live.bytes <= out.nbytes + 2 * HIDDEN
