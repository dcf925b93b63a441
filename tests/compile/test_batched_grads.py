"""Backwards of compiled regions with batched cotangents, where the backend executes its graph as it is:
Jacobians by `is_grads_batched`. (Torch refuses `torch.func.vmap` over such a backward.)"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remat import remat, save_matmuls, save_nothing, save_ops
from remat.policies import offload
from tests.compiled import compiled
from tests.helpers import crossed

W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def product(x: Tensor) -> Tensor:
    return (x @ W).sin() * x


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x @ W, 0.5).sin() + x.exp()


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x.exp().view(2, 2), (2,)).flatten() @ W


def expanded(x: Tensor) -> Tensor:
    return (x.sin().unsqueeze(0).expand(4, 4).transpose(0, 1) * W).cos().sum(0)


def rolled(x: Tensor) -> Tensor:
    table = torch.arange(4.0, dtype=torch.float64).cos()
    return torch.roll(x.sin() * table, 1).exp().cumsum(0)


FUNCTIONS = {f.__name__: f for f in (product, dropped, normed, expanded, rolled)}
POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "host": offload(save_matmuls),
    "sines": save_ops(torch.ops.aten.sin),
}


def at_once(y: Tensor, x: Tensor) -> Tensor:
    eye = torch.eye(4, dtype=y.dtype)
    return torch.autograd.grad(y, x, eye, retain_graph=True, is_grads_batched=True)[0]


def row_by_row(y: Tensor, x: Tensor) -> Tensor:
    eye = torch.eye(4, dtype=y.dtype)
    return torch.stack([torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in eye])


@pytest.mark.parametrize(("name", "policy"), crossed(FUNCTIONS, POLICIES, every=4))
def test_a_jacobian_by_batched_cotangents(name: str, policy: str) -> None:
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    y = compiled(remat(FUNCTIONS[name], policy=POLICIES[policy]))(x)
    if name != "dropped":
        bare = FUNCTIONS[name](x)
        torch.testing.assert_close(row_by_row(y, x), row_by_row(bare, x), rtol=0, atol=1e-12)
    torch.testing.assert_close(at_once(y, x), row_by_row(y, x), rtol=0, atol=1e-12)


def test_a_jacobian_of_nested_regions() -> None:
    inner = remat(product)
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    y = compiled(remat(lambda x: inner(x.exp()).cos()))(x)
    bare = product(x.exp()).cos()
    torch.testing.assert_close(at_once(y, x), row_by_row(bare, x), rtol=0, atol=1e-12)
