"""vmap and grad in every order."""

import pytest
import torch
from torch.func import grad, vmap

from remat import remat, save_everything, save_matmuls, save_nothing
from tests.helpers import batched, check, inexact, loss_of, matrix, nan_where_nobody_wrote, rand, same, scalar


def vmapped(fn):
    return vmap(fn, randomness="different")


@matrix("vmap", "grad")
def test_vmap_of_grad(name, policy):
    def run(fn, args):
        return (), vmapped(grad(loss_of(fn), inexact(args)))(*batched(args))

    check(name, policy, run)


@matrix("vmap", "grad")
def test_grad_of_vmap(name, policy):
    def run(fn, args):
        loss = lambda *args: scalar(vmapped(fn)(*args))  # noqa: E731
        return (), grad(loss, inexact(args))(*batched(args))

    check(name, policy, run)


@matrix("vmap", "grad", policies=("nothing", "matmuls", "unbatched"))
def test_vmap_of_vmap_of_grad(name, policy):
    def run(fn, args):
        per_example = vmapped(vmapped(grad(loss_of(fn), inexact(args))))
        return (), per_example(*batched(batched(args), 3))

    check(name, policy, run)


@matrix("vmap", "grad", policies=("nothing", "unbatched", "rule"))
def test_per_sample_gradients(name, policy):
    """The weights are shared, the first argument is batched: the usual form."""

    def run(fn, args):
        first, *rest = args
        in_dims = (0, *(None for _ in rest))
        per_sample = vmap(grad(loss_of(fn), inexact(args)), in_dims, randomness="different")
        return (), per_sample(torch.stack([first, first, first]), *rest)

    check(name, policy, run)


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
        return vmap(lambda x: grad(lambda a: f(a, x).sum())(x))(rand(5, 3, 4))

    same(run(remat(region)), run(region))
