"""Per-sample gradients and clipping, `vmap(grad(remat(f)))`: one gradient for each sample of a batch.

    python examples/per_sample_gradients.py

Differential privacy, influence functions and gradient noise need them. Without remat, vmap keeps what the
backward of every sample reads, all at once.
"""

# %%
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from remat import remat, saved_residuals


def block(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(F.gelu(x @ weight))


def loss_with(block: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(weights: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = block(weight, x)
        return F.mse_loss(x, y)

    return loss


def clipped_sum(gradients: list[torch.Tensor], bound: float) -> list[torch.Tensor]:
    """The sum over samples, each sample's gradient scaled down to a norm of at most `bound` (DP-SGD)."""
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    factors = (bound / norms).clamp(max=1.0)
    return [torch.einsum("n,n...->...", factors, g) for g in gradients]


def main() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(64, 64) / 8 for _ in range(4)]
    samples, targets = torch.randn(16, 32, 64), torch.randn(16, 32, 64)
    expected = vmap(grad(loss_with(block)), (None, 0, 0))(weights, samples, targets)
    for name, version in {"no remat": block, "remat": remat(block)}.items():
        batched = vmap(loss_with(version), (None, 0, 0))
        kept = saved_residuals(batched, weights, samples, targets).kept_bytes
        got = vmap(grad(loss_with(version)), (None, 0, 0))(weights, samples, targets)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(clipped_sum(got, 0.1), clipped_sum(expected, 0.1))
        print(f"{name:<10}{kept:>10} bytes kept, {len(got[0])} gradients of each weight equal, and clipped")


# %%
if __name__ == "__main__":
    main()
