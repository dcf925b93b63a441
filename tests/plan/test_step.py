"""Steps on no device: attention as the target runs it, blocks traced once, what is outside of them."""

import json

import pytest
import torch
import torch.nn.functional as F

from remat import checkpoint_policy, fit, nn
from remat.plan import pareto, plans_by_budget, step_of
from tests.inside import main
from tests.plan.inside import planned_for, record

FLASH, EFFICIENT, CUDNN = (
    f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")
)


@pytest.mark.parametrize(
    ("device", "dtype", "options", "kernel"),
    [
        ("h100", torch.bfloat16, {"is_causal": True}, CUDNN),
        ("a100", torch.bfloat16, {"is_causal": True}, FLASH),
        ("h100", torch.float32, {"is_causal": True}, EFFICIENT),
        ("h100", torch.bfloat16, {"value": 64}, CUDNN),
        ("a100", torch.bfloat16, {"value": 64}, EFFICIENT),
        ("h100", torch.bfloat16, {"mask": torch.bool, "groups": 2, "enable_gqa": True}, CUDNN),
        ("a100", torch.bfloat16, {"mask": torch.bool, "groups": 2, "enable_gqa": True}, "bmm"),
        ("cpu", torch.float32, {"groups": 2, "enable_gqa": True}, f"{FLASH}_for_cpu"),
    ],
)
def test_attention_is_that_of_the_device_planned_for(device, dtype, options, kernel):
    groups, width, mask = options.pop("groups", 8), options.pop("value", 128), options.pop("mask", None)
    q, k, v = (
        torch.empty(2, heads, 64, size, dtype=dtype, device="meta", requires_grad=True)
        for heads, size in ((8, 128), (groups, 128), (groups, width))
    )
    options |= {} if mask is None else {"attn_mask": torch.empty(2, 1, 64, 64, dtype=mask, device="meta")}
    with planned_for(device):
        joint = record(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), (q, k, v))
    assert kernel in {op.name.split(".")[1] for op in joint.forward}
    assert joint.values[joint.results[0]].shape == (2, 8, 64, width)


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_norms_and_dropout_are_those_of_the_device_planned_for(device):
    """An H100 recorded these ops, and saved what is counted here, under torch 2.11."""
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with planned_for(device):
        joint = record(lambda x, w: F.dropout(F.rms_norm(x, (64,), w), 0.1), (x, w))
    forward = [op.name.split(".")[1] for op in joint.forward]
    backward = [op.name.split(".")[1] for op in joint.backward]
    fused = ["_fused_rms_norm", "native_dropout"]
    assert forward == fused if device == "h100" else not {*forward} & {*fused}
    assert [joint.values[g].shape for g in joint.gradients] == [(4, 64), (64,)]
    if device == "h100":
        assert backward == ["native_dropout_backward", "_fused_rms_norm_backward"]
        # The factor of each row and the mask: what autograd saves beside its operands.
        saved = sum(joint.values[v].bytes for v in {v for op in joint.backward for v in op.reads} if v >= 2)
        assert saved == 4 * 4 + 4 * 64 + 2 * 2 * 4 * 64, saved


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("call", "alone"),
    [
        (lambda x, w: F.dropout(x, 0.1, training=False), True),
        (lambda x, w: F.rms_norm(x, (64,), w.float()), True),
        (lambda x, w: F.rms_norm(x, (64,)), False),
        (lambda x, w: F.dropout(x.clone(), 0.5, inplace=True), True),
    ],
)
def test_what_a_gpu_takes_apart_is_planned_so(call, alone):
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with planned_for("h100"):
        joint = record(call, (x, w))
    names = {op.name.split(".")[1] for op in joint.ops}
    assert bool(names & {"_fused_rms_norm", "native_dropout"}) is not alone


class Block(torch.nn.Module):
    def __init__(self, number, width=16):
        super().__init__()
        self.number, self.linear = number, torch.nn.Linear(width, width)

    def forward(self, x, shared):
        return self.linear(x).tanh() * shared


class Odd(Block):
    def forward(self, x, shared):
        return super().forward(x, shared) + (x.exp() if self.number % 4 == 3 else x)


@pytest.mark.parametrize(("kind", "traced"), [(Block, 1), (Odd, 2)])
def test_blocks_that_are_alike_are_traced_once(kind, traced):
    blocks = torch.nn.ModuleList(kind(k) for k in range(12))
    nn.apply(blocks, layers="*", policy=checkpoint_policy(budget=1.0))
    shared = torch.nn.Parameter(torch.ones(16))

    def through(x):
        scale = shared * 2
        for block in blocks:
            x = block(x, scale)
        return x.square().sum()

    x = torch.randn(4, 16)
    step = step_of(through, (x,), {}, wanted=plans_by_budget)
    # The first block's input needs no gradient.
    assert len(step.graphs) == 12 and step.traced == 1 + traced
    assert [owner is block for owner, block in zip(step.owners, blocks, strict=True)] == [True] * 12
    lengths = {len(graph.ops) for graph in step.graphs}
    assert len(lengths) == traced
    # What all share is outside, once.
    assert not any(v.origin == "argument" for v in step.graphs[1].joint.values[1:2])
    plan = fit(through, x, budget=0.7)
    plan(x).backward()
    assert all(p.grad is not None for p in blocks.parameters())


def test_a_look_fills_no_table():
    class Lazy(dict):
        asked = 0

        def __getitem__(self, key):
            type(self).asked += 1
            return super().__getitem__(key)

        def __iter__(self):
            type(self).asked += 1
            return super().__iter__()

        def keys(self):
            type(self).asked += 1
            return super().keys()

    table, x = Lazy(a=1), torch.ones(4, requires_grad=True)
    pareto(lambda x: (x * len(vars(table) or "1")).sin().exp(), x, points=2, torch_solvers=())
    assert Lazy.asked == 0 and dict(dict.items(table)) == {"a": 1}


@pytest.mark.slow
def test_a_published_model_is_planned_in_one_line(tmp_path, capsys):
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = ["plan", f"hf:{tmp_path}", "--params", "meta", "--seq", "256", "--device", "h100"]
    assert main([*line, "--peak", "1GiB"]) == 0
    assert "fits as it is" in (said := capsys.readouterr().out) and "planned in" in said
    assert main([*line, "--peak", "1GiB", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    limit = int(0.7 * plain["plain_bytes"])
    assert main([*line, "--peak", str(limit), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] <= limit
    for wrong, why in (
        (["--budget", "0.4"], "--budget"),
        ([], "--peak 80GB"),
        (["--peak", "1KiB"], "below what"),
    ):
        assert main([*line, *wrong]) == 2 and why in capsys.readouterr().err
    assert main(["plan", "hf:no-such-model", "--peak", "1GiB"]) == 2
    assert "no published model known here" in capsys.readouterr().err
