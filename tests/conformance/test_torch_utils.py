"""torch's own tests of torch.utils.checkpoint, by their names, over `remat.interop.checkpoint`.

Of test/test_utils.py, TestCheckpoint; docs/measured/trust.md has the table of all.
"""

import queue
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad as func_grad

from remat import RematError
from remat.interop import checkpoint, checkpoint_sequential
from tests.conformance.rows import row
from tests.conformance.torchs import REENTRANT, leaf
from tests.helpers import LiveBytes, OpCounter


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = 0

    def forward(self, x):
        self.counter += 1
        return (x * torch.tensor(2.0)).sin()


@row("adapted", "ops are counted: Python runs once")
@REENTRANT
def test_checkpoint_trigger(use_reentrant):
    modules = [Counts() for _ in range(10)]
    out = checkpoint_sequential(modules, 2, leaf(3, 4), use_reentrant=use_reentrant)
    with OpCounter() as ops:
        out.sum().backward()
    assert [m.counter for m in modules] == [1] * 10
    assert ops["sin"] == 4


def six():
    sizes = [(100, 50), (50, 20), (20, 5)]
    return nn.Sequential(*[layer for a, b in sizes for layer in (nn.Linear(a, b), nn.ReLU())])


@row("pass", "with `use_reentrant=True`, too")
@REENTRANT
def test_checkpoint_valid(use_reentrant):
    """create_graph through a sequence, which torch's reentrant variant refuses."""
    model, x = six(), leaf(1, 100)

    def gradients(out):
        return torch.autograd.grad(out, x, torch.ones(1, 5), create_graph=True)

    got = checkpoint_sequential(list(model), 2, x, use_reentrant=use_reentrant)
    torch.testing.assert_close(gradients(got), gradients(model(x)))


def check_sequential(model, variants, use_reentrant):
    x = leaf(1, 100)
    parameters = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), parameters)
    for variant in variants:
        out = checkpoint_sequential(variant, 2, x, use_reentrant=use_reentrant)
        torch.testing.assert_close(out, model(x))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), parameters), expected)


@REENTRANT
def test_checkpoint(use_reentrant):
    model = six()
    check_sequential(model, [list(model.children()), model], use_reentrant)


@REENTRANT
def test_checkpoint_module_list(use_reentrant):
    model = six()
    check_sequential(model, [nn.ModuleList(model)], use_reentrant)


def test_checkpoint_sequential_deprecated_multiple_args():
    with pytest.raises((TypeError, RematError)):
        checkpoint_sequential(nn.Sequential(nn.Identity()), 1, leaf(1), leaf(1), False, 3)  # type: ignore[call-arg]


def test_checkpoint_sequential_deprecated_no_args():
    with pytest.raises(TypeError):
        checkpoint_sequential(nn.Sequential(nn.Identity()), 1)  # type: ignore[call-arg]


@REENTRANT
def test_checkpoint_rng_cpu(use_reentrant):
    for _ in range(5):
        x = leaf(2000)
        state = torch.get_rng_state()
        out = checkpoint(nn.Dropout(), nn.Dropout()(x), use_reentrant=use_reentrant)
        (got,) = torch.autograd.grad(out.sum(), x)
        torch.set_rng_state(state)
        (expected,) = torch.autograd.grad(nn.Dropout()(nn.Dropout()(x)).sum(), x)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@row("pass", "on a CPU")
def test_checkpoint_not_preserve_rng_state_and_without_reentrant():
    checkpoint(nn.Dropout(), leaf(2), preserve_rng_state=False).sum().backward()


def test_checkpoint_non_tensor():
    def run(a, b):
        return a if b is None else a + b

    checkpoint(run, leaf(1, 100), None, use_reentrant=True).sum().backward()


def mixed(t1, t2, scale, t3) -> Any:
    t4 = t1 + t2 * t3
    t5 = t1 * t2 + t3
    t4 *= scale
    t5 *= scale
    return scale, t4, None, True, t5, "bar", t1


def test_checkpoint_non_tensor_inputs_outputs():
    t1, t2, t3, scale = leaf(10), leaf(10), torch.rand(10), random.randint(0, 10)
    expected = mixed(t1, t2, scale, t3)
    got = checkpoint(mixed, t1, t2, scale, t3, use_reentrant=True)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for i in (1, 4):
        got[i].sum().backward(retain_graph=True)
    grads, t1.grad, t2.grad = (t1.grad, t2.grad), None, None
    torch.autograd.backward([expected[1].sum(), expected[4].sum()])
    torch.testing.assert_close(grads, (t1.grad, t2.grad))


def test_checkpoint_no_tensors():
    numbers = [random.random() for _ in range(3)]
    args = (*numbers[:2], 3, numbers[2])
    assert checkpoint(mixed, *args, use_reentrant=True) == mixed(*args)  # pyright: ignore[reportCallIssue]


@row("adapted", "a result without gradient is no error")
def test_checkpoint_partial_grad():
    a, b = leaf(1, 4), torch.randn(1, 4)
    checkpoint(lambda a, b: (a, b), a, b, use_reentrant=True)[0].sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(1, 4))
    assert not checkpoint(lambda b, a: b, b, a, use_reentrant=True).requires_grad


@row("adapted", "bytes alive, for a GPU's allocator")
@pytest.mark.parametrize("retain", [False, True])
def test_checkpointing_without_reentrant_early_free(retain):
    alive = []

    def fn(x):
        for _ in range(3):
            x = x.square()
            x.register_hook(lambda g: alive.append(live.bytes))
        return x.square().sum()

    x = leaf(1000)
    x.grad = torch.zeros_like(x)
    with LiveBytes() as live:
        checkpoint(fn, x).backward(retain_graph=retain)
    assert len(alive) == 3 and alive[0] > alive[-1]


@row("adapted", "a region on the meta device")
def test_infer_device_state_recursive_meta():
    x = torch.rand(10, device="meta", requires_grad=True)
    assert checkpoint(lambda given: given["foo"].sin().sin(), {"foo": x}).device.type == "meta"


@row("adapted", "on the meta device")
def test_checkpoint_preserves_device_context():
    devices = queue.SimpleQueue()

    def fn(x):
        made = torch.empty(4)
        devices.put(made.device.type)
        return (x.sin() * made).sin()

    x = torch.rand(4, device="meta", requires_grad=True)
    with torch.device("meta"):
        out = checkpoint(fn, x)
    out.sum().backward()
    with torch.device("meta"):
        func_grad(lambda x: checkpoint(fn, x).sum())(x.detach())
    assert devices.qsize() >= 3 and {devices.get_nowait() for _ in range(devices.qsize())} == {"meta"}
