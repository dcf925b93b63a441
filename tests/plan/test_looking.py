"""Planning looks and leaves no trace: state, caches, hooks, random numbers and autocast are as they were."""

import gc
import itertools
import random
import subprocess
import sys
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from remat import RematError, checkpoint_policy, fit, nn as remat_nn, remat, saved_residuals, scan_remat
from remat.plan import BudgetPolicy, pareto
from tests.helpers import crossed
from tests.inside import is_fake
from tests.stateful import MODULES, X, same

POLICY = BudgetPolicy(0.5)


def through(module):
    region = remat(module, policy=POLICY)
    return lambda x: region(x).sum()


LOOKS = {
    "plan": lambda module: POLICY.plan(module, X),
    "bind": lambda module: POLICY.bind(module, (X,), {}),
    "plan of a closure": lambda module: POLICY.plan(lambda x: module(x), X),
    "fit of a function": lambda module: fit(through(module), X, budget=0.5),
    "pareto": lambda module: pareto(module, X, points=2, torch_solvers=()),
    "fit of stages": lambda module: fit([module, module], X, peak="1GiB"),
    "peak": lambda module: BudgetPolicy(1.0, peak=1 << 30).plan(module, X),
}


@pytest.mark.parametrize(("look", "kind"), crossed(LOOKS, MODULES))
def test_a_look_leaves_everything_as_it_was(kind, look):
    module = kind()
    before = module.seen()
    LOOKS[look](module)
    assert same(module.seen(), before)
    left = pytree.tree_leaves(module.others())
    assert not [value for value in left if is_fake(value)]


@pytest.mark.parametrize("kind", MODULES)
def test_under_a_budget_a_step_does_what_it_does_without(kind):
    def run(policy):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        module = kind()
        fn = module if policy is None else remat(module, policy=policy)
        found = []
        for _ in range(2):
            out = fn(X)
            found += [out.detach(), *torch.autograd.grad(out.sum(), (X, module.layer.weight))]
        return found, module(X).detach()

    plain, planned = run(None), run(checkpoint_policy(budget=0.5))
    assert same(planned, plain)


def test_autocast_casts_the_same_and_remembers_no_cast_of_a_plan():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    tied = lambda x: layer(layer(x).relu()).sin()  # noqa: E731
    region = remat(tied, policy=checkpoint_policy(budget=0.5))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            out, plain = region(X), tied(X)
            assert not is_fake(out) and torch.equal(out, plain)
    gradients = torch.autograd.grad(out.sum(), (X, layer.weight))
    assert same(gradients, torch.autograd.grad(plain.sum(), (X, layer.weight)))


@pytest.mark.filterwarnings("error")
def test_autocast_inside_a_function_too():
    layer = nn.Linear(4, 4)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            x = layer(layer(x))
        with torch.autocast("cpu", enabled=False):
            return layer(x.float()).sin()

    region = remat(fn, policy=checkpoint_policy(budget=0.3))
    for _ in range(2):
        assert torch.equal(region(X), fn(X))


def test_a_hidden_cache_that_keeps_a_fake_is_named(monkeypatch):
    # In a list of all objects a tuple would be that another thread is just making: Python refuses to go on.
    monkeypatch.delattr(gc, "get_objects")

    class Opaque(dict): ...

    hidden = Opaque()
    module = types.ModuleType("logging")
    exec("held = None\ndef keep(x):\n    held['mask'] = x\n    return x", vars(module))
    module.held = hidden  # pyright: ignore[reportAttributeAccessIssue]
    fn = lambda x: module.keep(x.sin()).exp()  # noqa: E731
    with pytest.raises(RematError, match="left a tensor without data in .*'mask'"):
        POLICY.plan(fn, X)
    assert "mask" not in hidden


@pytest.fixture
def mesh():
    """Two ranks in one process: torch's fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def layered():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)])


def flat(layer, mesh):
    return FullyShardedDataParallel(layer, device_id=torch.device("cpu"), process_group=mesh.get_group())


def together(layer, mesh):
    fully_shard([layer[0], layer[2]], mesh=mesh)
    return fully_shard(layer, mesh=mesh)


SPREAD = {
    "fsdp2": lambda layer, mesh: fully_shard(layer, mesh=mesh),
    "fsdp2, two at once": together,
    "fsdp1": flat,
    "ddp": lambda layer, mesh: nn.parallel.DistributedDataParallel(layer),
}


def seen_in(model):
    """The parameters of a model, as they are."""
    return {name: (type(p), p.shape, id(p)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("how", SPREAD)
def test_calls_of_spread_modules_are_planned_as_what_they_compute(mesh, how):
    """The parameters that are gathered are no activations, and a look gathers none."""
    x = torch.ones(4, 8)
    expected = POLICY.plan(layered()[0], x)
    layer = SPREAD[how](layered()[0], mesh)
    for at in range(2):
        before = seen_in(layer)
        plan = POLICY.plan(layer.__call__, x)
        assert (plan.ops, plan.saved, plan.kept_bytes) == (expected.ops, expected.saved, expected.kept_bytes)
        assert seen_in(layer) == before
        if at == 0:
            loss = remat(layer.__call__, policy=POLICY)(x).sum()
            if how.startswith("fsdp"):  # (the fake group cannot reduce buckets)
                loss.backward()


def test_a_sharded_parameter_is_planned_as_its_part(mesh):
    def plan(x):
        weight = nn.Parameter(x + 1)
        return POLICY.plan(lambda x: torch.tanh(x * weight).exp(), x)

    plans = [plan(x) for x in (torch.ones(4, 8), distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))]
    assert len({(plan.ops, plan.saved, plan.kept_bytes, plan.peak_bytes) for plan in plans}) == 1


@pytest.mark.parametrize("around", [True, False])
def test_models_that_fsdp_has_sharded_are_planned(mesh, around):
    plain, model, x = layered(), layered(), torch.ones(4, 8)
    remat_nn.apply(plain, layers="*", policy=POLICY)
    if not around:
        remat_nn.apply(model, layers="*", policy=POLICY)
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    before = seen_in(model)
    if around:
        regions = [remat(layer.__call__, policy=POLICY) for layer in model]
        made = fit(lambda x: regions[1](regions[0](x)).sum(), x, budget=0.5)
    else:
        made = fit(lambda x: model(x), x, budget=0.5)
    assert made.kept_bytes == fit(lambda x: plain(x), x, budget=0.5).kept_bytes
    assert seen_in(model) == before


def test_mixed_precision_of_fsdp_is_planned(mesh):
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    layer: Any = fully_shard(layered()[0], mesh=mesh, mp_policy=half)
    plan = POLICY.plan(layer.__call__, torch.ones(4, 8, requires_grad=True))
    assert [op for op in plan.ops if "_to_copy" in op] == ["aten._to_copy.default"] * 2
    assert (
        plan.default_bytes == POLICY.plan(layered()[0].bfloat16(), torch.ones(4, 8).bfloat16()).default_bytes
    )


def test_a_look_that_fails_amid_a_sharded_module_leaves_it_sharded(mesh):
    class Asks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    layer: Any = fully_shard(Asks(8, 8), mesh=mesh)
    before = seen_in(layer)
    with pytest.raises(RematError, match=r"\.item\(\)"):
        POLICY.plan(layer.__call__, torch.ones(4, 8))
    assert seen_in(layer) == before
    layer(torch.ones(4, 8)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*view tensor")
def test_what_needs_data_in_a_sharded_module_is_planned_from_its_first_call(mesh):
    """Gathered parameters are nothing that it keeps."""

    class Asks(nn.Sequential):
        def forward(self, input):  # noqa: A002
            assert input.sum().item() < 1e9
            return super().forward(input)

    def layers() -> Any:
        return layered()[0]

    x = torch.ones(64, 8, requires_grad=True)
    parts: list[Any] = [layers(), fully_shard(Asks(*layers()), mesh=mesh)]
    regions = [remat(part.__call__, policy=BudgetPolicy(0.7)) for part in parts]
    kept = []
    for region in regions:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                region(x).sum().backward()
        kept.append([r.shape for r in saved_residuals(region, x) if r.why == "policy"])
    assert [w for w in told if "cannot be planned" in str(w.message)]
    assert not [w for w in told if "nearly every call" in str(w.message)]
    assert kept[1] == kept[0] and kept[0]


def forces(energy, x, w):
    return torch.func.grad(lambda x: energy(x).sum())(x)


def pulled(energy, x, w):
    return torch.func.vjp(energy, x)[1](x)[0] * w[0]


def rows(energy, x, w):
    return torch.func.vmap(torch.func.grad(lambda row: energy(row[None]).sum()))(x)


def along(energy, x, w):
    return torch.func.jvp(energy, (x,), (x * w[1],))[1]


@pytest.mark.parametrize("policy", [checkpoint_policy(budget=0.5), checkpoint_policy(peak="1MiB")], ids=repr)
@pytest.mark.parametrize("step", [forces, pulled, rows, along])
def test_a_look_in_a_step_of_a_scan(step, policy):
    """Nobody around is told what its functions ran under, which is without data."""
    w = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
    x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)

    def body(wrap):
        energy = wrap(lambda x: torch.tanh(x @ w).square())
        return lambda x: step(energy, x, w).sin()

    h = x
    for _ in range(3):
        h = body(lambda fn: fn)(h)
    want = torch.autograd.grad(h.sum(), (x, w))
    planned = remat(body(remat), policy=policy)
    for _ in range(2):
        end, _ = scan_remat(lambda h, _: (planned(h), None), x, length=3, checkpoints="sqrt")
        for one, other in zip(torch.autograd.grad(end.sum(), (x, w)), want, strict=True):
            torch.testing.assert_close(one, other)


def test_a_cycle_is_no_cache_where_another_thread_collects_meanwhile(monkeypatch):
    collect, calls = gc.collect, itertools.count()
    # Python leaves a collection out while another is under way.
    monkeypatch.setattr(gc, "collect", lambda *gens: collect(*gens) if next(calls) > 3 else 0)

    def fn(x):
        cycle = {"x": x.sin()}
        cycle["itself"] = cycle
        return cycle["x"].exp()

    gc.disable()
    try:
        POLICY.plan(fn, X)
    finally:
        gc.enable()


FIRST = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from remat import checkpoint_policy, remat, save_matmuls, saved_residuals

halves, x = checkpoint_policy(budget=0.5, cost="flops"), torch.ones(8, 8, requires_grad=True)
inside = remat(torch.sin, policy=halves)
remat(lambda x: inside(inside(x)).cos(), policy=halves)(x)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
layer = fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
print([r.op for r in saved_residuals(remat(layer.__call__, policy=~save_matmuls), x) if r.why == "policy"])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_first_region_of_a_process_runs_in_a_look():
    """What torch gathers parameters by has a stand-in then, below what the region puts there for good."""
    run = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert run.stdout.count("OpOverload") == 1 and "aten.tanh" in run.stdout
