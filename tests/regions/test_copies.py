"""Modules that hold regions: registered, copied, pickled, compiled; and kept values in others' hands."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import grad

from remat import RematError, remat, save_matmuls, save_nothing
from remat.nn import apply_to
from tests.helpers import rand


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x, scale=1.0):
        return self.linear(x).sin() * scale

    def cosine(self, x):
        return self.linear(x).cos()


class Scaled:
    """A callable that is no module."""

    def __init__(self, block):
        self.block = block

    def __call__(self, x):
        return self.block(x) * 3


# What a module may hold of its block.
HELD = {
    "module": lambda block: remat(block),
    "module twice": lambda block: remat(remat(block), policy=save_matmuls),
    "bound method": lambda block: remat(block.cosine, policy=save_matmuls),
    "partial": lambda block: remat(functools.partial(block, scale=2.0)),
    "callable": lambda block: remat(Scaled(block)),
}


class Model(torch.nn.Module):
    def __init__(self, held, keep=True):
        super().__init__()
        block = Block()
        if keep:
            self.block = block
        self.held = HELD[held](block)

    def forward(self, x):
        return self.held(x)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("held", HELD)
def test_a_copy_calls_its_own_weights(held, duplicate):
    model, x = Model(held), rand(2, 4)
    want = model(x)
    other = duplicate(model)
    assert torch.equal(other(x), want)
    with torch.no_grad():
        for p in other.block.parameters():
            p.zero_()
    assert not torch.equal(other(x), want) and torch.equal(model(x), want)
    other(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert any(p.grad is not None for p in other.parameters())


def test_a_region_of_a_module_is_a_module():
    model = Model("module", keep=False)
    assert list(model.state_dict()) == ["held.linear.weight", "held.linear.bias"]
    assert isinstance(model.held, Block) and [n for n, _ in model.held.named_parameters()] == [
        "linear.weight",
        "linear.bias",
    ]
    plain = torch.nn.Sequential(Block())
    plain.load_state_dict(torch.nn.Sequential(remat(Block())).state_dict())
    model.eval().float()
    assert not model.held.__wrapped__.training and model.held.linear.weight.dtype is torch.float32  # pyright: ignore[reportAttributeAccessIssue]
    assert list(inspect.signature(model.held.forward).parameters) == ["x", "scale"]
    assert len(list(Model("module").parameters())) == 2


def test_what_is_set_on_either_is_set_on_both():
    block = Block()
    region = remat(block)
    region.linear, region.flag = torch.nn.Linear(4, 3, dtype=torch.float64), 3  # pyright: ignore[reportArgumentType]
    assert block.flag == 3 and region(rand(2, 4)).shape == (2, 3)
    calls = []
    region.register_forward_hook(lambda *_: calls.append("hook"))
    region(rand(2, 4).requires_grad_()).sum().backward()
    assert calls == ["hook"]


def test_layers_are_made_regions_once():
    with pytest.raises(RematError, match="the module itself"):
        apply_to(remat(Block()))


def test_a_decorated_method_is_a_method():
    class Decorated(torch.nn.Module):
        @remat
        def forward(self, x):
            return x.sin()

    assert copy.deepcopy(Decorated())(rand(2)).shape == (2,)


# -- values that are kept, in the hands of others ------------------------------------------------------


def net(x, w):
    return ((x @ w).sin() @ w).exp()


def reduced(x, w):
    """Its saved values are smaller than its arguments, and held as they are."""
    return (x @ w).mean().exp()


WRAPS = {"alone": lambda f: f, "in": remat, "inside": lambda f: remat(lambda *a: f(*a).cos())}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("fn", [net, reduced])
def test_kept_values_go_through_the_users_hooks(fn, wrap):
    x, w = rand(3, 3).requires_grad_(), rand(3, 3).requires_grad_()
    seen = []

    def pack(t):
        seen.append("pack")
        return torch.full_like(t, 7)

    region = wrap(remat(fn, policy=save_matmuls))
    with saved_tensors_hooks(pack, lambda t: t):
        y = region(x, w).sum()
    assert "pack" in seen
    want = torch.autograd.grad(wrap(fn)(x, w).sum(), (x, w))
    got = torch.autograd.grad(y, (x, w))
    # What the hooks made of the values is what the backward read.
    assert not torch.equal(got[0], want[0])
    for _ in range(2):
        with save_on_cpu():
            y = region(x, w).sum()
        for a, b in zip(torch.autograd.grad(y, (x, w)), want, strict=True):
            assert torch.allclose(a, b)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
@pytest.mark.parametrize("by_func", [False, True])
def test_a_kept_result_that_is_overwritten_is_told(policy, by_func):
    region = remat(lambda x, w: ((h := x @ w), h.sin())[0:2], policy=policy)
    x, w = rand(3, 3), rand(3, 3)

    def loss(x):
        h, s = region(x, w)
        h.detach().mul_(2)
        return s.sum()

    want = grad(lambda x: (x @ w).sin().sum())(x)
    run = grad(loss) if by_func else lambda x: torch.autograd.grad(loss(x), x)[0]
    for _ in range(2):
        if policy is save_nothing:
            assert torch.allclose(run(x.requires_grad_(not by_func)), want)
            continue
        with pytest.raises(RematError, match="written in place"):
            run(x.requires_grad_(not by_func))


def test_a_held_residual_that_is_overwritten_is_told():
    x = rand(100, 3).requires_grad_()
    out = remat(lambda x: x.mean(0).exp())(x)
    out.detach().mul_(2)
    with pytest.raises(RematError, match="written in place"):
        out.sum().backward()
