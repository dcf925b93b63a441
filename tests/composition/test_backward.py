"""Plain autograd: one backward, several, parts of one."""

import pytest
import torch

from remat import remat
from tests.helpers import POLICIES, check, gradients, leaves_of, matrix, rand, same, scalar


@matrix("backward")
def test_backward_accumulates_into_grad(name, policy):
    def run(fn, args):
        leaves = leaves_of(args)
        outputs = fn(*leaves)
        scalar(outputs).backward()
        return outputs, [leaf.grad for leaf in leaves if leaf.requires_grad and leaf.grad is not None]

    check(name, policy, run)


@matrix("backward")
def test_autograd_grad(name, policy):
    def run(fn, args):
        leaves = leaves_of(args)
        outputs = fn(*leaves)
        return outputs, [g for g in gradients(outputs, leaves) if g is not None]

    check(name, policy, run)


@matrix("backward")
def test_retained_graph_gives_a_second_backward(name, policy):
    def run(fn, args):
        leaves = leaves_of(args)
        outputs = fn(*leaves)
        first = gradients(outputs, leaves, retain_graph=True)
        return outputs, [g for g in (*first, *gradients(outputs, leaves)) if g is not None]

    check(name, policy, run)


@matrix("backward", policies=("rule",))
def test_no_gradient_asked(name, policy):
    """The function runs as it is: no policy is asked."""

    def run(fn, args):
        with torch.no_grad():
            outputs = fn(*leaves_of(args))
        return outputs, ()

    check(name, policy, run, policed=False)


def two_outputs(x, w):
    h = torch.tanh(x @ w)
    return h.sin() @ w, h.cos() * x


@pytest.mark.parametrize("policy", POLICIES)
def test_two_partial_backwards(policy):
    def run(fn):
        x, w = leaves_of((rand(3, 3), rand(3, 3, seed=1)))
        first, second = fn(x, w)
        first.sum().backward(retain_graph=True)
        second.square().sum().backward()
        return x.grad, w.grad

    same(run(remat(two_outputs, policy=POLICIES[policy])), run(two_outputs))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradient_for_one_input_then_for_the_other(policy):
    def run(fn):
        x, w = leaves_of((rand(3, 3), rand(3, 3, seed=1)))
        loss = scalar(fn(x, w))
        by_x = torch.autograd.grad(loss, x, retain_graph=True)
        return by_x, torch.autograd.grad(loss, w)

    same(run(remat(two_outputs, policy=POLICIES[policy])), run(two_outputs))


def test_second_backward_without_retained_graph_is_refused_as_by_torch():
    x = rand(3, 3).requires_grad_()
    loss = remat(lambda x: (x.sin() * x.cos()).sum())(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_may_be_changed_in_place(policy):
    def run(fn):
        x, w = leaves_of((rand(3, 3), rand(3, 3, seed=1)))
        first, second = fn(x.clone(), w)
        first.add_(second).mul_(2)
        second.view(-1)[1:].add_(2)
        scalar((first, second)).backward()
        return first, x.grad, w.grad

    # Neither output is read by its own backward, so torch without remat allows the changes too.
    def region(x, w):
        h = torch.tanh(x @ w)
        return h @ w, h + x

    same(run(remat(region, policy=POLICIES[policy])), run(region))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("enter_inside", [False, True])
def test_weight_used_twice_under_autocast(policy, enter_inside):
    """Autocast's cache makes both uses one cast, in which the gradients add up in bfloat16."""

    def region(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.tanh(torch.tanh(x @ w) @ w)

    def run(wrap):
        x, w = leaves_of((rand(3, 4, dtype=torch.float32), rand(4, 4, dtype=torch.float32)))
        with torch.autocast("cpu", torch.bfloat16, enabled=not enter_inside):
            out = wrap(region)(x, w)
        return out, torch.autograd.grad(out.float().square().sum(), (x, w))

    same(run(lambda f: remat(f, policy=POLICIES[policy])), run(lambda f: f))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_of_results_of_several_calls_add_up(policy):
    def run(wrap):
        x, w = leaves_of((rand(2, 3), rand(3, 3)))
        region = wrap(lambda x: torch.sin(x @ w))
        out = region(region(x) + region(x.cos()))
        out.sum().backward()
        return out, x.grad, w.grad

    same(run(lambda f: remat(f, policy=POLICIES[policy])), run(lambda f: f))
