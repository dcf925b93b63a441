"""Tensors that a region takes from elsewhere than its arguments are differentiated in every mode."""

import functools
import types
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, vjp, vmap

from remat import RematError, remat, save_matmuls, save_nothing, scan_remat
from tests.helpers import POLICIES, crossed, jvp, rand, same, unseen

GLOBAL: dict[str, torch.Tensor] = {}


class Holder:
    def __init__(self, w):
        self.w = w

    def method(self, x):
        return torch.tanh(x @ self.w)

    def __call__(self, x):
        return self.method(x)


def by_inner_function(x, w):
    inner = lambda x: x @ w  # noqa: E731
    return lambda x: torch.tanh(inner(x))


def by_keyword_default(x, w):
    def fn(x, *, w=w):
        return torch.tanh(x @ w)

    return fn


def by_attribute_of_attribute(x, w):
    outer = Holder(Holder(w))
    return lambda x: torch.tanh(x @ outer.w.w)


def by_global(x, w):
    GLOBAL["w"] = w
    return lambda x: torch.tanh(x @ GLOBAL["w"])


def by_view(x, w):
    half = w.t().contiguous().t()
    return lambda x: torch.tanh(x @ half[:, :]) + half.sum()


def by_function_of_it(x, w):
    derived = (w * 2).sin()
    return lambda x: torch.tanh(x @ w) @ derived


def only_captured(x, w):
    y = x * 2
    return lambda _: torch.tanh(y @ w)


HOW = {
    "partial": lambda x, w: functools.partial(lambda w, x: torch.tanh(x @ w), w),
    "keyword partial": lambda x, w: functools.partial(lambda x, w: torch.tanh(x @ w), w=w),
    "default": lambda x, w: lambda x, w=w: torch.tanh(x @ w),
    "bound method": lambda x, w: Holder(w).method,
    "callable object": lambda x, w: Holder(w),
    "used twice": lambda x, w: lambda x: torch.tanh(torch.tanh(x @ w) @ w) * w.sum(),
    "argument and captured": lambda x, w: lambda other: torch.tanh(other @ w) * x,
} | {
    f.__name__: f
    for f in (
        by_inner_function, by_keyword_default, by_attribute_of_attribute, by_global, by_view,
        by_function_of_it, only_captured,
    )
}  # fmt: skip


def loss(how, wrap):
    return lambda x, w: wrap(how(x, w))(x).square().sum()


RUNS = {
    "backward": lambda f, x, w: torch.autograd.grad(f(x, w), (x, w)),
    "double": lambda f, x, w: torch.autograd.grad(
        torch.autograd.grad(f(x, w), w, create_graph=True)[0].square().sum(), (x, w)
    ),
    "grad": lambda f, x, w: grad(f, (0, 1))(x.detach(), w.detach()),
    "vmap": lambda f, x, w: vmap(f, (None, 0))(x.detach(), torch.stack([w, 2 * w]).detach()),
    "vmap_grad": lambda f, x, w: vmap(grad(f, (0, 1)), (0, None))(
        torch.stack([x, 2 * x]).detach(), w.detach()
    ),
    "grad_vmap": lambda f, x, w: grad(
        lambda w: vmap(f, (0, None))(torch.stack([x, 2 * x]).detach(), w).sum()
    )(w.detach()),
    "jvp": lambda f, x, w: jvp(f, (x.detach(), w.detach()), (x.detach(), w.detach() * 2)),
    "hessian": lambda f, x, w: hessian(f, 1)(x.detach(), w.detach()),
    "grad_grad": lambda f, x, w: grad(lambda w: grad(f, 1)(x.detach(), w).square().sum())(w.detach()),
    "outside": lambda f, x, w: torch.autograd.grad(grad(f)(x.detach(), w).square().sum(), w),
}


@pytest.mark.parametrize(
    ("kind", "policy", "run"), crossed(HOW, ["nothing", "matmuls", "rule"], RUNS, every=7)
)
def test_captured(kind, policy, run):
    how = HOW[kind]
    x, w = rand(2, 3).requires_grad_(), rand(3, 3).requires_grad_()
    wrap = lambda fn: remat(fn, policy=POLICIES[policy])  # noqa: E731
    same(RUNS[run](loss(how, wrap), x, w), RUNS[run](loss(how, lambda fn: fn), x, w))


def test_captured_batch_of_an_outer_vmap():
    x, weights = rand(4, 3), rand(2, 3, 3)

    def run(wrap):
        def outer(w):
            region = wrap(lambda x: torch.tanh(x @ w))
            return vmap(grad(lambda x: region(x).sum()))(x)

        return vmap(outer)(weights)

    same(run(remat), run(lambda fn: fn))


def test_region_made_once_captures_what_it_finds_at_each_call():
    held = {}
    region = remat(lambda x: torch.tanh(x * held["w"]))

    def f(w):
        held["w"] = w
        return region(torch.ones(3, dtype=torch.float64)).sum()

    for seed in range(3):
        w = rand(3, seed=seed)
        same(grad(f)(w), grad(lambda w: torch.tanh(w).sum())(w))


def test_a_captured_tensor_that_a_transform_inside_is_given():
    """torch.func wraps it for a level of its own, with no torch function: in its place goes the operand."""

    def forces(x, w):
        return x @ grad(lambda w: w.sin().square().sum())(w)

    def by_capturing(x, w):
        return remat(lambda x: forces(x, w))(x).sum()

    x, w = rand(2, 3), rand(3, 3)
    expected = grad(lambda x, w: forces(x, w).sum(), (0, 1))(x, w)
    same(grad(by_capturing, (0, 1))(x, w), expected)
    same(grad(lambda x: by_capturing(x, w))(x), expected[0])
    same(grad(lambda x, w: remat(forces)(x, w).sum(), (0, 1))(x, w), expected)

    def scanned(w):
        return scan_remat(lambda c, _: (c + forces(c, w), None), x, length=2)[0].sum()

    def looped(w):
        once = x + forces(x, w)
        return (once + forces(once, w)).sum()

    same(hessian(scanned)(w), hessian(looped)(w))


class Held:
    __slots__ = ("memory",)


class Kept:
    memory: torch.Tensor


def by_variable(w, memory):
    def write(new):
        nonlocal memory
        memory = new

    return recurrent(w, lambda: memory, write)


def by_global_that_an_inner_function_names(w, memory):
    global memory_of_file
    memory_of_file = memory

    def step(x):
        def write(new):
            global memory_of_file
            memory_of_file = new

        return recurrent(w, lambda: memory_of_file, write)(x)

    return step


def by_attribute_of_a_function(w, memory):
    def step(x):
        out = torch.tanh(x @ w + vars(step)["memory"])
        vars(step)["memory"] = out.detach()
        return out * x

    vars(step)["memory"] = memory
    return step


def of(held: Any) -> Any:
    def made(w, memory):
        held.memory = memory
        return recurrent(w, lambda: held.memory, lambda new: setattr(held, "memory", new))

    return made


def in_item(held: Any, key: Any) -> Any:
    def made(w, memory):
        held[key] = memory
        return recurrent(w, lambda: held[key], lambda new: held.__setitem__(key, new))

    return made


HOLDERS = {
    "variable": by_variable,
    "global of an inner function": by_global_that_an_inner_function_names,
    "attribute of a function": by_attribute_of_a_function,
    "attribute": of(torch.nn.Module()),
    "slot": of(Held()),
    "class": of(Kept),
    "name in a module": of(types.ModuleType("kept")),
    "item": in_item({}, "memory"),
    "list": in_item([None], 0),
    "global": in_item(GLOBAL, "memory"),
}


def recurrent(w, read, write):
    def step(x):
        out = torch.tanh(x @ w + read())
        write(out.detach())
        return out * x

    return step


@pytest.mark.parametrize("held", HOLDERS)
def test_a_state_that_is_replaced_is_the_old_one_in_the_recomputation(held):
    """The function ran again on its next state: gradients off by 0.8, silently."""

    def three(wrap):
        memory = torch.zeros(2, 3, dtype=torch.float64)
        step, x = wrap(HOLDERS[held](rand(3, 3), memory)), rand(2, 3)
        return [grad(lambda x: step(step(x)).square().sum())(x + i) for i in range(3)]

    same(three(remat), three(lambda fn: fn))


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("policy", [save_nothing, save_matmuls])
def test_a_state_that_is_replaced_where_a_function_runs_again_as_a_whole(policy, twice):
    """A raw kernel lets it run again in plain autograd, on the next state: right or refused."""
    w, state = rand(3, 3), {"h": torch.zeros(2, 3, dtype=torch.float64)}

    def step(x):
        h = torch.tanh(x @ w + state["h"] + unseen(x))
        state["h"] = h.detach()
        return h * x

    region, x = remat(step, policy=policy), rand(2, 3).requires_grad_()
    out = region(region(x)) if twice else region(x)
    after = state["h"]
    with pytest.raises(RematError, match="reads a tensor .* put in the place of the forward's"):
        out.square().sum().backward()
    assert state["h"] is after

    # The same numbers in another tensor are no change.
    state["h"] = torch.zeros(2, 3, dtype=torch.float64)
    still = remat(lambda x: torch.tanh(x @ w + state["h"] + unseen(x)), policy=policy)
    out = still(x).square().sum()
    state["h"] = state["h"].clone()
    same(torch.autograd.grad(out, x)[0], torch.autograd.grad(torch.tanh(x @ w).square().sum(), x)[0])


def test_a_region_in_a_vmapped_one_whose_level_is_gone_in_the_backward():
    """Of `vjp` the pull-back is called later: what the inner region captures is in that level's wrapper."""

    def of(wrap):
        def loss(x, y):
            around = wrap(lambda a, b: wrap(lambda a: x.sin() * 2)(a))
            return vmap(around)(torch.stack([y, x]), torch.stack([x, x])).sum()

        return vjp(loss, rand(3, 4), rand(3, 4))[1](torch.ones((), dtype=torch.float64))

    same(of(remat), of(lambda fn: fn))
