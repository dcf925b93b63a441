"""Random numbers are the same in the forward and in every recomputation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import RematError, remat, scan_remat
from tests.helpers import rand, unseen


def test_vmap_refuses_random_ops_as_without_remat():
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(remat(lambda x: torch.rand_like(x)))(rand(2, 4))


@pytest.mark.parametrize("by", ["autograd", "func"])
@pytest.mark.parametrize("kind", ["region", "read unseen", "scan", "forward mode inside"])
def test_draws_in_a_graph_of_make_fx_are_refused(by, kind):
    """The graph has no generator states: forward and recomputation would draw two masks, as in torch's."""

    def f(x):
        if kind == "scan":
            return scan_remat(lambda c, _: (F.dropout(c.exp(), 0.5), None), x, length=2, checkpoints=1)[0]
        noise = lambda x: F.dropout((x + unseen(x) if kind == "read unseen" else x).exp(), 0.5)  # noqa: E731
        if kind == "forward mode inside":
            return remat(lambda x: torch.func.jvp(noise, (x,), (x.sin(),))[1])(x)
        return remat(noise)(x)

    def step(x):
        if by == "func":
            return torch.func.grad(lambda x: f(x).sum())(x)
        return torch.autograd.grad(f(x).sum(), x)[0]

    with pytest.raises(RematError, match="make_fx"):
        make_fx(step)(torch.randn(3, requires_grad=by == "autograd"))


def test_draws_in_a_gradient_that_linearize_traces_are_refused():
    """By make_fx: a graph that draws two masks, where no ops of the recomputation can be compared."""
    force = torch.func.grad(lambda x: remat(lambda x: F.dropout(x.exp(), 0.5))(x).sum())
    with pytest.raises(RematError, match="make_fx"):
        torch.func.linearize(force, rand(3))


@pytest.fixture
def cudnn() -> Iterator[list[int]]:
    """In place of cuDNN's RNN a kernel of the CPU: it drops out by a random state that no generator knows."""
    library, state = torch.library.Library("aten", "IMPL"), [0]

    def rnn(x: Tensor, weights: Any, stride: int, buffer: Any, hx: Tensor, cx: Any, *options: Any) -> Any:
        p, trains = options[5], options[6]
        state[0] += 1
        draw = torch.Generator().manual_seed(state[0])
        mask = (torch.rand(x.shape, generator=draw) > p * trains).to(x.dtype)
        return x.sin() * mask, hx.clone(), hx.new_zeros(0), mask, weights[0].new_zeros(0)

    def back(x: Tensor, weights: Any, *rest: Any) -> Any:
        grad, mask = rest[5], rest[-2]
        return grad * x.cos() * mask, torch.zeros_like(rest[2]), None, [torch.zeros_like(w) for w in weights]

    library.impl("_cudnn_rnn", rnn, "CPU")
    library.impl("_cudnn_rnn_backward", back, "CPU")
    yield state
    library._destroy()


@pytest.mark.parametrize("how", ["backward", "grad", "grad of a region in a region"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_what_cudnn_drops_out_by_its_own_state_is_kept(cudnn: list[int], p: float, how: str) -> None:
    w = torch.ones(2, 4, dtype=torch.float64)
    calls = [0]

    def layer(x: Tensor) -> Tensor:
        calls[0] += 1
        h = x.new_zeros(1, 3, 4)
        out = torch.ops.aten._cudnn_rnn(
            x.sin(), [w], 1, None, h, None, 0, 4, 0, 1, True, p, True, False, [], None
        )
        return out[0].sin()

    def derivative(fn: Any) -> Tensor:
        if how == "backward":
            return torch.autograd.grad(fn(x).sum(), x)[0]
        return grad(lambda x: fn(x).sum())(x.detach())

    x = torch.rand(3, 2, 4, dtype=torch.float64, requires_grad=True)
    region = remat(remat(layer)) if how.endswith("region") else remat(layer)
    for _ in range(3):
        start = cudnn[0]
        expected = derivative(layer)
        cudnn[0], calls[0] = start, 0
        assert torch.equal(derivative(region), expected)
        if how == "backward":
            # With dropout it is kept, without it runs again.
            assert (cudnn[0] - start, calls[0]) == (1 if p else 2, 1)
