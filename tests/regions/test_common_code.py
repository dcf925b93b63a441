"""Code that is common in models and that checkpoints refuse, count twice or die of: as without remat."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.dlpack
from torch import nn
from torch.func import grad

from remat import checkpoint_name, checkpoint_policy, remat, save_matmuls, save_nothing, save_ops
from tests.helpers import rand, same

D = torch.float64
BUFFERS = {
    "mean": lambda: torch.zeros(4, dtype=D),
    "queue": lambda: torch.linspace(-1, 1, 32, dtype=D).view(8, 4),
    "count": lambda: torch.zeros((), dtype=D),
    "pointer": lambda: torch.zeros(1, dtype=torch.long),
}


class Common(nn.Module):
    """One layer of every kind, and buffers of every use; `what` says which of them a call runs."""

    mean: torch.Tensor
    queue: torch.Tensor
    count: torch.Tensor
    pointer: torch.Tensor

    def __init__(self, what):
        super().__init__()
        for name, make in BUFFERS.items():
            self.register_buffer(name, make())
        self.bn = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.embedding = nn.Embedding(6, 4, max_norm=0.5)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(4, 4))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lin = nn.Linear(4, 4)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.adjacency = torch.eye(4, dtype=D).add(torch.ones(4, 4, dtype=D).tril()).to_sparse()
        self.rows = self.adjacency.to_sparse_csr()
        # Not a module of this one: `double()` is not for it.
        self.quantized = [torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})]
        self.what = what
        self.caches, self.calls = {}, 0

    def forward(self, x):
        return getattr(self, f"run_{self.what}")(x)

    def run_average(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (x - self.mean).sin().exp()

    def run_average_twice(self, x):
        for _ in range(2):
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1).clamp_(-1, 1)
            x = (x - self.mean).sin()
        return x.exp()

    def run_queue(self, x):
        with torch.no_grad():
            self.queue[: len(x)] = x
        return x.sin() @ self.queue.t() @ self.queue

    def run_ring(self, x):
        at = int(self.pointer)
        with torch.no_grad():
            self.queue[at : at + len(x)] = x
            self.pointer[0] = (at + len(x)) % 8
        return x.sin() * self.queue.mean(0)

    def run_counter(self, x):
        self.count.add_(1)
        return (x * self.count).sin().exp()

    def run_counter_read_between(self, x):
        self.count += 1
        h = (x + self.count).sin() + self.count
        self.count += 1
        return (h * self.count).exp()

    def run_counter_as_condition(self, x):
        self.count += 1
        return x.sin().exp() if self.count > 1 else x.cos().exp()

    def run_bn_twice(self, x):
        return self.bn(self.bn(x).sin()).exp()

    def run_instance(self, x):
        return self.instance(torch.stack([x, x.sin()])).exp()

    def run_max_norm(self, x):
        return self.embedding(torch.tensor([1, 2, 1, 5])).sin().exp() * x

    def run_functional_max_norm(self, x):
        return (
            F.embedding_bag(torch.tensor([[1, 2], [3, 3]]), self.embedding.weight, max_norm=0.3).sin() @ x.t()
        )

    def run_spectral(self, x):
        return self.spectral(x).sin().exp()

    def run_old_spectral(self, x):
        return self.old_spectral(x).sin().exp()

    def run_weighted(self, x):
        return self.weighted(x).sin().exp()

    def run_attention(self, x):
        return self.attention(x, x, x)[0].exp()

    def run_identity(self, x):
        return attend(x, x, x).exp()

    def run_sparse(self, x):
        return torch.sparse.mm(self.adjacency, x.sin()).exp()

    def run_sparse_operator(self, x):
        return (self.adjacency @ x.sin()).exp() + (self.rows @ x.cos()).exp()

    def run_gru(self, x):
        return self.gru(x[None])[0].exp()

    def run_lazy_cache(self, x):
        mask = self.caches.setdefault(len(x), torch.tril(torch.ones(4, 4, dtype=D)))
        return (x * mask).sin().exp()

    def run_quantized(self, x):
        return x.sin() * self.quantized[0](x.detach().float()).double()


def attend(q, k, v):
    """As torch's attention does, it takes another way where its arguments are one tensor."""
    return (q @ k.t()).softmax(-1) @ v if q is k else q.sin() + v


ALL = [name.removeprefix("run_") for name in vars(Common) if name.startswith("run_")]


def steps(model, call):
    """What is seen of four calls, the last of them frozen: gradients, buffers, Python state."""
    seen = []
    for at in range(4):
        model.train(at < 3)
        x = torch.linspace(-1, 1, 16, dtype=D).view(4, 4).mul(1 + at).requires_grad_()
        out = call(x)
        leaves = [x, *model.parameters()]
        grads = torch.autograd.grad(out.pow(2).sum(), leaves, allow_unused=True)
        seen.append([out.detach(), *[g for g in grads if g is not None]])
        seen[-1] += [value.clone() for value in model.buffers()]
        model.calls += 1
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "policy"), [("module", save_nothing), ("closure", save_matmuls)])
@pytest.mark.parametrize("what", ALL)
def test_it_is_as_without_remat(what, form, policy):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Common(what).double())
    plain, ours = models
    region = remat(ours if form == "module" else (lambda x: ours(x)), policy=policy)
    same(steps(ours, region), steps(plain, plain), 1e-12)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_module_under_torch_func():
    """Its weights are an object that every op is given in a new wrapper."""
    model, x = Common("quantized"), rand(3, 4)
    region = remat(model.run_quantized)
    same(grad(lambda x: region(x).sum())(x), grad(lambda x: model.run_quantized(x).sum())(x))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_argument(layout):
    matrix = torch.eye(4, dtype=D).add(torch.ones(4, 4, dtype=D).tril())
    matrix = matrix.to_sparse() if layout == "coo" else matrix.to_sparse_csr()
    found = []
    for wrap in (remat, remat, lambda fn: fn):
        x = torch.linspace(-1, 1, 16, dtype=D).view(4, 4).requires_grad_()
        out = wrap(lambda a, x: (a @ x.sin()).exp())(matrix, x)
        found.append(torch.autograd.grad(out.sum(), x)[0])
    same(found[0], found[2], 0.0)
    same(found[1], found[2], 0.0)


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


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
@pytest.mark.parametrize("around", ["forward", "step", "nothing"])
@pytest.mark.parametrize("island", ISLANDS)
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


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=["nothing", "matmuls"])
@pytest.mark.parametrize(
    "write", [by_numpy, by_detached_numpy, by_pointer, by_dlpack, by_data, by_other_data]
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
