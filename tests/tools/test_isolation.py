"""What a look isolates: gradients, hooks of autograd, storages; and what it leaves to the user's Python."""

import contextlib
import copy
import functools
import gc
import sys
import threading
import types
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import remat
from remat import checkpoint_policy, explain, fit, save_matmuls, saved_residuals
from remat.plan import pareto
from tests.helpers import crossed
from tests.inside import diagnose
from tests.stateful import same

BUDGET = checkpoint_policy(budget=0.5)


def by_call(model, x):
    remat.remat(lambda x: model(x), policy=checkpoint_policy(budget=0.5))(x)


def by_model(model, x):
    region = remat.remat(lambda x: model(x), policy=BUDGET)
    fit(lambda x: region(x).sum(), x, budget=0.5)


LOOKS = {
    "saved_residuals": saved_residuals,
    "explain": explain,
    "policies": lambda model, x: explain(model, x, policies=[save_matmuls]),
    "pareto": lambda model, x: pareto(model, x, points=2, torch_solvers=()),
    "pareto, measured": lambda model, x: pareto(model, x, points=2, torch_solvers=(), measure=1),
    "budget": by_call,
    "fit of a function": by_model,
    "fit of stages": lambda model, x: fit([model, torch.sin], x, peak="1GiB"),
    "fit": lambda model, x: remat.fit(model, x, peak="1GiB", layers=Block, loss=lambda y: y.sum()),
}


def planned(fn, x):
    """Without a call; what needs data cannot be planned."""
    with contextlib.suppress(remat.RematError):
        checkpoint_policy(budget=1.0).plan(fn, x)  # pyright: ignore[reportAttributeAccessIssue]


# Of functions that go their own ways.
OF_FUNCTIONS = LOOKS | {"plan": planned, "doctor": diagnose}

# -- backwards inside ---------------------------------------------------------------------------------


class Reversible(torch.autograd.Function):
    """Recomputes its body in the backward, whose weights get their gradients there."""

    @staticmethod
    def forward(ctx, x, body, *given):
        ctx.body = body
        ctx.save_for_backward(x, *given)
        with torch.no_grad():
            return x + body(x)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *given = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x + ctx.body(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None, *[None for _ in given]


class Tiled(torch.autograd.Function):
    """Goes over rows in tiles, in the backward once more: `Tensor.backward` accumulates tile by tile."""

    @staticmethod
    def forward(ctx, x, body):
        ctx.body = body
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([tile + body(tile) for tile in x.chunk(2)])

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        found = []
        for tile, part in zip(x.chunk(2), gradient.chunk(2), strict=True):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                y = tile + ctx.body(tile)
            y.backward(part)
            found.append(tile.grad)
        return torch.cat(found), None


INSIDE = {
    "captured": lambda block, x: Reversible.apply(x, block.body),
    "given": lambda block, x: Reversible.apply(x, block.body, *block.parameters()),
    "tiled": lambda block, x: Tiled.apply(x, block.body),
    "twice": lambda block, x: Tiled.apply(Reversible.apply(x, block.body), block.body),
}


class Block(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.lin, self.inside = nn.Linear(16, 16), inside

    def body(self, x):
        return self.lin(x).relu()

    def forward(self, x):
        return INSIDE[self.inside](self, x)


def made(inside):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(inside), Block(inside))


def trained(model) -> list[Any]:
    model(X).square().sum().backward()
    return [p.grad for p in model.parameters()]


X = torch.linspace(-1, 1, 128).reshape(8, 16)


@pytest.mark.parametrize(("inside", "look"), crossed(INSIDE, LOOKS, every=4))
def test_a_backward_inside_leaves_no_gradient(inside, look):
    model, x = made(inside), X.clone().requires_grad_()
    LOOKS[look](model, x)
    assert [p.grad for p in (*model.parameters(), x)] == [None] * 7
    for found, right in zip(trained(model), trained(made(inside)), strict=True):
        assert type(found) is torch.Tensor and torch.equal(found, right)


@pytest.mark.parametrize("look", ["saved_residuals", "pareto, measured", "budget", "fit"])
def test_a_gradient_that_is_there_stays_what_it_is(look):
    model = made("captured")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [(p.grad, p.grad._version) for p in model.parameters() if p.grad is not None]
    LOOKS[look](model, X)
    assert [(p.grad, p.grad._version) for p in model.parameters() if p.grad is not None] == before
    assert all(torch.equal(g, torch.ones_like(g)) for g, _ in before)


def accumulators(p, hook):
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    return node, node.register_hook(hook)


HOOKS = {
    "after accumulation": lambda p, hook: p.register_post_accumulate_grad_hook(hook),
    "of the tensor": lambda p, hook: p.register_hook(hook),
    "of its node": accumulators,
}


@pytest.mark.parametrize(("kind", "look"), crossed(HOOKS, LOOKS))
def test_no_hook_of_a_weight_is_called(kind, look):
    """An optimizer in the backward would step, a wrapper would reduce."""
    model, met = made("captured"), []
    keep = [HOOKS[kind](p, lambda *given: met.append(given)) for p in model.parameters()]
    LOOKS[look](model, X)
    assert not met and len(keep) == 6
    trained(model)
    assert len(met) >= 6


@pytest.mark.slow
def test_an_optimizer_in_the_backward_trains_as_without_looks():
    def run(*looks):
        model = made("twice")
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            for look in looks:
                LOOKS[look](model, X)
            model(X).square().sum().backward()
        return [p.detach() for p in model.parameters()]

    for found, right in zip(run(*LOOKS), run(), strict=True):
        assert torch.equal(found, right)


def reentrant(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)


def step_inside(model, x):
    """A step that goes backward itself, and reads gradients of leaves and of what is in between."""
    hidden = reentrant(model, x.sin())
    hidden.retain_grad()
    loss = hidden.square().sum()
    loss.backward(retain_graph=True)
    assert hidden.grad is not None and x.grad is not None
    return loss * x.grad.norm() * hidden.grad.norm() * sum(p.grad.norm() for p in model.parameters())


@pytest.mark.parametrize(
    ("fn", "look"),
    crossed([reentrant, step_inside], ["saved_residuals", "explain", "pareto", "plan", "doctor"], every=2),
)
def test_checkpoints_of_torch_that_accumulate_are_looked_at(fn, look):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), X.clone().requires_grad_()
    found = OF_FUNCTIONS[look](lambda x: fn(model, x), x)
    if look == "doctor":
        assert "error" not in {finding.cause for finding in found.findings}
    assert all(p.grad is None for p in (*model.parameters(), x))


MODULE_HOOKS = {
    "full": lambda m, hook: m.register_full_backward_hook(hook),
    "before": lambda m, hook: m.register_full_backward_pre_hook(hook),
    "old": lambda m, hook: m.register_backward_hook(hook),
}


@pytest.mark.filterwarnings("ignore:.*non-full backward hook")
@pytest.mark.parametrize(
    ("kind", "look"), crossed(MODULE_HOOKS, ["pareto", "budget", "fit of a function", "fit of stages"])
)
def test_no_hook_of_a_module_is_given_gradients_without_data(kind, look):
    model, met = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), []

    def hook(module, *gradients):
        met.extend(type(g) for given in gradients for g in given if g is not None)

    MODULE_HOOKS[kind](model[0], hook)
    x = X.clone().requires_grad_()
    LOOKS[look](model, x)
    assert not met
    model(x).sum().backward()
    assert set(met) == {torch.Tensor}


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize(
    ("look", "kind", "stepped"),
    crossed(["saved_residuals", "explain", "doctor", "plan"], OPTIMIZERS, [True, False], every=4),
)
def test_a_step_with_its_optimizer_inside_trains_nothing(look, kind, stepped):
    model = nn.Linear(16, 16)
    optimizer = OPTIMIZERS[kind](model.parameters())

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.zero_grad(set_to_none=False)
        return model(x).sum()

    if stepped:
        step(X)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    known = copy.deepcopy(optimizer.state_dict())
    OF_FUNCTIONS[look](step, X)
    assert same(dict(model.state_dict()), before) and same(optimizer.state_dict(), known)
    assert all(
        (p.grad is not None and not p.grad.any()) if stepped else p.grad is None for p in model.parameters()
    )


def test_a_thread_that_trains_while_another_looks_keeps_its_hooks():
    model, other, met, stop = nn.Linear(8, 8), nn.Linear(8, 8), [], threading.Event()
    model.weight.register_post_accumulate_grad_hook(lambda p: met.append(p.grad is not None))

    def look():
        while not stop.is_set():
            explain(lambda x: other(x).sin(), torch.ones(2, 8))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(100):
            model.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
    finally:
        stop.set()
        thread.join()
    assert met == [True] * 100


@pytest.fixture
def process_group():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("look", ["explain", "pareto, measured", "budget"])
def test_a_wrapper_that_reduces_gradients_is_not_asked(process_group, look):
    """And its next forward finds no reduction that was begun and not ended."""
    model = nn.parallel.DistributedDataParallel(made("captured"))
    LOOKS[look](model, X)
    assert all(p.grad is None for p in model.parameters())
    for found, right in zip(trained(model), trained(made("captured")), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("look", ["explain", "pareto"])
def test_a_look_that_fails_leaves_the_engine_and_gradients(look):
    model, engine = made("captured"), torch.autograd.Variable._execution_engine

    def fails(x):
        model(x).sum().backward()
        raise ValueError("inside")

    with pytest.raises((ValueError, remat.RematError), match="inside"):
        LOOKS[look](fails, X)
    assert torch.autograd.Variable._execution_engine is engine
    assert "resize_" not in vars(torch.UntypedStorage)
    assert all(p.grad is None for p in model.parameters())


# -- storages -----------------------------------------------------------------------------------------


def fetched(p, home):
    p.untyped_storage().resize_(home.untyped_storage().nbytes())
    p.data.copy_(home)


def streamed(m, home, x):
    """Fetches weights that are not there, as offloaders do."""
    for p in m.parameters():
        if p.untyped_storage().size() == 0:
            fetched(p, home[p])
    return torch.sin(m(x))


def dropped(m, home, x):
    y = streamed(m, home, x)
    y = y * 2
    for p in m.parameters():
        p.untyped_storage().resize_(0)
    y.register_hook(lambda g: [fetched(p, home[p]) for p in m.parameters()] and None)
    return y


def held(m, home, x):
    """Resizes storages that it has held all along, more than once."""
    for storage, p in home["storages"]:
        storage.resize_(0)
        storage.resize_(p.numel() * 4)
        p.data.copy_(home[p])
    return torch.sin(m(x))


@pytest.mark.parametrize(
    ("look", "layer", "there"),
    crossed(["saved_residuals", "explain", "pareto", "plan"], [streamed, dropped, held], [True, False]),
)
def test_storages_have_the_size_and_the_contents_that_they_had(look, layer, there):
    torch.manual_seed(0)
    m = nn.Linear(3, 3)
    home: dict[Any, Any] = {p: p.detach().clone() for p in m.parameters()}
    home["storages"] = [(p.untyped_storage(), p) for p in m.parameters()]
    if not there:
        for p in m.parameters():
            p.untyped_storage().resize_(0)
    sizes = [p.untyped_storage().nbytes() for p in m.parameters()]

    def fn(x):
        return layer(m, home, x)

    OF_FUNCTIONS[look](fn, torch.ones(2, 3))
    assert [p.untyped_storage().nbytes() for p in m.parameters()] == sizes
    if there:
        assert all(torch.equal(p, home[p]) for p in m.parameters())
    assert torch.equal(
        fn(torch.ones(2, 3)),
        torch.sin(torch.ones(2, 3) @ home[m.weight].T + home[m.bias]) * (2 if layer is dropped else 1),
    )


WRITES = {
    "copy of a storage": lambda m: m.weight.untyped_storage().copy_(torch.zeros(3, 3).untyped_storage()),
    "fill of a storage": lambda m: m.mask.untyped_storage().fill_(1),
    "numpy": lambda m: m.mask.numpy().fill(5),
    "in place": lambda m: [t.mul_(3) for t in (m.weight.data, m.mask)],
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(3, 3))),
    "data": lambda m: setattr(m.weight, "data", torch.zeros(3, 3)),
}


@pytest.mark.parametrize(("look", "write"), crossed(["saved_residuals", "explain", "plan"], WRITES))
def test_parameters_and_buffers_are_what_they_were(look, write):
    m = nn.Linear(3, 3)
    m.register_buffer("mask", torch.ones(3))
    before, held = {k: v.clone() for k, v in m.state_dict().items()}, [*m.parameters()]

    def fn(x):
        WRITES[write](m)
        return (m(x) * m.mask).sin()

    OF_FUNCTIONS[look](fn, torch.ones(2, 3))
    assert same(dict(m.state_dict()), before) and all(
        a is b for a, b in zip(m.parameters(), held, strict=True)
    )


class Running(torch.autograd.Function):
    """Writes its running mean, of which it returns the same tensor."""

    @staticmethod
    def forward(ctx, x, mean):  # pyright: ignore[reportIncompatibleMethodOverride]
        mean.mul_(0.9).add_(x.mean(0))
        ctx.mark_dirty(mean)
        return x - mean, mean

    @staticmethod
    def backward(ctx, g, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g - g.mean(0), None


@pytest.mark.parametrize("look", ["saved_residuals", "explain", "pareto", "plan", "fit of a function"])
def test_a_buffer_that_a_function_marks_as_dirty_has_no_history_of_a_look(look):
    m: Any = nn.Linear(3, 3)
    m.register_buffer("mean", torch.zeros(3))
    OF_FUNCTIONS[look](lambda x: (Running.apply(m(x), m.mean)[0] * m.mean).sin(), torch.ones(2, 3))
    assert m.mean.grad_fn is None and not m.mean.requires_grad and torch.equal(m.mean, torch.zeros(3))


# -- the user's Python --------------------------------------------------------------------------------


class Plain:
    calls = 0


@pytest.mark.parametrize("look", ["explain", "pareto", "budget"])
def test_tables_of_the_process_are_as_the_function_left_them(look):
    """A registry that an import fills once would stay empty, if a look emptied it again."""
    registry, log, state = {}, [], Plain()
    name = f"made_by_{look.replace(' ', '_')}"
    loaded = sys.modules

    @functools.lru_cache
    def number(n):
        return n + 1

    def fn(x):
        if name not in sys.modules:
            loaded[name] = types.ModuleType(name)
            registry["kernel"] = torch.sin
            log.append("registered")
        state.calls = state.calls + 1
        return registry["kernel"](x * number(1)).exp()

    LOOKS[look](fn, torch.ones(3, requires_grad=True))
    try:
        assert name in sys.modules and list(registry) == ["kernel"] and log == ["registered"]
        assert state.calls > 0 and number.cache_info().currsize == 1
    finally:
        sys.modules.pop(name)


@pytest.mark.parametrize("place", ["object", "module"])
def test_a_counter_counts_once_a_look_and_one_of_a_module_not_at_all(place):
    state: Any = Plain() if place == "object" else nn.Module()
    state.calls = 0

    def fn(x):
        state.calls = state.calls + 1
        return x.sin().exp()

    x, found = torch.ones(3, requires_grad=True), []
    for look in (saved_residuals, explain, checkpoint_policy(budget=1.0).plan):  # pyright: ignore[reportAttributeAccessIssue]
        before = state.calls
        look(fn, x)
        found.append(int(state.calls) - int(before))
    assert found == ([1, 2, 1] if place == "object" else [0, 0, 0])


@pytest.mark.parametrize("look", ["explain", "pareto"])
def test_parameters_stand_in_the_order_that_they_had(look):
    model = nn.Linear(16, 16)
    hooks = [model.register_forward_hook(lambda *given: None) for _ in range(2)]

    def fn(x):
        weight = model.weight
        del model.weight
        model.weight = weight
        OrderedDict.move_to_end(cast("Any", model._forward_hooks), hooks[0].id)
        return model(x)

    OF_FUNCTIONS[look](fn, X)
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
    assert [*model._forward_hooks] == [hook.id for hook in hooks]


@pytest.mark.parametrize("look", ["pareto", "plan", "fit of a function"])
def test_no_tensor_without_data_stays_in_python_and_what_was_there_does(look):
    """Also not deep in what was made inside, beside entries of the same table that stay."""
    held = {"ema": torch.zeros(3), "boxes": [Plain()]}
    before, box = held["ema"], held["boxes"][0]

    @functools.lru_cache
    def table(n):
        return torch.arange(n) * 1.0

    def fn(x):
        held["ema"] = 0.9 * held["ema"] + x.detach()
        new = Plain()
        new.inner = (x.detach(), {"graph": (x * 2).grad_fn})  # pyright: ignore[reportAttributeAccessIssue]
        held["boxes"].append(new)
        return (x * table(3)).sin().exp()

    x = torch.ones(3, requires_grad=True)
    OF_FUNCTIONS[look](fn, x)
    if look != "fit of a function":
        assert held["ema"] is before and held["boxes"] == [box]
    out = fn(x)
    assert torch.equal(out, (x * torch.arange(3.0)).sin().exp())


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_no_tensor_without_data_stays_wrapped_by_a_transform(transform):
    """What an object among the arguments has come to hold was batched when it was made."""

    def fn(x, state):
        state.seen.append(x.cos())
        state.last = x.sin()
        return state.last.exp()

    region = remat.remat(fn, policy=checkpoint_policy(budget=0.5))

    def loss(x, fn: Any = region):
        state: Any = Plain()
        state.seen = []
        return (fn(x, state) * state.last * state.seen[0]).sum()

    for _ in range(2):
        x = torch.rand(3, 4)
        assert same(transform(loss)(x), transform(lambda x: loss(x, fn))(x))


class Key:
    def __repr__(self):
        raise AssertionError("a look prints nothing of the user's")

    __str__ = __repr__


@pytest.mark.parametrize("key", [torch.nn.Parameter(torch.linspace(0, 1, 600)), Key(), (Key(), 1)])
def test_names_of_paths_print_no_object_of_the_user(key):
    w = torch.linspace(0, 1, 600)
    home = {key: w}

    def fn(x, given):
        return torch.sin(x * home[key] * given[key])

    x, given = torch.ones(2, 600, requires_grad=True), {key: torch.ones(600)}
    found = saved_residuals(fn, x, given)
    assert f"home[{type(key).__name__}]" in {r.path for r in found}
    assert "tensor(" not in str(explain(fn, x, given)) and "Parameter containing" not in str(found)


@pytest.mark.parametrize("look", ["explain", "pareto", "budget"])
def test_the_garbage_collector_stays_on(look):
    on = []

    def body(x):
        on.append(gc.isenabled())
        return x.sin()

    model = made("captured")
    vars(model[1])["body"] = body
    LOOKS[look](model, X)
    assert on and all(on) and gc.isenabled()


def test_no_function_of_transformers_is_exchanged():
    masking = pytest.importorskip("transformers.masking_utils")
    find, positions = masking.find_packed_sequence_indices, torch.arange(6)[None].expand(2, 6)
    met = []

    def fn(x, positions):
        met.append(masking.find_packed_sequence_indices)
        return x.sin() if masking.find_packed_sequence_indices(positions) is None else x.exp()

    plan = checkpoint_policy(budget=1.0).plan(fn, torch.ones(3, requires_grad=True), positions)  # pyright: ignore[reportAttributeAccessIssue]
    assert "aten.sin.default" in plan.ops and "aten.exp.default" not in plan.ops
    assert set(met) == {find}


@pytest.mark.parametrize("mode", ["meta", "a mode of the user"])
def test_numbers_of_a_plan_are_computed_outside_of_the_users_modes(mode):
    class Shifts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out + 1 if func in (torch.full, torch.zeros, torch.minimum) else out

    around = torch.device("meta") if mode == "meta" else Shifts()
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    x = torch.empty(512, 64, requires_grad=True)
    right = fit(blocks, x, peak="3MiB", device="h100").peak_bytes
    with around:
        assert fit(blocks, x, peak="3MiB", device="h100").peak_bytes == right
