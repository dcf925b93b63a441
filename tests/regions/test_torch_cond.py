"""torch.cond in regions: in eager code the branch's own ops, as after an `if`; in compiled code one op."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

from remat import checkpoint_name, checkpoint_policy, offload, remat, save_matmuls, save_names, save_nothing
from tests.helpers import OpCounter, crossed, scalar

W = torch.eye(3) + 0.1
X = torch.tensor([[0.5, -0.2, 0.3], [0.1, 0.4, -0.1]])


def block(cond, w):
    """A predicate of the argument; branches that capture `w`, name a value and return one tensor."""

    def positive(x):
        return checkpoint_name(torch.sin(torch.sin(x) @ w), "h").sin()

    def other(x):
        return checkpoint_name(torch.cos(x @ w.sin()), "h").exp()

    return lambda x: torch.tanh(cond(x.sum() > 0, positive, other, (x,)))


def by_if(pred, true_fn, false_fn, operands):
    return true_fn(*operands) if pred else false_fn(*operands)


def by_where(pred, true_fn, false_fn, operands):
    return torch.where(pred, true_fn(*operands), false_fn(*operands))


POLICIES = [save_nothing, offload(save_names("h")), save_matmuls & ~save_names("h")]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_plain_autograd(policy):
    """Two orders, with respect to the argument and to what the branches capture, call after call."""
    w = W.clone().requires_grad_()
    region = remat(block(torch.cond, w), policy=policy)
    for data in (X, -X, X, 2 * X):
        x = data.clone().requires_grad_()
        for order in (1, 2):
            found, right = (derivatives(fn, x, w, order) for fn in (region, block(by_if, w)))
            torch.testing.assert_close(found, right)


def derivatives(fn, x, w, order):
    grads = torch.autograd.grad(fn(x).sum(), (x, w), create_graph=order == 2)
    return grads if order == 1 else torch.autograd.grad(grads[0].sin().sum(), (x, w))


TRANSFORMS = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, -x])),
    "vmap(grad)": lambda f, x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, -x])),
    "grad(vmap)": lambda f, x: grad(lambda x: vmap(f)(torch.stack([x, -x])).sum())(x),
}


@pytest.mark.parametrize(("transform", "policy"), crossed(TRANSFORMS, POLICIES))
def test_torch_func(transform, policy):
    """Where torch itself has no rule, too: under `grad` with captured tensors, `jvp`, `hessian`."""
    run, w = TRANSFORMS[transform], W.clone().requires_grad_()
    expected = block(by_where if "vmap" in transform else by_if, w)
    torch.testing.assert_close(run(remat(block(torch.cond, w), policy=policy), X), run(expected, X))


def test_a_policy_sees_the_ops_of_the_branch():
    for policy, products in ((save_nothing, 2), (save_matmuls, 1)):
        out = remat(block(torch.cond, W), policy=policy)(X.clone().requires_grad_())
        with OpCounter() as ops:
            out.sum().backward()
        assert ops.counts["mm"] == products, policy


def test_torch_cond_outside_still_compiles_itself():
    """Dynamo leaves for good what it met under a dispatch mode: torch.cond's own code must not be left so."""
    w = W.clone().requires_grad_()
    for fn in (remat(block(torch.cond, w)), block(torch.cond, w), remat(block(torch.cond, w))):
        x = X.clone().requires_grad_()
        torch.testing.assert_close(derivatives(fn, x, w, 1), derivatives(block(by_if, w), x, w, 1))


def test_a_budget_is_planned_from_the_branch_that_was_taken():
    x = X.clone().requires_grad_()
    region = remat(block(torch.cond, W), policy=checkpoint_policy(budget=0.5))
    right = torch.autograd.grad(block(by_if, W)(x).sum(), x)
    with pytest.warns(UserWarning, match="cannot be planned.*branches on values out of the region"):
        torch.testing.assert_close(torch.autograd.grad(region(x).sum(), x), right)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(region(x).sum(), x), right)


@pytest.mark.parametrize("graded", [True, False], ids=["grad mode", "no_grad"])
def test_torch_cond_where_nothing_is_differentiated(graded):
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    with torch.set_grad_enabled(graded):
        found = torch.func.vmap(remat(f))(x)
    torch.testing.assert_close(found, torch.stack([x[0].sin(), x[1].cos()]))


@pytest.mark.parametrize("tree", [lambda t: t, lambda t: (t,), lambda t: {"a": [t]}])
def test_torch_cond_that_plain_autograd_differentiates(tree):
    """Under a dispatch mode torch.cond's own batching rule takes a tensor for a tuple of its rows."""

    def f(x):
        return torch.cond(x.sum() > 0, lambda x: tree(x.sin()), lambda x: tree(x.cos()), (x,))

    def expected(x):
        return tree(torch.where(x.sum() > 0, x.sin(), x.cos()))

    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], requires_grad=True)
    found, right = torch.func.vmap(remat(f))(x), torch.func.vmap(expected)(x)
    torch.testing.assert_close(found, right)
    grads = [torch.autograd.grad(scalar(out), x)[0] for out in (found, right)]
    torch.testing.assert_close(*grads)
    found = remat(torch.func.vmap(f))(x)  # all of it in the region
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(scalar(found), x)[0], grads[1])
    region = remat(lambda x: torch.cond(x.sum() > 0, lambda x: (x, x.sin()), lambda x: (-x, x.cos()), (x,)))
    torch.testing.assert_close(torch.func.vmap(region)(x)[1], torch.stack([x[0].sin(), x[1].cos()]))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
def test_compiled(kept):
    """What the branches are given was mistaken for a number: an error of the backend."""
    run, plain = (
        torch.compile(remat(block(torch.cond, W), policy=kept), backend="aot_eager", fullgraph=True),
        block(by_if, W),
    )
    for x in (X, -3 * X):
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.testing.assert_close(
            torch.autograd.grad(run(one).sum(), one), torch.autograd.grad(plain(other).sum(), other)
        )
