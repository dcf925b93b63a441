"""Buffers that a region writes to, as inputs of a function under torch.func: torch's error tells that form.

Plain torch is the reference, bit for bit: gradients, buffers, and what later calls make of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import RematError, remat, save_nothing
from remat.nn import apply
from tests.helpers import crossed

FUNC = torch.func
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Params = dict[str, Tensor]


class Block(nn.Module):
    """A linear layer and what keeps a state of its results."""

    def __init__(self, state: nn.Module) -> None:
        super().__init__()
        self.lin, self.state = nn.Linear(4, 4), state

    def forward(self, x: Tensor) -> Tensor:
        return x + self.state(self.lin(x)).tanh()


class Ema(nn.Module):
    """Reads its mean before it writes it, and after."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        before = x * self.mean.clone()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return before + x.sin() * self.mean.clone()


class Counter(nn.Module):
    """An integer that scales."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * x * self.count


STATES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "ema": Ema,
    "counter": Counter,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
}


def made(state: str, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[Block(STATES[state]()) for _ in range(depth)]).double().train()


def marked(model: nn.Module, policy: Any) -> nn.Module:
    model = copy.deepcopy(model)
    apply(model, layers=Block, policy=policy)
    return model


def grad(loss: Any, params: Params, buffers: Params) -> Any:
    return FUNC.grad(loss)(params, buffers)


def jacfwd(loss: Any, params: Params, buffers: Params) -> Any:
    return FUNC.jacfwd(loss)(params, buffers)


def hessian(loss: Any, params: Params, buffers: Params) -> Any:
    return FUNC.hessian(loss)(params, buffers)


def ensemble(loss: Any, params: Params, buffers: Params) -> Any:
    stacked = {n: torch.stack([p, p + 0.1]) for n, p in params.items()}
    many = {n: torch.stack([b, b]) for n, b in buffers.items()}
    return FUNC.vmap(FUNC.grad(loss))(stacked, many), many


def grad_of_grad(loss: Any, params: Params, buffers: Params) -> Any:
    def norm(p: Params, b: Params) -> Tensor:
        return sum((g.square().sum() for g in FUNC.grad(loss)(p, b).values()), torch.zeros(()))

    return FUNC.grad(norm)(params, buffers)


def twice(loss: Any, params: Params, buffers: Params) -> Any:
    return FUNC.grad(lambda p, b: loss(p, b) + loss(p, b))(params, buffers)


WAYS: dict[str, Any] = {f.__name__: f for f in (grad, jacfwd, hessian, ensemble, grad_of_grad, twice)}


def run(model: nn.Module, way: Any) -> Any:
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}

    def loss(params: Params, buffers: Params) -> Tensor:
        return FUNC.functional_call(model, (params, buffers), (X,)).square().sum()

    found = [way(loss, params, buffers) for _ in range(2)]
    return found, buffers


def plain_or_refusal(model: nn.Module, way: Any) -> Any:
    """What plain torch gives, None where it refuses."""
    try:
        return run(model, way)
    except (RuntimeError, NotImplementedError):
        return None


def same(want: Any, got: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(got, want, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize(("state", "way"), crossed(STATES, WAYS, every=2))
def test_gradients_and_buffers_are_those_of_plain_torch(state: str, way: str) -> None:
    model = made(state)
    want = plain_or_refusal(model, WAYS[way])
    if want is None:
        pytest.skip("plain torch refuses it")
    # Torch adds up the parts of a gradient that comes by several ways in another order.
    several = {"rtol": 1e-12, "atol": 1e-10} if way in ("hessian", "grad_of_grad", "twice") else {}
    same(want, run(marked(model, save_nothing), WAYS[way]), **several)


# -- buffers as arguments of the function itself -------------------------------------------------------------


def running(x: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """Reads, writes whole and in part, and reads again."""
    first = x * mean.clone()
    with torch.no_grad():
        mean.lerp_(x.mean(0), 0.1)
        mean[:2].mul_(2)
        count += 1
    return first.sin() + (x * mean.clone()).tanh() / count.clone()


def weighted(x: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """Carries a derivative in its state."""
    first = x * mean.clone()
    mean.copy_(0.9 * mean + x.mean(0))
    count += 1
    return first.sin() + (x * mean.clone()).tanh() / count.clone()


def looked(x: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """Shows its memory to NumPy, so that it runs again as a whole."""
    held = x.detach().numpy().mean(0)
    with torch.no_grad():
        mean.mul_(0.5).add_(torch.from_numpy(held))
        count += 1
    return (x * mean.clone()).tanh() / count.clone() + x.sin()


def parts(x: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """A view of a buffer is an argument, too."""
    return layer_of_two(x, mean[1:], mean, count)


def layer_of_two(x: Tensor, part: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    with torch.no_grad():
        part.add_(x.mean())
        count.fill_(2)
    return x.sin() * mean.clone() * part.clone().sum() * count.clone()


FUNCTIONS: dict[str, Any] = {
    "running": (running, running),
    "looked": (looked, looked),
    "parts": (layer_of_two, parts),
    "weighted": (weighted, weighted),
}


def outer(function: str, r: Any) -> Any:
    inner, around = FUNCTIONS[function]
    wrapped = r(inner)
    return (lambda x, m, c: wrapped(x, m[1:], m, c)) if inner is not around else wrapped


def state() -> tuple[Tensor, Tensor]:
    return torch.linspace(0.5, 2.0, 4, dtype=torch.float64), torch.tensor(1)


def backward(step: Any) -> Any:
    found, held = [], state()
    for _ in range(3):
        x = X.clone().requires_grad_()
        held[0].detach_()
        y = step(x * 1, *held)
        held[0].detach_()  # which may have a derivative now
        y = step(y, *held)  # twice in one graph: what the first has written is written again
        y.square().mean().backward()
        found.append((y.detach(), x.grad))
    return found, held


def func_grad_read(step: Any) -> Any:
    """What the state is after the region is a part of the loss."""
    held = state()

    def loss(x: Tensor, mean: Tensor, count: Tensor) -> Tensor:
        return (step(x, mean, count) * mean).square().mean() * count

    return [FUNC.grad_and_value(loss)(X, *held) for _ in range(2)], held


def func_hessian(step: Any) -> Any:
    held = state()

    def loss(x: Tensor, mean: Tensor, count: Tensor) -> Tensor:
        return (step(x, mean, count) * mean).square().mean()

    return FUNC.hessian(loss)(X, *held), held


def per_example(step: Any) -> Any:
    held = torch.ones(6, 4, dtype=torch.float64), torch.ones(6, dtype=torch.int64)
    of = FUNC.vmap(FUNC.grad(lambda x, m, c: step(x[None], m, c).square().mean()))
    return of(X, *held), held


STEPS: dict[str, Any] = {f.__name__: f for f in (backward, func_grad_read, func_hessian, per_example)}


@pytest.mark.parametrize(
    ("function", "way", "policy"), crossed(FUNCTIONS, STEPS, ["nothing", "nested"], every=2)
)
def test_a_state_among_the_arguments(function: str, way: str, policy: str) -> None:
    wraps: dict[str, Any] = {
        "nothing": remat,
        "nested": lambda f: remat(lambda *args: remat(f)(*args) * 1.5),
    }
    scale = 1.5 if policy == "nested" else 1.0
    try:
        want = STEPS[way](outer(function, lambda f: lambda *args: f(*args) * scale))
    except RuntimeError:
        pytest.skip("plain torch refuses it")
    same(want, STEPS[way](outer(function, wraps[policy])), rtol=1e-12, atol=1e-12)


def test_a_later_call_whose_arguments_share_memory() -> None:
    """What was learnt of arguments apart does not hold for views of one memory."""

    def step(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            a.mul_(2)
        return x.sin() * b.clone()

    def run(step: Any) -> Any:
        found = []
        for shares in (False, False, True, True, False):
            x, a = X.clone().requires_grad_(), torch.ones(4, dtype=torch.float64)
            step(x, a, a[:] if shares else a.clone()).sum().backward()
            found.append(x.grad)
        return found

    same(run(step), run(remat(step)))


def test_a_write_into_what_is_differentiated() -> None:
    def loss(r: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            y = x * 1
            return (r(lambda x: x.mul_(2).sin())(y) * y).sum()

        return of

    for transform in (FUNC.grad, FUNC.hessian, FUNC.jacfwd):
        same(transform(loss(lambda f: f))(X), transform(loss(remat))(X))
    with pytest.raises(RematError, match="which is an argument that is differentiated"):
        loss(remat)(X.clone().requires_grad_())


def test_what_was_written_between_forward_and_pull_back_is_not_read() -> None:
    """Two calls of one batch norm, pulled back in reverse: each sees what its own forward saw."""

    class Twice(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x).tanh())

    for state in ("batch norm", "ema"):
        model = Twice(made(state, 1)[0])
        same(run(model, grad), run(marked(model, save_nothing), grad))
