"""What the search for captured tensors finds of steps: attributes that are set after or around the scan."""

from typing import Any

import torch
from torch.func import grad

from remat import remat, scan_remat
from tests.helpers import loop, rand, same


def test_an_attribute_set_after_the_scan_that_only_the_search_finds():
    """A region inside is a method, so the search for what it captures finds it when steps run again."""

    class Layer(torch.nn.Module):
        last = None

        def step(self, h):
            return h.sin() * 2

        def run(self, x, remat):
            h = scan_remat(lambda h, _: (remat(self.step)(h) * x, None), x, length=2, checkpoints=1)[0]
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
