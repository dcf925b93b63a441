"""What a scan leaves behind: random streams, buffers that its body writes to, steps that are only tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import RematError, save_everything, scan_remat, while_remat
from tests.compiled import compiled
from tests.helpers import rand, same, sparse

scale = {"hidden": torch.ones(4, dtype=torch.float64)}


def hidden() -> Tensor:
    """A tensor that no walk finds: a name in code that was compiled apart."""
    return eval("scale['hidden']")


def dropped(h: Tensor, _: Any) -> tuple[Tensor, None]:
    return nn.functional.dropout(h, 0.5) * hidden(), None


def by_while(x: Tensor) -> Tensor:
    body = lambda c: (dropped(c[0], None)[0], c[1] + 1)  # noqa: E731
    return while_remat(lambda c: c[1] < 3, body, (x, 0), max_steps=4)[0]


SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda x: scan_remat(dropped, x, length=3)[0],
    "all": lambda x: scan_remat(dropped, x, length=3, checkpoints="all")[0],
    "auto": lambda x: scan_remat(dropped, x, length=3, checkpoints="auto", budget="1MiB")[0],
    "while": by_while,
}


@pytest.mark.parametrize("scan", sparse(SCANS, every=1))
@pytest.mark.parametrize("found", [False, True])
def test_each_number_is_drawn_once(scan, found, monkeypatch):
    # A captured tensor that is met late makes the scan begin again.
    monkeypatch.setitem(scale, "hidden", rand(4).requires_grad_(found))
    x = rand(8, 4).requires_grad_()

    def loop(x: Tensor) -> Tensor:
        for _ in range(3):
            x = dropped(x, None)[0]
        return x

    def run(fn: Callable[[Tensor], Tensor]) -> Any:
        torch.manual_seed(1)
        out = fn(x)
        return out, torch.rand(2), torch.autograd.grad(out.sum(), x), torch.rand(2)

    same(run(SCANS[scan]), run(loop))


def test_a_scan_without_steps_draws_nothing():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    scan_remat(lambda h, x: (dropped(h, x)[0], h), rand(8, 4), torch.ones(0, 3))
    assert torch.equal(before, torch.get_rng_state())


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(4, 4))
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(x @ self.weight))

    def scanned(self, x: Tensor, **options: Any) -> Tensor:
        return scan_remat(lambda h, _: (self(h), None), x, length=5, **options)[0]

    def looped(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self(x)
        return x


WROTE = "wrote into a captured tensor"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpoints": 2},
    {"checkpoints": "auto", "budget": "1MiB"},
    {"compile": "aot_eager"},
]


@pytest.mark.parametrize("options", sparse(OPTIONS, every=1))
def test_writes_into_buffers_are_refused(options):
    with pytest.raises(RematError, match=WROTE):
        Norm().scanned(rand(8, 4), **options)


def test_writes_in_a_later_step_are_refused():
    count, w = torch.zeros(()), rand(4).requires_grad_()

    def body(h: Tensor, k: Tensor) -> tuple[Tensor, None]:
        if k == 3:
            count.add_(1)
        return h * w, None

    with pytest.raises(RematError, match=WROTE):
        scan_remat(body, rand(4), torch.arange(5))


@pytest.mark.parametrize("way", ["torch.func", "compiled", "layers"])
def test_writes_are_refused_elsewhere_too(way):
    net, x = Norm(), rand(8, 4)
    with pytest.raises(Exception, match=WROTE):
        if way == "torch.func":
            torch.func.grad(lambda x: net.scanned(x).sum())(x)
        elif way == "compiled":
            compiled(lambda x: net.scanned(x))(x)
        else:
            scan_remat(lambda h, w: (net.norm(h @ w), None), x, rand(3, 4, 4).requires_grad_())


WITHOUT_A_BACKWARD: list[dict[str, Any]] = [
    {},
    {"checkpoints": "all", "policy": save_everything},
]


@pytest.mark.parametrize("options", sparse(WITHOUT_A_BACKWARD, every=1))
def test_writes_are_kept_where_no_backward_comes(options):
    x, mine, theirs = rand(8, 4), Norm(), Norm()
    theirs.load_state_dict(mine.state_dict())
    with torch.no_grad():
        same(mine.scanned(x, **options), theirs.looped(x))
    same(list(mine.buffers()), list(theirs.buffers()))


def test_a_policy_of_every_step_lets_bodies_write():
    x, mine, theirs = rand(8, 4), Norm(), Norm()
    theirs.load_state_dict(mine.state_dict())
    mine.scanned(x, policy=save_everything, checkpoints="all").sum().backward()
    theirs.looped(x).sum().backward()
    same([mine.weight.grad, *mine.buffers()], [theirs.weight.grad, *theirs.buffers()])


def test_auto_refuses_steps_that_it_cannot_measure():
    with pytest.raises(RematError, match="cannot measure a step that uses torch.func"):
        body = lambda h, _: (torch.func.grad(lambda a: a.sin().sum())(h), None)  # noqa: E731
        scan_remat(body, rand(3).requires_grad_(), length=3, checkpoints="auto", budget="1KiB")
