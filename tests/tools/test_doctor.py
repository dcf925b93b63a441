"""`remat doctor` names the cause of each mistake that it was made for, and is silent where all is well."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from remat import checkpoint_name, checkpoint_policy, remat, save_everything, save_names
from tests.helpers import rand
from tests.inside import diagnose, main

X, W = rand(64, 32), rand(32, 32).requires_grad_()


def block(x, w):
    return x + torch.tanh((x @ w).sin()).exp()


def steps(wrap, x=X, depth=4):
    for _ in range(depth):
        x = wrap(x, W)
    return x.square().sum()


# -- ten mistakes: a step, and the cause that is named ----------------------------------------------------


def view_kept():
    def sliced(x, w):
        h = torch.tanh((x @ w).sin()).exp()
        return x + checkpoint_name(h[:2], "head").square().sum()

    return steps(remat(sliced, policy=save_names("head")))


def region_too_small():
    def small(x, w):
        return x + remat(torch.square)(torch.tanh(x @ w))

    return steps(small)


def parameter_captured_as_a_copy():
    scaled = W.t().contiguous()
    return steps(remat(lambda x, w: x + torch.tanh((x @ scaled).sin()).exp()))


def unused_policy_name():
    return steps(remat(block, policy=save_names("hiden"), name="doctor_names"))


def budget_larger_than_need():
    return steps(remat(block, policy=checkpoint_policy(budget="1GiB")))


def nested_regions():
    inner = remat(lambda x, w: torch.tanh((x @ w).sin()).exp(), name="inner")
    return steps(remat(lambda x, w: x + inner(x, w).sin(), name="outer"))


def eager_inside_compile():
    def broken(x, w):
        h = x @ w
        torch._dynamo.graph_break()
        return torch.tanh(h.sin()).exp()

    region = remat(broken)
    return torch.compile(lambda: steps(region, depth=1), backend="eager")()


def grad_of_compiled():
    compiled = torch.compile(lambda w: remat(block)(X, w).sum(), backend="aot_eager")
    return torch.func.grad(compiled)(W.detach())


def missing_requires_grad():
    region = remat(block)
    return region(X, W.detach()).sum()


class DynamicCache:
    """As transformers' own: layers append to it."""

    def __init__(self):
        self.keys = []

    def update(self, key):
        self.keys.append(key)
        return key


def drop_in_on_a_model_with_a_cache():
    cache = DynamicCache()
    region = remat(lambda x, w, *, past_key_values: block(past_key_values.update(x.detach()), w))
    return steps(lambda x, w: region(x, w, past_key_values=cache), depth=2)


MISTAKES = {
    view_kept: ("view", "clone"),
    region_too_small: ("too small", "whole block"),
    parameter_captured_as_a_copy: ("captured copy", "inside the region"),
    unused_policy_name: ("unused name", "checkpoint_name"),
    budget_larger_than_need: ("budget", "budget=0.5"),
    nested_regions: ("nested", "one region"),
    eager_inside_compile: ("eager inside compile", "fullgraph=True"),
    grad_of_compiled: ("transform of compiled", "torch.compile(torch.func.grad(f))"),
    missing_requires_grad: ("no requires_grad", "requires_grad_(True)"),
    drop_in_on_a_model_with_a_cache: ("use_cache", "use_cache=False"),
}


@pytest.mark.parametrize("step", MISTAKES, ids=lambda step: step.__name__)
def test_the_cause_of_a_mistake_is_named(step):
    cause, advice = MISTAKES[step]
    found = diagnose(step)
    assert cause in [f.cause for f in found.findings], str(found)
    first = next(f for f in found.findings if f.cause == cause)
    assert advice in first.advice and first.said in str(found).replace("\n      ", " ")


# -- no false alarm --------------------------------------------------------------------------------------


def well():
    return steps(remat(block))


def with_its_own_backward():
    steps(remat(block)).backward()


def with_its_own_optimizer():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    x = X.float()
    for layer in model:
        x = remat(layer)(x)
    x.square().sum().backward()
    optimizer.step()


def func_grad():
    return torch.func.grad(lambda w: remat(block)(remat(block)(X, w), w).sum())(W.detach())


@pytest.mark.parametrize("step", [well, with_its_own_backward, with_its_own_optimizer, func_grad])
def test_where_all_is_well_nothing_is_found(step):
    found = diagnose(step)
    assert not found.findings, str(found)
    assert found.saved_bytes > 0 and "nothing found that defeats them" in str(found)


def test_other_examples_of_the_classes():
    assert [f.cause for f in diagnose(lambda: steps(block)).findings] == ["no region"]
    everything = diagnose(lambda: steps(remat(block, policy=save_everything)))
    assert [f.cause for f in everything.findings] == ["save_everything"]
    whole = diagnose(lambda: remat(lambda x, w: steps(block, x))(X, W))
    assert "whole step" in [f.cause for f in whole.findings]
    block_of = rand(64, 320)
    sliced = diagnose(lambda x: steps(remat(block), x), block_of[:, :32])
    assert "view" in [f.cause for f in sliced.findings]
    cast = W.detach().float().requires_grad_()

    def bfloat16():
        w = cast.bfloat16()
        region = remat(lambda x: x + torch.tanh((x @ w).sin()).exp())
        return region(region(X.bfloat16())).sum()

    assert "captured copy" in [f.cause for f in diagnose(bfloat16).findings]


def test_a_step_that_raises_a_refusal_is_told():
    def refused(x):
        return remat(lambda x: x.mul_(2).sum())(x * 1)

    found = diagnose(refused, X.clone().requires_grad_())
    assert [f.cause for f in found.findings] == ["error"] and "cannot be measured" in str(found)


def healthy():
    return (well,)


def sick():
    return (nested_regions,)


def test_the_command(capsys):
    assert main(["explain", f"{__name__}:healthy", "--check"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["doctor", f"{__name__}:sick", "--json"]) == 1
    said = capsys.readouterr()
    assert said.err == "remat doctor is deprecated: write remat explain --check.\n"
    told = json.loads(said.out)
    assert [f["cause"] for f in told["findings"]] == ["nested"] and told["saved_bytes"] > 0
