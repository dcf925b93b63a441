"""Joint graphs on fake tensors, and the exact figures that plans on them must reach."""

import pytest
import torch

from remat import RematError, register_op
from remat.plan import BudgetPolicy, Flops, Plan
from tests.helpers import Watched
from tests.plan.inside import Bound, Graph, Repeats, fake_mode, least, record, solve
from tests.plan.models import GPTBlock, LlamaBlock


@pytest.fixture(scope="module")
def gpt():
    """The GPT block at full size, and a token's worth of hidden state; nothing is allocated."""
    width, length = 4096, 2048
    with fake_mode([]):
        block = _bfloat16(lambda: GPTBlock(width, 32))
        x = torch.empty(1, length, width, dtype=torch.bfloat16, requires_grad=True) * 1
    return Graph(record(block, (x,))), length * width


def _bfloat16(make):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def test_forward_lists_what_eager_dispatches():
    """Position by position the same ops as an eager run with data: a plan's positions mean the same there."""
    seen: list[str] = []
    for block in (GPTBlock(32, 4), GPTBlock(32, 4, dropout=0.1)):
        x = torch.randn(2, 8, 32, requires_grad=True)
        seen.clear()
        with Watched(lambda op, *_: seen.append(str(op))):
            block(x)
        eager = [name for name in seen if name != "aten.detach.default"]
        assert list(Graph(record(block, (x,))).names) == eager


def test_gpt_block_reaches_the_known_minimum(gpt):
    """Bytes per token and hidden unit: 32.03 by default, 20.03 with no FLOPs run again, 2 at the least."""
    graph, unit = gpt
    assert round(graph.kept_by_default / unit, 2) == 32.03
    free = least(graph.problem(Flops(), keep_heavy=True))
    assert round(free.bytes / unit, 2) == 20.03
    assert sum(graph.flops[op] for op in free.replayed) == 0
    assert least(graph.problem(Flops())).bytes / unit == 2.0


@pytest.mark.parametrize("kept", [2, 4, 8, 16, 18])
def test_gpt_frontier_is_the_straight_line(gpt, kept):
    """replay% = 2.53 % * (20 - M) / 2 of forward and backward."""
    graph, unit = gpt
    solution = solve(graph.problem(Flops()), kept * unit).solution
    replay = sum(graph.flops[op] for op in solution.replayed) / graph.step_flops
    assert solution.bytes == kept * unit
    assert replay == pytest.approx(0.02532 * (20 - kept) / 2, rel=1e-3)


def test_llama_block_reaches_the_known_minimum():
    width, length = 4096, 2048
    with fake_mode([]):
        block = _bfloat16(lambda: LlamaBlock(width, 32, 8, 14336))
        x = torch.empty(1, length, width, dtype=torch.bfloat16, requires_grad=True) * 1
        cos, sin = (torch.empty(length, 64, dtype=torch.bfloat16) for _ in range(2))
    graph = Graph(record(block, (x, cos, sin)))
    free = least(graph.problem(Flops(), keep_heavy=True))
    assert round(free.bytes / (length * width), 2) == 23.09
    assert round(least(graph.problem(Flops())).bytes / (length * width), 2) == 2.06


def test_a_draw_that_runs_again_takes_every_earlier_draw_along():
    """Otherwise the generator would stand elsewhere, and the masks would be others."""
    graph = Graph(record(GPTBlock(32, 4, dropout=0.5), (torch.randn(2, 8, 32),)))
    assert [graph.names[k] for k in graph.draws] == ["aten.bernoulli_.float"] * 2
    for budget in range(2048, graph.kept_by_default, 1024):
        replayed = solve(graph.problem(Flops()), budget).solution.replayed
        first, second = (k in replayed for k in graph.draws)
        assert first or not second
    assert least(graph.problem(Flops())).bytes == 2 * 8 * 32 * 4


def test_attention_without_dropout_draws_nothing():
    assert Graph(record(GPTBlock(32, 4), (torch.randn(2, 8, 32),))).draws == ()


def test_a_value_written_in_place_is_kept_as_it_was_before():
    def fn(x):
        return (x @ x).relu_().sin()

    x = torch.randn(8, 8, requires_grad=True)
    problem = Graph(record(fn, (x,))).problem(Flops())
    assert [problem.size[k] < float("inf") for k in range(3)] == [True, False, True]
    solution = least(Graph(record(fn, (x,))).problem(Flops(), keep_heavy=True))
    assert solution.saved == {0, 3} and solution.replayed == {1}


def test_views_keep_their_base():
    """A saved slice of a split pins all of it, and is paid for once."""

    def fn(x):
        a, b = torch.tanh(x).split(4, -1)
        return a.exp() * b.sin()

    graph = Graph(record(fn, (torch.randn(3, 8, requires_grad=True),)))
    # tanh's result with both of its slices, exp, sin; x itself is not needed.
    assert graph.kept_by_default == 96 + 48 + 48
    assert all(
        k.op != "aten.split.Tensor"
        for k in BudgetPolicy(1.0).plan(fn, torch.ones(3, 8).requires_grad_()).kept
    )


def test_captured_tensors_and_parameters_are_free():
    weight = torch.randn(8, 8, requires_grad=True)

    def captured(x):
        return torch.tanh(x @ weight)

    def passed(params, x):
        return torch.tanh(x @ params["w"])

    x = torch.randn(4, 8)
    assert Graph(record(captured, (x,))).kept_by_default == 2 * 4 * 8 * 4
    assert Graph(record(passed, ({"w": weight}, x))).kept_by_default == 2 * 4 * 8 * 4


def test_functions_that_look_at_data_are_named():
    def fn(x):
        return x * x.sum().item()

    with pytest.raises(
        RematError, match=r"fn cannot be planned: aten._local_scalar_dense.default at .*test_graph.py"
    ):
        record(fn, (torch.ones(2, requires_grad=True),))


def test_custom_op_costs():
    @torch.library.custom_op("remat_test::slow", mutates_args=())
    def slow(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    slow.register_fake(lambda x: torch.empty_like(x))
    slow.register_autograd(lambda ctx, g: g, setup_context=lambda ctx, inputs, output: None)

    def fn(x):
        return slow(x).tanh().exp()

    x = torch.ones(16, requires_grad=True)
    with pytest.warns(UserWarning, match="cost of remat_test::slow is not known"):
        assert Graph(record(fn, (x,))).flops[0] == 1024 * 64
    register_op(slow, flops=lambda shape: 7 * shape[0])
    assert Graph(record(fn, (x,))).flops[0] == 7 * 16


def test_plan_is_a_value():
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32)
    plan = BudgetPolicy(0.5).plan(block, x)
    assert plan.kept_bytes <= plan.budget <= plan.default_bytes / 2 + 1
    assert plan == Plan.from_json(plan.to_json()) and hash(plan) == hash(Plan.from_json(plan.to_json()))
    assert plan.gap <= 0.005 and plan.lower_bound <= plan.cost
    assert "Plan for GPTBlock" in str(plan) and "models.py:" in str(plan)
    tight = BudgetPolicy(0.3).plan(block, x)
    assert plan.diff(plan) == "" and "this plan" in plan.diff(tight)
    with pytest.raises(RematError, match="not a plan"):
        Plan.from_json("{}")


def test_plan_for_another_function_names_the_first_difference():
    x = torch.randn(2, 8, 32)
    plan = BudgetPolicy(0.5).plan(GPTBlock(32, 4), x)
    with pytest.raises(RematError, match="op 19 is aten.empty_like.default, planned was aten.add.Tensor"):
        plan.bind(GPTBlock(32, 4, dropout=0.1), (x,), {})
    assert plan.bind(GPTBlock(32, 4), (x,), {}) == Bound((plan,))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1.5, "share from 0.0 to 1.0"),
        (-1, "cannot be negative"),
        (True, "share, bytes or a text"),
        ("3 parsecs", "is not a budget"),
        (1, "At least 2,048 bytes must be kept"),
        ("1KiB", "At least 2,048 bytes must be kept"),
    ],
)
def test_bad_budgets(budget, message):
    with pytest.raises(RematError, match=message):
        BudgetPolicy(budget).plan(GPTBlock(32, 4), torch.randn(2, 8, 32))


def test_a_share_below_the_least_warns_and_plans_the_least():
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32)
    with pytest.warns(UserWarning, match="least this region can keep, 2,048 bytes"):
        assert BudgetPolicy(0.001).plan(block, x).kept_bytes == 2048
    assert BudgetPolicy(0).plan(block, x).kept_bytes == 2048


def test_without_scipy_a_plan_is_as_good_or_says_how_far_off_it_may_be(monkeypatch, told):
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32)
    exact = BudgetPolicy(0.55).plan(block, x)
    monkeypatch.setattr("remat.plan.solve.milp.available", lambda: False)
    listed = BudgetPolicy(0.55, time_limit=2.0).plan(block, x)
    assert listed.solver == "front" and listed.cost == pytest.approx(exact.cost) and not told
    monkeypatch.setattr("remat.plan.solve.portfolio.front", lambda *_: [])
    plan = BudgetPolicy(0.55, time_limit=3.0).plan(block, x)
    assert plan.solver == "hull" and plan.kept_bytes <= plan.budget
    assert plan.lower_bound <= listed.cost < plan.cost and "gap" in str(plan)
    assert [f"at most {100 * plan.gap:.1f} % of what it recomputes" in line for line in told] == [True]


def _repeating(x, n):
    """Ops that look like earlier ones but for the type of a number, a dtype, strides or an alias."""
    for _ in range(3):
        x = (x + n) * 1 - (n + 1.0) * (n + 1) + x.sum(0) + x.sum(0, keepdim=True) + x.t().contiguous()
        wide = torch.cat([x, x.t()]).mul(2).add_(1)
        x = x + wide[2 : 2 + len(x)].relu_() + torch.view_as_complex(torch.stack([x, x], 2)).conj().imag
        x = (
            x.bfloat16().float()
            + x.double().float().sort()[0].detach()
            + wide.chunk(2)[1].expand(2, -1, -1)[0]
        )
    return x, x.abs().max(0)[1] + n


def test_a_record_is_that_of_torchs_own_fake_tensors(monkeypatch):
    """What has run before is not asked of torch again, and comes out the same."""
    args = torch.randn(6, 6, requires_grad=True), torch.tensor(3)
    quick = record(_repeating, args)
    asked = []

    def run(self, func, args, kwargs):
        asked.append(func)
        return func(*args, **kwargs)

    monkeypatch.setattr(Repeats, "run", run)
    plain = record(_repeating, args)
    assert asked
    assert plain == quick
    assert (plain.held, plain.ends) == (quick.held, quick.ends)
