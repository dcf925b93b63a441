"""Budgets on functions that cannot be looked at, or that run other ops from call to call."""

import functools
import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from remat import checkpoint_policy, fit, remat
from remat.plan import BudgetPolicy, pareto
from remat.policies import FromCallable
from remat.transforms import RematError
from tests.plan.inside import Graph, _passed_over, learned, listen, record
from tests.plan.models import GPTBlock

X = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
W = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
BUDGET = checkpoint_policy(budget=0.5)


pytestmark = pytest.mark.usefixtures("traced")  # no function of another test is known


def step(fn, x=X):
    out = fn(x)
    return [out.detach(), *torch.autograd.grad(out.sum(), (x, W), allow_unused=True)]


def item(x):
    return torch.sin(torch.tanh(x @ W) * x.mean().item()).exp()


def branch(x):
    h = torch.tanh(x @ W)
    return h.sin().exp() if h.sum() > 0 else h.cos().exp()


def numpy(x):
    scale = torch.from_numpy(np.exp(x.detach().numpy()))
    return torch.sin(torch.tanh(x @ W) * scale).exp()


def tolist(x):
    return torch.sin(torch.tanh(x @ W) * x[0].tolist()[0]).exp()


def nonzero(x):
    rows = torch.nonzero(x[:, 0] < 9)[:, 0]
    return torch.sin(torch.tanh(x @ W)[rows]).exp()


def mask(x):
    return torch.sin(torch.tanh(x @ W)[x > 0]).exp()


def cond(x):
    h = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    return torch.tanh(h @ W).exp()


class Sampled(torch.autograd.Function):
    """Looks at data, in Python."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = float(x.abs().max())
        return x * ctx.scale

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale


def function(x):
    return torch.sin(torch.tanh(Sampled.apply(x) @ W)).exp()


NEED_DATA = [item, branch, numpy, tolist, nonzero, mask, cond, function]


@pytest.mark.parametrize("fn", NEED_DATA)
def test_a_function_that_needs_data_is_right_with_one_warning(fn):
    region = remat(fn, policy=BUDGET)
    plain = step(fn)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            torch.testing.assert_close(step(region), plain, rtol=0, atol=0)
    said = [w for w in said if "cannot be planned" in str(w.message)]
    assert len(said) == 1 and said[0].filename == __file__


def kept(fn):
    with listen() as heard:
        step(fn)
    held = (X.untyped_storage().data_ptr(), W.untyped_storage().data_ptr())
    sizes = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage().nbytes() for k in heard}
    return sum(size for at, size in sizes.items() if at not in held)


def chain(x):
    h = torch.tanh(x @ W)
    for _ in range(4):
        h = torch.sin(h) * 1.1
    return h.exp()


def needy_chain(x):
    return chain(x) * x.sum().item()


@pytest.mark.filterwarnings("ignore:.*cannot be planned")
def test_what_a_call_has_run_is_planned_for_the_next_one():
    region = remat(needy_chain, policy=BUDGET)
    first, second, third = (kept(region) for _ in range(3))
    assert first == 0 < second == third == kept(remat(chain, policy=BUDGET))


def test_a_graph_that_was_learned_is_the_one_that_was_looked_at():
    block, x = GPTBlock(32, 4, 0.2), torch.randn(2, 8, 32, requires_grad=True)
    tapes = []
    policy = Tapes(tapes)
    remat(block, policy=policy)(x)
    mine, theirs = Graph(learned(tapes[0])), Graph(record(block, (x,)))
    assert mine.names == theirs.names and mine.kept_by_default == theirs.kept_by_default
    assert mine.flops == theirs.flops and mine.draws == theirs.draws
    for budget in (0, 0.3, 0.6):
        plans = [BudgetPolicy(budget)._plan(graph, block) for graph in (mine, theirs)]
        assert plans[0].kept_bytes == plans[1].kept_bytes and plans[0].cost == pytest.approx(plans[1].cost)


def writes(x):
    h = torch.tanh(x @ W)
    h.mul_(2)
    a, b = h[:2], h[2:]
    b += 1
    torch._foreach_add_([a], 1.0)  # pyright: ignore[reportPrivateImportUsage]
    return torch.sin(h * 2).exp()


def test_writes_and_views_are_learned_as_they_are_seen():
    tapes = []
    remat(writes, policy=Tapes(tapes))(X)
    mine, theirs = Graph(learned(tapes[0])), Graph(record(writes, (X,)))
    # (A view of what was written to is made anew by an op on fakes.)
    names = [[name for name in graph.names if not _passed_over(name)] for graph in (mine, theirs)]
    assert names[0] == names[1] and mine.kept_by_default == theirs.kept_by_default
    plans = [BudgetPolicy(0.5)._plan(graph, writes) for graph in (mine, theirs)]
    assert plans[0].kept_bytes == plans[1].kept_bytes


class Tapes(FromCallable):
    tapes: list

    def __init__(self, tapes):
        super().__init__(lambda info: False, True)
        object.__setattr__(self, "tapes", tapes)

    def finished(self, tape):
        self.tapes.append(tape)


class Paths(nn.Module):
    """Takes another path by something that no key sees."""

    def __init__(self, period):
        super().__init__()
        self.__dict__["hidden"] = (Box(), period)

    def forward(self, x):
        box, period = self.__dict__["hidden"]
        return (chain(x.cos()) if box.calls % period == 0 else chain(x)).square()


class Box:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


@pytest.mark.parametrize("period", [2, 3])
@pytest.mark.filterwarnings("error")
def test_a_path_that_changes_from_call_to_call_is_planned_once_and_silently(period):
    plain, module = Paths(period), Paths(period)
    region = remat(module, policy=BUDGET)
    for call in range(7):
        for each in (plain, module):
            each.__dict__["hidden"][0].calls = call + 1
        torch.testing.assert_close(step(region), step(plain), rtol=0, atol=0)
    assert kept(region) > 0 < kept(region)


def test_one_warning_where_every_call_takes_another_path(recwarn):
    calls = Box()

    def fn(x):
        for _ in range(calls.calls):
            x = torch.sin(x @ W)
        return x

    module = nn.Module()
    module.__dict__["hidden"] = (calls,)
    region = remat(fn, policy=BUDGET)
    for count in range(11):
        calls.calls = count + 1
        found = step(region)
        torch.testing.assert_close(found, step(fn), rtol=0, atol=0)
    said = [w for w in recwarn if "other ops at nearly every call" in str(w.message)]
    assert len(said) <= 1


class Counting(nn.Module):
    """Has a counter: a number of which no key can know that it means nothing."""

    def __init__(self):
        super().__init__()
        self.calls, self.width = 0, 4

    def forward(self, x):
        self.calls += 1
        return chain(x.repeat(1, self.width // 4)[:, :4] * 2)


def test_a_counter_does_not_have_looks_fail_at_every_call(recwarn):
    class State:
        calls = 0

    state = State()

    def fn(x):
        state.calls += 1
        return chain(x) if x.sum().item() else x

    region = remat(fn, policy=BUDGET)
    for _ in range(8):
        torch.testing.assert_close(step(region), step(chain))
    assert state.calls == 8 + 3 and len(recwarn) == 1


def test_sizes_that_no_key_knows_keep_to_the_budget():
    """A number that is not a mere counter: what is planned as small turns out to be large."""

    def fn(x):
        return torch.sin(torch.tanh(x.repeat(1, module.width // 4)).square().exp()).sum(1)

    module = Counting()
    region = remat(lambda x: fn(x) * (1 + 0 * module.calls), policy=checkpoint_policy(budget="400B"))
    for k in range(8):
        module.calls, module.width = k, 4 if k < 6 else 400
        assert kept(region) <= 400
    torch.testing.assert_close(step(region)[:2], step(fn)[:2])


@functools.lru_cache
def causal(n):
    return torch.tril(torch.ones(n, n, dtype=torch.float64))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.tril(torch.ones(4, 4, dtype=torch.float64))
        return chain(x * self.mask)


FILLED = {}


def by_dict(x):
    if "mask" not in FILLED:
        FILLED["mask"] = torch.tril(torch.ones(4, 4, dtype=torch.float64))
    return chain(x * FILLED["mask"])


@pytest.mark.parametrize("make", [Lazy, lambda: by_dict, lambda: lambda x: chain(x * causal(4))])
@pytest.mark.filterwarnings("error")
def test_what_is_filled_in_the_first_call_is_planned_without_a_word(make):
    causal.cache_clear(), FILLED.clear()
    region, plain = remat(make(), policy=BUDGET), make()
    found = [step(region) for _ in range(4)]
    expected = step(plain)
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))
    least = BudgetPolicy(0.5).plan(lambda x: chain(x * 1), X).kept_bytes
    assert 0 < kept(region) <= least + X.nbytes


@pytest.mark.filterwarnings("error")
def test_an_iterator_is_not_used_up_by_a_plan():
    noise = iter([torch.full((4, 4), float(k), dtype=torch.float64) for k in range(9)])
    count = itertools.count()
    stream = (k for k in range(9))

    def fn(x):
        return chain(x * next(noise)) * (1 + next(count)) * (1 + next(stream))

    region = remat(fn, policy=BUDGET)
    for k in range(4):
        expected = chain(X * k) * (1 + k) ** 2
        torch.testing.assert_close(region(X), expected)


def test_who_asks_for_a_plan_of_what_needs_data_is_told_so():
    with pytest.raises(RematError, match="cannot be planned"):
        BUDGET.plan(numpy, X)
    with pytest.raises(RematError, match="cannot be planned"):
        pareto(numpy, X)
    with pytest.raises(RematError, match="cannot be planned"):
        fit(lambda x: remat(chain, policy=BUDGET)(numpy(x)).sum(), X, budget=0.5)


def test_a_warning_about_a_budget_is_at_the_users_line():
    def wide(x):
        return torch.sin(x @ W).exp()

    with pytest.warns(UserWarning, match="below the least") as said:
        BudgetPolicy(0.001).plan(wide, X)
        remat(lambda x: wide(x).sin(), policy=checkpoint_policy(budget=0.001))(X)
    assert [w.filename for w in said] == [__file__] * 2


@pytest.mark.filterwarnings("ignore:.*cannot be planned")
@pytest.mark.parametrize("fn", [item, branch])
def test_under_torch_func_a_function_that_needs_data_recomputes(fn):
    expected = torch.func.grad(lambda x: fn(x).sum())(X)
    for _ in range(2):
        found = torch.func.grad(lambda x: remat(fn, policy=BUDGET)(x).sum())(X)
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*cannot be planned")
def test_layers_of_one_code_that_cannot_be_looked_at_each_learn_their_plan():
    """The second layer's first call is no repetition of the first one's, though their ops are the same."""

    def layer(linear):
        return lambda x: torch.sin(torch.tanh(linear(x)) * x.mean().item()).exp()

    layers = [layer(torch.nn.Linear(4, 4).double()) for _ in range(3)]
    for fn in layers:
        remat(fn, policy=BUDGET)(X).sum()
    for fn in layers:
        (plan,) = BUDGET.bind(fn, (X,), {}).plans  # pyright: ignore[reportAttributeAccessIssue]
        assert plan.saved


def test_a_share_that_no_plan_of_a_model_can_meet_warns():
    block = remat(lambda x: torch.sin(x @ W).exp(), policy=checkpoint_policy(budget=0.5))
    with pytest.warns(UserWarning, match="below the least these regions can keep"):
        fit(lambda x: block(block(x)).sum(), X, budget=0.0125)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(lambda x: block(block(x)).sum(), X, budget=0.0)
        fit(lambda x: block(block(x)).sum(), X, budget=0.9)


def test_ten_blocks_of_one_budget_warn_once():
    blocks = [
        remat(lambda x, k=k: torch.sin(x @ W).exp() * k, policy=checkpoint_policy(budget=0.002))
        for k in range(1, 11)
    ]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, block in zip([torch.randn(n, 4, dtype=W.dtype) for n in range(1, 11)], blocks, strict=True):
            block(x)
    assert len(said) == 1


def test_a_frontier_of_regions_is_not_said_to_be_without_remat():
    block = remat(lambda x: torch.sin(x @ W).exp())
    said = str(pareto(lambda x: block(block(x)).sum(), X, points=2, torch_solvers=()))
    assert "kept without a plan" in said and "without remat" not in said
