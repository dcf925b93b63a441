"""torch.func.vmap over a region."""

import pytest
import torch
from torch.func import vmap

from remat import remat
from tests.helpers import POLICIES, batched, check, inexact, matrix, rand, same


@matrix("vmap")
def test_vmap(name, policy):
    def run(fn, args):
        return vmap(fn, randomness="different")(*batched(args)), ()

    check(name, policy, run)


@matrix("vmap", policies=("nothing", "matmuls"))
def test_vmap_over_the_first_argument(name, policy):
    def run(fn, args):
        first, *rest = args
        in_dims = (0, *(None for _ in rest))
        return vmap(fn, in_dims, randomness="same")(torch.stack([first, first]), *rest), ()

    check(name, policy, run)


@matrix("vmap", policies=("nothing", "unbatched"))
def test_vmap_of_vmap(name, policy):
    def run(fn, args):
        twice = vmap(vmap(fn, randomness="different"), randomness="different")
        return twice(*batched(batched(args), 3)), ()

    check(name, policy, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_other_axes(policy):
    def region(x, w):
        return torch.tanh(x @ w), (x * w).sum(0)

    args = rand(3, 4, 3), rand(3, 3, 4)
    expected = vmap(region, (1, 2), (1, 0))(*args)
    same(vmap(remat(region, policy=POLICIES[policy]), (1, 2), (1, 0))(*args), expected, 0.0)


def test_outputs_that_do_not_depend_on_the_batch():
    def region(x):
        return x.sin(), torch.ones(2)

    same(vmap(remat(region))(rand(3, 2)), vmap(region)(rand(3, 2)), 0.0)


@matrix("vmap", policies=("nothing", "matmuls", "unbatched"))
def test_chunks(name, policy):
    def run(fn, args):
        return vmap(fn, randomness="different", chunk_size=2)(*batched(args, 3)), inexact(args)

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
