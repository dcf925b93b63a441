"""One process of test_many: regions around and inside of what shards modules, and ranks that do not agree."""

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from remat import RematError, checkpoint_policy, save_matmuls, save_nothing
from remat._ranks import agreement, wrapped
from remat.debug import assert_recomputed
from tests.inside import trace_memory
from tests.interop.ranks import group_of

# Gloo's threads free some gathered parameters, in about one step of six, and the profiler does not see them
# do it: such a step seems to keep a block more. The least of so many steps is what is kept.
STEPS = 12

aten = torch.ops.aten
SAC = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Around(nn.Module):
    """A region, or torch's checkpoint, around a module's call, hooks included."""

    def __init__(self, inner: nn.Module, policy: Any) -> None:
        super().__init__()
        self.inner = inner
        if isinstance(policy, functools.partial):
            self.call: Any = functools.partial(checkpoint, inner, use_reentrant=False, context_fn=policy)
        else:
            self.call = remat.remat(inner.__call__, policy=policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def fsdp1(module: nn.Module, flat: bool) -> nn.Module:
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": not flat}
    return FullyShardedDataParallel(module, **options)


SHARDED: dict[str, Any] = {
    "fsdp2": fully_shard,
    "fsdp2, region inside": fully_shard,
    "fsdp1": functools.partial(fsdp1, flat=False),
    "fsdp1, flat": functools.partial(fsdp1, flat=True),
    "replicate": replicate,
    "ddp": nn.parallel.DistributedDataParallel,
}


def stacked(layout: str, policy: Any) -> nn.Module:
    """Blocks that are sharded one by one, each in a region."""
    torch.manual_seed(0)
    stack = nn.Sequential(*[Block() for _ in range(3)])
    for i, block in enumerate(stack):
        inside = layout.endswith("inside") and not isinstance(policy, functools.partial)
        if inside and policy is not None:
            remat.nn.apply_to(block, policy=policy)
        made = SHARDED[layout](block)
        stack[i] = made if policy is None or inside else Around(made, policy)
    # The outermost one is what FSDP's hooks ask.
    return SHARDED[layout](stack) if layout.startswith("fsdp") else stack


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d" and "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def train(layout: str, policy: Any) -> tuple[list[torch.Tensor], list[int], int]:
    """The gradients of three steps; what further ones keep; and the all-gathers of a last one."""
    stack, found = stacked(layout, policy), []

    def step(mark: Callable[[], None]) -> None:
        loss = stack(x).square().mean()
        mark()
        loss.backward()

    for at in range(3):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(at + 7 * dist.get_rank()))
        stack.zero_grad()
        step(lambda: None)
        grads: list[Any] = [p.grad for p in stack.parameters()]
        found += [g.to_local() if hasattr(g, "to_local") else g.clone() for g in grads if g is not None]
    kept = []
    for _ in range(STEPS):
        stack.zero_grad()
        kept.append(trace_memory(step).kept)
    with Gathers() as gathers:
        step(lambda: None)
    return found, kept, gathers.count


def around() -> None:
    for layout in SHARDED:
        expected, *_ = train(layout, None)
        _, torchs, gathers = train(layout, SAC)
        assert not layout.startswith("fsdp") or gathers
        sizes = []
        every = save_nothing, save_matmuls, checkpoint_policy(budget=0.5)
        for policy in every if layout == "fsdp2" else every[1:2]:
            found, kept, again = train(layout, policy)
            assert all(map(torch.equal, found, expected)), (layout, policy)
            assert again <= gathers, (layout, policy, again, gathers)
            assert min(kept) <= max(torchs), (layout, policy, kept, torchs)
            sizes.append(min(kept))
        if layout != "fsdp2":
            continue
        # The budget is one of activations: the input, and half of what no remat keeps at the most.
        plan = checkpoint_policy(budget=0.5).plan(Block(), torch.empty(64, 32, requires_grad=True))
        assert sizes[2] - sizes[0] == 3 * (plan.kept_bytes - 64 * 32 * 4), (layout, sizes, plan.kept_bytes)


def compiled() -> None:
    """FSDP2 blocks compiled one by one, regions inside: one graph, no break, no recomputation lost."""
    backend = "aot_eager_decomp_partition"  # as Inductor, which would take longer
    found = {}
    for policy in (None, save_nothing, save_matmuls):
        torch._dynamo.reset()
        torch.manual_seed(0)
        stack = nn.Sequential(*[Block() for _ in range(2)])
        if policy is not None:
            remat.nn.apply(stack, layers="*", policy=policy)
            assert_recomputed(stack[0], torch.ones(64, 32, requires_grad=True), ops=["tanh"])
        counters.clear()
        for block in stack:
            block.compile(backend=backend, fullgraph=True)
            fully_shard(block)
        fully_shard(stack)
        # (Blocks whose input needs no gradient would have a graph of their own.)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()

        def step(mark: Callable[[], None], stack: nn.Module = stack, x: torch.Tensor = x) -> None:
            loss = stack(x).square().mean()
            mark()
            loss.backward()

        kept = []
        for _ in range(STEPS):
            stack.zero_grad()
            kept.append(trace_memory(step).kept)
        grads: list[Any] = [p.grad for p in stack.parameters()]
        assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
        found[policy] = [g.to_local() for g in grads], min(kept)
    expected, most = found.pop(None)
    for policy, (grads, kept) in found.items():
        torch.testing.assert_close(grads, expected, rtol=1e-6, atol=1e-7)
        assert kept < most, (policy, kept, most)


def disagreeing() -> None:
    """Policies that differ between ranks raise on all of them, in the first forward."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    @checkpoint_policy
    def sly(info: Any) -> bool:
        return "all_reduce" in str(info.op) and rank == 0

    def parallel(policy: Any) -> nn.Module:
        torch.manual_seed(0)
        block = Block()
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return remat.nn.apply_to(block, policy=policy)

    x = torch.ones(4, 32, requires_grad=True)
    mine = save_matmuls if rank == 0 else save_nothing
    for policies in ([save_nothing, mine], [save_nothing, save_nothing, mine]):
        with pytest.raises(RematError, match=rf"rank {rank} has .*rank {1 - rank} has"):
            nn.Sequential(*map(parallel, policies))(x)
    for policy in (mine, sly):
        said = rf"rank {rank} has .*rank {1 - rank} has"
        with pytest.raises(RematError, match=said):
            parallel(policy)(x)
        with pytest.raises(RematError, match=said):
            block = parallel(policy)
            grad(lambda x, block=block: block(x).sum())(x.detach())
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match=said):
            torch.compile(parallel(policy), backend="aot_eager")(x)
    for _ in range(2):
        parallel(save_matmuls)(x).sum().backward()
    disagreeing_around(rank)


def disagreeing_around(rank: int) -> None:
    """The same where parameters are gathered inside, or user code sends; ranks have data of their own."""

    def sends(x: torch.Tensor) -> torch.Tensor:
        total = x.detach().mean(0)
        dist.all_reduce(total)
        return (x - total).tanh() @ x.T

    @checkpoint_policy
    def sly(info: Any) -> bool:
        return "tanh" in str(info.op) and rank == 0

    def step(layout: str, policy: Any, x: torch.Tensor) -> None:
        run = remat.remat(sends, policy=policy) if layout == "sends" else stacked(layout, policy)
        run(x).sum().backward()

    x = torch.ones(4 + rank, 32, requires_grad=True)
    for layout in ("fsdp2", "fsdp1", "sends"):
        for policy in (save_matmuls if rank == 0 else save_nothing, sly):
            if policy is sly:
                x = torch.ones(4, 32, requires_grad=True)
            with pytest.raises(RematError, match="keeps other values on other ranks: rank"):
                step(layout, policy, x)
        # Other rows, other plans: no difference that counts.
        rows = torch.ones(4 + rank, 32, requires_grad=True)
        for policy in (
            save_matmuls,
            checkpoint_policy(budget=0.5),
            checkpoint_policy(lambda i: i.bytes < 600),
        ):
            step(layout, policy, rows)


def disagreeing_inside(compiled: bool) -> None:
    """The same for regions inside: all ranks raise in the first backward, where no collective would tell."""
    rank = dist.get_rank()

    @checkpoint_policy
    def sly(info: Any) -> bool:
        return "tanh" in str(info.op) and rank == 0

    class Dropped(nn.Module):
        """Each rank leaves out another block."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                x = x if number == 2 * rank else block(x)
            return x

    def run(layout: str, policies: list[Any], kind: Any = Dropped, more: int = 0) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model: Any = kind()
        for block, policy in zip(model.blocks, policies, strict=True):
            _ = remat.nn.apply_to(block, policy=policy) if policy is not None else None
            _ = compiled and block.compile(backend="aot_eager")
        if layout == "ddp":
            model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        elif layout == "replicate":
            model = replicate(model, find_unused_parameters=True)
        elif layout == "fsdp1":
            model = fsdp1(model, flat=False)
        else:
            model = fully_shard(model)
        for rows in (4 + more, 4):
            model(torch.ones(rows, 32)).sum().backward()
            model.zero_grad()

    class Whole(Dropped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    mine = save_matmuls if rank == 0 else save_nothing
    if not compiled:
        model: Any = fully_shard(remat.nn.apply_to(Block(), policy=mine))
        with pytest.raises(RematError, match="region 'Block' of the model keeps other values"):
            grad(lambda x: model(x).sum())(torch.ones(4, 32))
    for layout in ("ddp", "replicate", "fsdp1", "fsdp2"):
        said = r"region 'Block' of \S*blocks.1 keeps other values.*rank 0 has .*rank 1 has"
        for policies in ([save_nothing, mine, save_nothing], [sly] * 3)[: 1 if compiled else 2]:
            with pytest.raises(RematError, match=said if policies[0] is not sly else "keeps other values"):
                run(layout, policies, Whole)
            with pytest.raises(RematError, match=said):
                run(layout, policies)
        # Other rows, other blocks, other plans: no difference that counts.
        budget = checkpoint_policy(budget=0.5)
        for policies in ([save_nothing, save_matmuls, budget], [budget] * 3)[compiled:]:
            run(layout, policies, more=rank)


def alone() -> None:
    """A rank without regions: the others go on, with a warning. Around collectives they raise, and that rank
    is told by its process group as soon as they end."""
    rank = dist.get_rank()
    wrapped._SECONDS = 2
    agreement._SECONDS = 2
    torch.manual_seed(0)
    block = Block() if rank else remat.nn.apply_to(Block())
    model = nn.parallel.DistributedDataParallel(block)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(4, 32)).sum().backward()
    assert sum("Not all ranks of [0, 1] came" in str(w.message) for w in told) == 1 - rank
    block = Block()
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, init_device_mesh("cpu", (2,)), styles)
    error, said = (RematError, "not all ranks") if rank == 0 else (RuntimeError, "closed")
    with pytest.raises(error, match=said):
        (block if rank else remat.nn.apply_to(block))(torch.ones(4, 32, requires_grad=True)).sum().backward()


def work(rank: int, path: str) -> None:
    gc.freeze()  # `trace_memory` collects garbage before each step: not among what was imported
    with group_of(rank, path, seconds=900):
        disagreeing()
        disagreeing_inside(compiled=False)
        around()
        disagreeing_inside(compiled=True)
        compiled()
        alone()
