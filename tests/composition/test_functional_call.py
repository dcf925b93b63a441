"""`torch.func.functional_call`: the tensors that it puts into modules are there in every recomputation, which
runs after it, however the region's function leads to its modules."""

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from remat import remat, save_matmuls, save_nothing
from tests.helpers import rand, same


class Net(nn.Module):
    b: torch.Tensor

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("b", torch.ones(3))

    def forward(self, x):
        return torch.tanh(self.lin(x) * self.b) * self.b


class Model(nn.Module):
    def __init__(self, way, make):
        super().__init__()
        self.net = Net().double()
        self.region = way(self.net, make)

    def forward(self, x):
        return self.region(x)


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
def test_parameters_of_a_module_of_torchscript(policy):
    """They lie in C++: the pull-back runs when `functional_call` has put the module's own back."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()
    scripted = torch.jit.script(net)

    class Model(torch.nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.inner, self.wrap = scripted, wrap

        def forward(self, x):
            return self.wrap(lambda x: self.inner(x) * 2)(x)

    own = {f"inner.{name}": p.detach() * 1.5 for name, p in net.named_parameters()}

    def gradients(wrap):
        model = Model(wrap)
        loss = lambda own: functional_call(model, own, (rand(3, 4),)).sin().sum()  # noqa: E731
        return torch.func.grad(loss)(own)

    expected = gradients(lambda fn: fn)
    for _ in range(2):
        got = gradients(lambda fn: remat(fn, policy=policy))
        assert all(torch.allclose(got[name], expected[name]) for name in own)
        assert all(torch.equal(a, b) for a, b in zip(scripted.parameters(), net.parameters(), strict=True))


@pytest.mark.parametrize("given", ["all", "some", "trained"])
def test_a_region_that_puts_parameters_in_itself(given: str) -> None:
    """The module's own parameters are trained, and where others stand for all of them nothing reads those."""
    net, calls = Net().double(), []
    own = dict(net.named_parameters())
    put = {name: p if given == "trained" else p.detach() for name, p in own.items()}
    if given == "some":
        del put["lin.bias"]

    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return functional_call(net, p, (x,)).square().sum()

    region, xs = remat(loss), rand(4, 2, 3)
    ways: list[Any] = [
        lambda f: grad(f)(put, xs[0]),
        lambda f: vmap(grad(f), (None, 0))(put, xs),
        lambda f: jvp(lambda x: grad(f)(put, x), (xs[0],), (xs[1],)),
    ]
    for way in ways:
        want = pytree.tree_leaves(way(loss))
        for _ in range(2):
            calls.clear()
            got = pytree.tree_leaves(way(region))
            same(got, want)
            assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
            assert len(calls) == 1 or given != "all"
    if given != "all":
        got, want = [
            torch.autograd.grad(grad(f)(put, xs[0])["lin.weight"].sum(), own["lin.bias"])[0]
            for f in (region, loss)
        ]
        same(got, want)
