"""Looking at the real thing leaves no trace either: all in reach of a function is as it was, tensors too."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from remat import explain, remat, save_matmuls, saved_residuals
from remat.debug import assert_recomputed, recomputed
from remat.jax_names import print_saved_residuals
from tests.helpers import crossed
from tests.stateful import MODULES, X, same

LOOKS = {
    "saved_residuals": saved_residuals,
    "print_saved_residuals": print_saved_residuals,
    "explain": explain,
    "policies": lambda fn, *args: explain(fn, *args, policies=[save_matmuls]),
}


WRAPS = {"plain": lambda m: m, "region": remat, "closure": lambda m: lambda x: m(x)}


@pytest.mark.parametrize(("look", "wrap", "kind"), crossed(LOOKS, WRAPS, MODULES))
def test_a_look_leaves_everything_as_it_was(kind, wrap, look):
    module = kind()
    before = module.seen()
    LOOKS[look](WRAPS[wrap](module), X)
    assert same(module.seen(), before)


@pytest.mark.parametrize("kind", MODULES)
def test_the_next_step_is_what_it_would_have_been(kind):
    def run(*looks):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        module = kind()
        for look in looks:
            look(module, X)
        out = module(X)
        return [out.detach(), *torch.autograd.grad(out.sum(), (X, module.layer.weight)), module(X).detach()]

    assert same(run(saved_residuals, explain), run())


class Moving(nn.Module):
    """Moves what it holds in every way that tensors know."""

    state: torch.Tensor
    wide: torch.Tensor
    swapped: torch.Tensor

    def __init__(self):
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("state", torch.ones(4))
        self.register_buffer("wide", torch.ones(2, 3))
        self.register_buffer("swapped", torch.ones(4))

    def seen(self):
        held = self.state_dict(keep_vars=True).values()
        return [(t.detach().clone(), t.requires_grad, t.grad, t._version) for t in held]

    def forward(self, x):
        self.frozen.requires_grad_(not self.frozen.requires_grad)
        self.swapped.data = torch.zeros(7)
        self.state.resize_(2, 2).zero_()
        self.wide.t_()
        self.weight.grad = torch.ones(4)
        self.weight.register_hook(lambda g: g * 2)
        with torch.no_grad():
            self.weight.mul_(2)
        return (x * self.weight * self.frozen).sin()


@pytest.mark.parametrize("look", sorted(LOOKS.keys() - {"policies"}))
def test_tensors_are_moved_back(look):
    module = Moving()
    before = module.seen()
    LOOKS[look](module, X)
    assert same(module.seen(), before) and module.weight._backward_hooks is None


def test_a_look_between_forward_and_backward_spoils_neither():
    """A buffer that autograd has saved is written to and put back, and nobody is the wiser."""
    scale = torch.ones(4)
    x = torch.ones(4, requires_grad=True)
    out = x * scale

    def fn(x):
        return (x * scale.mul_(2)).sin()

    saved_residuals(fn, x)
    explain(fn, x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(4)) and torch.equal(scale, torch.ones(4))  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("look", [recomputed, assert_recomputed])
def test_looking_at_what_is_compiled_leaves_no_trace(look):
    norm, calls = nn.BatchNorm1d(4), []
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    held = {"n": 0}

    def fn(x):
        held["n"] += 1
        return remat(lambda x: torch.tanh(norm(x)).sin(), name="block")(x).sum()

    look(fn, X)
    # What Python does besides happens once a look, as in a call.
    assert same(dict(norm.state_dict()), before) and held == {"n": 1} and not calls
