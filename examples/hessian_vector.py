"""Hessian-vector products, `jvp(grad(remat(f)))`: second order with the memory of remat.

python examples/hessian_vector.py
"""

# %%
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.func import grad, jvp

from remat import remat, saved_residuals


def block(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ weight)


def loss_with(block: Callable[..., torch.Tensor], x: torch.Tensor) -> Callable[..., torch.Tensor]:
    def loss(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        h = x
        for weight in weights:
            h = block(weight, h)
        return h.square().mean()

    return loss


def product(loss: Callable[..., torch.Tensor], point: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]):
    """H v, forward over reverse: one tangent through the gradient (Pearlmutter 1994)."""
    return jvp(grad(loss), (point,), (v,))[1]


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(128, 64, dtype=torch.float64)
    point = tuple(torch.randn(64, 64, dtype=torch.float64) / 8 for _ in range(6))
    v = tuple(torch.randn_like(weight) for weight in point)
    expected = product(loss_with(block, x), point, v)
    for name, version in {"no remat": block, "remat": remat(block)}.items():
        loss = loss_with(version, x)
        kept = saved_residuals(loss, point).kept_bytes
        torch.testing.assert_close(product(loss, point, v), expected, rtol=1e-10, atol=1e-12)
        print(f"{name:<10}{kept:>10} bytes kept, H v equal")


# %%
if __name__ == "__main__":
    main()
