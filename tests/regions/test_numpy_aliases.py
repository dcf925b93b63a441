"""Memory that NumPy has given a second storage: what a region writes to the one is written to the other."""

import pytest
import torch

from remat import remat, save_matmuls
from tests.helpers import rand


def region(buffer, alias):
    def fn(x, w):
        h = (x @ w).sin() * alias.sum().detach()  # read before the write
        buffer.add_(1.0)
        return (h.cos() @ w * alias.detach().clone().sum()).sin()

    return fn


@pytest.mark.parametrize("policy", [None, save_matmuls])
@pytest.mark.parametrize("earlier", [False, True], ids=["a first call", "after one that shared nothing"])
@pytest.mark.parametrize("given", [False, True], ids=["captured", "arguments"])
def test_writes_reach_it(policy, earlier, given):
    """The recomputation read what was written: gradients were off by up to 6.0 without a message."""
    x, w = rand(4, 3).requires_grad_(), rand(3, 3, seed=1)
    buffer = torch.ones(3, dtype=torch.float64)
    alias = torch.from_numpy(buffer.numpy())
    call = lambda f, b, a: f(b, a)(x, w) if not given else f(None, None)(x, w, b, a)  # noqa: E731

    def run(wrap, b, a):
        def given_them(x, w, b, a):
            return region(b, a)(x, w)

        buffer.fill_(1.0)
        made = wrap(given_them if given else region(b, a))
        return torch.autograd.grad(call(lambda *_: made, b, a).sum(), x)[0], buffer.clone()

    def plain(fn):
        return fn

    expected = run(plain, buffer, alias)
    wrap = lambda fn: remat(fn, policy=policy)  # noqa: E731
    if earlier:
        run(wrap, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    for _ in range(2):
        for one, other in zip(run(wrap, buffer, alias), expected, strict=True):
            assert torch.equal(one, other)
