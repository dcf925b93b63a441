"""What single transforms ask of a region beside right numbers; the bank's programs run in every way."""

import pytest
import torch
from torch.func import grad, vmap

from remat import remat, save_everything, save_matmuls, save_nothing
from tests.helpers import (
    FEW,
    POLICIES,
    OpCounter,
    batched,
    gradients,
    jvp,
    leaves_of,
    nan_where_nobody_wrote,
    rand,
    same,
)  # fmt: skip


def test_second_backward_without_retained_graph_is_refused_as_by_torch():
    x = rand(3, 3).requires_grad_()
    loss = remat(lambda x: (x.sin() * x.cos()).sum())(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("policy", FEW)
@pytest.mark.parametrize("enter_inside", [False, True])
def test_weight_used_twice_under_autocast(policy, enter_inside):
    """Autocast's cache makes both uses one cast, in which the gradients add up in bfloat16."""

    def region(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(torch.tanh(x @ w) @ w)

    def run(wrap):
        x, w = leaves_of((rand(3, 4, dtype=torch.float32), rand(4, 4, dtype=torch.float32)))
        with torch.autocast("cpu", torch.bfloat16, enabled=not enter_inside):
            out = wrap(region)(x, w)
        return out, torch.autograd.grad(out.float().square().sum(), (x, w))

    same(run(lambda f: remat(f, policy=POLICIES[policy])), run(lambda f: f))


# -- forward mode ------------------------------------------------------------------------------------------


def test_forward_mode_evaluates_the_region_once():
    with OpCounter() as ops:
        jvp(remat(lambda x: x.exp().sinh()), (rand(3),), (rand(3),))
    assert ops["exp"] == 1 and ops["sinh"] == 1


# -- vmap --------------------------------------------------------------------------------------------------


def differentiated(fn, args, **options):
    """vmap alone over leaves: without any the function would run as it is, and be compared with itself."""
    leaves = leaves_of(args)
    outputs = vmap(fn, **options)(*leaves)
    return outputs, gradients(outputs, leaves, materialize_grads=True)


def test_where_nothing_is_differentiated_the_function_runs_as_it_is():
    given, seen = [], []

    def outer(x):
        given.append(x)
        return remat(lambda x: seen.append(x) or x.sin())(x)

    same(vmap(outer)(rand(3, 2)), rand(3, 2).sin(), 0.0)
    assert len(seen) == 1 and seen[0] is given[0]


def test_outputs_that_do_not_depend_on_the_batch():
    def region(x):
        return x.sin(), torch.ones(2)

    same(differentiated(remat(region), (rand(3, 2),)), differentiated(region, (rand(3, 2),)))


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_everything], ids=repr)
@pytest.mark.parametrize("read", [0, 1])
def test_results_that_nobody_differentiates(read, policy):
    """What only they need is not recomputed, and no zero is multiplied by it."""

    def block(w, a, b):
        return b.sin(), (a @ w).tanh().exp()

    args = rand(2, 3, 3), rand(2, 3), rand(2, 3, seed=1)
    for transform in (vmap, lambda f: vmap(vmap(f))):
        loss = lambda fn: grad(lambda *ts: fn(*ts)[read].sum(), (0, 1, 2))  # noqa: E731
        lanes = args if transform is vmap else batched(args)
        with nan_where_nobody_wrote():
            for _ in range(2):
                same(transform(loss(remat(block, policy=policy)))(*lanes), transform(loss(block))(*lanes))


def test_a_tensor_passed_with_and_without_a_derivative():
    """Below the levels both are one tensor; only what counts for nothing is differentiated."""

    def region(a, b):
        q = b[None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, q.sin(), q)[0, 0]

    def run(f):
        x = rand(3, 4)
        twice = grad(lambda a: grad(lambda b: f(b, x).sum())(a).sum())(x)
        return vmap(lambda x: grad(lambda a: f(a, x).sum())(x))(rand(5, 3, 4)), twice

    same(run(remat(region)), run(region))
