"""Captured buffers that a region writes to: copied before, unless all is written and nothing was read."""

import pytest
import torch

from remat import remat, save_matmuls, saved_residuals
from tests.helpers import crossed
from tests.regions.test_generator_states import held

N = 64
HOMES = [torch.randn(N, N) / 8 for _ in range(3)]
SIZE = N * N * 4


def copied(i, x, window):
    with torch.no_grad():
        window.copy_(HOMES[i])
    return torch.tanh(x @ window)


def assigned(i, x, window):
    with torch.no_grad():
        window[:] = HOMES[i]
    return torch.tanh(x @ window.t())


def zeroed(i, x, window):
    with torch.no_grad():
        window.zero_().add_(HOMES[i])
        window.mul_(0.5)
    return torch.tanh(x @ window)


def drawn(i, x, window):
    with torch.no_grad():
        window.normal_().mul_(0.1)
    return torch.tanh(x @ window)


def many(i, x, window):
    with torch.no_grad():
        torch._foreach_copy_([window], [HOMES[i]])  # pyright: ignore[reportPrivateImportUsage]
    return torch.tanh(x @ window)


def inside(i, x, window):
    return remat(copied, static_argnums=0)(i, x.sin(), window)


def read_before(i, x, window):
    with torch.no_grad():
        scale = window.abs().mean()
        window.copy_(HOMES[i])
    return torch.tanh(x @ window * scale)


def by_halves(i, x, window):
    with torch.no_grad():
        window[: N // 2].copy_(HOMES[i][: N // 2])
    return torch.tanh(x @ window)


def of_itself(i, x, window):
    with torch.no_grad():
        window.copy_(window.t().exp() / 9)
    return torch.tanh(x @ window)


def added(i, x, window):
    with torch.no_grad():
        window.add_(HOMES[i]).mul_(0.5)
    return torch.tanh(x @ window)


def looked_at(i, x, window):
    factor = float(window.numpy().sum() * 0.001)
    with torch.no_grad():
        window.copy_(HOMES[i])
    return torch.tanh(x @ window) * factor


WHOLE = [copied, assigned, zeroed, drawn, many, inside]
PARTS = [read_before, by_halves, of_itself, added, looked_at]


def train(layer, wrap):
    torch.manual_seed(0)
    window, grads = torch.randn(N, N) / 8, []
    region = wrap(layer)
    for _ in range(3):
        x = y = torch.randn(2, N, requires_grad=True)
        for i in range(3):
            if region is layer:
                window = window.clone()  # plain autograd does not know the window's weights any more
            y = region(i, y, window)
        grads += [y, torch.autograd.grad(y.sum(), x)[0], window.clone()]
    return grads


@pytest.mark.parametrize(("layer", "policy"), crossed(WHOLE + PARTS, [None, save_matmuls], every=2))
def test_gradients_and_what_is_written(layer, policy):
    region = train(layer, lambda fn: remat(fn, policy=policy, static_argnums=0))
    assert all(map(torch.equal, region, train(layer, lambda fn: fn)))


@pytest.mark.parametrize("layer", WHOLE, ids=lambda f: f.__name__)
def test_what_is_written_over_is_not_copied(layer):
    window, region = torch.randn(N, N), remat(layer, static_argnums=0)
    for i in range(3):
        x = torch.randn(2, N, requires_grad=True)
        kept, _ = held(region, i, x, window)
        assert kept < SIZE // 4  # SIZE and more before: what lay in the window


@pytest.mark.parametrize("layer", [copied, assigned, many], ids=lambda f: f.__name__)
def test_reports_say_so(layer):
    window, x = torch.randn(N, N), torch.randn(2, N, requires_grad=True)
    found = saved_residuals(remat(lambda x: layer(0, x, window)), x)
    assert sum(r.bytes for r in found if r.why == "captured") == 2 * SIZE  # the window and the home; 3 before
