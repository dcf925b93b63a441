"""Code that is common in models and that checkpoints refuse, count twice or die of: as without remat."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import nn
from torch.func import grad

from remat import checkpoint_name, checkpoint_policy, remat, save_matmuls, save_nothing, save_ops
from tests.helpers import crossed, rand, same

D = torch.float64


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_module_under_torch_func():
    """Its weights are an object that every op is given in a new wrapper."""
    inner = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    fn, x = (lambda x: x.sin() * inner(x.detach().float()).double()), rand(3, 4)
    same(grad(lambda x: remat(fn)(x).sum())(x), grad(lambda x: fn(x).sum())(x))


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


# -- raw writes to memory from outside ---------------------------------------------------------------------


def by_numpy(buffer):
    buffer.numpy()[...] += 1


def by_detached_numpy(buffer):
    view = np.asarray(buffer.detach()[1:])
    view *= 2


def by_pointer(buffer):
    import ctypes

    numbers = (ctypes.c_double * buffer.numel()).from_address(buffer.data_ptr())
    numbers[0] += 1.5


def by_dlpack(buffer):
    np.from_dlpack(buffer.detach())  # a door that is opened and not used
    torch.utils.dlpack.from_dlpack(buffer.detach()).add_(1)


def by_data(buffer):
    buffer.data.add_(1)


def by_other_data(buffer):
    buffer.data = buffer.data * 0.5


DOORS = [by_numpy, by_detached_numpy, by_pointer, by_dlpack, by_data, by_other_data]


@pytest.mark.parametrize(
    ("write", "policy", "nested"), crossed(DOORS, [save_nothing, save_matmuls], [False, True], every=2)
)
def test_a_raw_write_to_a_captured_buffer_happens_once(write, policy, nested):
    found = []
    for wrap in (lambda fn: remat(fn, policy=policy), lambda fn: fn):
        buffer = torch.linspace(0.5, 1, 4, dtype=D)

        def run(x, buffer=buffer):
            h = (x @ x.t() + buffer).sin() + buffer
            write(buffer)
            return (h * buffer).sin().exp()

        region, seen = wrap(run), []
        if nested:
            region = wrap(lambda x, inside=region: x.sin() * inside(x.cos()))
        for _ in range(3):
            x = torch.linspace(-1, 1, 16, dtype=D).view(4, 4).requires_grad_()
            seen.append(torch.autograd.grad(region(x).sum(), x)[0])
            seen.append(buffer.clone())
        found.append(seen)
    same(found[0], found[1], 1e-12)


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
def test_factories_that_take_shapes_of_the_meta_device(policy):
    like = torch.empty(3, device="meta", dtype=D)
    factories = [
        lambda: torch.ones_like(like, device="cpu"),
        lambda: like.new_full((3,), 2.0, device="cpu"),
        lambda: torch.zeros_like(like, device=torch.device("cpu")) + 3,
    ]
    for make in factories:
        fn = lambda x, make=make: (x.sin() * make().exp()).sin()  # noqa: E731
        region, x = remat(fn, policy=policy), torch.linspace(-1, 1, 3, dtype=D).requires_grad_()
        expected = torch.autograd.grad(fn(x).sum(), x)[0]
        for _ in range(2):
            same(torch.autograd.grad(region(x).sum(), x)[0], expected)
        same(torch.func.grad(lambda x, region=region: region(x).sum())(x.detach()), expected)


def test_an_embedding_that_scales_its_weight_beside_a_region_under_vmap():
    """The weight is an operand of what `vmap` runs as well, and is written to in that."""

    def gradients(wrap):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"embedding": nn.Embedding(5, 4, max_norm=0.5), "lin": nn.Linear(4, 4)}
        ).double()
        x = torch.linspace(-1, 1, 12, dtype=D).view(3, 4).requires_grad_()
        inner = wrap(lambda a, b: checkpoint_name(torch.tanh(b @ model["lin"].weight), "h"))

        def run(a):
            both = torch.func.vmap(inner)(torch.stack([a, x]), torch.stack([x, x])).sum(0)
            return model["embedding"](torch.arange(len(both))) * both

        region = wrap(run, policy=save_ops(torch.ops.aten.select, torch.ops.aten.view))
        leaves: Any = (x, model["lin"].weight, model["embedding"].weight)
        return [torch.autograd.grad(region(x).sum(), leaves) for _ in range(2)]

    same(gradients(remat), gradients(lambda fn, **_: fn), 1e-12)
