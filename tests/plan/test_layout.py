"""Plans for every rank of a job: what they hold, what they refuse, and that ranks keep what was planned."""

import copy
import functools
import itertools
import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.mesh import Decoder, Sizes, planned, tensor_parallel
from remat import RematError, fit, nn as remat_nn
from remat.plan import BudgetPolicy, Layout, MeshPlan
from tests.helpers import TORCH, sparse
from tests.inside import trace_memory
from tests.interop.ranks import spawned
from tests.plan import mesh_worker
from tests.plan.inside import (
    Linked,
    Pipe,
    Repeated,
    added,
    agree,
    as_region,
    cost_model,
    local_program,
    single,
    traced,
)

TINY = Sizes(layers=3, width=32, heads=4, groups=2, hidden=64, vocab=64)
TOKENS = (2, 16)
NEEDS_GLOO = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)


@functools.cache
def tiny(memory="1GiB", sizes=TINY, **layout) -> MeshPlan:
    return planned(sizes, TOKENS, Layout(**layout), memory=memory)


@functools.cache
def _traced() -> Pipe:
    with torch.device("meta"):
        model, tokens = Decoder(TINY, TOKENS[1]), torch.empty(TOKENS, dtype=torch.long)
    with local_program(model, Layout()) as local:
        args, kwargs = local.arguments(((tokens,), {}), None)
        seen = traced(local, [f"layers.{k}" for k in range(3)], args, kwargs, as_region)
    return Pipe(seen, Layout(), local.weights, Linked(cost_model("roofline", "h100"), "h100", {}))


def pipe(**layout) -> Pipe:
    made = copy.copy(_traced())
    made.layout = Layout(**layout)
    return made


# -- sums -------------------------------------------------------------------------------------------------


def test_sums_are_those_of_all_choices():
    plans = [(3, 9.0), (5, 4.0), (9, 1.0)], [(2, 5.0), (4, 0.0)]
    rows = [Repeated(single(*map(list, zip(*p, strict=True)))) for p in plans]
    both = added(rows[0].of(3), rows[1].of(2))
    every = [
        (sum(b for b, _ in made), sum(c for _, c in made))
        for made in itertools.product(*[plans[0]] * 3, *[plans[1]] * 2)
    ]
    for room in range(12, 40):
        place = both.at_most(room)
        expected = min((cost for size, cost in every if size <= room), default=None)
        assert (None if place < 0 else float(both.cost[place])) == expected
        if place >= 0:
            picks = [
                rows[k].picks((3, 2)[k], int(side[place])) for k, side in enumerate((both.left, both.right))
            ]
            assert sum(plans[k][pick][0] for k in (0, 1) for pick in picks[k]) == int(both.bytes[place])


# -- what a plan holds ------------------------------------------------------------------------------------


def sizes():
    """Numbers of a block's parameters, and of those outside of blocks."""
    model = Decoder(TINY, TOKENS[1])
    block = sum(p.numel() for p in model.layers["0"].parameters())
    return block, sum(p.numel() for p in model.parameters()) - 3 * block


@pytest.mark.slow
def test_fixed_bytes_line_by_line():
    plan = tiny(dp_shard=2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    block, outside = sizes()
    stored = (3 * block + outside) * 4 // 2
    assert plan.stages[0].fixed == {
        "sharded parameters": stored,
        "sharded gradients": stored,
        "optimizer state": 2 * stored,
        "gathered outside of layers": 2 * outside,
        "the gathered layer": 2 * block,
        "the prefetched layer": 2 * block,
        "whole gradients of a layer": 2 * max(block, outside),
        "reduce-scatter buffers": 4 * (block + max(block, outside)),
    }


@pytest.mark.parametrize(
    ("options", "reshard"),
    sparse(
        pytest.param(*row)
        for row in [
            ({}, False),
            ({"optimizer": "sgd"}, True),
            ({"dp_replicate": 2}, True),
            ({"optimizer": "lion"}, False),
        ]
    ),
    ids=str,
)
def test_fixed_bytes_of_variants(options, reshard):
    """In float32: what stays gathered, what an optimizer holds, and HSDP, whose copies hold no more."""
    lines = tiny(dp_shard=2, reshard=reshard, **options).stages[0].fixed
    block, outside = (4 * count for count in sizes())
    stored = (3 * block + outside) // 2
    states = {"sgd": 0, "lion": 1}.get(options.get("optimizer"), 2)
    gathered = {"gathered outside of layers": outside, "the gathered layer": block}
    assert lines == {
        "sharded parameters": stored,
        "sharded gradients": stored,
        **({"optimizer state": states * stored} if states else {}),
        **(gathered if reshard else {"gathered layers": 3 * block + outside}),
        "the prefetched layer": block,
        "whole gradients of a layer": max(block, outside),
        "reduce-scatter buffers": block + max(block, outside),
    }


@pytest.mark.slow
def test_gradients_are_reduced_as_this_torch_does():
    half, own = torch.bfloat16, torch.float32
    buffers = {
        dtype: tiny(dp_shard=2, param_dtype=half, reduce_dtype=dtype)
        .stages[0]
        .fixed["reduce-scatter buffers"]
        for dtype in (None, half, own)
    }
    assert buffers[half] < buffers[own]
    assert buffers[None] == buffers[half if TORCH < (2, 15) else own]


def test_fixed_bytes_without_shards():
    """One rank, and under DistributedDataParallel the buckets of gradients beside the gradients."""
    block, outside = sizes()
    whole = 4 * (3 * block + outside)
    alone = {"parameters": whole, "gradients": whole, "optimizer state": 2 * whole}
    assert tiny().stages[0].fixed == alone
    assert tiny(dp_replicate=2).stages[0].fixed == alone | {"buckets of gradients": whole}


@pytest.mark.slow
def test_equal_blocks_are_traced_once_and_numbered_ones_are_alike():
    plan = tiny(dp_shard=2)
    assert list(plan.stages[0].blocks) == ["layers.0", "layers.1", "layers.2"] and len(plan.programs) == 1
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(5)])
    for number, layer in enumerate(model):
        layer.number = number
    model[3].append(nn.Tanh())
    several = fit(model, torch.ones(2, 4), mesh=Layout(layers="*"), memory="1MiB")
    programs = [keeps.program for keeps in several.stages[0].blocks.values()]
    assert len(set(programs)) == 2 and programs.count(programs[3]) == 1


def test_blocks_may_use_torch_func_inside():
    """torch.func refuses the hooks on saved tensors by which a look sees what autograd keeps."""

    class Force(nn.Linear):
        def forward(self, input):
            h = torch.tanh(super().forward(input))
            return torch.func.grad(lambda a: torch.tanh(a @ self.weight).sum())(h) * h

    model, x = nn.Sequential(*[Force(16, 16) for _ in range(3)]), torch.ones(64, 16)
    plan = fit(model, x, mesh=Layout(layers="*"), memory="1GiB")
    alone = BudgetPolicy(1.0).plan(model[1], x.requires_grad_() * 1)
    assert [block.kept_bytes for block in plan.stages[0].blocks.values()] == [alone.kept_bytes] * 3


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16), nn.Dropout(0.1))
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        y = self.net(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


@pytest.mark.slow
def test_kernels_are_those_of_the_device_planned_for():
    """On a CPU dropout writes in place, so that a region runs it again however much memory there is."""
    model, x = nn.Sequential(Dropping(), Dropping()), torch.randn(2, 8, 16)
    layout = Layout(dp_shard=2, layers="*")
    plans = {name: fit(model, x, mesh=layout, memory="1GiB", device=name) for name in (None, "cpu")}
    ops = {name: {op for ops in plan.programs.values() for op in ops} for name, plan in plans.items()}
    kernels = {"aten.native_dropout.default", "aten._fused_rms_norm.default"}
    kernels |= {"aten.scaled_dot_product_attention"}
    assert kernels <= ops[None] and "aten.bernoulli_.float" not in ops[None]
    assert not kernels & ops["cpu"] and "aten.bernoulli_.float" in ops["cpu"]
    assert plans[None].stages[0].recompute_seconds == 0 < plans["cpu"].stages[0].recompute_seconds


@pytest.mark.slow
def test_tensor_parallel_plans_are_of_the_local_program():
    whole, part = tiny(), tiny(tp=2, parallelize=tensor_parallel)
    (ops,) = part.programs.values()
    kinds = [op.split(".")[1] for op in ops if op.startswith("_c10d_functional")]
    assert kinds.count("reduce_scatter_tensor") == 2 and kinds.count("all_gather_into_tensor") == 2
    assert part.weights["layers.0.attention.wq.weight"][:2] == ((32, 32), (16, 32))
    sizes = [plan.stages[0].blocks["layers.0"].kept_bytes for plan in (whole, part)]
    assert sizes[1] < 0.7 * sizes[0]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("schedule", "flying"), [("1f1b", [3, 2, 1]), ("gpipe", [8, 8, 8]), ("zerobubble", [3, 2, 1])]
)
def test_microbatches_in_flight(schedule, flying):
    layout = Layout(pp=3, microbatches=8, schedule=schedule)
    assert [layout.in_flight(stage) for stage in range(3)] == flying
    assert [layout.waiting(stage) for stage in range(3)] == (
        [1, 2, 3] if schedule == "zerobubble" else [0, 0, 0]
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zerobubble"])
def test_the_slowest_stage_is_as_fast_as_can_be(schedule):
    made = pipe(pp=2, microbatches=4, schedule=schedule)
    least = max(part.least() for part, _ in made.split(1e12) or ())
    for memory in (1e12, 1.1 * least, 1.01 * least):
        found = made.split(memory)
        slowest = []
        for cut in (1, 2):
            given = pipe(pp=2, microbatches=4, schedule=schedule, split=(cut, 3 - cut))
            if (split := given.split(memory)) is not None:
                slowest.append(max(chosen.seconds for _, chosen in split))
        assert (found is None) == (not slowest)
        if found is not None:
            assert max(chosen.seconds for _, chosen in found) == min(slowest)
            assert all(part.peak(chosen) <= memory for part, chosen in found)


def test_weight_gradients_that_wait_hold_what_they_read():
    lines = [
        {s: p.lines for s, (p, _) in enumerate(pipe(pp=2, microbatches=4, schedule=k).split(1e12) or ())}
        for k in ("1f1b", "zerobubble")
    ]
    waits = "inputs of gradients that wait"
    assert waits not in lines[0][0] and lines[1][0][waits] > 0 < lines[1][1][waits]


def test_less_memory_recomputes_more():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)])
    x = torch.ones(64, 8)
    most = fit(model, x, mesh=Layout(layers="*"), memory="1MiB").stages[0]
    size = sum(most.fixed.values())
    costs = [
        fit(model, x, mesh=Layout(layers="*"), memory=int(size + share * (most.peak_bytes - size))).stages[0]
        for share in (0.6, 0.8, 1.0)
    ]
    seconds = [stage.recompute_seconds for stage in costs]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 0 == seconds[2]
    with pytest.raises(RematError, match=r"(?s)No plan fits into .*optimizer state"):
        fit(model, x, mesh=Layout(layers="*"), memory=size)


# -- files, and carrying out ------------------------------------------------------------------------------


def test_a_plan_is_a_file_and_all_make_the_same():
    plan = tiny(dp_shard=2)
    again = planned(TINY, TOKENS, Layout(dp_shard=2), memory="1GiB")
    assert again == plan and again.hash == plan.hash and MeshPlan.from_json(plan.to_json()) == plan
    text = plan.to_json().replace('"in_flight": 1', '"in_flight": 2')
    with pytest.raises(RematError, match="changed after it was written"):
        MeshPlan.from_json(text)
    with pytest.raises(RematError, match="not a plan written by"):
        MeshPlan.from_json("{}")
    with pytest.raises(RematError, match="cannot be read"):
        MeshPlan.load("nowhere.json")
    assert "optimizer state" in str(plan) and "3 blocks" in str(plan)


@pytest.mark.slow
def test_a_rank_keeps_what_was_planned(tmp_path):
    torch.manual_seed(0)
    model, tokens = Decoder(TINY, TOKENS[1]), torch.randint(0, 64, TOKENS)
    whole = tiny(memory="1GiB").stages[0]
    plan = tiny(memory=int(whole.peak_bytes - 0.5 * whole.kept_bytes))
    plan.save(tmp_path / "plan.json")
    model(tokens).sum().backward()
    expected = [p.grad for p in model.parameters()]
    remat_nn.apply(model, plan=tmp_path / "plan.json")
    assert remat_nn.regions(model) == ["layers.0", "layers.1", "layers.2"]

    def step(mark):
        out = model(tokens)
        mark()
        out.sum().backward()

    # Not in the step: the profiler may take memory that it has not seen for some that it has.
    model.zero_grad()
    step(lambda: None)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)
    kept = trace_memory(step).kept
    planned_bytes = plan.stages[0].kept_bytes
    assert 0 < planned_bytes < whole.kept_bytes
    assert abs(kept / planned_bytes - 1) < 0.02


def changed(**changes):
    return Decoder(Sizes(**{**vars(TINY), **changes}), TOKENS[1])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: changed(layers=4), r"it has the block layers.3, which was not planned \(3 blocks were\)"),
        (lambda: changed(layers=2), "it lacks the block layers.2 of stage 0"),
        (
            lambda: changed(hidden=96),
            r"layers.0.feed_forward.w1.weight has the shape \[96, 32\], planned was \[64, 32\]",
        ),
        (lambda: changed().to(torch.bfloat16), "has the dtype bfloat16, planned was float32"),
        (lambda: changed(experts=2), "layers.0.feed_forward.w[13]"),
    ],
)
def test_another_model(model, message):
    with pytest.raises(RematError, match=message):
        remat_nn.apply(model(), plan=tiny())


def test_another_computation(monkeypatch):
    model = remat_nn.apply(Decoder(TINY, TOKENS[1]), plan=tiny())
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.gelu)
    with pytest.raises(
        RematError, match=r"op \d+ of block layers.0 \(stage 0\) is aten.gelu.*planned was aten.silu"
    ):
        model(torch.zeros(TOKENS, dtype=torch.long))


def test_ranks_compare(monkeypatch):
    plan, model = tiny(dp_shard=2), Decoder(TINY, TOKENS[1])
    told: list[Any] = [("a", None, ("x",)), ("a", None, ())]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, mine: into.__setitem__(slice(None), told))
    assert agree("a", None, ["x"]) == (0,)
    told[1] = ("b", None, ())
    with pytest.raises(RematError, match="Rank 1 has another plan than rank 0"):
        agree("a", None)
    told[1] = ("a", "there are 2 ranks, planned were 4", ())
    with pytest.raises(RematError, match="does not fit rank 1: there are 2 ranks, planned were 4"):
        agree("a", None)
    told[:] = [(plan.hash, None, ())] * 2
    remat_nn.apply(model, plan=plan)
    with pytest.raises(RematError, match="is in\none|process alone"):
        tiny(tp=2, parallelize=tensor_parallel, sizes=Sizes(**{**vars(TINY), "layers": 1}))


def test_stages_split_in_another_way():
    plan = tiny(pp=2, microbatches=2, split=(1, 2))
    model = Decoder(TINY, TOKENS[1])
    del model.layers["2"]
    with pytest.raises(RematError, match="has layers.0 of stage 0 and layers.1 of stage 1"):
        remat_nn.apply(model, plan=plan)
    del model.layers["0"]
    with pytest.raises(RematError, match="lacks the block layers.2 of stage 1"):
        remat_nn.apply(model, plan=plan)


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp is 1 or more"),
        ({"schedule": "1F1B"}, "write one of 1f1b"),
        ({"optimizer": "sophia"}, "adamw"),
        ({"ep": 3, "dp_shard": 4}, "ep must divide"),
        ({"microbatches": 4}, "without a pipeline"),
        ({"pp": 2, "split": (1, 1, 1)}, "for each stage"),
    ],
)
def test_layouts_that_mean_nothing(options, message):
    with pytest.raises(RematError, match=message):
        Layout(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.5}, "budget=...\\) is not for mesh"),
        ({"mesh": None}, "is for mesh"),
        ({"memory": "lots"}, "memory of one device"),
        ({"mesh": Layout(layers="*.h.*")}, "lists of modules in it: 'layers"),
        ({"mesh": Layout(pp=4)}, "fewer than stages"),
        ({"mesh": Layout(tp=2)}, "nothing says how Decoder is spread"),
        ({"mesh": {"tp": 2}}, "takes a remat.plan.Layout"),
        ({"cost": "flops"}, "by seconds"),
    ],
)
def test_plans_that_cannot_be(options, message):
    with torch.device("meta"):
        model, tokens = Decoder(TINY, TOKENS[1]), torch.empty(TOKENS, dtype=torch.long)
    with pytest.raises(RematError, match=message):
        fit(model, tokens, **{"mesh": Layout(), "memory": "1GiB", **options})


# -- processes --------------------------------------------------------------------------------------------


def _spawned(work, path, *args, ranks=2):
    (path / "store").unlink(missing_ok=True)
    spawned(work, (str(path), *args), ranks)
    return [json.loads((path / f"{rank}.txt").read_text()) for rank in range(ranks)]


@NEEDS_GLOO
@pytest.mark.slow
def test_ranks_keep_what_was_planned(tmp_path):
    """Under FSDP2: to the byte."""
    layout = Layout(dp_shard=2)
    tokens = mesh_worker.ROWS, mesh_worker.LENGTH
    whole = planned(mesh_worker.SIZES, tokens, layout, memory="1GiB").stages[0]
    plan = planned(mesh_worker.SIZES, tokens, layout, memory=int(whole.peak_bytes - 0.5 * whole.kept_bytes))
    plan.save(tmp_path / "plan.json")
    gathered = whole.fixed["gathered outside of layers"]
    planned_bytes = plan.stages[0].kept_bytes + gathered, whole.kept_bytes + gathered
    for sizes in _spawned(mesh_worker.sharded, tmp_path, 2, ranks=2):
        for size, expected in zip(sizes, planned_bytes, strict=True):
            assert abs(expected / size - 1) < 0.02


@NEEDS_GLOO
@pytest.mark.slow
def test_ranks_of_tensor_parallelism_keep_what_was_planned(tmp_path):
    """To the byte, in every step. The first block is given a collective's result that is on its way."""
    layout, tokens = Layout(tp=2, parallelize=tensor_parallel), (mesh_worker.ROWS, mesh_worker.LENGTH)
    whole = planned(mesh_worker.SIZES, tokens, layout, memory="1GiB").stages[0]
    plan = planned(mesh_worker.SIZES, tokens, layout, memory=int(whole.peak_bytes - 0.5 * whole.kept_bytes))
    plan.save(tmp_path / "plan.json")
    expected = plan.stages[0].kept_bytes, whole.kept_bytes
    for sizes in _spawned(mesh_worker.spread, tmp_path):
        assert sizes == [[size] * 3 for size in expected]


@NEEDS_GLOO
@pytest.mark.slow
def test_stages_keep_what_was_planned(tmp_path):
    """Two stages under 1F1B, where their first backward begins."""
    layout = Layout(pp=2, microbatches=4, split=(2, 2))
    tokens = mesh_worker.ROWS, mesh_worker.LENGTH
    whole = planned(mesh_worker.SIZES, tokens, layout, memory="1GiB").stages[0]
    memory = int(whole.peak_bytes - 0.3 * whole.kept_bytes)
    plan = planned(mesh_worker.SIZES, tokens, layout, memory=memory)
    plan.save(tmp_path / "plan.json")
    assert plan.stages[0].recompute_seconds > 0
    for stage, (size,) in zip(plan.stages, _spawned(mesh_worker.piped, tmp_path, 4), strict=True):
        assert abs((stage.kept_bytes + stage.fixed["pipeline buffers"]) / size - 1) < 0.02


@NEEDS_GLOO
@pytest.mark.slow
def test_ranks_with_different_plans_all_raise(tmp_path):
    for rank, options in enumerate(({"dp_replicate": 2}, {"dp_replicate": 2, "optimizer": "sgd"})):
        tiny(**options).save(tmp_path / f"{rank}.json")
    assert _spawned(mesh_worker.disagreeing, tmp_path, TINY) == ["Rank 1 has another plan than rank 0"] * 2
    for said in _spawned(mesh_worker.other_ops, tmp_path, TINY):
        assert re.search(r"does not fit rank 1: op \d+ of block layers.1 .*is aten.gelu.*planned was", said)
    (tmp_path / "1.json").unlink()
    for said in _spawned(mesh_worker.disagreeing, tmp_path, TINY):
        assert said.startswith("The plan does not fit rank 1: ") and "1.json' cannot be read" in said
