"""Scans and regions that draw, under a vmap in which every example draws for itself."""

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap
from torch.nn.functional import dropout

from remat import remat, scan_remat
from tests.compiled import compiled
from tests.helpers import same


def dropped(x):
    for _ in range(2):
        x = dropout(x, 0.5).sin() + 0.1
    return x


def scanned(x):
    return scan_remat(lambda h, _: (dropout(h, 0.5).sin() + 0.1, None), x, length=2, checkpoints=1)[0]


X = torch.linspace(-1, 1, 6, dtype=torch.float64)
APART = {
    "vmap": lambda fn, i: fn(X).sum() * i,
    "vmap of grad": lambda fn, i: grad(lambda x: fn(x).sum())(X).sum() * i,
    "vmap of vjp": lambda fn, i: vjp(fn, X)[1](X * i)[0].sum(),  # the level is gone when it is pulled back
    "vmap of jvp": lambda fn, i: jvp(lambda x: fn(x).sum(), (X,), (X,))[1] * i,
}


@pytest.mark.parametrize("fn", [scanned, remat(dropped)], ids=["scan", "region"])
@pytest.mark.parametrize("way", APART)
def test_every_example_draws_where_no_operand_has_a_batch(way, fn):
    """Dropout of a Monte Carlo: `vmap(lambda _: model(x), randomness="different")`."""

    def of(fn):
        torch.manual_seed(0)
        many = vmap(lambda i: APART[way](fn, i), randomness="different")
        return many(torch.ones(4)), torch.rand(1)

    same(of(fn), of(dropped))


def test_what_a_step_captures_gets_no_batch():
    """Else a write into a copy of it would put a batch into memory that has none, or the other way round."""

    def total(run, x):
        a, b = x.sin(), x.cos()
        return run(lambda h: dropout(a.clone().mul_(b) + b.clone().mul_(a), 0.5) + h, x).sum()

    def of(run):
        torch.manual_seed(0)
        many = vmap(lambda i: grad(lambda x: total(run, x))(X) * i, randomness="different")
        return many(torch.ones(4)), torch.rand(1)

    scan = lambda step, x: scan_remat(lambda h, _: (step(h), None), x, length=2)[0]  # noqa: E731
    same(of(scan), of(lambda step, x: step(step(x))))


def test_every_example_draws_in_a_compiled_scan():
    many = vmap(lambda i: scanned(X).sum() * i, randomness="different")
    assert len(set(compiled(many)(torch.ones(4)).tolist())) == 4
