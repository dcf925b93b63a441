"""Plans for jobs that no machine here could run: made in one process, on shapes alone.

    python -m benchmarks.mesh     # Llama-3-70B on 64 and 512 devices, Mixtral-8x7B with experts apart

Prints the plans and the table of `docs/measured/mesh-plans.md`, and writes `results/mesh.csv`. Each job is
planned in a process of its own, whose CPU time and peak memory are those of planning.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.records import Record, save
from remat import fit
from remat.plan import Layout, MeshPlan


@dataclass(frozen=True)
class Sizes:
    """A decoder of Llama's kind; with `experts`, of Mixtral's."""

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocab: int
    experts: int = 0


LLAMA_70B = Sizes(80, 8192, 64, 8, 28672, 128256)
MIXTRAL_8X7B = Sizes(32, 4096, 32, 8, 14336, 32000, experts=8)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.width // sizes.heads
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk, self.wv = (nn.Linear(sizes.width, sizes.groups * self.head, bias=False) for _ in range(2))
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, -1, self.head).transpose(1, 2) for f in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Two of the experts for each token, each with room for a quarter more tokens than its share."""

    group: Any = None

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.count, width, hidden = sizes.experts, sizes.width, sizes.hidden
        self.router = nn.Linear(width, self.count, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(self.count, width, hidden)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(self.count, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        room = -(-flat.shape[0] * 5 // (2 * self.count))
        picked = F.one_hot(chosen.flatten(), self.count)
        place = (picked.cumsum(0) * picked).sum(-1) - 1
        # What finds no room goes to a row that nobody reads.
        rows = torch.where(place < room, chosen.flatten() * room + place, self.count * room)
        sent = flat.new_zeros(self.count * room + 1, x.shape[-1]).index_add(
            0, rows, flat.repeat_interleave(2, 0)
        )
        made = self._computed(sent[:-1].view(self.count, room, -1)).reshape(self.count * room, -1)
        back = torch.cat((made, made.new_zeros(1, x.shape[-1])))[rows].view(-1, 2, x.shape[-1])
        return (back * weights.unsqueeze(-1)).sum(1).view_as(x)

    def _computed(self, x: Tensor) -> Tensor:
        """What the experts make of `[experts, room, width]`, tokens of all ranks exchanged."""
        weights: tuple[Any, ...] = self.w1, self.w2, self.w3
        w1, w2, w3 = (w.to_local() if hasattr(w, "to_local") else w for w in weights)
        here, room = w1.shape[0], x.shape[1]
        if self.group is not None:
            x = _exchanged(x, self.group).view(-1, here, room, x.shape[2]).transpose(0, 1).flatten(1, 2)
        y = torch.bmm(F.silu(torch.bmm(x, w1)) * torch.bmm(x, w3), w2)
        if self.group is not None:
            y = _exchanged(y.view(here, -1, room, y.shape[2]).transpose(0, 1).flatten(0, 1), self.group)
        return y


def _exchanged(x: Tensor, group: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    even = [x.shape[0] // group.size()] * group.size()
    return all_to_all_single_autograd(x.contiguous(), even, even, group)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.feed_forward = Experts(sizes) if sizes.experts else FeedForward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """torchtitan's names, so that its plans fit. Parts of it that a stage does not have are None."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(sizes.vocab, sizes.width)
        self.layers = nn.ModuleDict({str(k): Block(sizes) for k in range(sizes.layers)})
        self.norm: nn.Module | None = RMSNorm(sizes.width)
        self.output: nn.Module | None = nn.Linear(sizes.width, sizes.vocab, bias=False)
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(torch.arange(length).float(), 5e5 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    """torchtitan's tensor and sequence parallelism for a Llama, and experts apart for a Mixtral."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if "ep" in mesh.mesh_dim_names:
        for module in model.modules():
            if isinstance(module, Experts):
                module.group = mesh.get_group("ep")
                for name in ("w1", "w2", "w3"):
                    spread = distribute_tensor(getattr(module, name), mesh["ep"], [Shard(0)])
                    setattr(module, name, nn.Parameter(spread))
    if "tp" not in mesh.mesh_dim_names:
        return
    gathered, parts = (Replicate(),), (Shard(1),)
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=parts, desired_input_layouts=gathered),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    names = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    plan |= {f"layers.*.{name}": ColwiseParallel() for name in names}
    there = {
        name: style for name, style in plan.items() if getattr(model, name.split(".")[0], None) is not None
    }
    parallelize_module(model, mesh["tp"], there)


def jobs() -> Iterator[tuple[str, Sizes, tuple[int, int], Layout]]:
    """Name, model, rows and tokens in a row of a microbatch, layout."""
    options: dict[str, Any] = {"parallelize": tensor_parallel, "param_dtype": torch.bfloat16}
    options["reduce_dtype"] = torch.float32
    name = "Llama-3-70B on 64 H100: `dp_shard=8, tp=8`, 2 x 8192 tokens"
    yield name, LLAMA_70B, (2, 8192), Layout(dp_shard=8, tp=8, **options)
    name = "the same, `dp_shard=2, tp=8, pp=4`, 16 microbatches of 8192 tokens"
    yield name, LLAMA_70B, (1, 8192), Layout(dp_shard=2, tp=8, pp=4, microbatches=16, **options)
    name = "Llama-3-70B on 512 H100: `dp_shard=16, tp=8, pp=4`"
    yield name, LLAMA_70B, (1, 8192), Layout(dp_shard=16, tp=8, pp=4, microbatches=16, **options)
    name = "Mixtral-8x7B on 32 H100: `dp_shard=32, ep=8`, 8192 tokens"
    yield name, MIXTRAL_8X7B, (1, 8192), Layout(dp_shard=32, ep=8, **options)


def planned(sizes: Sizes, tokens: tuple[int, int], layout: Layout, memory: int | str = "79GiB") -> MeshPlan:
    """The plan of a job, made on the meta device."""
    with torch.device("meta"):
        model, microbatch = Decoder(sizes, tokens[1]), torch.empty(tokens, dtype=torch.long)
    return fit(model, microbatch, mesh=layout, memory=memory, device="h100")


def measured(number: int) -> list[Record]:
    """Plans one of the jobs, prints the plan, and says what it took."""
    name, sizes, tokens, layout = list(jobs())[number]
    start = time.process_time()
    plan = planned(sizes, tokens, layout)
    values = {
        "planning": ("s", time.process_time() - start),
        "planner's memory": ("GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20),
        "a rank's peak": ("GiB", max(stage.peak_bytes for stage in plan.stages) / 2**30),
        "recomputed": ("%", max(100 * stage.recompute_seconds / stage.seconds for stage in plan.stages)),
    }
    print(f"{name}\n{plan}\n", flush=True)
    return [Record("mesh", name, "plan", metric, *value) for metric, value in values.items()]


def row(name: str, values: dict[str, float]) -> str:
    """A row of the table in the docs."""
    seconds, memory, peak, again = values.values()
    return f"| {name} | {seconds:.1f} s | {memory:.2f} GiB | {peak:.1f} GiB | {again:.1f} % |"


def main() -> None:
    spawning = multiprocessing.get_context("spawn")
    with spawning.Pool(1, maxtasksperchild=1) as pool:
        found = pool.map(measured, range(len(list(jobs()))), chunksize=1)
    for records in found:
        print(row(records[0].mode, {record.metric: record.value or 0.0 for record in records}))
    print(save("mesh", [record for records in found for record in records]))


if __name__ == "__main__":
    main()
