"""Tensors that a region takes from elsewhere than its arguments are differentiated in every mode."""

import types
from typing import Any

import pytest
import torch
from torch.func import grad

from remat import RematError, remat, save_matmuls, save_nothing
from tests.helpers import rand, same, unseen

GLOBAL: dict[str, torch.Tensor] = {}


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
