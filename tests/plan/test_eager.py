"""Plans carried out: what is kept is what was planned, and gradients are those without remat."""

import gc
import warnings
from functools import partial

import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from remat import RematError, checkpoint_policy, fit, remat, save_nothing, saved_residuals, scan_remat
from remat.plan import BudgetPolicy, Flops, Plan
from tests.helpers import OpCounter, crossed, same, sparse
from tests.plan.models import GPTBlock


def kept_bytes(fn, x):
    """Bytes that regions keep, parameters and generators' states aside."""
    return sum(r.bytes for r in saved_residuals(fn, x * 1) if r.why not in ("captured", "random"))


def gradients(fn, module, x):
    """Gradients of a loss, with the random numbers fixed; x is no leaf, as inside a network."""
    torch.manual_seed(0)
    module.zero_grad()
    x.grad = None
    fn(x * 1).square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


class Rough(Flops):
    """FLOPs that tell a ready policy's plan from no better one."""

    accuracy = 1.0


@pytest.mark.parametrize(
    ("budget", "dropout", "cost"),
    [
        (0, 0.3, "roofline"),
        (0.1, 0.3, Rough()),
        (0.3, 0.0, "roofline"),
        (0.5, 0.3, "roofline"),
        (0.7, 0.3, Rough()),
        (0.9, 0.0, "roofline"),
        (1.0, 0.3, "roofline"),
        ("free", 0.3, "roofline"),
    ],
)
def test_kept_bytes_are_those_planned_and_gradients_right(budget, dropout, cost):
    torch.manual_seed(1)
    block, x = GPTBlock(32, 4, dropout), torch.randn(2, 8, 32, requires_grad=True)
    policy = BudgetPolicy(budget, cost)
    plan = policy.plan(block, x * 1)
    expected = gradients(block, block, x)
    actual = gradients(remat(block, policy=policy), block, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    kept = kept_bytes(remat(block, policy=policy), x)
    assert kept <= plan.budget
    assert kept == plan.kept_bytes
    if not isinstance(budget, str):
        assert kept <= max(budget * plan.default_bytes, BudgetPolicy(0).plan(block, x * 1).kept_bytes)


class FlopCount(TorchDispatchMode):
    """Counts by torch's formulas; CPU attention by the one of flash attention, which torch's table lacks."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            packet = torch.ops.aten._scaled_dot_product_flash_attention
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("budget", [0, 0.3, "free"])
def test_recomputed_flops_are_those_planned(budget):
    """Counted in the backward that runs, against the backward without remat."""
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32, requires_grad=True)
    policy = BudgetPolicy(budget, cost="flops")
    plan = policy.plan(block, x * 1)
    counts = []
    for fn in (block, remat(block, policy=policy)):
        out = fn(x * 1).sum()
        with FlopCount() as counter:
            out.backward()
        counts.append(counter.total)
    assert counts[1] - counts[0] == plan.recomputed_flops


def test_plan_value_is_a_policy():
    block, x = GPTBlock(32, 4), torch.randn(2, 8, 32, requires_grad=True)
    plan = BudgetPolicy(0.5).plan(block, x * 1)
    again = Plan.from_json(plan.to_json())
    actual = gradients(remat(block, policy=again), block, x)
    assert kept_bytes(remat(block, policy=again), x) == plan.kept_bytes
    torch.testing.assert_close(actual, gradients(block, block, x))
    with pytest.raises(RematError, match="does not fit this function: op 19"):
        remat(GPTBlock(32, 4, 0.3), policy=plan)(x)


def layer(params, x):
    hidden = torch.tanh(x @ params["a"] + params["b"])
    hidden = torch.nn.functional.gelu(hidden @ params["c"])
    return (hidden.sin() @ params["d"]).exp().sum(-1)


TRANSFORMS = {
    "grad": lambda f, p, x: grad(lambda p: f(p, x).sum())(p),
    "vmap(grad)": lambda f, p, x: vmap(grad(lambda p, x: f(p, x).sum()), (None, 0))(p, x),
    "grad(vmap)": lambda f, p, x: grad(lambda p: vmap(lambda x: f(p, x))(x).sum())(p),
    "vmap": lambda f, p, x: vmap(lambda x: f(p, x))(x),
    "jvp": lambda f, p, x: jvp(lambda p: f(p, x), (p,), (p,)),
    "jacrev": lambda f, p, x: jacrev(lambda p: f(p, x))(p),
    "grad(grad)": lambda f, p, x: grad(
        lambda p: sum(g.sum() for g in grad(lambda p: f(p, x).sum())(p).values())
    )(p),
}


@pytest.mark.parametrize(("name", "budget"), crossed(TRANSFORMS, [0, 0.7, "free"]))
def test_budgets_compose_with_torch_func(name, budget):
    torch.manual_seed(2)
    params = {k: torch.randn(16, 16) * 0.3 for k in "abcd"}
    params["b"] = params["b"][0]
    x = torch.randn(5, 16)
    region = remat(layer, policy=checkpoint_policy(budget=budget))
    run = TRANSFORMS[name]
    torch.testing.assert_close(run(region, params, x), run(layer, params, x))


def of_region(region, w, x):
    return region(region(x, w), w)


def of_region_with_captured(region, w, x):
    return remat(lambda x: region(x, w))(x)


def of_scan_with_captured(region, w, x):
    return scan_remat(lambda h, _: (region(h, w), None), x, length=3)[0]


@pytest.mark.parametrize(
    ("outer", "transform"),
    crossed([of_region, of_region_with_captured, of_scan_with_captured], [grad, jacrev]),
)
def test_planned_inside_another_region(outer, transform):
    """What the outer region puts in the place of captured tensors is not asked of a plan's stand-ins."""
    w, x = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def inner(x, w):
        return torch.sin(torch.tanh(x @ w) @ w)

    def closing(w):
        region = remat(lambda x, _: inner(x, w), policy=checkpoint_policy(budget="free"))
        return remat(partial(outer, region))(w, x).sum()

    expected = transform(lambda w: outer(inner, w, x).sum())(w)
    torch.testing.assert_close(transform(closing)(w), expected)


def test_a_budget_is_as_good_inside_a_level_of_vmap():
    """Of two products one is kept, whichever transform is around the other."""
    w, x = torch.randn(4, 4), torch.randn(5, 4)
    region = remat(lambda x: torch.tanh(torch.tanh(x @ w) @ w).sin(), policy=checkpoint_policy(budget=0.5))
    for _ in range(2):
        with OpCounter() as ops:
            grad(lambda x: vmap(region)(x).sum())(x)
        assert ops.dots == 5


@pytest.mark.slow
def test_one_budget_over_the_regions_of_a_model():
    torch.manual_seed(3)
    model = torch.nn.Sequential(*[GPTBlock(32, 4, 0.1) for _ in range(3)])
    regions = [remat(block, policy=checkpoint_policy(budget=0.5)) for block in model]

    def through(x):
        for region in regions:
            x = region(x)
        return x

    x = torch.randn(2, 8, 32, requires_grad=True)
    expected = gradients(model, model, x)
    for budget in (0.1, "free", 1.0):
        planned = fit(through, x, budget=budget, cost="flops")
        torch.testing.assert_close(gradients(planned, model, x), expected, rtol=0, atol=0)
        assert len(planned.regions) == 3 and planned.gap <= 0.005
        assert kept_bytes(planned, x) == planned.kept_bytes <= planned.budget
        assert "3 regions keep" in str(planned)


@pytest.mark.parametrize("budget", sparse([0.5, 0, "free"]))
def test_nothing_outlives_a_step(budget):
    """Neither recomputed nor kept values: attention saves its own result, which must not hold itself."""
    block, x = GPTBlock(32, 4), torch.randn(3, 7, 32, requires_grad=True)
    region = remat(block, policy=checkpoint_policy(budget=budget))

    def living():
        gc.collect()
        return sum(type(o) is torch.Tensor and 3 in o.shape for o in gc.get_objects())

    gradients(region, block, x)
    before = living()
    for _ in range(3):
        gradients(region, block, x)
    assert living() == before


def test_a_layer_in_a_new_partial_at_every_call_is_planned_once(traced):
    """Transformers hand over `partial(layer.__call__, **options)`, another one at every step."""
    layer, x = Scaled(), torch.randn(4, 16, requires_grad=True)

    def run(scale):
        region = remat(partial(layer.__call__, scale=scale), policy=checkpoint_policy(budget=0.5))
        region(x * 1).sum().backward()

    for _ in range(3):
        run(2.0)
    assert len(traced) == 1
    # What it is bound to decides about the plan as any argument does.
    run(3.0)
    assert len(traced) == 2


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x, scale):
        return torch.sin(self.linear(x)) * scale


@pytest.mark.parametrize(
    ("inside", "transform"),
    crossed(["scan", "region", "planned region"], ["jacrev", "grad(vmap)", "vmap(grad)"]),
)
def test_what_torch_func_differentiates_may_be_captured(transform, inside):
    """By a function that is planned, and read there by a scan or by a region."""
    w, x = torch.randn(4, 4).double() / 2, torch.randn(3, 2, 4).double()

    def network(w, x, remat_it):
        def inner(h):
            return torch.sin(h @ w)

        def repeated(h):
            if inside == "scan":
                return scan_remat(lambda h, _: (inner(h), None), h, length=2)[0]
            policy = checkpoint_policy(budget=0.5) if inside == "planned region" else save_nothing
            return remat(inner, policy=policy)(h) if remat_it else inner(h)

        def outer(x):
            return repeated(x * w.sum(0)).cos()

        return (remat(outer, policy=checkpoint_policy(budget=0.5)) if remat_it else outer)(x).sum()

    run = {
        "jacrev": lambda f: jacrev(lambda w: f(w, x[0])[None])(w),
        "grad(vmap)": lambda f: grad(lambda w: vmap(f, (None, 0))(w, x).sum())(w),
        "vmap(grad)": lambda f: vmap(grad(f), (None, 0))(w, x),
    }[transform]
    expected = run(lambda w, x: network(w, x, False))
    torch.testing.assert_close(run(lambda w, x: network(w, x, True)), expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("transform", ["autograd", "grad", "vmap(grad)"])
def test_functions_that_use_torch_func_inside_are_planned(transform):
    """Forces: torch.func refuses hooks on saved tensors, by which a look sees what autograd keeps."""
    w, x = torch.randn(4, 4).double() / 2, torch.randn(3, 6, 4).double()

    def forces(x):
        h = torch.tanh(x @ w) @ w
        return (grad(lambda a: torch.tanh(a @ w).sum())(h) * h).sin()

    def gradients(f):
        if transform == "autograd":
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad(f(leaf).sum(), leaf)[0]
        run = grad(lambda x: f(x).sum())
        return vmap(run)(x) if transform == "vmap(grad)" else run(x)

    ours = remat(forces, policy=checkpoint_policy(budget=0.5))
    for _ in range(2):
        torch.testing.assert_close(gradients(ours), gradients(forces))
    plans = [BudgetPolicy(budget).plan(forces, x.requires_grad_()) for budget in (1.0, 0.5)]
    assert saved_residuals(forces, x).kept_bytes == 2888
    assert plans[0].default_bytes == 2888
    # Of the second one 576 are the argument: the function runs again as a whole, and reads it.
    assert [plan.kept_bytes for plan in plans] == [2888, 1160]


def test_a_budget_around_a_function_that_calls_a_compiled_module():
    """What `torch.compile` makes of a module has no `training` of its own."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
    fast = torch.compile(net, backend="aot_eager")
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)

    def gradients(f):
        return [g for _ in range(2) for g in torch.autograd.grad(f(x).sin().sum(), (x, *net.parameters()))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = gradients(remat(lambda x: fast(x), policy=checkpoint_policy(budget=0.5)))
    same(ours, gradients(net))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A budget of")
@pytest.mark.parametrize("transform", ["autograd", "grad", "compiled"])
def test_nested_budgets_leave_torchs_log_empty(transform, capfd):
    """A look inside of a look: whatever torch tries there and takes back is nobody's to read."""
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]

    def budgeted(fn):
        return remat(fn, policy=checkpoint_policy(budget=0.6))

    def inner(x):
        for layer in layers:
            x = budgeted(lambda x, layer=layer: layer(x).tanh().sin())(x)
        return x

    outer = budgeted(lambda x: budgeted(inner)(x).square().tanh())
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        if transform == "grad":
            grad(lambda x: outer(x).sum())(x)
        else:
            fn = torch.compile(outer, backend="aot_eager") if transform == "compiled" else outer
            fn(x).sum().backward()
    assert not capfd.readouterr().err
