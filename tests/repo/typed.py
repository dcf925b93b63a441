# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedFunction=false, reportUnusedClass=false
"""What a type checker knows of the public functions: pyright reads this file, nothing runs it.

Each wrong line is said to be wrong. An ignored line that turns out to be right is an error, too.
"""

from typing import assert_type

import torch
from torch import Tensor

import remat
from remat import Policy, checkpoint_policy, nn, save_matmuls, save_names
from remat.interop import checkpoint
from remat.plan import BudgetPolicy, Plan


class Model(torch.nn.Module):
    @remat.remat
    def block(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x.sin() * scale

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, 2.0)


def layer(x: Tensor, n: int) -> tuple[Tensor, int]:
    return x.sin(), n


def known(x: Tensor) -> None:
    budget = checkpoint_policy(budget=0.5)
    assert_type(budget, BudgetPolicy)
    assert_type(budget.plan(torch.sin, x), Plan)
    assert_type(checkpoint_policy(lambda info: info.bytes < 1024), Policy)
    assert_type(checkpoint_policy("q"), Policy)
    assert_type(remat.remat(layer)(x, 2), tuple[Tensor, int])
    assert_type(remat.remat(layer).__wrapped__(x, 2), tuple[Tensor, int])
    assert_type(remat.remat(policy=save_matmuls | ["q"])(layer)(x, n=2), tuple[Tensor, int])
    assert_type(remat.remat(Model(), policy=save_matmuls), Model)
    assert_type(remat.remat(policy=save_matmuls)(Model()), Model)
    model = nn.apply(torch.nn.Sequential(Model()), layers=Model, policy=save_names("q"))
    assert_type(model, torch.nn.Sequential)
    assert_type(nn.remove(nn.apply_to(Model())), Model)
    assert_type(Model().block(x, 2.0), Tensor)
    assert_type(checkpoint(layer, x, 1, use_reentrant=False), tuple[Tensor, int])
    assert_type(checkpoint(use_reentrant=False)(layer)(x, 1), tuple[Tensor, int])


def mistakes(x: Tensor) -> None:
    remat.remat(layer, policy=3)  # pyright: ignore[reportCallIssue, reportArgumentType]
    remat.remat(layer, determinism_check="meta")  # pyright: ignore[reportCallIssue, reportArgumentType]
    remat.remat(layer)(x)  # pyright: ignore[reportCallIssue]
    remat.remat(layer)(x, "n")  # pyright: ignore[reportArgumentType]
    checkpoint_policy(lambda info: info.bites < 3)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownLambdaType]
    checkpoint_policy(save_matmuls, budget=0.5)  # pyright: ignore[reportCallIssue]
    nn.apply(layer)  # pyright: ignore[reportArgumentType]
    Model().block(x, 2.0, 3)  # pyright: ignore[reportCallIssue]
