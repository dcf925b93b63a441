"""Graphs that a region's function differentiates inside of it go as they do without a region."""

import gc
from itertools import accumulate

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from remat import remat, save_nothing
from tests.helpers import allocations


def peak(fn, *args):
    """The most bytes that the CPU's allocator held during a call, and the result."""
    changes, out = allocations(fn, *args)
    return max(accumulate(changes)), out


torch.manual_seed(0)
W1, W2 = (torch.randn(16, 256) / 4).requires_grad_(), (torch.randn(256, 1) / 16).requires_grad_()
STEPS = 20


def energy(x):
    return (torch.tanh(x @ W1) @ W2).sum()


def langevin(x):
    for _ in range(STEPS):
        z = x.detach().requires_grad_()
        x = x - 0.1 * torch.autograd.grad(energy(z), z)[0]
    return energy(x)


def by_backward(x):
    for _ in range(STEPS):
        z = x.detach().requires_grad_()
        energy(z).backward(inputs=[z])
        x = x - 0.1 * z.grad
    return energy(x)


def traces(x):
    """The exact divergence of a flow that is not differentiated: a graph is read several times."""
    total = 0.0
    for _ in range(STEPS // 4):
        z = x.detach().requires_grad_()
        field = torch.tanh(z @ W1)[:, :16]
        for i in range(4):
            total = total + torch.autograd.grad(field[:, i].sum(), z, retain_graph=i < 3)[0][:, i].sum()
        x = x + 0.1 * field.detach()
    return energy(x) + total


def products_with_hessians(x):
    for _ in range(STEPS // 4):
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(energy(z), z, create_graph=True)
        x = x - 0.1 * torch.autograd.grad(g.square().sum(), z)[0]
    return energy(x)


def inside(x):
    return remat(langevin)(x.sin())


PROGRAMS = [by_backward, traces, products_with_hessians, inside]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_inner_graphs_go_at_once(program):
    x, region = torch.randn(64, 16), remat(program)
    without = program if program is not inside else lambda x: langevin(x.sin())
    for _ in range(2):
        most, out = peak(region, x)
        plain, want = peak(without, x)
        assert torch.equal(out, want)
        assert all(map(torch.equal, torch.autograd.grad(out, (W1, W2)), torch.autograd.grad(want, (W1, W2))))
    assert most <= 1.4 * plain  # Langevin: 1,496 KiB for 200 before


def test_results_that_share_memory_go_with_their_last_handle():
    """They were held by a cycle until the collector came: 678 KB of a memory's state for each layer."""

    def memory(w, x):
        step = torch.func.grad(lambda w: (torch.tanh(x @ w) - x).square().sum())(w)
        whole = torch.tanh(x @ (w - 0.1 * step)).repeat(1, 8)
        return whole.sum(-1), whole, whole[:, :8]

    region = remat(memory, policy=save_nothing)
    w, x = torch.eye(8, requires_grad=True), torch.randn(16, 8)
    gc.collect()
    gc.disable()
    try:
        region(w, x)[0].sum().backward()  # in it the region learns that torch.func is used
        for _ in range(2):
            out = region(w, x)
            held = [StorageWeakRef(t.untyped_storage()) for t in out[1:]]
            loss = out[0].sum()
            del out
            assert all(ref.expired() for ref in held)
            loss.backward()
    finally:
        gc.enable()
