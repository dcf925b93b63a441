"""Threads: each trains, or evaluates, as it does alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat import remat
from remat.policies import save_matmuls, save_nothing
from tests.regions.inside import dual_level_known_if_any


@pytest.fixture(autouse=True)
def short_turns() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """What each of these returns, all at once."""
    results: list[Any] = [None] * len(jobs)
    failed: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(at: int) -> None:
        try:
            start.wait()
            results[at] = jobs[at]()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return results


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.silu(self.a(x)).mul(torch.tanh(x)))


def blocks(seed: int, policy: Any) -> nn.Sequential:
    made = [Block() for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in made:
            for p in block.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)
    return nn.Sequential(*[remat(block, policy=policy) for block in made])


def batches(seed: int, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4 + i % 2, 8, generator=generator) for i in range(steps))


def trains(seed: int, policy: Any, steps: int) -> list[Tensor]:
    model = blocks(seed, policy)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for i, x in enumerate(batches(seed, steps)):
        loss = model(x).square().mean()
        if i % 4 == 0:
            # In parts, of which each makes its own values.
            for p in model.parameters():
                (p.grad,) = torch.autograd.grad(loss, p, retain_graph=True)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def trains_by_func(seed: int, policy: Any, steps: int) -> list[Tensor]:
    model = blocks(seed, policy)
    params = {name: p.detach() for name, p in model.named_parameters()}
    for i, x in enumerate(batches(seed, steps)):

        def loss(params: Any, x: Tensor = x) -> Tensor:
            return torch.func.functional_call(model, params, (x,)).square().mean()

        grads = torch.func.grad(loss)(params)
        if i % 4 == 0:
            # The only thread that does so: torch has one such level in a process.
            assert torch.func.jvp(loss, (params,), (grads,))[1] > 0
        params = {name: p - 1e-2 * grads[name] for name, p in params.items()}
    return list(params.values())


def has_forces(seed: int, steps: int) -> list[Tensor]:
    w = next(blocks(seed, save_nothing).parameters()).detach()

    @remat
    def forces(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.grad(lambda y: torch.tanh(y @ w).sum())(x)

    for x in batches(seed, steps):
        w = w.detach().requires_grad_()
        (grad,) = torch.autograd.grad(forces(x.requires_grad_(), w).square().sum(), w)
        w = w - 1e-2 * grad
    return [w]


def evaluates(seed: int, policy: Any, steps: int) -> list[Tensor]:
    model = blocks(seed, policy)
    with torch.no_grad():
        return [model(x) for x in batches(seed, steps)]


@pytest.mark.parametrize("steps", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_two_train_and_one_evaluates(steps):
    jobs = [
        lambda: trains(1, save_nothing, steps),
        lambda: trains(2, save_matmuls, steps),
        lambda: evaluates(3, save_nothing, steps),
    ]
    compare(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_under_torch_func(steps):
    jobs = [
        lambda: trains_by_func(1, save_nothing, steps),
        lambda: trains(2, save_matmuls, steps),
        lambda: has_forces(3, steps),
        lambda: evaluates(4, save_matmuls, steps),
    ]
    compare(jobs)


def compare(jobs: list[Callable[[], list[Tensor]]]) -> None:
    alone = [job() for job in jobs]
    for got, want in zip(together(*jobs), alone, strict=True):
        assert all(map(torch.equal, got, want))


def pulled_back(f: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    out = f(x)
    return out, torch.autograd.grad(out.sum(), x)[0]


def pulled_by_func(f: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    out, pull = torch.func.vjp(f, x.detach())[:2]
    return out, pull(torch.ones_like(out))[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", [pulled_back, pulled_by_func])
def test_drawing_from_one_generator(way):
    """A function of degree one is its gradient times its argument, if both are made with the same mask."""
    sys.setswitchinterval(1e-6)

    def train(steps: int = 300) -> int:
        region, x = remat(lambda x: F.dropout(x.relu(), 0.5) * torch.rand_like(x)), torch.linspace(-1, 1, 64)
        pairs = (way(region, x.requires_grad_()) for _ in range(steps))
        return sum(not torch.allclose(grad * x, out) for out, grad in pairs)

    assert together(train, train) == [0, 0]


# -- one thread is held where another one met it ------------------------------------------------------------


class Held:
    """A thread that runs a function which stops in the middle."""

    def __init__(self, run: Callable[[Callable[[], None]], Any]) -> None:
        self.there, self.on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: run(self.stop))
        self.thread.start()
        assert self.there.wait(60)

    def stop(self) -> None:
        self.there.set()
        self.on.wait(60)

    def go_on(self) -> None:
        self.on.set()
        self.thread.join()


def in_a_region(stop: Callable[[], None]) -> None:
    def function(x: Tensor) -> Tensor:
        stop()
        return x.sin().exp()

    remat(function)(torch.ones(3, requires_grad=True)).sum().backward()


def in_forward_mode(stop: Callable[[], None]) -> None:
    def function(x: Tensor) -> Tensor:
        stop()
        return x.sin().exp()

    torch.func.jvp(remat(function), (torch.ones(3),), (torch.ones(3),))


def in_dual_level(stop: Callable[[], None]) -> None:
    with torch.autograd.forward_ad.dual_level():
        stop()


def test_compiling_while_a_region_runs():
    """Dynamo knows the function by which torch.func refuses saved-tensor hooks."""
    import torch._dynamo

    def step(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: y.sin().sum())(x)

    disabling = torch.autograd.graph.disable_saved_tensors_hooks
    held = Held(in_a_region)
    try:
        assert torch.autograd.graph.disable_saved_tensors_hooks is disabling
        x = torch.ones(3)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), step(x))
    finally:
        held.go_on()
        torch._dynamo.reset()


@pytest.mark.parametrize("other", [in_forward_mode, in_dual_level])
def test_levels_are_counted_back(other):
    """Torch counts forward-mode levels for all threads."""
    held = Held(other)
    with dual_level_known_if_any():
        held.go_on()
    one = torch.ones(3)
    assert torch.autograd.forward_ad._current_level == -1
    assert torch.equal(torch.func.jvp(torch.sin, (one,), (one,))[1], one.cos())
