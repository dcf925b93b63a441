"""Random numbers are the same in the forward and in every recomputation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import RematError, checkpoint_policy, remat, save_all_but_names, scan_remat
from tests.helpers import POLICIES, crossed, nan_where_nobody_wrote, rand, same, unseen


@pytest.mark.parametrize(
    ("around", "inside", "own"),
    crossed(["odd", "even", "nothing"], ["nothing", "everything"], [False, True], every=2),
)
def test_a_backward_of_nested_regions_leaves_the_stream_alone(around, inside, own):
    """What is kept goes as it is read; what was made of it is drawn again for the other region."""
    policies = {**POLICIES, "odd": checkpoint_policy(lambda op: op.index % 2 == 1)}
    policies["even"] = checkpoint_policy(lambda op: op.index % 2 == 0)
    generator = torch.Generator().manual_seed(1)

    def drop(x):
        drawn = torch.bernoulli(torch.full_like(x, 0.5), generator=generator)
        return x * drawn if own else F.dropout(x, 0.5)

    inner = remat(lambda x: drop(drop(x.sin()).exp()) * x, policy=policies[inside])
    outer = remat(lambda x: inner(x.cos()).sin(), policy=policies[around])
    for _ in range(2):
        x = rand(8, 8).requires_grad_()
        out = outer(x).sum()
        before = torch.get_rng_state(), generator.get_state()
        torch.autograd.grad(out, x)
        same((torch.get_rng_state(), generator.get_state()), before)


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


@pytest.mark.parametrize("where", ["before", "after", "fork", "both"])
def test_a_second_call_that_takes_another_way_draws_the_same_again(where: str):
    """It leaves the tape of the first, and its function runs again: no generator is moved on by that."""
    raw = [False]

    def noise(h: Tensor, place: str) -> Tensor:
        if where == "fork" and place == "before":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                return h + F.dropout(h.sin(), 0.5)
        return F.dropout(h.sin(), 0.5) if where in (place, "both") or where == "fork" else h.sin()

    def f(x: Tensor) -> Tensor:
        h = noise(x, "before")
        if raw[0]:
            h = h * unseen(x, 2.0)
        return noise(h, "after").exp()

    def step(fn: Any, at: int) -> tuple[Tensor, Tensor, Tensor]:
        raw[0] = at > 0
        torch.manual_seed(at)
        x = rand(3).requires_grad_()
        value = fn(x)
        torch.rand(2)
        return value, torch.autograd.grad(value.sum(), x)[0], torch.get_rng_state()

    region = remat(f)
    for at in range(3):
        same(step(region, at), step(f, at))


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


DRAWS_FROM = {
    "multinomial": lambda g: torch.multinomial(torch.ones(4), 4, generator=g).double(),
    "bernoulli": lambda g: torch.bernoulli(torch.full((4,), 0.5, dtype=torch.float64), generator=g),
    "normal": lambda g: torch.normal(torch.zeros(4, dtype=torch.float64) + 1, 0.5, generator=g),
}


@pytest.mark.filterwarnings("ignore:Policy save_all_but_names")
@pytest.mark.parametrize("kind", DRAWS_FROM)
def test_what_a_kept_draw_reads_is_made_again(kind: str) -> None:
    """It runs in a second run of the function, too, for the generator that this one makes."""

    def draws(x: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(3)
        return (x.sin() * DRAWS_FROM[kind](g)).exp() * torch.rand(4, generator=g, dtype=torch.float64)

    def run(fn: Any) -> Tensor:
        return grad(lambda x: grad(lambda x: fn(x).sum())(x).square().sum())(rand(4))

    expected = run(draws)
    with nan_where_nobody_wrote():
        for _ in range(2):
            same(run(remat(draws, policy=save_all_but_names("h"))), expected)
