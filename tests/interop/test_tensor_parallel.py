"""Regions under tensor parallelism, on one rank of two: torch's fake process group has no other one.

On two processes: `test_many.py`.
"""

import collections
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from remat import (
    RematError,
    checkpoint_name,
    checkpoint_policy,
    offload,
    save_collectives,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    saved_residuals,
)
from remat.debug import assert_recomputed
from tests.inside import trace_memory

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
SAC = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    # Torch 2.11's fake group leaves what collectives make as it finds the memory: no two runs are alike.
    library = torch.library.Library("_c10d_functional", "IMPL")
    if torch.__version__ < "2.12":
        library.impl("all_reduce", lambda x, *_: x.clone(), "CPU")
        library.impl("all_gather_into_tensor", lambda x, size, _: torch.cat([x] * size), "CPU")
        library.impl("reduce_scatter_tensor", lambda x, _, size, __: x.chunk(size)[0].clone(), "CPU")
    yield init_device_mesh("cpu", (2,))
    library._destroy()
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.last, self.looks = nn.LayerNorm(32), looks

    def forward(self, x):
        hidden = checkpoint_name(torch.tanh(self.up(self.norm(x))), "hidden")
        if self.looks:
            hidden.data_ptr()  # so that the function runs again, not its ops
        # The second norm reads what a collective has made.
        return x + torch.sin(self.last(x + self.down(hidden)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=SAC)


def model(mesh, policy, sequence, **options):
    torch.manual_seed(0)
    stack = nn.Sequential(Block(**options), Block(**options))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    for block in stack:
        # The weights are the seed's: the fake group's other rank would send none.
        parallelize_module(block, mesh, plan, src_data_rank=None)
    if policy is SAC:
        return nn.Sequential(*map(Checkpointed, stack))
    if policy is not None:
        remat.nn.apply(stack, layers="*", policy=policy)
    return stack


class Sent(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self.counts[func.overloadpacket.__name__] += func.namespace == "_c10d_functional"
        return func(*args, **(kwargs or {}))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(mesh, policy, sequence, x, **options):
    """Gradients of three steps, and the bytes that a fourth one keeps; the collectives of its backward."""
    stack, found = model(mesh, policy, sequence, **options), []
    leaf = x.clone().requires_grad_()
    for _ in range(3):
        stack.zero_grad()
        stack(leaf).square().sum().backward()
        tensors: Any = (leaf, *stack.parameters())
        found += [local(t.grad).clone() for t in tensors]
    sent = Sent()

    def step(mark):
        loss = stack(leaf).square().sum()
        mark()
        with sent:
            loss.backward()

    stack.zero_grad()
    return found, trace_memory(step).kept, sent.counts


@pytest.mark.slow
def test_policies_keep_what_they_say(mesh):
    """Bytes at most those of torch's selective checkpoint with the same verdicts; gradients bit for bit."""
    x = torch.randn(2, 16, 32)
    expected, plain, _ = train(mesh, None, True, x)
    _, torchs, _ = train(mesh, SAC, True, x)
    kept = {}
    for policy in (save_nothing, save_names("hidden"), save_matmuls, save_everything):
        found, kept[policy], _ = train(mesh, policy, True, x)
        assert all(map(torch.equal, found, expected)), policy
    assert kept[save_nothing] < kept[save_names("hidden")] < plain
    assert kept[save_nothing] < kept[save_matmuls] <= torchs
    assert kept[save_everything] <= plain


@pytest.mark.slow
def test_collectives_are_ops(mesh):
    """They run again unless a policy keeps them; torch's checkpoint runs as many again as save_nothing."""
    x, counts = torch.randn(2, 16, 32), {}
    gathers = save_ops(c10d.all_gather_into_tensor)
    policies = {"none": None, "nothing": save_nothing, "collectives": save_collectives, "gathers": gathers}
    for name, policy in policies.items():
        counts[name] = train(mesh, policy, True, x)[2]
    again = {name: counts[name] - counts["none"] for name in counts}
    assert again["nothing"]["reduce_scatter_tensor"] == again["nothing"]["all_gather_into_tensor"] == 2
    assert again["collectives"]["reduce_scatter_tensor"] == 0
    assert again["collectives"]["all_gather_into_tensor"] == 2
    assert again["gathers"]["all_gather_into_tensor"] == 0
    reduced = [train(mesh, policy, False, x)[2]["all_reduce"] for policy in (save_nothing, save_collectives)]
    assert reduced[0] == reduced[1] + 2


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_the_function_runs_again(mesh, policy):
    """Where its ops do not tell all, Python runs under the local program too."""
    x = torch.randn(2, 16, 32)
    expected = train(mesh, None, True, x, looks=True)[0]
    assert all(map(torch.equal, train(mesh, policy, True, x, looks=True)[0], expected))


def test_wrappers_as_arguments(mesh):
    """A DTensor, and the result of a collective on its way, given and returned; ops and Python run again."""
    from torch.distributed._functional_collectives import all_reduce

    def square(x, w):
        return torch.tanh(x * w).exp()

    def looking(x, w):
        made = torch.tanh(x * w)
        local(made).data_ptr()
        return made.exp()

    whole = [Replicate()]
    weight = DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)]).requires_grad_()
    for fn in (square, looking):
        region = remat.remat(fn)
        for start in (
            lambda x: DTensor.from_local(x, mesh, [Shard(0)]),
            lambda x: DTensor.from_local(torch.cat([x, x]), mesh, whole).redistribute(mesh, [Shard(0)]),
            lambda x: DTensor.from_local(all_reduce(x, "sum", mesh), mesh, [Shard(0)]),
        ):
            found = []
            for call in (fn, region, region):
                x = torch.ones(4, 8, requires_grad=True)
                weight.grad = None
                made = call(start(x), weight)
                assert isinstance(made, DTensor) and made.placements == (Shard(0),)
                made.to_local().sum().backward()
                found.append((x.grad, local(weight.grad)))
            assert all(torch.equal(a, b) for pair in found[1:] for a, b in zip(pair, found[0], strict=True))


def test_a_write_to_a_sharded_weight_is_noticed(mesh):
    """The wrapper has the version that counts: its local tensor knows of no write."""
    weight = nn.Parameter(DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)]))
    x = DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)])
    for _ in range(2):
        out: Any = remat.remat(lambda x, w: torch.tanh(x * w).exp())(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RematError, match="written in place"):
            out.to_local().sum().backward()


def test_budgets_are_of_the_local_program(mesh):
    x = torch.randn(2, 16, 32)
    expected, plain, _ = train(mesh, None, True, x)
    found, kept, _ = train(mesh, checkpoint_policy(budget=0.5), True, x)
    assert all(map(torch.equal, found, expected))
    assert kept <= 0.6 * plain


def test_wrappers_as_arguments_are_planned(mesh, recwarn):
    """Of a `DTensor` that a budget's region is given, the plan has this rank's part."""
    w = distribute_tensor(torch.randn(32, 32), mesh, [Replicate()]).requires_grad_()
    x = DTensor.from_local(torch.randn(8, 32), mesh, [Shard(0)])

    def kept(policy):
        region = remat.remat(lambda x: torch.tanh(torch.tanh(x @ w).exp()).sin(), policy=policy)

        def step(mark):
            loss = local(region(x)).sum()
            mark()
            loss.backward()

        step(lambda: None)
        return trace_memory(step).kept

    assert kept(checkpoint_policy(budget=0.5)) <= 0.5 * kept(save_everything)
    assert not [w for w in recwarn if "cannot be planned" in str(w.message)]


@pytest.mark.slow
def test_compiled(mesh):
    """Modules that are sharded inside a region: the graph has the recomputation of this rank's part."""
    x, found = torch.randn(2, 16, 32), []
    for given in (None, save_matmuls):
        torch._dynamo.reset()
        block = model(mesh, given, True)[0]
        if given is not None:
            assert_recomputed(block, x, ops=["tanh"])
        leaf = x.clone().requires_grad_()
        torch.compile(block, backend="aot_eager", fullgraph=True)(leaf).square().sum().backward()
        found.append([local(t.grad) for t in (leaf, *block.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


def test_compiled_with_values_on_the_host(mesh):
    """Regions of sharded tensors, one after another: what is sent, fetched ahead and waited for is this
    rank's part. (Fetches were given the wrappers of what they wait for.)"""
    whole = torch.randn(8, 16)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()]).requires_grad_()

    def block(x):
        return (x @ w).sin() @ w + x

    def step(region):
        return lambda x: region(region(x)).square().sum()

    expected = torch.autograd.grad(step(block)(x), (x, w))
    torch._dynamo.reset()
    run = torch.compile(
        step(remat.remat(block, policy=offload(save_matmuls))), backend="aot_eager", fullgraph=True
    )
    got = torch.autograd.grad(run(x), (x, w))
    torch.testing.assert_close([local(t) for t in got], [local(t) for t in expected], rtol=1e-5, atol=1e-5)


def test_reports_are_of_the_local_program(mesh):
    seen = []
    stack = model(mesh, checkpoint_policy(lambda info: bool(seen.append(info))), True)
    # (Reports put back what the function has written, `seen` too.)
    found = saved_residuals(stack, torch.randn(2, 16, 32))
    up = next(r for r in found if r.path == "0.up.weight")
    assert (up.shape, up.bytes, up.placements) == ((64, 32), 64 * 32 * 4, "(Shard(dim=0),)")
    assert "f32[64,32] of (Shard(dim=0),)" in str(up)
    stack(torch.randn(2, 16, 32))
    gather = next(info for info in seen if info.op is c10d.all_gather_into_tensor.default)
    assert gather.bytes == 2 * gather.args[0].bytes
    said = remat.explain(stack, torch.randn(2, 16, 32))
    assert "_c10d_functional.reduce_scatter_tensor" in str(said) and "collective" in str(said)


def test_reports_say_how_kept_values_lie(mesh):
    """Of what a policy keeps, too, where it is a `DTensor`'s local part; bytes are those of the part."""
    stack = model(mesh, save_matmuls, True)
    said = remat.explain(stack, torch.randn(2, 16, 32))
    kept = [(r.shape, r.bytes, r.placements) for r in said.kept if r.why == "policy"]
    up, down = (64, 64), (64, 32)
    assert kept == [(up, 64 * 64 * 4, "(Shard(dim=1),)"), (down, 64 * 32 * 4, "(Partial(sum),)")] * 2
    assert said.to_dict()["kept"][-1].keys() >= {"placements"}
    table = next(t for t in said.page().tables if "placements" in t.columns)
    rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    assert rows[0]["from"].startswith("aten.addmm") and rows[0]["placements"] == "(Shard(dim=1),)"
    assert any(r["from"] == "0.up.weight" and r["placements"] == "(Shard(dim=0),)" for r in rows)
    plain = remat.explain(lambda x: x.sin().exp(), torch.ones(3))
    assert not any("placements" in t.columns for t in plain.page().tables)


def test_ways_of_differentiating(mesh):
    """A region in a region, a second backward, one result at a time, a backward inside, hooks around."""
    stack: Any = model(mesh, None, True)

    def nested(wrap, x):
        inner = wrap(stack[0])
        wrap(lambda x: stack[1](inner(x)))(x).square().sum().backward()

    def twice(wrap, x):
        loss = wrap(stack[0])(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def one_by_one(wrap, x):
        a, b = wrap(lambda x: (h := torch.tanh(stack[0].up(stack[0].norm(x))), stack[0].down(h.sin())))(x)
        a.sum().backward(retain_graph=True)
        b.sum().backward()

    def inside(wrap, x):
        def force(x):
            y = stack[0](x)
            return y * torch.autograd.grad(y.sum(), x, retain_graph=True)[0]

        wrap(force)(x).sum().backward()

    def hooked(wrap, x):
        with torch.autograd.graph.save_on_cpu():
            loss = wrap(stack[0])(x).square().sum()
        loss.backward()

    for way in (nested, twice, one_by_one, inside, hooked):
        found = []
        for wrap in (lambda f: f, lambda f: remat.remat(f, policy=offload(save_matmuls))):
            x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()
            stack.zero_grad()
            way(wrap, x)
            found.append([local(t.grad) for t in (x, *stack.parameters()) if t.grad is not None])
        assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found)), way
