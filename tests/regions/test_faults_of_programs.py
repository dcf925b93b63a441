"""A fault at any op of programs of every kind: nothing is left behind, and the next call is right."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jvp, vmap

from remat import capture, checkpoint_name, offload, remat, save_matmuls, scan_remat, while_remat
from tests.compiled import compiled
from tests.conftest import ambient
from tests.helpers import LiveBytes, crossed, forget, rand, same, sparse, unseen
from tests.regions.test_faults import ERRORS, Fault

torch.manual_seed(0)
X, W, BUFFER = rand(3, 4), rand(4, 4), torch.zeros(4, dtype=torch.float64)


def layer(x, w):
    return F.dropout(torch.tanh(x @ w).sin().mul_(2), 0.4)


def nested(region):
    inner = region(layer)
    middle = region(lambda x, w: inner(inner(x, w), w).cos().exp())
    return region(lambda x, w: middle(inner(x, w), w).sin().mean())


def buffered(region):
    def fn(x, w):
        h = torch.tanh(x @ w)
        with torch.no_grad():
            BUFFER.lerp_(h.mean(0), 0.1)
        return (h - BUFFER).exp()

    inner = region(fn)
    return region(lambda x, w: inner(inner(x, w), w).mean())


def runs_again(region):
    inner = region(lambda x, w: layer(x + unseen(x), w))
    return region(lambda x, w: inner(inner(x, w), w).exp().mean())


def forces(region):
    energy = region(lambda x, w: torch.tanh(x @ w).sin().sum())

    def fn(x, w):
        (force,) = torch.autograd.grad(energy(x, w), x, create_graph=True)
        return force.square().sum()

    return region(fn)


def named(region):
    inner = region(lambda x, w: checkpoint_name(torch.tanh(x @ w), "h").sin())

    return lambda x, w: capture(inner, ["h"])(x, w)[0].exp().mean()


def scanned(region, **options):
    step = region(lambda carry, row, w: torch.tanh(carry @ w + F.dropout(row, 0.3)))

    def fn(x, w):
        body = lambda carry, row: (step(carry, row, w), carry.sum())  # noqa: E731
        carry, rows = scan_remat(body, x[0], x, **options)
        return carry.sum() + rows.square().sum()

    return region(fn)


def looped(region):
    def fn(x, w):
        step = lambda c: (c[0] + 1, torch.tanh(c[1] @ w))  # noqa: E731
        return while_remat(lambda c: c[0] < 4, step, (torch.tensor(0), x), max_steps=5)[1].sum()

    return fn


def backward(fn):
    leaves = [X.clone().requires_grad_(), W.clone().requires_grad_()]

    def run():
        out = fn(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves)]

    return run


def by_parts(fn):
    """Gradients of inputs and of weights in passes of their own, and of second order."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

    def run():
        out = fn(x, w)
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), w, retain_graph=True)
        return [first.detach(), second, *torch.autograd.grad(out, w)]

    return run


def transformed(derive):
    return lambda fn: lambda: [derive(lambda x: fn(x, W))(X)]


def smooth(region):
    inner = region(lambda x, w: torch.tanh(x @ w).sin())
    return region(lambda x, w: inner(inner(x, w), w).exp().sum())


def small(region):
    inner = region(lambda x, w: torch.tanh(x @ w))
    return region(lambda x, w: inner(x, w).sum())


def pushed(fn):
    return lambda x: jvp(grad(fn), (x,), (x,))[1]


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "nested": (nested, backward),
    "buffered": (buffered, backward),
    "function runs again": (runs_again, backward),
    "forces": (forces, backward),
    "captured": (named, backward),
    "by parts": (smooth, by_parts),
    "scan": (scanned, backward),
    "scan of few carries": (lambda region: scanned(region, checkpoints=2), backward),
    "while": (looped, backward),
    "grad": (smooth, transformed(grad)),
    "batched grad": (smooth, transformed(lambda fn: vmap(grad(lambda row: fn(row[None]))))),
    "jvp of grad": (small, transformed(pushed)),
    "hessian": (small, transformed(hessian)),
}


@functools.cache
def thread_locals():
    modules = [module for name, module in sys.modules.items() if name.startswith("remat.")]
    return [value for m in modules for value in vars(m).values() if isinstance(value, threading.local)]


def thread_state():
    """How much lies in the engine's thread-locals that say what is going on."""
    found = [
        (key, len(value) if hasattr(value, "__len__") else value)
        for local in thread_locals()
        for key, value in vars(local).items()
    ]
    return [(key, value) for key, value in found if key not in ("task", "made", "frames", "last")]


def start():
    torch.manual_seed(3)
    BUFFER.zero_()


def outcome(run):
    start()
    return [*run(), BUFFER.clone(), torch.get_rng_state()]


def broken(run, at, error, kind):
    """Break a call at this op, by an error of this kind; how many bytes of it are alive then."""
    start()
    with LiveBytes() as live:
        try:
            with Fault(at, ERRORS[error](), kind):
                run()
        except BaseException as raised:
            assert "a fault" in str(raised)
        else:
            raise AssertionError(f"the fault at op {at} is lost")
    # Torch's engine itself holds, until its next pass, what it had not come to.
    torch.ones(1, requires_grad=True).exp().sum().backward()
    if live.bytes:
        gc.collect()
    return live.bytes


def check_faults(name, policy, errors, first, step=1, kind=None):
    """Faults of every kind at every op (`step` apart, of one kind), and then the call itself.

    `first`: in calls that nothing is known for. In a program of many ops the kinds of faults take turns.
    """
    make, run_by = PROGRAMS[name]
    forget()
    gc.collect()
    gc.freeze()
    run = run_by(make(lambda fn: remat(fn, policy=policy)))
    expected = outcome(run)
    same(outcome(run)[:-1], outcome(run_by(make(lambda fn: fn)))[:-1], 1e-10)
    before, state, counted = ambient(), thread_state(), Fault(kind=kind)
    start()
    with counted:
        run()
    kinds, many = list(errors), counted.count > 100
    for at in range(1, counted.count + 1, step):
        for error in kinds[at % len(kinds) :][:1] if many else kinds:
            if first:
                forget()
            assert broken(run, at, error, kind) == 0, f"op {at}, {error}"
            assert ambient() == before, f"op {at}, {error}"
            assert thread_state() == state, f"op {at}, {error}"
        same(outcome(run), expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fault_at_many_ops(name):
    check_faults(name, None, ERRORS, True, 3)
    check_faults(name, save_matmuls, ERRORS, False, 10)


@pytest.mark.slow
def test_a_fault_at_every_op_of_what_is_offloaded():
    check_faults("nested", offload(save_matmuls), ERRORS, True)


@pytest.mark.parametrize(("name", "error"), crossed(["scan", "by parts", "batched grad"], ERRORS))
def test_a_fault_at_some_ops(name, error):
    check_faults(name, save_matmuls, [error], True, 20)


@pytest.mark.parametrize("error", ["memory", "interrupt"])
def test_a_fault_while_it_is_settled_what_to_hold(error):
    """The function itself has succeeded."""
    check_faults("nested", save_matmuls, [error], True, 5, "detach")


def test_a_fault_in_the_search_for_tangents():
    """It is not taken for torch's own error below autograd, which says that there are none."""
    check_faults("jvp of grad", None, ["memory"], False, 6, "alias")


CALLS: list[Any] = [0, -1, ValueError("")]


@torch.library.custom_op("remat_tests::breaks", mutates_args=())
def breaks(x: torch.Tensor) -> torch.Tensor:
    """A sine, until the call of the number in `CALLS`."""
    CALLS[0] += 1
    if CALLS[0] == CALLS[1]:
        raise CALLS[2]
    return x.sin()


breaks.register_fake(torch.empty_like)
breaks.register_autograd(
    lambda ctx, g: breaks(ctx.saved_tensors[0] + torch.pi / 2) * g,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.mark.parametrize("error", sparse(ERRORS))
def test_a_fault_in_compiled_code(error):
    """In its forward, its recomputation and its backward."""
    inner = remat(lambda x, w: breaks(torch.tanh(breaks(x) @ w)).exp())
    torch._dynamo.reset()
    run = backward(compiled(remat(lambda x, w: breaks(inner(inner(x, w), w)).mean())))
    expected, before = outcome(run), ambient()
    CALLS[0] = 0
    outcome(run)
    for at in range(1, CALLS[0] + 1):
        CALLS[:] = 0, at, ERRORS[error]()
        with pytest.raises(BaseException, match="a fault"):
            run()
        CALLS[1] = -1
        assert ambient() == before
        same(outcome(run), expected, 0.0)
