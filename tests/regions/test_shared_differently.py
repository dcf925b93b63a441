"""Calls that run the same ops on tensors which share memory in one of them, and not in the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from remat import checkpoint_policy, remat, save_matmuls, save_nothing
from tests.helpers import gradients, rand, same


def apart():
    return rand(4, seed=1), rand(4, seed=2)


def overlapping():
    memory = rand(8, seed=1)
    return memory[:4], memory.view(2, 4)[0]


def by_halves():
    memory = rand(8, seed=1)
    return memory[:4], memory[2:6]


def unseen():
    memory = rand(4, seed=1)
    return memory, memory.data


SHARED = [overlapping, by_halves, unseen]
POLICIES = [save_nothing, save_matmuls, checkpoint_policy(budget=0.6)]


class Layer(nn.Module):
    """Reads two buffers, and may write to the second one."""

    one: Tensor
    other: Tensor

    def __init__(self, buffers, writes):
        super().__init__()
        self.weight = nn.Parameter(rand(4, 4))
        self.buffers_from(buffers)
        self.writes = writes

    def buffers_from(self, buffers):
        one, other = buffers()
        self.register_buffer("one", one)
        self.register_buffer("other", other)

    def forward(self, x):
        h = torch.sin(torch.sin(x @ self.weight + self.one) + self.other)
        if self.writes:
            with torch.no_grad():
                self.other.add_(1)
        return h.cos() + self.other


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("shared", SHARED)
def test_a_layer_whose_buffers_share_memory_after_one_whose_do_not(shared, policy):
    def run(wrap):
        layers = [Layer(apart, writes=False), Layer(shared, writes=True)]
        h = x = rand(3, 4, seed=3).requires_grad_()
        for layer in layers:
            h = wrap(layer)(h)
        return h, gradients(h, [x, *[layer.weight for layer in layers]]), layers[1].one

    # (Gradients were off by up to 14.5.)
    same(run(lambda layer: remat(layer, policy=policy)), run(lambda layer: layer))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("shared", SHARED)
def test_a_layer_whose_buffers_come_to_share_memory(shared, policy):
    def run(wrap):
        layer, found = Layer(apart, writes=False), []
        region = wrap(layer)
        for call in range(3):
            if call == 1:
                layer.buffers_from(shared)
                layer.writes = True
            x = rand(3, 4, seed=call).requires_grad_()
            h = region(x)
            found.append((h, gradients(h, [x, layer.weight]), layer.one.clone()))
        return found

    same(run(lambda layer: remat(layer, policy=policy)), run(lambda layer: layer))


def looks_at_both(w, x, one, other, writes):
    seen = other.view(2, 2).view(4)
    h = torch.sin(torch.sin(x @ w + seen) + one)
    if writes:
        with torch.no_grad():
            seen.add_(1)
    return h.cos() + other


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("first, second", [*[(s, apart) for s in SHARED], *[(apart, s) for s in SHARED]])
def test_arguments_that_share_memory_in_one_of_two_calls(first, second, policy):
    def run(wrap):
        writes, w, found = [False], rand(4, 4).requires_grad_(), []
        region = wrap(lambda w, x, one, other: looks_at_both(w, x, one, other, writes[0]))
        for made, writes[0] in [(first, False), (second, True), (first, False), (second, True)]:
            x, (one, other) = rand(3, 4, seed=3).requires_grad_(), made()
            h = region(w, x, one, other)
            found.append((h, gradients(h, [x, w]), one, other))
        return found

    same(run(lambda fn: remat(fn, policy=policy)), run(lambda fn: fn))
