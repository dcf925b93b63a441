"""Where torch.utils.checkpoint is known to go wrong beside other parts of torch; here it is right."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable
from torch.func import grad
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from remat import RematError, nn as remat_nn, offload, remat, save_matmuls, save_nothing
from remat.interop import checkpoint
from tests.helpers import crossed, leaves_of, rand

# -- meta device --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "policy"), [(True, save_nothing), (False, offload(save_matmuls))], ids=["context", "tensors"]
)
def test_meta_device(policy, inside):
    """torch's checkpoint looks for a module torch.meta that would hold generator states."""

    def step():
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)).to("meta")
        x = torch.empty(3, 4, device="meta", requires_grad=True)
        remat(model, policy=policy)(x).sum().backward()
        return [t.grad for t in (x, *model.parameters()) if t.grad is not None]

    if inside:
        with torch.device("meta"):
            gradients = step()
    else:
        gradients = step()
    assert [tuple(g.shape) for g in gradients] == [(3, 4), (4, 4), (4,), (2, 4), (2,)]
    assert all(g.is_meta for g in gradients)


# -- tensors in keyword arguments ---------------------------------------------------------------------


def scaled(x, *, scale, rest=()):
    return torch.exp(x * scale) * (rest[0] if rest else 1)


@pytest.mark.parametrize(
    ("run", "policy"),
    [(remat, save_matmuls), (lambda f, **_: lambda *a, **k: checkpoint(f, *a, **k), save_nothing)],
    ids=["remat", "checkpoint"],
)
def test_tensors_in_keyword_arguments_are_differentiated(policy, run):
    region = run(scaled, policy=policy)
    x, scale, more = leaves_of((rand(3), rand(3, seed=1), rand(3, seed=2)))
    got = torch.autograd.grad(region(x, scale=scale, rest=[more]).sum(), (x, scale, more))
    torch.testing.assert_close(
        got, torch.autograd.grad(scaled(x, scale=scale, rest=[more]).sum(), (x, scale, more))
    )
    values = [t.detach() for t in (x, scale, more)]
    by_func = grad(lambda x, s, m: region(x, scale=s, rest=[m]).sum(), (0, 1, 2))(*values)
    torch.testing.assert_close(by_func, got)


@pytest.mark.parametrize("where", ["scale", "rest"])
def test_tensors_in_keyword_arguments_that_are_written_to_raise(where):
    """torch's checkpoint guards positional arguments alone, and gives wrong gradients otherwise."""
    x, scale, more = rand(3).requires_grad_(), rand(3, seed=1), rand(3, seed=2)
    out = remat(scaled)(x, scale=scale, rest=[more])
    (scale if where == "scale" else more).mul_(2)
    with pytest.raises((RematError, RuntimeError), match="in.?place"):
        out.sum().backward()


# -- torch's checkpoint beside regions, as functions and as hooks of modules -----------------------------


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Around(nn.Module):
    def __init__(self, inner, wrap):
        super().__init__()
        self.inner, self.run = inner, wrap(inner.__call__)

    def forward(self, x):
        return self.run(x)


def region_of(module, policy):
    return remat_nn.apply_to(module, policy=policy)


def theirs(function):
    return lambda x: torch_checkpoint(function, x, use_reentrant=False)


# How a model of three blocks is wrapped.
BESIDE = {
    "one each": lambda m, p: (composable(m[0]), region_of(m[1], p)),
    "region inside": lambda m, p: (region_of(m[1].up, p), composable(m[1])),
    "region around": lambda m, p: (
        composable(m[1]),
        m.__setitem__(1, Around(m[1], lambda f: remat(f, policy=p))),
    ),
    "both, ours first": lambda m, p: (region_of(m[1], p), composable(m[1])),
    "both, theirs first": lambda m, p: (composable(m[1]), region_of(m[1], p)),
    "theirs around all": lambda m, p: ([region_of(b, p) for b in m], composable(m)),
    # Of the first block only what a policy keeps goes through their hooks: leaves do not.
    "of a leaf": lambda m, p: (region_of(m[0], p), m.__setitem__(0, Around(m[0], theirs))),
    "as a function": lambda m, p: (region_of(m[2], p), m.__setitem__(2, Around(m[2], theirs))),
}


@pytest.mark.parametrize(("how", "policy"), crossed(BESIDE, [save_nothing, save_matmuls], every=2))
def test_torchs_checkpoint_beside_regions(how, policy):
    """A recomputation of torch's that a region asks for runs with autograd."""

    def trained(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(*[Gated() for _ in range(3)])
        found = []
        wrap(model)
        for at in range(2):
            model.zero_grad()
            x = rand(5, 8, seed=at, dtype=torch.float32).requires_grad_()
            model(x).square().sum().backward()
            found += [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]
        return found

    expected = trained(lambda model: None)
    torch.testing.assert_close(trained(lambda m: BESIDE[how](m, policy)), expected, rtol=0, atol=0)
