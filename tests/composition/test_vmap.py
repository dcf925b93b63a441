"""torch.func.vmap over a region."""

import pytest
import torch
from torch.func import vmap

from remat import remat
from tests.helpers import POLICIES, batched, check, gradients, leaves_of, matrix, rand, same


def differentiated(fn, args, **options):
    """vmap alone over leaves: without any the function would run as it is, and be compared with itself."""
    leaves = leaves_of(args)
    outputs = vmap(fn, **options)(*leaves)
    return outputs, gradients(outputs, leaves, materialize_grads=True)


@matrix("vmap")
def test_backward_through_vmap(name, policy):
    def run(fn, args):
        return differentiated(fn, batched(args), randomness="different")

    check(name, policy, run)


@matrix("vmap", policies=("nothing", "matmuls", "rule"))
def test_vmap_over_the_first_argument(name, policy):
    def run(fn, args):
        first, *rest = args
        in_dims = (0, *(None for _ in rest))
        return differentiated(fn, (torch.stack([first, first]), *rest), in_dims=in_dims, randomness="same")

    check(name, policy, run)


@matrix("vmap", policies=("nothing", "unbatched", "rule"))
def test_vmap_of_vmap(name, policy):
    def run(fn, args):
        inner = vmap(fn, randomness="different")
        return differentiated(inner, batched(batched(args), 3), randomness="different")

    check(name, policy, run)


def test_where_nothing_is_differentiated_the_function_runs_as_it_is():
    given, seen = [], []

    def outer(x):
        given.append(x)
        return remat(lambda x: seen.append(x) or x.sin())(x)

    same(vmap(outer)(rand(3, 2)), rand(3, 2).sin(), 0.0)
    assert len(seen) == 1 and seen[0] is given[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_other_axes(policy):
    def region(x, w):
        return torch.tanh(x @ w), (x * w).sum(0)

    args = rand(3, 4, 3), rand(3, 3, 4)
    axes = {"in_dims": (1, 2), "out_dims": (1, 0)}
    expected = differentiated(region, args, **axes)
    same(differentiated(remat(region, policy=POLICIES[policy]), args, **axes), expected)


def test_outputs_that_do_not_depend_on_the_batch():
    def region(x):
        return x.sin(), torch.ones(2)

    same(differentiated(remat(region), (rand(3, 2),)), differentiated(region, (rand(3, 2),)))


@matrix("vmap", policies=("nothing", "unbatched", "rule"))
def test_chunks(name, policy):
    def run(fn, args):
        return differentiated(fn, batched(args, 3), randomness="different", chunk_size=2)

    check(name, policy, run)


def test_a_captured_tensor_that_the_search_misses_is_still_differentiated():
    hidden = {}

    class Opaque:
        __slots__ = ("key",)

        def __init__(self, key):
            self.key = key

        def get(self):
            return hidden[self.key]

    w = hidden["w"] = torch.ones(2, requires_grad=True)
    holder, x = Opaque("w"), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    torch.func.vmap(remat(lambda x: (x * holder.get()).sin()))(x).sum().backward()
    torch.testing.assert_close(w.grad, x.cos().mul(x).sum(0))
