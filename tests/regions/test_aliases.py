"""Tensors that share memory in ways that no op tells, and ops that give one of them another shape."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import dlpack

from remat import RematError, checkpoint_policy, remat, save_matmuls, save_nothing
from tests.helpers import crossed, rand, same

BUFFER = rand(4, 4, seed=7)
# A capsule, as before `__dlpack__`.
to_dlpack: Any = getattr(dlpack, "to_dlpack")  # noqa: B009


def transposed_original(h, w):
    h = h.clone()
    k = h.detach()
    h.transpose_(0, 1)
    return h * k


def strided_alias(h, w):
    k = h.data
    k.as_strided_((4, 4), (1, 4))
    return h * h * k


def resized_alias(h, w):
    k = h.detach()
    k.resize_(2, 4).add_(1)
    return h[:2] * k * h[2:]


def transposed_alias_of_outside(h, w):
    k = BUFFER.detach()
    k.t_()
    k[0].add_(1)
    return h * (h @ k) * BUFFER.clone()


def memory_set_to_outside(h, w):
    k: Any = torch.empty(0, dtype=h.dtype)
    k.set_(BUFFER)
    k.add_(1)
    return h * BUFFER * k


def memory_set_to_a_storage(h, w):
    k = torch.empty(0, dtype=h.dtype).set_(h.detach().clone().untyped_storage(), 0, (4, 4), (1, 4))
    return h * k * k


def python_writes_outside(h, w):
    BUFFER.apply_(lambda a: a * 0.5 + 1)
    return h * BUFFER * BUFFER


def raw_writes_outside(h, w):
    size = BUFFER.numel()
    there: Any = (ctypes.c_double * size).from_address(BUFFER.data_ptr())
    np.frombuffer(there, dtype=np.float64)[:] *= 0.5
    return h * BUFFER * BUFFER


def legacy_dlpack(h, w):
    k = dlpack.from_dlpack(to_dlpack(h.detach()))
    k.view(-1)[3:7].add_(1)
    return h * h


def legacy_dlpack_of_a_part(h, w):
    k = dlpack.from_dlpack(to_dlpack(h.detach()[1:]))
    h.detach().mul_(3)
    return h[1:] * h[1:] * k


def legacy_dlpack_as_another_dtype(h, w):
    k = dlpack.from_dlpack(to_dlpack(h.detach().view(torch.int64)))
    k.bitwise_and_(-(1 << 45))
    return h * h


def sparse_rows(h, w):
    """Torch takes the values as they are, and tells of no alias."""
    values = h.detach().reshape(-1).clone()
    s = torch.sparse_csr_tensor(torch.arange(0, 17, 4), torch.arange(4).repeat(4), values, (4, 4))
    values.mul_(2)
    return h * (s @ h)


def nested_rows(h, w):
    n = torch.nested.as_nested_tensor([h[:2], h[2:3]])
    n.detach().unbind()[0].mul_(2)
    return n.to_padded_tensor(0.0).sin() * h[:2]


# Torch itself refuses them below a transform, or (`.data`) gives the derivative of another function.
EAGER = (strided_alias, resized_alias, memory_set_to_a_storage, sparse_rows, nested_rows, legacy_dlpack)
EAGER += (legacy_dlpack_of_a_part, legacy_dlpack_as_another_dtype, transposed_alias_of_outside)
BOTH = (transposed_original, memory_set_to_outside, python_writes_outside, raw_writes_outside)
# What needs data is planned from its first call on, with a warning; so are budgets that are too small.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*({text})")
    for text in ("cannot be planned", "below the least", "invariant checks", "beta state", "prototype stage")
]
POLICIES = {"nothing": save_nothing, "matmuls": save_matmuls, "budget": checkpoint_policy(budget=0.5)}


def plainly(region, x, w):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    return torch.autograd.grad(region(x, w).sum(), (x, w))


def nested(region, x, w):
    return plainly(remat(lambda x, w: region(x.cos(), w).tanh()), x, w)


def twice(region, x, w):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    slopes = torch.autograd.grad(region(x, w).sum(), (x, w), create_graph=True)
    return torch.autograd.grad(slopes[0].sin().sum() + slopes[1].sin().sum(), (x, w))


def by_grad(region, x, w):
    return torch.func.grad(lambda x, w: region(x, w).sum(), (0, 1))(x, w)


def two_calls(fn: Any, way: Callable[..., Any], wrap: Callable[[Any], Any]) -> list[Any]:
    BUFFER.copy_(rand(4, 4, seed=7))
    region = wrap(lambda x, w: fn((x @ w).sin(), w))
    return [*(way(region, rand(4, 4, seed=n), rand(4, 4, seed=5)) for n in range(2)), BUFFER.clone()]


@pytest.mark.parametrize(
    ("fn", "way", "policy"), crossed([*EAGER, *BOTH], [plainly, nested, twice], POLICIES)
)
def test_plain_autograd(fn, way, policy):
    if way is nested:
        want = two_calls(fn, plainly, lambda f: lambda x, w: f(x.cos(), w).tanh())
    else:
        want = two_calls(fn, way, lambda f: f)
    same(two_calls(fn, way, lambda f: remat(f, policy=POLICIES[policy])), want)


@pytest.mark.parametrize(("fn", "policy"), crossed(BOTH, POLICIES))
def test_torch_func(fn, policy):
    wrap = lambda f: remat(f, policy=POLICIES[policy])  # noqa: E731
    same(two_calls(fn, by_grad, wrap), two_calls(fn, by_grad, lambda f: f))


def test_an_alias_of_an_argument():
    """It has a shape of its own; only to change that of the argument itself is refused."""

    def fn(x, m):
        k = m.detach()
        k.t_()
        return x.sin() * k

    x, m = rand(4, 4).requires_grad_(), rand(4, 4, seed=1)
    same(torch.autograd.grad(remat(fn)(x, m).sum(), x), (x.cos() * m.t(),))
    with pytest.raises(RematError, match="argument"):
        remat(lambda x, m: x * m.t_())(x, m)
    assert m.equal(rand(4, 4, seed=1))


def test_what_needs_data_is_told_of_before_it_ends_the_process():
    with pytest.warns(UserWarning, match="data_ptr goes to memory"):
        remat(lambda x: raw_writes_outside(x.sin(), x), policy=checkpoint_policy(budget=0.5))(rand(4, 4))


def test_a_tensor_given_the_memory_of_a_storage_runs_no_python_again() -> None:
    """As torch does before cuDNN's RNNs, to look at all weights as one."""
    calls = [0]

    def layer(x: Tensor, w: Tensor) -> Tensor:
        calls[0] += 1
        with torch.no_grad():
            flat = torch.empty(0, dtype=w.dtype).set_(w.untyped_storage(), 0, (w.numel(),), (1,))
        return (x @ w).sin() * flat.sum()

    x, w = rand(3, 4).requires_grad_(), rand(4, 4).requires_grad_()
    expected = torch.autograd.grad(layer(x, w).sum(), (x, w))
    region = remat(layer)
    for _ in range(3):
        calls[0] = 0
        same(torch.autograd.grad(region(x, w).sum(), (x, w)), expected)
        assert calls[0] == 1
        with torch.no_grad():
            w.mul_(0.5)
        expected = torch.autograd.grad(layer(x, w).sum(), (x, w))
