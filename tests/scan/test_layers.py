"""`scan_layers` of a module beside the loop over its layers: what else the module holds, what is frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from remat import save_matmuls, scan_layers, stack_params
from tests.helpers import rand, same, sparse

OPTIONS: list[dict[str, Any]] = [{}, {"checkpoints": 2}, {"checkpoints": "sqrt", "policy": save_matmuls}]


class Block(nn.Module):
    """A layer that reads, beside its parameters, a tensor of its own and a module that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(4, 4))
        self.scale = rand(4).requires_grad_()
        self.made = self.scale * 2  # deepcopy refuses it
        self._private = rand(4).requires_grad_()
        self.others: Any = [nn.Linear(4, 4).double()]

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x @ self.weight, self.others[0].weight)
        return torch.tanh(x * self.scale + self.made * self._private)

    def leaves(self) -> list[Tensor]:
        return [self.scale, self._private, self.others[0].weight]


def looped(block: nn.Module, stacked: dict[str, Tensor], x: Tensor) -> Tensor:
    for i in range(3):
        x = functional_call(block, {name: t[i] for name, t in stacked.items()}, (x,))
    return x


@pytest.mark.parametrize("options", sparse(OPTIONS))
def test_gradients_of_what_a_layer_holds_beside_its_parameters(options):
    blocks = [Block() for _ in range(3)]
    stacked = {k: t.detach().requires_grad_() for k, t in stack_params(blocks).items()}
    wanted = [*stacked.values(), *blocks[0].leaves()]

    def found(run: Callable[..., Tensor], **options: Any) -> Any:
        out = run(blocks[0], stacked, rand(2, 4), **options).square().sum()
        first = torch.autograd.grad(out, wanted, create_graph=True)
        second = torch.autograd.grad([g.square().sum() for g in first], wanted, retain_graph=True)
        return out.detach(), first, second

    same(found(scan_layers, **options), found(looped))
    assert blocks[0].weight.grad is None


def test_what_a_layer_notes_is_noted():
    class Counting(Block):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x)

    blocks = nn.ModuleList(Counting() for _ in range(3))
    scan_layers(blocks[0], stack_params(blocks), rand(2, 4))
    assert blocks[0].count == 3


@pytest.mark.parametrize("options", sparse(OPTIONS[:2]))
def test_parameters_that_stand_for_others_make_no_graph(options):
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    frozen = {k: t.detach() for k, t in stack_params(blocks).items()}
    assert not scan_layers(blocks[0], frozen, torch.ones(2, 4), **options).requires_grad
