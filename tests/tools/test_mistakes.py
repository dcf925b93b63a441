"""Ordinary mistakes: each message says what was met, and what to write."""

# What is passed is meant to be wrong.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat as library
from remat import (
    RematError,
    checkpoint_name,
    checkpoint_policy,
    remat,
    save_attention,
    save_matmuls,
    save_names,
    save_ops,
    save_unbatched_matmuls,
    scan_remat,
    while_remat,
)
from remat.jax_names import checkpoint_policies as jax

X = torch.ones(4, 4, requires_grad=True)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def f(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()


def under(policy: Any) -> Any:
    return remat(f, policy=policy)(X)


anything: Any = library
# What is done, what the message says was met, and what it says to write.
MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a class": (lambda: remat(Layer), "a class of modules", r"remat\(Layer\(...\)\).*layers=Layer"),
    "a policy as decorator": (lambda: remat(save_matmuls), "a policy", r"policy=save_matmuls"),
    "two policies as decorator": (
        lambda: remat(save_matmuls | save_attention), "a policy", r"policy=save_matmuls \| save_attention"
    ),
    "a policy by position": (
        lambda: remat(f, save_matmuls), "by name", r"remat\(fn, policy=save_matmuls\)"
    ),
    "arguments by position": (lambda: remat(f, X), "1 more", r"remat\(fn\)\(x\)"),
    "a result": (lambda: remat(f(X)), "a Tensor", r"remat\(fn\)\(x\)"),
    "a string": (lambda: remat("model"), "'model'", "@remat"),
    "torch's option": (lambda: remat(f, use_reentrant=False), "no such option", "leave it out"),
    "a misspelt option": (lambda: remat(f, polcy=save_matmuls), "polcy", "policy"),
    "a or b": (lambda: save_matmuls or save_attention, "neither true nor false", r"a \| b"),
    "not a": (lambda: not save_matmuls, "neither true nor false", "~a"),
    "save_matmuls()": (lambda: save_matmuls(), "is a policy already", "policy=save_matmuls, without"),
    "save_unbatched_matmuls()": (
        lambda: save_unbatched_matmuls(), "is a policy already", "policy=save_unbatched_matmuls"
    ),
    "a factory": (lambda: under(save_names), "makes policies", r"policy=save_names\(...\)"),
    "checkpoint_policy itself": (lambda: under(checkpoint_policy), "makes policies", "call it"),
    "a policy's name": (lambda: under("save_matmuls"), "'save_matmuls'", r"policy=remat.save_matmuls for"),
    "JAX's name": (lambda: under("dots_saveable"), "'dots_saveable'", r"checkpoint_policies.dots_saveable"),
    "a value's name": (lambda: under("h"), "'h'", r"policy=save_names\('h'\)"),
    "an op's name": (lambda: under(["aten.mm"]), "'aten.mm' in a list", r"torch.ops.aten.mm.default"),
    "a function of torch": (lambda: under(torch.mm), "builtin", r"torch.ops.aten.mm"),
    "a list of them": (lambda: under([torch.mm]), "not an op", r"torch.ops.aten.mm"),
    "a share": (lambda: under(0.4), "0.4 of type float", r"checkpoint_policy\(budget=0.4\)"),
    "a bool": (lambda: under(True), "True of type bool", "save_matmuls"),
    "a rule without return": (lambda: under(lambda info: None), "answered None", "without a return"),
    "a rule that makes one": (
        lambda: under(lambda info: save_matmuls), "answered save_matmuls", "policy=save_matmuls"
    ),
    "JAX's factory": (
        lambda: under(jax.save_only_these_names), "makes policies", r"save_only_these_names\(...\)"
    ),
    "JAX's name misspelt": (lambda: jax.dots_savable, "no 'dots_savable'", "dots_saveable"),
    "JAX's name here": (lambda: anything.dots_saveable, "dots_saveable", "jax_names.checkpoint_policies"),
    "torch's name here": (lambda: anything.checkpoint, "'checkpoint'", "remat.interop.checkpoint"),
    "per cent": (lambda: under(checkpoint_policy(budget=40)), "40 bytes", "40 % write budget=0.4"),
    "a share above one": (lambda: checkpoint_policy(budget=1.5), "got 1.5", "budget=0.4"),
    "a unit": (lambda: checkpoint_policy(budget="2 gigs"), "'2 gigs'", "2GiB"),
    "a negative budget": (lambda: checkpoint_policy(budget=-1), "got -1", "budget=0.4"),
    "rule and budget": (lambda: checkpoint_policy(f, budget=0.4), "got both", "budget=0.4"),
    "one policy to compare": (
        lambda: library.compare(f, X, policies=save_matmuls), "takes several", r"policies=\[save_matmuls\]"
    ),
    "apply's policy by position": (
        lambda: library.nn.apply(MODEL, save_matmuls), "by name", "policy=save_matmuls"
    ),
    "apply to a function": (lambda: library.nn.apply(f), "got a function", r"remat\(fn"),
    "apply to a class": (lambda: library.nn.apply(Layer), "the class Layer", r"Layer\(...\)"),
    "layers as an instance": (lambda: library.nn.apply(MODEL, layers=Layer()), "got a Layer", "layers=Layer"),
    "no layer": (lambda: library.nn.apply(MODEL), "no submodule", r"'\*'"),
    "every=0": (lambda: library.nn.apply(MODEL, every=0), "every=0", "every=2"),
    "residuals of a result": (
        lambda: library.saved_residuals(f(X)), "got a Tensor", r"saved_residuals\(fn, x\)"
    ),
    "explain a name": (lambda: library.explain("model"), "got 'model'", r"explain\(fn, x\)"),
    "explain a result": (lambda: library.explain(f(X)), "got a Tensor", r"explain\(fn, x\)"),
    "fit a function": (lambda: library.fit(f, X, peak="1GiB"), "takes a module", "plan_model"),
    "fit without a limit": (lambda: library.fit(MODEL, X), "takes peak", 'peak="20GiB"'),
    "a body without a pair": (
        lambda: scan_remat(lambda c, x: c, X, torch.ones(3, 4)), "returned", r"a pair \(carry, y\)"
    ),
    "a scan without a length": (lambda: scan_remat(lambda c, x: (c, None), X), "no tensor", "length="),
    "a loop without a bound": (
        lambda: while_remat(lambda c: c.sum() < 9, lambda c: c + 1, X), "while_remat", "max_steps="
    ),
    "a name and then the value": (
        lambda: checkpoint_name("h", X), "got a tensor", r"checkpoint_name\(x, 'attn'\)"
    ),
    "an op's name for save_ops": (lambda: save_ops("mm"), "'mm'", r"torch.ops.aten.mm"),
    "static_argnums by name": (lambda: remat(f, static_argnums="x"), "'x'", "integers"),
    "determinism_check=True": (lambda: remat(f, determinism_check=True), "True", "'exact'"),
    "no region to plan": (lambda: library.plan_model(f, X, budget=0.5), "no region", "checkpoint_policy"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message_says_what_was_met_and_what_to_write(mistake: str) -> None:
    make, met, write = MISTAKES[mistake]
    with pytest.raises((RematError, AttributeError)) as caught:
        make()
    said = re.sub(r"\s+", " ", str(caught.value))
    assert re.search(met, said), said
    assert re.search(write, said), said
    assert "tensor([" not in said, "numbers of a tensor say nothing"


def test_there_are_as_many_as_were_promised() -> None:
    assert len(MISTAKES) >= 48


def test_a_name_that_no_value_bears_warns_with_the_nearest() -> None:
    block = remat(lambda x: checkpoint_name(x @ x, "hidden").sin(), policy=save_names("hiden"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        block(X).sum().backward()
    assert "'hidden'" in str(said[0].message)


def test_importing_all_leaves_nn_alone() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("from remat import *", space)
    assert space["nn"] is nn and "remat" in space
