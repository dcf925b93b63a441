"""Hooks inside regions, and whether code that runs can tell that it runs again."""

import itertools
import os
import queue

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from remat import (
    RematError,
    capture_grads,
    checkpoint_name,
    checkpoint_policy,
    is_recomputing,
    remat,
    save_everything,
    save_matmuls,
    save_nothing,
)
from tests.helpers import rand, same, unseen

POLICIES = pytest.mark.parametrize("policy", [save_nothing, save_matmuls, save_everything], ids=repr)
X = rand(5, 3)


def observed(wrap, passes=1):
    """What the hooks of every layer see: {(pass, recomputing, layer, hook): [values]}, and the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)
    ).double()
    seen = {}

    def note(hook, i, tensor):
        # A number is read at once; a tensor would be that of ops which nothing in the backward reads.
        key = (step, is_recomputing(), i, hook)
        seen.setdefault(key, []).append(None if tensor is None else tensor.detach().norm().item())

    for i, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda m, args, i=i: note("pre", i, args[0]))
        layer.register_forward_hook(lambda m, args, out, i=i: note("forward", i, out))
        layer.register_full_backward_pre_hook(lambda m, gout, i=i: note("backward pre", i, gout[0]))
        layer.register_full_backward_hook(lambda m, gin, gout, i=i: note("backward", i, gin[0]))
    for step in range(passes):  # noqa: B007
        wrap(model)(X.clone().requires_grad_()).square().sum().backward()
    return seen, [p.grad for p in model.parameters()]


@POLICIES
@pytest.mark.parametrize("passes", [1, 3])
def test_module_hooks_see_right_values_once_per_pass(policy, passes):
    """A recomputation runs ops, and no hooks: they see what they see without remat."""
    expected, gradients = observed(lambda m: m, passes)
    seen, got = observed(lambda m: remat(m, policy=policy), passes)
    same(got, gradients)
    assert seen == expected and all(len(values) == 1 for values in expected.values())


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_module_hooks_run_again_where_the_function_does(policy):
    """With a kernel that went unseen: up to the last value that the backward wants, with the same numbers."""
    expected, gradients = observed(lambda m: m)
    seen, got = observed(lambda m: remat(lambda x: m(x + unseen(x)), policy=policy))
    same(got, gradients)
    assert {key: values for key, values in seen.items() if not key[1]} == expected
    again = {(at, False, i, hook): v for (at, twice, i, hook), v in seen.items() if twice}
    last = (0, False, 4, "forward")
    assert again.keys() == {key for key in expected if not key[3].startswith("backward")} - {last}
    assert all(expected[key] == values for key, values in again.items())


@POLICIES
def test_module_hooks_of_a_retained_graph_run_once_per_backward(policy):
    def run(wrap):
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), []
        for i, layer in enumerate(model):
            layer.register_full_backward_hook(
                lambda m, gin, gout, i=i: seen.append((is_recomputing(), i, gin[0].norm().item()))
            )
        out = wrap(model)(X.clone().requires_grad_()).square().sum()
        for retain in (True, True, False):
            out.backward(retain_graph=retain)
        return seen, [p.grad for p in model.parameters()]

    seen, got = run(lambda m: remat(m, policy=policy))
    expected, gradients = run(lambda m: m)
    assert seen == expected and len(seen) == 9
    same(got, gradients)


@POLICIES
def test_hooks_that_change_values_change_them_in_both_passes(policy):
    def gradients(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model[1].register_forward_hook(lambda m, args, out: torch.add(out, 1))  # type: ignore[arg-type]
        model[1].register_full_backward_hook(lambda m, gin, gout: (gin[0] * 3,))
        model[2].register_full_backward_pre_hook(lambda m, gout: (gout[0] * 5,))
        x = X.clone().requires_grad_()
        wrap(model)(x).square().sum().backward()
        return x.grad, [p.grad for p in model.parameters()]

    same(gradients(lambda m: remat(m, policy=policy)), gradients(lambda m: m))


def jacrev_of_grad(f):
    return jacrev(grad(f))


def test_forward_hooks_under_torch_func():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    calls = []
    model[1].register_forward_hook(lambda m, args, out: calls.append(is_recomputing()))
    params = {k: p.detach() for k, p in model.named_parameters()}

    def loss(wrap):
        return lambda p, x: torch.func.functional_call(Outer(wrap), p, (x,)).square().sum()

    class Outer(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.wrap, self.model = wrap, model

        def forward(self, x):
            return self.wrap(self.model)(x)

    params = {"model." + k: p for k, p in params.items()}
    for way, runs in ((grad, [False]), (hessian, [False]), (jacrev_of_grad, [False, True, True, True])):
        expected = vmap(way(loss(lambda m: m)), (None, 0))(params, X)
        calls.clear()
        same(vmap(way(loss(remat)), (None, 0))(params, X), expected)
        assert calls == runs


def test_hooks_are_told_where_a_budget_is_planned():
    """It is planned once, on tensors without data, in a run beside the passes: Python effects happen then,
    too, but hooks on the backward of a module see no tensor without data."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    seen, told = [], queue.SimpleQueue()

    def note(what):
        seen.append(what)
        told.put((is_recomputing(), what))

    model[1].register_forward_hook(lambda m, args, out: note(type(out)))
    model[1].register_full_backward_hook(lambda m, *_: note("backward"))
    region = remat(model, policy=checkpoint_policy(budget=1.0))
    for _ in range(2):
        region(X.clone().requires_grad_()).sum().backward()
    assert seen == [FakeTensor, *[torch.Tensor, "backward"] * 2]
    heard = [told.get() for _ in range(told.qsize())]
    assert [what for again, what in heard if again] == [FakeTensor]
    assert [what for again, what in heard if not again] == seen[1:]


def over_a_level(fn):
    """Plain autograd over a gradient of `torch.func`."""
    x = X.clone().requires_grad_()
    return torch.autograd.grad(grad(lambda x: fn(x).sin().sum())(x).square().sum(), x)[0]


def in_plain_autograd(fn):
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(fn(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


TWICE = {
    "grad of grad": lambda fn: grad(lambda x: grad(lambda x: fn(x).sin().sum())(x).square().sum())(X),
    "jacrev of grad": lambda fn: jacrev(grad(lambda x: fn(x).sin().sum()))(X),
    "autograd over grad": over_a_level,
    "autograd twice": in_plain_autograd,
    "autograd over a vmap of grad": lambda fn: over_a_level(lambda x: vmap(fn)(x)),
    "three levels": lambda fn: grad(lambda x: TWICE["grad of grad"](lambda y: fn(x * y.sin())).sum())(X),
}


@pytest.mark.parametrize("way", [way for way in TWICE if "vmap" not in way])
def test_data_that_two_levels_differentiate_is_refused(way):
    """At a level of torch.func `.data` cuts off the derivatives of that level, and no others."""

    def reads(x):
        return x.sin() * x.data

    if way == "autograd twice":
        same(TWICE[way](remat(reads)), TWICE[way](reads))
        return
    with pytest.raises(RematError, match=r"Write `\.detach\(\)`"):
        TWICE[way](remat(reads))
    same(grad(lambda x: remat(reads)(x).sum())(X), X.cos() * X)


def test_hooks_are_told_where_names_are_looked_for():
    told = []

    def region(x):
        told.append(is_recomputing())
        return checkpoint_name(x.sin(), "h").exp().sum()

    vmap(capture_grads(remat(region), "h"))(X)
    assert told.count(False) == 1


MODES = {
    "backward": lambda f, x: f(x.clone().requires_grad_()).sum().backward(),
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vmap grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x),
    "jvp of grad": lambda f, x: jvp(grad(lambda x: f(x).sum()), (x,), (x,)),
}


@pytest.mark.parametrize("mode", MODES)
def test_is_recomputing(mode):
    told = []

    def region(x):
        told.append(is_recomputing())
        return x.sin().exp()

    assert not is_recomputing()
    MODES[mode](remat(region), X)
    assert told == [False] and not is_recomputing()
    nested = region
    for _ in range(3):
        told.clear()
        nested = remat(lambda x, nested=nested: nested(x.cos()))
        MODES[mode](nested, X)
        assert told == [False] and not is_recomputing()
    told.clear()
    TWICE["grad of grad"](remat(region))
    assert told.count(False) == 1 and any(told) and not is_recomputing()


def test_is_recomputing_where_a_kernel_went_unseen():
    told, runs = {}, itertools.count()

    def region(x):
        told[next(runs)] = is_recomputing()
        assert told[len(told) - 1] == (len(told) == 2)
        return (x + unseen(x)).sin().exp()

    MODES["backward"](remat(region), X)
    assert next(runs) == 2 and not is_recomputing()
    assert told == {0: False}  # what it leaves is that of its forward


@pytest.mark.parametrize("run", MODES.values(), ids=MODES)
def test_the_backward_after_a_recomputation_is_none(run):
    told = []

    def region(x):
        y = x.sin().exp()
        if y.requires_grad:
            y.register_hook(lambda g: told.append(is_recomputing()))
        return y * 2

    run(remat(region), X)
    assert told and not any(told)


def labels(run):
    """The labels of regions in a profiler's trace, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    return [event.name.removeprefix("remat::") for event in events if event.name.startswith("remat::")]


@pytest.mark.parametrize("mode", MODES)
def test_a_profiler_sees_labels(mode):
    run = MODES[mode]
    first, second = (remat(lambda x: x.sin().exp(), name=name) for name in "ab")
    fn = lambda x: second(first(x))  # noqa: E731
    assert labels(lambda: run(fn, X)) == ["forward a", "forward b", "recompute b", "recompute a"]
    with pytest.raises(ZeroDivisionError):
        labels(lambda: run(remat(lambda x: x / (1 // 0)), X))
    nested = remat(lambda x: first(x.cos()), name="outer")
    # In plain autograd the inner one is asked first. What it starts from is recomputed by the outer one.
    again = ["recompute outer", "recompute a"] if mode == "backward" else ["recompute outer"]
    assert labels(lambda: run(nested, X))[: 2 + len(again)] == ["forward outer", "forward a", *again]


@pytest.mark.parametrize("mode", ["backward", "grad of grad"])
def test_a_failing_recomputation_is_over(mode):
    def region(x):
        if is_recomputing():
            raise ZeroDivisionError
        return (x + unseen(x) if mode == "backward" else x).sin().exp()

    run = MODES["backward"] if mode == "backward" else lambda f, _: TWICE[mode](f)
    with pytest.raises(ZeroDivisionError):
        run(remat(region), X)
    assert not is_recomputing()


@pytest.mark.parametrize("run", [MODES["backward"], lambda f, _: TWICE["grad of grad"](f)])
def test_other_ops_in_the_recomputation_are_told(run):
    """What runs no op may depend on `is_recomputing`; other ops there would make another function."""

    def region(x):
        h = (x + unseen(x)).exp()
        return (h if is_recomputing() else h.clone()).sin()

    with pytest.raises(RematError, match="does not repeat its forward"):
        run(remat(region), X)


def test_what_leaves_a_region_that_hooks_have_broken_off_has_no_backward():
    """Told in words. What leaves by another raise of that exception, or of one with its id, has derivatives.

    Python gives the id of one that is gone to another.
    """
    left, error = list[torch.Tensor](), ValueError()

    def refuse(tensor):
        raise error

    def breaks(x):
        left.append(x.sin().exp())
        with torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t):
            remat(torch.tanh)(x * 2)

    def ends(x):
        left.append(x.sin().exp())
        raise error

    x = X.clone().requires_grad_()
    for region in breaks, ends:
        with pytest.raises(ValueError):
            remat(region)(x)
    (made,) = torch.autograd.grad(left.pop().sum(), x)
    same(made, X.cos() * X.sin().exp())
    with pytest.raises(RematError, match="broken off"):
        left.pop().sum().backward()
