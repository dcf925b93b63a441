"""Code that is common in models and that checkpoints refuse, count twice or die of: as without remat."""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.dlpack

from remat import checkpoint_policy, offload, remat, save_everything, save_matmuls, save_nothing
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


LAYOUTS = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arguments_without_strides_under_hooks_of_the_users(layout):
    """What stays on the host between the passes has no place in memory that could be told by strides."""
    fixed = LAYOUTS[layout](torch.eye(4, dtype=D))
    fn = lambda a, x: (x.sin() @ (a.to_padded_tensor(0.0) if a.is_nested else a.to_dense())).exp()  # noqa: E731
    found = []
    for wrap in (remat, remat, lambda fn: fn):
        x = torch.linspace(-1, 1, 16, dtype=D).view(4, 4).requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            out = wrap(fn)(fixed, x)
        found.append(torch.autograd.grad(out.sum(), x)[0])
    same(found[0], found[2], 0.0)
    same(found[1], found[2], 0.0)


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


def jagged(x, lengths):
    return torch.nested.nested_tensor_from_jagged(x.tanh(), torch.tensor([0, *itertools.accumulate(lengths)]))


def attention(x, lengths):
    heads = jagged(x, lengths).unflatten(-1, [2, 2]).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads.sin(), heads.cos()).transpose(1, 2).flatten(-2)


def listed(x, lengths):
    parts = list(torch.split(x.tanh(), lengths))
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).sin().exp()


def with_its_offsets(x, lengths):
    rows: Any = jagged(x, lengths)
    return rows * torch.nested.nested_tensor_from_jagged(rows.values().sin(), rows.offsets())


JAGGED = {
    "elementwise": lambda x, lengths: (jagged(x, lengths).sin() * jagged(x, lengths).cos().values()[0]).exp(),
    "norm": lambda x, lengths: F.layer_norm(jagged(x, lengths), (4,)).relu(),
    "softmax": lambda x, lengths: torch.softmax(jagged(x, lengths) * 2, 1).sin(),
    "dropout": lambda x, lengths: F.dropout(jagged(x, lengths).sin(), 0.5).sin(),
    "padded": lambda x, lengths: jagged(x, lengths).sin().to_padded_tensor(0.0).cos(),
    "in place": lambda x, lengths: jagged(x, lengths).sin().mul_(2).cos(),
    "attention": attention,
    "listed": listed,
    "with its offsets": with_its_offsets,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "policy"),
    crossed(JAGGED, [save_nothing, save_matmuls, save_everything, offload(save_matmuls)], every=2),
)
def test_jagged_tensors_made_inside(name, policy):
    """Each run makes offsets of its own, and the sizes that they stand for are those of the forward.

    (torch's checkpoint refuses these: the symbols differ.)
    """
    region = remat(JAGGED[name], policy=policy)
    for lengths in ([2, 4], [2, 4], [3, 3], [1, 2, 3]):
        found = []
        for fn in (region, JAGGED[name]):
            torch.manual_seed(0)
            x = torch.linspace(-1, 1, 24, dtype=D).view(6, 4).requires_grad_()
            out = fn(x, lengths)
            (out.values() if out.is_nested else out).square().sum().backward()
            found.append(x.grad)
        same(found[0], found[1], 0.0)


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
