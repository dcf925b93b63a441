"""An error at any op of the forward, the recomputation or the backward leaves nothing behind."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode

from remat import RematError, checkpoint_name, remat, save_matmuls, save_nothing
from tests.conftest import ambient
from tests.helpers import LiveBytes, crossed, same, unseen


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


def plainly(fn, policy):
    return fn


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "policy", "runs_again"), crossed(ERRORS, [save_nothing, save_matmuls], [False, True])
)
def test_a_fault_at_any_op_leaves_the_next_step_right(error, policy, runs_again):
    torch.manual_seed(0)
    model, x = Model(policy, runs_again), torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected, before = step(model, x), ambient()
    counted = Fault()
    step(model, x, counted)
    for at in range(1, counted.count + 1, 3 if error == "exception" else 12):
        model.load_state_dict(state)
        with pytest.raises(BaseException, match="a fault"):
            step(model, x, Fault(at, ERRORS[error]()))
        assert ambient() == before, f"op {at}"
        model.load_state_dict(state)
        same(step(model, x), expected, 0.0)
    model.load_state_dict(state)
    model.wrap = plainly  # pyright: ignore
    same(step(model, x)[:-1], expected[:-1], 1e-12)


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_a_fault_keeps_nothing_alive(every):
    torch.manual_seed(0)
    model, x = Model(save_matmuls, False), torch.ones(3, 4, dtype=torch.float64)
    step(model, x)
    counted = Fault()
    step(model, x, counted)
    for at in range(1, counted.count + 1, every):
        with LiveBytes() as live:
            try:
                step(model, x, Fault(at, ValueError("a fault")))
            except (ValueError, RematError):  # a recomputation says where it failed
                pass
            gc.collect()
            # A look at a buffer's memory counts as made: that is all.
            assert live.bytes <= sum(b.nbytes for b in model.buffers()), f"op {at}"


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


class Early(Exception):
    """Ends a forward, with what was made until then."""


def test_values_that_leave_with_an_exception():
    """Early exits, and hooks that store what they saw, have derivatives as without regions."""

    def ends(x):
        raise Early((x * 2).sin().exp())

    def gradient(region):
        x = torch.linspace(-1, 1, 6).requires_grad_()

        def outer(x):
            try:
                return region(ends)(x)
            except Early as early:
                return early.args[0].cos() * x

        return torch.autograd.grad(region(outer)(x).sum(), x)[0]

    for policy in (save_nothing, save_matmuls) * 2:
        found = gradient(lambda fn, policy=policy: remat(fn, policy=policy))
        torch.testing.assert_close(found, gradient(lambda fn: fn))
