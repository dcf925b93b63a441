"""An error at any op of the forward, the recomputation or the backward leaves nothing behind."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode

from remat import checkpoint_name, remat, save_matmuls
from tests.helpers import unseen


class Fault(TorchDispatchMode):
    """Raises where the op of this number is to run; counts ops, or those called `kind` alone."""

    def __init__(self, at=-1, error=None, kind=None):
        super().__init__()
        self.at, self.error, self.kind, self.count = at, error, kind, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.kind in (None, func.overloadpacket.__name__)
        if self.count == self.at:
            raise self.error  # pyright: ignore
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    """Nested regions, statistics, masks, in-place ops and, where asked for, a function that runs again."""

    def __init__(self, policy, runs_again):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4)
        self.register_buffer("mean", torch.zeros(4))
        self.policy, self.runs_again, self.wrap = policy, runs_again, remat
        self.double()

    def inner(self, x):
        h = self.drop(self.norm(x).sin())
        return torch.tanh(h).cos().mul_(2)

    def outer(self, x):
        x = x + unseen(x) if self.runs_again else x
        h = self.wrap(self.inner, policy=self.policy)(self.up(x))
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)  # pyright: ignore
        return checkpoint_name(h - self.mean, "h").exp() @ self.up.weight  # pyright: ignore

    def forward(self, x):
        return self.wrap(self.outer, policy=self.policy)(x)


def step(model, x, fault=None):
    """Loss, gradients, buffers and the random stream after one step."""
    torch.manual_seed(1)
    with fault or Fault():
        loss = model(x).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach(), *grads, *[b.clone() for b in model.buffers()], torch.get_rng_state()]


ERRORS = {
    "exception": lambda: ValueError("a fault"),
    "interrupt": lambda: KeyboardInterrupt("a fault"),
    "memory": lambda: torch.OutOfMemoryError("a fault"),
}


def test_threads_do_not_meet():
    """Steps of several threads at once, some of which fail, are those of one thread."""
    torch.manual_seed(0)
    weight, x = torch.randn(4, 4, dtype=torch.float64), torch.linspace(-1, 1, 4, dtype=torch.float64)
    inner = remat(lambda x: torch.tanh(x @ weight).sin(), policy=save_matmuls)
    outer = remat(lambda x: inner(inner(x)).exp().sum())
    leaf = x.clone().requires_grad_()
    expected, wrong = torch.autograd.grad(outer(leaf), leaf)[0], []

    def work(number):
        for turn in range(20):
            own = x.clone().requires_grad_()
            try:
                with Fault((number + turn) % 12, ValueError("a fault")):
                    torch.autograd.grad(outer(own), own)
            except ValueError:
                pass
            for got in (torch.autograd.grad(outer(own), own)[0], grad(outer)(x)):
                wrong.extend([] if torch.equal(got, expected) else [(number, turn)])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def lines_of(fn):
    """Lines of Python that a call runs: what it costs, however busy the machine is."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.slow
def test_two_thousand_steps_without_growth():
    """Neither what is alive nor what a step runs grows with the steps before it."""
    torch.manual_seed(0)
    model, x = Model(save_matmuls, False), torch.ones(3, 4, dtype=torch.float64)
    for _ in range(50):
        step(model, x)
    gc.collect()
    objects, lines = len(gc.get_objects()), lines_of(lambda: step(model, x))
    for _ in range(2000):
        step(model, x)
    gc.collect()
    assert len(gc.get_objects()) < objects + 200
    assert lines_of(lambda: step(model, x)) < 1.02 * lines
