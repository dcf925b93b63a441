"""A whole training step in one graph: forward, loss, gradients and update, `torch.compile(step,
fullgraph=True)`.

    python examples/compiled_step.py

The peak counts what the step allocates at its highest point. Compiled, the gradients of one block need not
wait for those of the others; with remat neither do the values that they are computed from.
"""

# %%
from collections.abc import Callable

import torch
import torch.nn.functional as F

from remat import remat
from remat.cli.measure import trace_memory
from remat.debug import assert_recomputed
from remat.transforms import value_and_grad

Weights = list[tuple[torch.Tensor, torch.Tensor]]
Step = Callable[[Weights, torch.Tensor], torch.Tensor]


def block(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down


def loss_with(block: Callable[..., torch.Tensor]) -> Step:
    def loss(weights: Weights, x: torch.Tensor) -> torch.Tensor:
        for up, down in weights:
            x = block(up, down, x)
        return x.square().mean()

    return loss


def functional(loss: Step) -> Step:
    """One step of gradient descent, which writes into the weights."""

    def step(weights: Weights, x: torch.Tensor) -> torch.Tensor:
        value, gradients = value_and_grad(loss)(weights, x)
        for pair, gradient in zip(weights, gradients, strict=True):
            for weight, direction in zip(pair, gradient, strict=True):
                weight.sub_(0.1 * direction)
        return value

    return step


def backward(loss: Step) -> Step:
    """The same step by `.backward()`."""

    def step(weights: Weights, x: torch.Tensor) -> torch.Tensor:
        leaves = [(up.detach().requires_grad_(), down.detach().requires_grad_()) for up, down in weights]
        value = loss(leaves, x)
        value.backward()
        with torch.no_grad():
            for leaf in [w for pair in leaves for w in pair]:
                assert leaf.grad is not None
                leaf.sub_(leaf.grad, alpha=0.1)
        return value.detach()

    return step


def copied(weights: Weights) -> Weights:
    return [(up.clone(), down.clone()) for up, down in weights]


def main() -> None:
    torch.manual_seed(0)
    weights = [(torch.randn(64, 256) / 8, torch.randn(256, 64) / 16) for _ in range(8)]
    x = torch.randn(2048, 64)
    plain, region = loss_with(block), loss_with(remat(block))
    steps = {
        "no remat, compiled": torch.compile(functional(plain), fullgraph=True),
        "remat, compiled": torch.compile(functional(region), fullgraph=True),
        "remat, eager": functional(region),
        "remat, .backward()": backward(region),
    }
    assert_recomputed(functional(region), copied(weights), x, ops=["mm"])
    expected = None
    for name, step in steps.items():
        own = copied(weights)
        step(own, x)
        peak = trace_memory(lambda mark, step=step, own=own: step(own, x)).peak
        expected = expected or own
        torch.testing.assert_close(own, expected)
        print(f"{name:<20}{peak:>10} bytes kept at the peak, weights equal after two steps")


# %%
if __name__ == "__main__":
    main()
