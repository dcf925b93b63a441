"""One function, three policies: what each keeps between forward and backward, and the same gradients.

python examples/quickstart.py
"""

# %%
import torch
import torch.nn.functional as F

from remat import remat, save_matmuls, saved_residuals


def mlp(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    up, down = params
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down


def main() -> None:
    torch.manual_seed(0)
    params = [torch.randn(256, 1024) / 16, torch.randn(1024, 256) / 32]
    x = torch.randn(512, 256)
    versions = {
        "no remat": mlp,
        "save_nothing": remat(mlp),
        "save_matmuls": remat(mlp, policy=save_matmuls),
    }
    expected = torch.func.grad(lambda p: mlp(p, x).square().mean())(params)
    for name, fn in versions.items():
        kept = saved_residuals(fn, params, x).kept_bytes
        got = torch.func.grad(lambda p, fn=fn: fn(p, x).square().mean())(params)
        torch.testing.assert_close(got, expected)
        print(f"{name:<14}{kept:>10} bytes kept, gradients equal")


# %%
if __name__ == "__main__":
    main()
