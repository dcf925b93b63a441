"""Saved-tensor hooks of the user's around regions: every call packs the same values in the same order.

`torch.utils.checkpoint` counts what is packed: its second run of a region has to pack what the first did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from remat import (
    RematError,
    checkpoint_name,
    checkpoint_policy,
    fit,
    offload,
    remat,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    scan_remat,
)
from tests.helpers import crossed, unseen

Function = Callable[..., Any]
N = 6
aten = torch.ops.aten
EVERY = [
    save_nothing,
    save_matmuls,
    save_names("hidden"),
    offload(save_names("hidden")),
    save_everything,
    checkpoint_policy(budget=0.5),
]
pytestmark = pytest.mark.filterwarnings(
    "ignore:Policy",
    "ignore:The .grad attribute",
    "ignore:A budget",
    "ignore:run cannot be planned",
    "ignore:<lambda> cannot be planned",
)


# -- hooks ---------------------------------------------------------------------------------------------


def plainly(fn: Function) -> Function:
    return fn


def checkpointed(fn: Function) -> Function:
    return lambda *args: checkpoint(fn, *args, use_reentrant=False)


def to_its_end(fn: Function) -> Function:
    def run(*args: Any) -> Any:
        with set_checkpoint_early_stop(False):
            return checkpoint(fn, *args, use_reentrant=False)

    return run


def reentrant(fn: Function) -> Function:
    return lambda *args: checkpoint(fn, *args, use_reentrant=True)


def twice(fn: Function) -> Function:
    return checkpointed(checkpointed(fn))


def under(make: Function) -> Function:
    def wrap(fn: Function) -> Function:
        def run(*args: Any) -> Any:
            with make():
                return fn(*args)

        return run

    return wrap


on_cpu = under(save_on_cpu)
cloned = under(lambda: saved_tensors_hooks(torch.clone, torch.clone))
as_arrays = under(
    lambda: saved_tensors_hooks(lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a.copy()))
)


def in_both(fn: Function) -> Function:
    return on_cpu(checkpointed(fn))


COUNT = [checkpointed, to_its_end, reentrant, twice, in_both]


# -- what is called ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """One of a class whose `flag` decides which ops run, with the same arguments."""

    def __init__(self, flag: int) -> None:
        super().__init__()
        self.flag = flag
        self.w, self.v = (nn.Parameter(torch.randn(N, N, dtype=torch.float64) / 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = x @ self.w, x @ self.v
        if self.flag == 0:
            out = q @ k
        elif self.flag == 1:
            out = q @ (x @ x)
        else:
            out = (x @ x) * checkpoint_name(k.sin(), "hidden")
        return torch.softmax(out, -1).tanh()


def gradients(fn: Function, model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    x = (torch.arange(N * N, dtype=torch.float64).reshape(N, N) / 40).requires_grad_()
    fn(x * 1.5).square().sum().backward()
    return [x.grad, *[p.grad for p in model.parameters()]]


def alike(got: Any, want: Any) -> bool:
    def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        return one is other if one is None or other is None else torch.allclose(one, other, rtol=1e-12)

    return all(same(one, other) for one, other in zip(got, want, strict=True))


def one_after_another(parts: list[Function]) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        for part in parts:
            x = part(x)
        return x

    return run


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer(flag) for flag in (0, 2, 1, 2)])


def shapes_of(policy: Any, inner: Any, hooks: Function) -> dict[str, tuple[Function, Function]]:
    """Functions of layers, without regions and with."""

    def each(wrap: Function) -> Function:
        return lambda model: one_after_another([wrap(layer) for layer in model])

    plain: Function = lambda layer: layer  # noqa: E731
    return {
        "around each": (each(hooks), each(lambda m: hooks(remat(m, policy=policy)))),
        "around all": (
            lambda model: hooks(each(plain)(model)),
            lambda model: hooks(each(lambda m: remat(m, policy=policy))(model)),
        ),
        "nested": (
            lambda model: hooks(each(plain)(model)),
            lambda model: hooks(remat(each(lambda m: remat(m, policy=inner))(model), policy=policy)),
        ),
        "inside": (
            each(hooks),
            lambda model: remat(each(lambda m: hooks(remat(m, policy=inner)))(model), policy=policy),
        ),
    }


SHAPES = ["around each", "around all", "nested", "inside"]


def check(made: tuple[Function, Function], calls: int = 3) -> None:
    model = layers()
    expected = gradients(made[0](model), model)
    region = made[1](model)
    for _ in range(calls):
        assert alike(gradients(region, model), expected)


@pytest.mark.parametrize(("hooks", "shape", "policy"), crossed(COUNT, SHAPES, EVERY, every=6))
def test_hooks_that_count(hooks: Function, shape: str, policy: Any) -> None:
    """Torch's checkpoint around regions, or inside one: in the first call and in later ones."""
    check(shapes_of(policy, save_matmuls, hooks)[shape])


@pytest.mark.parametrize(
    ("hooks", "shape", "policy"),
    crossed([cloned, as_arrays, on_cpu], SHAPES, [save_nothing, save_matmuls, checkpoint_policy(budget=0.5)]),
)
def test_hooks_that_return_another_tensor(hooks: Function, shape: str, policy: Any) -> None:
    check(shapes_of(policy, save_nothing, hooks)[shape], calls=2)


@pytest.mark.parametrize(
    ("inner", "shape", "policy"),
    crossed([save_nothing, save_everything, checkpoint_policy(budget=0.5)], SHAPES, EVERY, every=5),
)
def test_every_call_packs_the_same(inner: Any, shape: str, policy: Any) -> None:
    """Also where the hooks compute with it. A look at a function for a budget shows them nothing."""
    seen: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        assert not isinstance(tensor, FakeTensor)
        seen.append((tuple(tensor.shape), tensor.detach().sum().item()))
        return tensor

    counting = under(lambda: saved_tensors_hooks(pack, lambda tensor: tensor))
    model = layers()
    region = shapes_of(policy, inner, counting)[shape][1](model)
    packed = []
    for _ in range(4):
        seen.clear()
        gradients(region, model)
        packed.append(list(seen))
    assert packed[1:] == packed[:1] * 3


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls, checkpoint_policy(budget=0.5)], ids=repr)
def test_functions_from_one_maker(policy: Any) -> None:
    """They share what is learnt of their code, and run other ops for the same arguments."""
    a, b = (torch.randn(N, N, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def make(kind: int) -> Function:
        def block(x: torch.Tensor) -> torch.Tensor:
            q, k = x @ a, x @ b
            return q @ k if kind == 0 else q @ (x @ x) if kind == 1 else (x @ x) * k

        return block

    for kind in (0, 1, 2, 1, 2, 0):
        block, x = make(kind), torch.randn(N, N, dtype=torch.float64, requires_grad=True)
        regions = checkpointed(remat(block, policy=policy))
        want = torch.autograd.grad(block(x).square().sum(), (x, a, b), allow_unused=True)
        for _ in range(2):
            got = torch.autograd.grad(regions(x).square().sum(), (x, a, b), allow_unused=True)
            assert alike(got, want)


BUDGETS = pytest.mark.parametrize(
    "policy", [checkpoint_policy(budget=0.5, cost="flops"), checkpoint_policy(peak="1MiB", cost="flops")]
)


def rows_above(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x + x[x > 0].exp().tanh().sum()


def chosen_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = (x @ w).argmax(-1).bincount(minlength=N).nonzero()[:, 0]
    return ((x[rows] @ w).sin() @ w).exp()


def routed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out, best = torch.zeros_like(x), (x @ w)[:, :3].argmax(-1)
    for number in range(3):
        rows = (best == number).nonzero()[:, 0]
        out = out.index_add(0, rows, (x[rows] @ w).sin())
    return out


@BUDGETS
@pytest.mark.parametrize("fn", [rows_above, chosen_rows, routed])
def test_a_budget_learns_nothing_between_two_runs(fn: Function, policy: Any) -> None:
    """Calls without hooks, between the two runs under them, teach other plans."""
    w = torch.linspace(-1, 1, N * N, dtype=torch.float64).reshape(N, N).requires_grad_()
    region = remat(lambda x: fn(x, w), policy=policy)
    for call in range(3):
        x = torch.sin(torch.arange(N * N, dtype=torch.float64) + call).reshape(N, N).requires_grad_()
        want = torch.autograd.grad(fn(x, w).sum() * 2, (x, w), allow_unused=True)
        under_hooks = checkpointed(region)(x)
        got = torch.autograd.grad(region(x).sum() + under_hooks.sum(), (x, w), allow_unused=True)
        assert alike(got, want)


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("budget", [0.4, 0.6, 0.9])
def test_a_plan_of_a_model_around_torchs_checkpoint(budget: float, inside: bool) -> None:
    """The second run comes when the call of the plan is over, or in the midst of it. What torch's checkpoint
    runs keeps its own budgets: there is a region outside of it to be planned."""
    w = torch.linspace(-1, 1, N * N, dtype=torch.float64).reshape(N, N)
    block: Function = lambda x: (x @ (x @ w).sin()).sigmoid() @ w  # noqa: E731
    region = remat(block, policy=checkpoint_policy(budget=0.5, cost="flops"))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = checkpointed(lambda x: region(region(x)))(region(x)).sum()
        if inside:
            loss.backward()
        return loss

    x = torch.ones(N, N, dtype=torch.float64, requires_grad=True)
    planned = fit(step, x, budget=budget, cost="flops")
    (want,) = torch.autograd.grad(block(block(block(x))).sum(), x)
    for _ in range(2):
        x.grad = None
        loss = planned(x)
        if not inside:
            loss.backward()
        assert alike([x.grad], [want])


class Louder(TorchFunctionMode):
    """Changes what some functions return, wherever it is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.25 if func in (torch.sin, torch.Tensor.sin) else out


@pytest.mark.parametrize("policy", [save_ops(aten.mul), save_ops(aten.mul, aten.sin), save_matmuls], ids=str)
@pytest.mark.parametrize("what", ["a mode", "a subclass", "a scan"])
def test_torch_functions_are_asked_when_hooks_run_a_region_again(what: str, policy: Any) -> None:
    """A kept value is asked for in the midst of a recomputation, in which no torch function is asked."""
    w = torch.linspace(-1, 1, N * N, dtype=torch.float64).reshape(N, N).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w @ w).sin() * (x @ w).sin()) @ w

    def scan(x: torch.Tensor) -> torch.Tensor:
        return scan_remat(lambda h, _: ((h @ w).sin() * x, None), x, length=3)[0]

    def loop(x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(3):
            h = (h @ w).sin() * x
        return h

    def around(fn: Function) -> Function:
        def run(x: torch.Tensor) -> torch.Tensor:
            if what == "a subclass":
                return fn(x.as_subclass(Loud)).as_subclass(torch.Tensor)
            with Louder() if what == "a mode" else contextlib.nullcontext():
                return fn(x)

        return run

    plain, region = (loop, scan) if what == "a scan" else (block, block)
    for _ in range(3):
        x = torch.ones(N, N, dtype=torch.float64, requires_grad=True)
        want = torch.autograd.grad(around(plain)(x).sum(), (x, w))
        again = checkpointed(around(remat(region, policy=policy)))
        assert alike(torch.autograd.grad(again(x).sum(), (x, w)), want)


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any = super().__torch_function__(func, types, args, kwargs or {})
        return out * 1.25 if func in (torch.sin, torch.Tensor.sin) else out


def test_a_region_that_calls_itself() -> None:
    """With one signature at every depth, and other ops."""
    w = torch.randn(N, N, dtype=torch.float64, requires_grad=True)
    depth = [0]

    def block(x: torch.Tensor) -> torch.Tensor:
        depth[0] += 1
        deep = depth[0] % 3
        h = (x @ w).sin() if deep else x.cos() @ w @ w
        return region(h) * x if deep else h

    region = remat(block, policy=save_matmuls)
    for _ in range(3):
        x = torch.randn(N, N, dtype=torch.float64, requires_grad=True)
        depth[0] = 0
        got = torch.autograd.grad(checkpointed(region)(x).sum(), (x, w))
        depth[0] = 0
        h = (x @ w).sin()
        h2 = (h @ w).sin()
        want = torch.autograd.grad((h2.cos() @ w @ w * h * x).sum(), (x, w))
        assert alike(got, want)


# -- regions whose function runs again -----------------------------------------------------------------


def looked_at(tensor: torch.Tensor) -> torch.Tensor:
    """From here on ops do not tell all: the region's function runs again as a whole."""
    return tensor + unseen(tensor)


STATE: dict[str, torch.Tensor] = {}


def by_argument(x: torch.Tensor) -> torch.Tensor:
    return looked_at(x.sin()).exp() * x


def by_another_way(x: torch.Tensor) -> torch.Tensor:
    # The argument itself, which the region is not given here.
    return looked_at(STATE["x"].sin()) * x


def by_a_look_at_it(x: torch.Tensor) -> torch.Tensor:
    return looked_at(x.sin()) @ STATE["x"].t() * STATE["x"][0]


def of_a_result(x: torch.Tensor) -> torch.Tensor:
    # Which it both reads and saves.
    return looked_at(x.sin()) @ STATE["h"] * STATE["h"].cos()


def of_a_buffer(x: torch.Tensor) -> torch.Tensor:
    return looked_at(x.sin()) @ STATE["buffer"] * STATE["buffer"].cos()


def by_an_operator(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e6, lambda t: t.sin().exp(), lambda t: t.cos().exp(), (x,)) * STATE["h"]


AGAIN = [by_argument, by_another_way, by_a_look_at_it, of_a_result, of_a_buffer, by_an_operator]


@pytest.mark.parametrize(
    ("fn", "hooks", "depth", "policy"),
    crossed(
        AGAIN,
        [cloned, as_arrays, *COUNT[:2], twice, in_both],
        [1, 2, 3],
        [save_nothing, save_matmuls],
        every=8,
    ),
)
def test_a_function_that_runs_again(fn: Function, hooks: Function, depth: int, policy: Any) -> None:
    """What it reads is known by what the region was given, not by what hooks give back."""
    if hooks is as_arrays and fn is by_an_operator:
        pytest.skip("torch.cond shows hooks tensors without memory")

    def gradient(run: Function) -> torch.Tensor | None:
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
        STATE.update(x=x * 1.5, h=(x * 0.5).tanh(), buffer=torch.ones(4, 4, dtype=torch.float64) / 3)
        run(STATE["x"]).square().sum().backward()
        return x.grad

    region = fn
    for _ in range(depth):
        region = remat(region, policy=policy)
    want = gradient(hooks(fn))
    for _ in range(2):
        assert torch.allclose(gradient(hooks(region)), want, rtol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize(("depth", "hooks"), crossed([0, 1, 2], [plainly, cloned, on_cpu]))
def test_a_tensor_that_was_put_in_anothers_place(hooks: Function, depth: int) -> None:
    """However deep, and whatever hooks are around: the gradient would be that of another function."""
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
    state = {"last": x.detach().sum(0).sigmoid()}

    def fn(h: torch.Tensor) -> torch.Tensor:
        last, state["last"] = state["last"], h.detach().mean(0)
        made = unseen(torch.empty(1, dtype=torch.float64), 2.0)  # by no op
        return remat(lambda z: (z.sin() * made).exp())(h * last)

    region: Function = remat(fn)
    for _ in range(depth):
        region = remat(lambda h, inner=region: inner(h))
    out = hooks(region)(x * 2)
    with pytest.raises(RematError, match="put in the place"):
        out.sum().backward()


@pytest.mark.parametrize("hooks", [cloned, as_arrays])
def test_an_argument_that_was_written_to(hooks: Function) -> None:
    """Hooks have what was in it; a function that reads it by another way would find the new."""
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
    STATE["x"] = x * 1.5
    out = hooks(remat(by_another_way))(STATE["x"])
    with torch.no_grad():
        STATE["x"].mul_(2)
    with pytest.raises(RematError, match="reads another tensor"):
        out.sum().backward()


# -- backwards inside, in torch's checkpoint -----------------------------------------------------------

KEPT: dict[str, Any] = {
    "nothing": save_nothing,
    "products": save_matmuls,
    "every second": checkpoint_policy(lambda info: info.index % 2 == 0),
    "every third": checkpoint_policy(lambda info: info.index % 3 == 0),
    "tanh": checkpoint_policy(lambda info: "tanh" in str(info.op)),
}
ENERGIES: dict[str, Any] = {
    "one region": lambda x, w, wrap: torch.tanh(x @ w).square(),
    "a region in it": lambda x, w, wrap: torch.sin(wrap(lambda h: (h @ w).tanh())(x.exp().cos())) @ w,
    "at its end": lambda x, w, wrap: wrap(lambda h: (h @ w).sin().square())((x @ w).tanh()),
    "draws": lambda x, w, wrap: F.dropout(wrap(lambda h: F.dropout((h @ w).sin(), 0.3))(x.sin()), 0.3),
}
AROUND: dict[str, Any] = {
    "checkpoint": lambda fn: checkpointed(fn),
    "two of them": lambda fn: checkpointed(checkpointed(fn)),
    "called twice": lambda fn: checkpointed(lambda x: fn(fn(x))),
    "in a region": lambda fn: remat(checkpointed(fn), policy=save_matmuls),
}


def forces(energy: Any, x: Any, w: Any, wrap: Any) -> Any:
    """What goes backward in its forward: then torch's checkpoint runs the function again."""
    out = wrap(lambda x: energy(x, w, wrap))(x)
    return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0].cos() * x + out.cos()


@pytest.mark.parametrize(
    ("outer", "inner", "energy", "around", "early", "before"),
    [
        ("every second", "nothing", "one region", "checkpoint", True, False),
        ("nothing", "products", "one region", "two of them", False, True),
        ("products", "nothing", "a region in it", "called twice", True, True),
        ("every third", "tanh", "a region in it", "in a region", False, False),
        ("tanh", "products", "at its end", "checkpoint", True, True),
        ("every second", "every third", "draws", "called twice", False, False),
        ("tanh", "every second", "draws", "checkpoint", True, False),
    ],
)
def test_a_backward_inside_of_regions_in_regions_in_torchs_checkpoint(
    outer, inner, energy, around, early, before
):
    """Its inner backward has torch's checkpoint recompute before the forward is over: what that computes was
    taken for ops of the region. Gradients were off by 3.6 and more, or CheckpointError."""
    generator = torch.Generator().manual_seed(0)
    start, data = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator)
    w = start.requires_grad_()

    def function(wrap):
        return lambda x: forces(ENERGIES[energy], x.tanh() if before else x, w, wrap)

    plain = function(lambda fn: fn)
    region = remat(function(lambda fn: remat(fn, policy=KEPT[inner])), policy=KEPT[outer])
    ways = (lambda x: plain(plain(x))) if around == "called twice" else plain, AROUND[around](region)
    for step in range(2):
        found = []
        for call in ways:
            torch.manual_seed(step)
            leaf = (data * (1 + step)).clone().requires_grad_()
            with set_checkpoint_early_stop(early):
                out = call(leaf)
                found.append((out.detach(), *torch.autograd.grad(out.sin().sum(), [leaf, w])))
        torch.testing.assert_close(found[1], found[0])


# -- regions under vmap --------------------------------------------------------------------------------

W = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
UNREAD: dict[str, Function] = {
    "no operand is read": lambda a, b: a * 2.0,
    "the other is read": lambda a, b: a.sin() + b,
    "a weight is differentiated": lambda a, b: W.sin()[:3] * 2 + b,
    "a view": lambda a, b: a.t().exp().t() + b[:1],
}
READING: dict[str, Any] = {
    "clones": (lambda t: t.clone(), lambda t: t),
    "clones back": (lambda t: t, lambda t: t.clone()),
    "sums": (lambda t: (t, t.double().sum().item()), lambda packed: packed[0]),
    "as numbers": (lambda t: (t.detach().tolist(), t), lambda packed: packed[1]),
}


@pytest.mark.parametrize(
    ("name", "hooks", "nested", "policy"),
    crossed(UNREAD, READING, [False, True], [save_nothing, save_matmuls], every=4),
)
def test_hooks_are_given_no_tensor_without_memory(name: str, hooks: str, nested: bool, policy: Any) -> None:
    """What a region under `vmap` holds for its backward has memory, if hooks are given it: they read it."""
    x = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()
    y = x.detach().cos()

    def run(wrap: Function, outer: Function) -> list[Any]:
        mapped = torch.func.vmap(wrap(UNREAD[name]))
        fn = outer(lambda x, y: mapped(torch.stack([x, y]), torch.stack([y, y])).sum(0))
        found = []
        for _ in range(2):
            with saved_tensors_hooks(*READING[hooks]):
                out = fn(x, y)
            found += torch.autograd.grad(out.sin().sum(), [x, W], allow_unused=True)
        return found

    region = lambda fn: remat(fn, policy=policy)  # noqa: E731
    expected = run(plainly, plainly)
    for found, right in zip(run(region, region if nested else plainly), expected, strict=True):
        if found is None or right is None:
            assert found is right
        else:
            assert torch.equal(found, right)


# -- writes to what hooks hold --------------------------------------------------------------------------


class Wrapped:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


# Hooks that hold the memory itself: autograd does not look whether it was written to.
HOLD: dict[str, Function] = {
    "the tensor": under(lambda: saved_tensors_hooks(lambda t: t, torch.clone)),
    "a list": under(lambda: saved_tensors_hooks(lambda t: ("cpu", [t.detach()]), lambda p: p[1][0])),
    "its data": under(lambda: saved_tensors_hooks(lambda t: t.data, lambda t: t)),
    "an object": under(lambda: saved_tensors_hooks(Wrapped, lambda wrapped: wrapped.tensor)),
    "an array": under(lambda: saved_tensors_hooks(lambda t: t.detach().numpy(), torch.from_numpy)),
    "save_on_cpu": on_cpu,
}


def reads_its_argument(wrap: Function) -> Function:
    return wrap(lambda a: (a + 1).sin() * 2)


def reads_it_two_deep(wrap: Function) -> Function:
    inner = wrap(lambda b: (b + 1).sin())
    return wrap(lambda a: inner(a + 1) * 2)


def reads_what_it_captures(wrap: Function) -> Function:
    return lambda a: wrap(lambda: (a + 1).sin())()


@pytest.mark.parametrize("make", [reads_its_argument, reads_it_two_deep, reads_what_it_captures])
@pytest.mark.parametrize("hooks", [*HOLD.values(), cloned], ids=[*HOLD, "a clone"])
def test_a_write_to_what_hooks_hold(hooks: Function, make: Function) -> None:
    """It is told, as without hooks: without regions autograd saves none of what is written to."""
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)

    def step(fn: Function) -> torch.Tensor:
        a = x * 2
        out = fn(a)
        a.mul_(5)
        return out.sum() + a.sum()

    (want,) = torch.autograd.grad(hooks(lambda: step(make(plainly)))(), x)
    for _ in range(2):
        loss = hooks(lambda: step(make(remat)))()
        if hooks is cloned:
            assert alike(torch.autograd.grad(loss, x), [want])
        else:
            with pytest.raises(RematError, match="written in place"):
                torch.autograd.grad(loss, x)


class Named(torch.Tensor):
    """A class of the user's."""


def test_a_checkpoint_around_tensors_of_a_users_class_is_right_or_raises():
    """A backward that begins with such a tensor runs without its class's functions."""
    x = torch.randn(3, 4).as_subclass(Named).requires_grad_()
    weight = torch.randn(4, 4)
    inner = remat(lambda x: checkpoint_name(torch.tanh(x @ weight), "h").exp(), policy=save_names("h"))
    outer = remat(lambda x: inner(x).sin(), policy=save_matmuls)
    with pytest.raises(RematError, match="as_subclass"):
        checkpoint(outer, x, use_reentrant=False).sum().backward()
    checkpoint(outer, x, use_reentrant=False).sum().as_subclass(torch.Tensor).backward()
    assert x.grad is not None
    want = torch.autograd.grad(torch.tanh(x @ weight).exp().sin().sum(), x)
    torch.testing.assert_close(x.grad.as_subclass(torch.Tensor), want[0].as_subclass(torch.Tensor))


def test_what_is_computed_in_inference_mode_is_packed_alike_in_each_call():
    """Methods of a user's class return aliases; there no view holds what those are aliases of."""
    x, y = (torch.randn(3, 4).as_subclass(Named) for _ in range(2))
    region = remat(lambda x: x * torch.inference_mode()(y.sin)().clone(), policy=save_matmuls)
    x.requires_grad_()
    checkpoint(region, x, use_reentrant=False).sum().as_subclass(torch.Tensor).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.as_subclass(torch.Tensor), y.sin().as_subclass(torch.Tensor))
