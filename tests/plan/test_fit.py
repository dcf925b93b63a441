"""`remat.fit`: the blocks are found, the step stays within the peak, gradients are those without."""

import re

import pytest
import torch

import remat
from remat import checkpoint_policy, nn
from remat.plan import BUILT_IN_POLICIES, Portfolio, cost_model, plans_by_budget, step_of
from remat.transforms import RematError
from tests.helpers import sparse
from tests.inside import trace_memory
from tests.plan.inside import held_by, listed
from tests.plan.models import LlamaBlock


class Model(torch.nn.Module):
    """Blocks with something before and behind them."""

    def __init__(self, depth=3, width=64):
        super().__init__()
        self.embed = torch.nn.Embedding(100, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = torch.nn.Linear(width, 400)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def example():
    torch.manual_seed(0)
    return Model(), torch.randint(100, (8, 64))


def gradients(model, *args):
    model.zero_grad(set_to_none=True)
    model(*args).backward()
    return [p.grad.clone() for p in model.parameters()]


def measured(model, *args):
    """The most that a step allocates."""
    gradients(model, *args)
    model.zero_grad(set_to_none=True)

    def step(mark):
        loss = model(*args)
        mark()
        loss.backward()

    return trace_memory(step).peak


def test_a_step_fits_and_is_the_same_step():
    model, tokens = example()
    expected = gradients(model, tokens)
    model.zero_grad(set_to_none=True)
    plain = remat.fit(model, tokens, peak="1GiB")
    assert plain.applied == () and "fits as it is" in str(plain) and not nn.regions(model)
    assert measured(model, tokens) == pytest.approx(plain.peak_bytes - plain.held.bytes, rel=0.05)
    held = plain.held.bytes
    model.zero_grad(set_to_none=True)
    limit = int(held + 0.75 * (plain.plain_bytes - held))
    done = remat.fit(model, tokens, peak=limit)
    assert done.applied == tuple(nn.regions(model)) and done.peak_bytes <= limit < done.plain_bytes
    assert measured(model, tokens) == pytest.approx(done.peak_bytes - held, rel=0.05)
    torch.testing.assert_close(gradients(model, tokens), expected, rtol=0, atol=0)
    assert done.per_gib > 0 and "per GiB" in str(done)
    assert not nn.regions(done.remove())


class Llama(torch.nn.Module):
    """Blocks that are handed the same rotary tables."""

    def __init__(self, dtype):
        super().__init__()
        self.layers = torch.nn.ModuleList(LlamaBlock(64, 4, 2, 128) for _ in range(2))
        angles = torch.randn(32, 8)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x.float().square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_blocks_that_share_tables_peak_as_planned():
    """A plan may keep the wide copy of a block's input in place of the input, which is gone then."""
    model, x = Llama(torch.bfloat16), torch.randn(2, 32, 64, dtype=torch.bfloat16)
    plain = remat.fit(model, x, peak="1GiB")
    held = plain.held.bytes
    with pytest.raises(RematError) as error:
        remat.fit(model, x, peak=held + 1)
    found = re.search(r"Write peak=(\d+)", str(error.value))
    assert found is not None
    lowest = int(found[1])
    for limit in (lowest, (lowest + plain.peak_bytes) // 2):
        done = remat.fit(model, x, peak=limit, cost="flops")
        peak = measured(model, x)
        assert done.applied and peak == pytest.approx(done.peak_bytes - held, rel=0.001)
        model.zero_grad(set_to_none=True)


@pytest.mark.slow
def test_no_ready_policy_everywhere_is_modelled_cheaper_at_its_own_peak():
    model, tokens = example()
    held = held_by(model, (tokens,), None).bytes
    nn.apply(model, layers="layers.*", policy=checkpoint_policy(budget=1.0))
    step = step_of(model, (tokens,), {}, wanted=plans_by_budget, device="h100")
    nn.remove(model)
    priced = cost_model("roofline", "h100")
    for name, policy in BUILT_IN_POLICIES.items():
        alone = Portfolio(step, priced, {name: policy}).uniform()[name]
        limit = -(-alone.peak * 101 // 100) + held  # one part in 100 is left free
        done = remat.fit(model, tokens, peak=limit, cost="roofline", device="h100")
        assert done.peak_bytes <= limit and done.cost <= alone.cost, name
        done.remove()


@pytest.mark.slow
def test_it_plans_for_other_calls_too():
    """Another length, another mode, no gradients: the blocks do what they do without."""
    model, tokens = example()
    plain = remat.fit(model, tokens, peak="1GiB")
    shorter = tokens[:2, :32]
    expected = gradients(model, shorter)
    model.zero_grad(set_to_none=True)
    held = plain.held.bytes
    remat.fit(model, tokens, peak=int(held + 0.6 * (plain.plain_bytes - held)))
    torch.testing.assert_close(gradients(model, shorter), expected, rtol=0, atol=0)
    model.eval()
    torch.testing.assert_close(gradients(model, shorter), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert model(tokens).isfinite()


@pytest.mark.slow
def test_the_loss_may_be_a_function_of_the_result():
    """The model's own loss, or one of its features: what is differentiated is planned."""
    model, tokens = example()
    plain = remat.fit(model, tokens, peak="1GiB")
    same = remat.fit(model, tokens, peak="1GiB", loss=lambda out: out * 2)
    assert same.plain_bytes == pytest.approx(plain.plain_bytes, rel=0.01)
    features = torch.nn.Sequential(*[Model().layers[0] for _ in range(3)])
    x = torch.randn(8, 64, 64, requires_grad=True)
    summed = remat.fit(features, x, peak="1GiB", loss=lambda out: out.square().sum())
    half = remat.fit(features, x, peak="1GiB", loss=lambda out: out[:, :1].sum())
    assert half.plain_bytes <= summed.plain_bytes
    assert remat.fit(features, x, peak="1GiB").plain_bytes == pytest.approx(summed.plain_bytes, rel=0.1)


@pytest.mark.slow
def test_what_is_held_and_what_is_said_of_a_peak_below():
    model, tokens = example()
    size = sum(p.nbytes for p in model.parameters())
    held = held_by(model, (tokens,), torch.optim.AdamW(model.parameters()))
    assert held.parameters == size and held.inputs == tokens.nbytes and held.gradients == 0
    assert 2 * size <= held.optimizer <= 2 * size + 8 * len([*model.parameters()])
    assert held_by(model, (), torch.optim.SGD(model.parameters())).optimizer == 0
    assert held_by(model, (), torch.optim.SGD(model.parameters(), momentum=0.9)).optimizer == size
    with pytest.raises(RematError, match=r"below what lives throughout.*parameters .*optimizer") as said:
        remat.fit(model, tokens, peak=size, optimizer="adamw")
    written = re.search(r"write peak=(\d+)", str(said.value))
    assert written is not None
    nearest = int(written[1])
    assert remat.fit(model, tokens, peak=nearest, optimizer="adamw").applied
    remat.remove(model)
    with pytest.raises(RematError, match="cannot be met"):
        remat.fit(model, tokens, peak=nearest - 1, optimizer="adamw")
    with pytest.raises(RematError, match=r"lowest found is [0-9,]+ bytes.*Held throughout: parameters"):
        remat.fit(model, tokens, peak=size + 2**20)
    assert not nn.regions(model)


def test_regions_that_were_there_are_the_blocks_and_come_back():
    model, tokens = example()
    nn.apply(model, layers=["layers.1", "layers.2"], policy=remat.save_matmuls)
    assert list(listed(model)) == [["layers.1", "layers.2"]]
    with pytest.raises(RematError, match="cannot be met"):
        remat.fit(model, tokens, peak=sum(p.nbytes for p in model.parameters()) + 2**20)
    assert nn.regions(model) == ["layers.1", "layers.2"]
    settings = nn.settings_of(model.layers[1])
    assert settings is not None and settings["policy"] is remat.save_matmuls


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, x: remat.fit(m.requires_grad_(False), x, peak="1GiB"), "has a gradient"),
        (lambda m, x: torch.inference_mode()(lambda: remat.fit(m, x, peak="1GiB"))(), "inference_mode"),
        (lambda m, x: remat.fit(m, x, peak="20 apples"), "not a peak"),
        (lambda m, x: remat.fit(m, x, peak="1GiB", optimizer="lamb"), "knows no such optimizer"),
        (lambda m, x: remat.fit(m, x, peak="1GiB", layers="*.nowhere.*"), "no submodule of Model fits"),
        (lambda m, x: remat.fit(m, x, headroom="900TiB"), "leaves nothing"),
        (lambda m, x: remat.fit(m, x, peak="1GiB", loss=lambda out: None), "loss gave NoneType"),
        (lambda m, x: remat.fit(m, x, peak="1GiB", loss=lambda out: 3.0), "loss gave float"),
        (
            lambda m, x: remat.fit(m, x, peak="1GiB", loss=lambda out: out.detach().sum()),
            "loss gave a tensor without a gradient",
        ),
    ],
)
def test_what_cannot_be_done_is_said(call, said):
    model, tokens = example()
    with pytest.raises(RematError, match=said):
        call(model, tokens)
    assert not nn.regions(model)


def test_the_blocks_of_a_model_of_lists():
    class Stage(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2) for _ in range(2)])

    model = torch.nn.Module()
    model.stages = torch.nn.ModuleList([torch.nn.ModuleList([Stage()]), torch.nn.ModuleList([Stage()])])
    model.head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    assert list(listed(model)) == [
        ["stages.0.0.blocks", "stages.1.0.blocks"],
        [f"stages.{k}.0.blocks.{j}" for k in range(2) for j in range(2)],
    ]


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRUCell, torch.nn.RNN])
def test_a_module_of_several_matrices_is_a_block(kind):
    """It has no modules inside. One matrix, and numbers for each channel, are no block."""
    model = torch.nn.Module()
    model.cells = torch.nn.ModuleList(kind(8, 8) for _ in range(2))
    model.heads = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
    model.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))
    assert list(listed(model)) == [["cells.0", "cells.1"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("compiled", ["whole", "in place", "blocks"])
def test_a_compiled_model_is_planned_as_it_is_written(compiled):
    model, tokens = example()
    expected, held = gradients(model, tokens), held_by(model, (tokens,), None).bytes
    model.zero_grad(set_to_none=True)
    fitted: torch.nn.Module = model
    if compiled == "whole":
        fitted = torch.compile(model, backend="aot_eager")  # pyright: ignore[reportAssignmentType]
    for module in {"whole": [], "in place": [model], "blocks": model.layers}[compiled]:
        module.compile(backend="aot_eager")
    plain = remat.fit(fitted, tokens, peak="1GiB")
    done = remat.fit(fitted, tokens, peak=int(held + 0.75 * (plain.plain_bytes - held)))
    assert done.applied and len(nn.regions(model)) == len(done.applied)
    torch.testing.assert_close(gradients(fitted, tokens), expected)


def test_a_policy_that_keeps_all_is_planned_as_no_region():
    """It makes none. The kernel of a GRU writes beside saved values, and does so once."""
    cells = [torch.nn.GRU(8, 8, batch_first=True) for _ in range(2)]
    blocks = [remat.remat(cell, policy=remat.save_everything) for cell in cells]

    def loss(x):
        return blocks[1](blocks[0](x)[0])[0].square().mean()

    step = step_of(loss, (torch.randn(4, 3, 8),), {}, wanted=lambda policy: True)
    portfolio = Portfolio(step, cost_model("flops", None), BUILT_IN_POLICIES)
    uniform, plain = portfolio.uniform(), portfolio.plain()
    assert uniform["save_everything"].peak == plain.peak < uniform["save_matmuls"].peak
    assert plain.cost == uniform["save_everything"].cost == 0 < uniform["save_matmuls"].cost


class Biased(torch.nn.Module):
    """It reads a buffer, which a plan that keeps the softmax need not hold."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)
        self.register_buffer("table", torch.zeros(24, 32))

    def forward(self, x):
        return x * self.down(torch.nn.functional.gelu(self.up((x + self.table).softmax(-1))))


def test_what_cannot_be_made_anew_stays_until_a_backward_ends():
    policy = remat.save_ops(torch.ops.aten._softmax, torch.ops.aten.gelu)
    block, x = Biased(), torch.randn(4, 24, 32)
    nn.apply_to(block, policy=policy)
    step = step_of(lambda x: block(x).square().mean(), (x,), {}, wanted=lambda policy: True)
    planned = Portfolio(step, cost_model("flops", None), {"mine": policy}).uniform()["mine"]
    taken = trace_memory(lambda _: block(x).square().mean().backward()).peak
    assert planned.peak == pytest.approx(taken, rel=0.01)


# -- budgets, functions and stages ------------------------------------------------------------------------


@pytest.mark.parametrize("budget", sparse([0.4, "900KiB", "free"]))
def test_blocks_of_a_module_share_a_budget(budget):
    model, tokens = example()
    wanted = gradients(model, tokens)
    done = remat.fit(model, tokens, budget=budget)
    assert done.applied and done.by_budget and 0 < done.kept_bytes <= done.limit < done.default_bytes
    assert "kept of" in str(done) and "(budget " in str(done)
    torch.testing.assert_close(gradients(model, tokens), wanted)
    planned = remat.saved_residuals(model, tokens).kept_bytes
    done.remove()
    assert planned < remat.saved_residuals(model, tokens).kept_bytes and not remat.regions(model)


def test_a_budget_of_everything_needs_no_regions():
    model, tokens = example()
    done = remat.fit(model, tokens, budget=1.0)
    assert done.applied == () and done.cost == 0 and done.kept_bytes == done.default_bytes


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (lambda m: m, {}, "one of them"),
        (lambda m: m, {"peak": "1GiB", "budget": 0.5}, "one of them"),
        (lambda m: m, {"budget": 0.5, "link": "pcie5"}, r"link=...\) is not for a module"),
        (lambda m: m, {"memory": "1GiB"}, "is for mesh"),
        (lambda m: lambda x: m(x), {"peak": "1GiB", "layers": "*"}, r"layers=...\) is not for a function"),
        (lambda m: lambda x: m(x), {"budget": 0.5, "measure": True}, r"measure=...\) is not for a function"),
        (lambda m: [m, m], {"budget": 0.5}, r"budget=...\) is not for a list of stages"),
        (lambda m: [m, 3], {"peak": "1GiB"}, "must be a function or a module, got 3"),
        (lambda m: [], {"peak": "1GiB"}, "no stages"),
        (lambda m: [m], {}, "takes peak"),
    ],
)
def test_options_that_are_not_for_what_is_given(given, options, said):
    model, tokens = example()
    with pytest.raises(RematError, match=said):
        remat.fit(given(model), tokens, **options)
    assert not remat.regions(model)


@pytest.mark.parametrize(("device", "rel"), sparse([pytest.param("cpu", 0.001), pytest.param("h100", 0.15)]))
def test_attention_inside_of_a_module_is_one_kernel_where_tensors_have_no_data(device, rel):
    """Torch's function of `nn.MultiheadAttention` is one to modes, which saw nothing of what it calls."""
    model, tokens = Model(2, 16), torch.randint(100, (2, 64))
    with torch.device("meta"):
        bare = Model(2, 16)
    here = remat.fit(model, tokens, peak="1TiB", device="cpu").default_bytes
    there = remat.fit(bare, tokens.to("meta"), peak="1TiB", device=device).default_bytes
    assert there == pytest.approx(here, rel=rel)  # (a GPU's kernel lays its result out otherwise)
