"""Opacus: gradients of single examples come by hooks on layers, which stand inside of regions."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import save_matmuls, save_nothing

opacus: Any = pytest.importorskip("opacus")
# It warns of insecure noise, and that its hooks see inputs without gradients.
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def samples(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(2):
        for p in model.parameters():
            p.grad, p.grad_sample = None, None
        model(x).square().mean((1, 2)).sum().backward()
    return [p.grad_sample.clone() for p in model.parameters()]


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
@pytest.mark.parametrize("before", [True, False])
def test_gradients_of_single_examples(policy: Any, before: bool) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(*[Block() for _ in range(3)]), torch.randn(5, 4, 8)
    expected = samples(opacus.GradSampleModule(copy.deepcopy(plain)), x)
    if before:
        model = opacus.GradSampleModule(remat.nn.apply(plain, layers="*", policy=policy))
    else:
        model = remat.nn.apply(opacus.GradSampleModule(plain), layers="_module.*", policy=policy)
    assert len(remat.nn.regions(model)) == 3
    torch.testing.assert_close(samples(model, x), expected)


def test_a_private_engine_steps() -> None:
    torch.manual_seed(0)
    model = remat.nn.apply(nn.Sequential(*[Block() for _ in range(3)]), layers="*", policy=save_nothing)
    rows = torch.utils.data.TensorDataset(torch.randn(16, 4, 8))
    private, optimizer, batches = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=torch.utils.data.DataLoader(rows, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    before = [p.clone() for p in private.parameters()]
    for (x,) in batches:
        optimizer.zero_grad()
        private(x).square().mean().backward()
        optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, private.parameters(), strict=True))
