"""A gated RNN of 500 steps as one scan: bytes kept between forward and backward, and the same gradients.

python examples/scan_rnn.py
"""

# %%
import torch

from remat import scan_remat
from remat.cli.measure import trace_memory


def main() -> None:
    torch.manual_seed(0)
    w = (torch.randn(32, 64) / 6).requires_grad_()
    xs, h = torch.randn(500, 8, 64), torch.zeros(8, 32)

    def body(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate, new = (h @ w + x).chunk(2, -1)
        return torch.lerp(h, torch.tanh(new), torch.sigmoid(gate)), None

    def loop(h: torch.Tensor) -> torch.Tensor:
        for x in xs:
            h, _ = body(h, x)
        return h

    versions = {
        "no remat": loop,
        "4 carries": lambda h: scan_remat(body, h, xs, checkpoints=4)[0],
        "sqrt": lambda h: scan_remat(body, h, xs, checkpoints="sqrt")[0],
        "all carries": lambda h: scan_remat(body, h, xs, checkpoints="all")[0],
    }
    expected = torch.autograd.grad(loop(h).square().sum(), w)
    for name, fn in versions.items():

        def step(mark, fn=fn):
            value = fn(h).square().sum()
            mark()
            return torch.autograd.grad(value, w)

        measured = trace_memory(step)
        torch.testing.assert_close(measured.result, expected)
        print(f"{name:<14}{measured.kept:>10} bytes kept, gradients equal")


# %%
if __name__ == "__main__":
    main()
