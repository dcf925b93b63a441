"""What bodies capture and no torch call has met: results returned as they are, constants given to regions."""

from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

from remat import remat, scan_remat, while_remat
from tests.compiled import compiled
from tests.helpers import crossed, loop, rand, same

LOOPS = {
    "scan": lambda body, h: scan_remat(lambda h, _: (body(h), None), h, length=2, checkpoints=1)[0],
    "all": lambda body, h: scan_remat(lambda h, _: (body(h), None), h, length=2, checkpoints="all")[0],
    "ys": lambda body, h: scan_remat(lambda h, _: (h, body(h)), h, length=2)[1].sum(0) / 2,
    "loop": lambda body, h: while_remat(
        lambda c: c[1] < 2, lambda c: (body(c[0]), c[1] + 1), (h, torch.tensor(0)), checkpoints=2, max_steps=3
    )[0],
}
BODIES = {
    "itself": lambda x: lambda h: x,
    "container": lambda x: lambda h: {"kept": [x]}["kept"][0],
    "region": lambda x: lambda h: remat(lambda a, b: b)(h, x),
    "computed": lambda x: lambda h: (h.sin(), x)[1],
}
WAYS = {
    "backward": lambda fn, x: torch.autograd.grad(fn(x.requires_grad_().tanh()).sin().sum(), x)[0],
    "grad": lambda fn, x: grad(lambda x: fn(x.tanh()).sin().sum())(x),
    "vmap_grad": lambda fn, x: vmap(grad(lambda x: fn(x.tanh()).sin().sum()))(torch.stack([x, x.cos()])),
    "jacrev": lambda fn, x: jacrev(lambda x: fn(x.tanh()).sin().sum(0))(x),
    "jvp": lambda fn, x: jvp(lambda x: fn(x.tanh()), (x,), (x.cos(),)),
}


@pytest.mark.parametrize(("way", "body", "loop"), crossed(WAYS, BODIES, LOOPS))
def test_a_captured_tensor_that_the_body_returns(loop, body, way):
    h = rand(3, 4)
    fn = lambda x: LOOPS[loop](BODIES[body](x), h)  # noqa: E731
    same(WAYS[way](fn, rand(3, 4)), WAYS[way](lambda x: x, rand(3, 4)))


@pytest.mark.parametrize(("body", "loop"), crossed(BODIES, ["scan", "ys"]))
def test_compiled(loop, body):
    h = rand(3, 4)
    fn = lambda x: LOOPS[loop](BODIES[body](x), h)  # noqa: E731
    run = compiled(lambda x: WAYS["grad"](fn, x))
    same(run(rand(3, 4)), WAYS["grad"](lambda x: x, rand(3, 4)))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_constant_that_is_given_to_a_region_inside(loop):
    x, constant = rand(3, 4), rand(3, 4)
    w = rand(4, 4).requires_grad_()
    step = remat(lambda h, c: torch.tanh(c @ w) + h)
    plain = lambda h, c: torch.tanh(c @ w) + h  # noqa: E731

    def loss(fn):
        return lambda s: LOOPS[loop](lambda h: fn(h, constant), x * s).sin().sum()

    ones = torch.ones(4, dtype=torch.float64)
    same(hessian(loss(step))(ones), hessian(loss(plain))(ones))


def test_an_attribute_set_after_the_scan_that_only_the_search_finds():
    """A region inside is a method, so the search for what it captures finds it when steps run again."""

    class Layer(torch.nn.Module):
        last = None

        def step(self, h):
            return h.sin() * 2

        def run(self, x, remat):
            h = LOOPS["scan"](lambda h: remat(self.step)(h) * x, x)
            self.last = h.sin()
            return self.last * x

    def second(remat):
        layer, x = Layer(), rand(3).requires_grad_()
        out = remat(lambda x: layer.run(x, remat))(x)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    same(second(remat), second(lambda f: f))


class Notes(torch.nn.Module):
    """Stores a result of a region, in which a step of a scan leads to it."""

    scan: Any
    lin: Any
    noted: Any
    region: Any

    def __init__(self, region, scan):
        super().__init__()
        self.region, self.scan = region, scan
        self.lin = torch.nn.Linear(3, 3).double()

    def forward(self, x):
        rows = rand(2, 3, seed=1)

        def whole(x):
            last, _ = self.scan(lambda carry, row: (torch.sin(self.lin(carry + row)), row), x, rows)
            self.noted = last.sin()
            return last

        return self.region(whole)(x).sum() + self.noted.cos().sum()


def test_a_step_that_leads_to_what_a_region_around_stores():
    """The second run of the region finds the result of the first, and does not read it."""
    model = Notes(remat, scan_remat)
    plain = Notes(lambda fn: fn, loop)
    plain.lin = model.lin
    for _ in range(2):
        same(grad(model)(rand(3)), grad(plain)(rand(3)))
