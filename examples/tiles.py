"""A SwiGLU and a loss head, a tile of tokens at a time: bytes of a step, and the same gradients.

python examples/tiles.py
"""

# %%
import torch
import torch.nn.functional as F
from torch import nn

from remat import tiled
from remat.cli.measure import trace_memory
from remat.losses import linear_cross_entropy


def main() -> None:
    torch.manual_seed(0)
    gate, up, down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)
    head = (torch.randn(4096, 64) / 8).requires_grad_()
    x, targets = torch.randn(1024, 64, requires_grad=True), torch.randint(4096, (1024,))

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return down(F.silu(gate(x)) * up(x))

    # %%
    versions = {
        "no remat": lambda: F.cross_entropy(F.linear(mlp(x), head), targets),
        "tiles": lambda: linear_cross_entropy(tiled(mlp, tiles=16)(x), head, targets),
    }
    of = [x, head, *gate.parameters(), *up.parameters(), *down.parameters()]
    expected = torch.autograd.grad(versions["no remat"](), of)
    for name, loss in versions.items():

        def step(mark, loss=loss):
            value = loss()
            mark()
            return torch.autograd.grad(value, of)

        measured = trace_memory(step)
        torch.testing.assert_close(measured.result, expected)
        print(f"{name:<9}{measured.kept:>10} bytes kept, {measured.peak:>10} at the peak, gradients equal")


# %%
if __name__ == "__main__":
    main()
