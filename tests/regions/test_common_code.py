"""Code that is common in models and that checkpoints refuse, count twice or die of: as without remat."""

import functools

import pytest
import torch
import torch.utils.dlpack

from remat import checkpoint_policy, remat, save_matmuls, save_nothing
from tests.helpers import crossed, same

D = torch.float64


def test_a_sparse_argument_that_is_differentiated():
    found = []
    for wrap in (remat, lambda fn: fn):
        matrix = torch.eye(4, dtype=D).to_sparse().requires_grad_()
        x = torch.linspace(-1, 1, 16, dtype=D).view(4, 4).requires_grad_()
        out = wrap(lambda a, x: torch.sparse.mm(a, x.sin()).exp())(matrix, x)
        grads = torch.autograd.grad(out.sum(), (matrix, x))
        found.append((grads[0].to_dense(), grads[1]))
    same(found[0], found[1], 0.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", [save_nothing, checkpoint_policy(budget=0.5)], ids=["nothing", "budget"])
def test_jagged_tensors_in_and_out(policy):
    found = []
    wrapped = functools.partial(remat, policy=policy)
    for wrap in (wrapped, wrapped, lambda fn: fn):
        parts = [torch.linspace(-1, 1, 4 * n, dtype=D).view(n, 4) for n in (1, 3)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        out = wrap(lambda n: (n.sin() * 2).exp())(nested)
        out.values().sum().backward()
        assert nested.grad is not None
        found.append(nested.grad.values())
    same(found[0], found[2], 0.0)
    same(found[1], found[2], 0.0)


# -- precision islands under autocast -----------------------------------------------------------------------


ISLANDS = {
    "off": lambda: torch.autocast("cpu", enabled=False),
    "on": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize(
    ("island", "around", "policy"),
    crossed(ISLANDS, ["forward", "step", "nothing"], [save_nothing, save_matmuls], every=2),
)
def test_autocast_switched_inside_a_region(island, around, policy):
    """Ops run again as they ran, whatever autocast is on around the region or its backward."""
    found = []
    for wrap in (lambda fn: remat(fn, policy=policy), lambda fn: fn):
        w = torch.linspace(-1, 1, 16).view(4, 4).cos().requires_grad_()

        def block(x, w=w):
            h = torch.tanh(x @ w)
            with ISLANDS[island]():
                h = (h.float() @ w).float().sin()
            return h @ w

        region, seen = wrap(block), []
        for _ in range(2):
            x = torch.linspace(-1, 1, 16).view(4, 4).sin().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=around != "nothing"):
                loss = region(x).float().pow(2).sum()
                grads = torch.autograd.grad(loss, (x, w)) if around == "step" else None
            seen.append(grads or torch.autograd.grad(loss, (x, w)))
        found.append(seen)
    same(found[0], found[1], 0.0)
