"""Ordinary mistakes: each message says what was met, and what to write."""

# What is passed is meant to be wrong.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import re
import subprocess
import sys
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
    interop,
    remat,
    save_attention,
    save_matmuls,
    save_names,
    save_ops,
    save_weight_matmuls,
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
    "arguments by position": (lambda: remat(f, X), "got 2 arguments", r"remat\(fn\)\(x\)"),
    "a result": (lambda: remat(f(X)), "a Tensor", r"remat\(fn\)\(x\)"),
    "a string": (lambda: remat("model"), "'model'", "@remat"),
    "torch's option": (lambda: remat(f, use_reentrant=False), "no such option", "leave it out"),
    "a misspelt option": (lambda: remat(f, polcy=save_matmuls), "polcy", "policy"),
    "a or b": (lambda: save_matmuls or save_attention, "neither true nor false", r"a \| b"),
    "not a": (lambda: not save_matmuls, "neither true nor false", "~a"),
    "save_matmuls()": (lambda: save_matmuls(), "is a policy already", "policy=save_matmuls, without"),
    "save_weight_matmuls()": (
        lambda: save_weight_matmuls(), "is a policy already", "policy=save_weight_matmuls"
    ),
    "a factory": (lambda: under(save_names), "the function save_names", r"policy=save_names\(...\)"),
    "a factory behind |": (lambda: save_matmuls | save_names, "makes policies", r"save_names\(...\)"),
    "a list of policies": (
        lambda: under([save_matmuls, save_attention]), "save_matmuls in a list", r"matmuls \| save_attention"
    ),
    "a tuple with one": (lambda: under((save_matmuls,)), "in a tuple", "Write policy=save_matmuls:"),
    "a + b": (lambda: save_matmuls + save_attention, r"save_matmuls \+ save_attention", r"a \| b"),
    "a - b": (lambda: save_matmuls - save_attention, "save_matmuls - save_attention", "a & ~b"),
    "a decision": (lambda: under(library.Decision.SAVE), "Decision.SAVE", "policy=save_everything"),
    "bytes": (lambda: under(4096), "4096 of type int", r"checkpoint_policy\(budget=4096\)"),
    "checkpoint_policy itself": (lambda: under(checkpoint_policy), "makes policies", "call it"),
    "a policy's name": (lambda: under("save_matmuls"), "'save_matmuls'", r"policy=remat.save_matmuls for"),
    "JAX's name": (lambda: under("dots_saveable"), "'dots_saveable'", r"checkpoint_policies.dots_saveable"),
    "a value's name": (lambda: under("h"), "'h'", r"policy=save_names\('h'\)"),
    "an op's name": (lambda: under(["aten.mm"]), "'aten.mm' in a list", r"torch.ops.aten.mm.default"),
    "a function of torch": (lambda: under(torch.sin), "the function sin", r"policy=\[torch.ops.aten.sin\]"),
    "a list of them": (lambda: under([torch.exp]), "not an op", r"torch.ops.aten.exp"),
    "a function of several ops": (
        lambda: save_ops(torch.matmul), "the function matmul", "policy=save_matmuls"
    ),
    "a method of torch": (lambda: save_ops(torch.Tensor.mm), "the function mm", r"torch.ops.aten.mm"),
    "a policy as an op": (lambda: save_ops(save_matmuls), "got save_matmuls", "write policy=save_matmuls"),
    "a share": (lambda: under(0.4), "0.4 of type float", r"checkpoint_policy\(budget=0.4\)"),
    "a bool": (lambda: under(True), "True of type bool", "policy=save_everything"),
    "a rule without argument": (lambda: under(lambda: True), "takes no argument", "lambda info:"),
    "torch's policy function": (
        lambda: under(lambda ctx, op, *args, **kwargs: True), "ctx, op and more", r"from_torch_policy\(fn\)"
    ),
    "JAX's policy function": (
        lambda: under(lambda prim, *avals, **params: True), "takes prim and more", "lambda info:"
    ),
    "a rule without return": (lambda: under(lambda info: None), "answered None", "without a return"),
    "a rule that makes one": (
        lambda: under(lambda info: save_matmuls), "answered save_matmuls", "policy=save_matmuls"
    ),
    "JAX's factory": (
        lambda: under(jax.save_only_these_names), "makes policies", r"save_only_these_names\(...\)"
    ),
    "JAX's name misspelt": (lambda: jax.dots_savable, "no 'dots_savable'", "dots_saveable"),
    "JAX's name here": (lambda: anything.dots_saveable, "dots_saveable", "jax_names.checkpoint_policies"),
    "torch's call here": (lambda: anything.checkpoint(f, X), "got 2 arguments", "remat.interop.checkpoint"),
    "torch's call, whole": (
        lambda: anything.checkpoint(f, X, use_reentrant=False), "use_reentrant=False",
        "remat.interop.checkpoint",
    ),
    "torch's call, with keywords": (
        lambda: anything.checkpoint(f, X, preserve_rng_state=False, y=X), "got 2 arguments",
        "remat.interop.checkpoint",
    ),
    "torch's call, reentrant": (
        lambda: anything.checkpoint(f, use_reentrant=True), "use_reentrant=True", "remat.interop.checkpoint"
    ),
    "another of torch's": (lambda: anything.CheckpointPolicy, "CheckpointPolicy", "remat.Decision"),
    "a name of another room": (lambda: anything.Layout, "'Layout'", "remat.plan.Layout"),
    "a name misspelt": (lambda: anything.save_matmul, "'save_matmul'", "did you mean save_matmuls"),
    "per cent": (lambda: under(checkpoint_policy(budget=40)), "40 bytes", "40 % write budget=0.4"),
    "per cent in words": (lambda: checkpoint_policy(budget="40%"), "'40%'", "budget=0.4"),
    "a share in quotes": (lambda: checkpoint_policy(budget="0.4"), "'0.4'", "budget=0.4"),
    "a share above one": (lambda: checkpoint_policy(budget=1.5), "got 1.5", "budget=0.4"),
    "a unit": (lambda: checkpoint_policy(budget="2 gigs"), "'2 gigs'", "2GiB"),
    "a negative budget": (lambda: checkpoint_policy(budget=-1), "got -1", "budget=0.4"),
    "rule and budget": (lambda: checkpoint_policy(f, budget=0.4), "got both", "budget=0.4"),
    "one policy to compare": (
        lambda: library.explain(f, X, policies=save_matmuls), "takes several", r"policies=\[save_matmuls\]"
    ),
    "a policy's name to compare": (
        lambda: library.explain(f, X, policies="save_matmuls"), "'save_matmuls'", "policy=remat.save_matmuls"
    ),
    "apply's policy by position": (
        lambda: library.nn.apply(MODEL, save_matmuls), "by name", "policy=save_matmuls"
    ),
    "apply to a function": (lambda: library.nn.apply(f), "got the function f", r"remat\(fn"),
    "apply to a class": (lambda: library.nn.apply(Layer), "the class Layer", r"Layer\(...\)"),
    "layers as an instance": (lambda: library.nn.apply(MODEL, layers=Layer()), "a Layer", "layers=Layer,"),
    "apply's option misspelt": (
        lambda: library.nn.apply(MODEL, layer="*"), r"remat.apply\(layer='\*'\)", "did you mean layers"
    ),
    "an option of apply": (lambda: remat(MODEL, layers="*"), r"remat\(layers='\*'\)", "remat.apply"),
    "apply to a list": (lambda: library.nn.apply([MODEL]), "list", r"remat\(fn"),
    "remove from a function": (lambda: library.nn.remove(f), "the function f", "a module"),
    "regions of a function": (lambda: library.nn.regions(f), "the function f", "a module"),
    "no layer": (lambda: library.nn.apply(MODEL), "no submodule", r"'\*'"),
    "layers that are used up": (
        lambda: library.fit(MODEL, X, peak="1GiB", layers=(x for x in ())), r"layers=a generator\)", r"'\*'"
    ),
    "layers by a rule": (
        lambda: library.fit(MODEL, X, peak="1GiB", layers=lambda name, module: False), "the function", r"'\*'"
    ),
    "every=0": (lambda: library.nn.apply(MODEL, every=0), "every=0", "every=2"),
    "residuals of a result": (
        lambda: library.saved_residuals(f(X)), "got a Tensor", r"saved_residuals\(fn, x\)"
    ),
    "explain a name": (lambda: library.explain("model"), "got 'model'", r"explain\(fn, x\)"),
    "explain a result": (lambda: library.explain(f(X)), "got a Tensor", r"explain\(fn, x\)"),
    "explain a class": (lambda: library.explain(Layer, X), "the class Layer", r"explain\(Layer\(...\), x\)"),
    "plan a class": (
        lambda: library.fit(Layer, X, budget=0.5), "the class Layer", r"fit\(Layer\(...\), x\)"
    ),
    "fit a class": (lambda: library.fit(Layer, X, peak="1GiB"), "the class Layer", r"fit\(Layer\(...\), x\)"),
    "fit with one policy": (
        lambda: library.fit(MODEL, X, peak="1GiB", policies=save_matmuls), "takes several",
        r"policies=\[save_matmuls\]",
    ),
    "fit with an optimizer's class": (
        lambda: library.fit(MODEL, X, peak="1GiB", optimizer=torch.optim.AdamW), "the class AdamW",
        'optimizer="adamw"',
    ),
    "fit without blocks": (
        lambda: library.fit(MODEL, X, peak=300), "with other modules inside, or several matrices", "layers="
    ),
    "fit a function": (lambda: library.fit(f, X, peak="1GiB"), "no region to plan", "checkpoint_policy"),
    "fit without a limit": (lambda: library.fit(MODEL, X), "takes peak", 'peak="20GiB"'),
    "a body without a pair": (
        lambda: scan_remat(lambda c, x: c, X, torch.ones(3, 4)), "returned", r"a pair \(carry, y\)"
    ),
    "a scan's carry first": (lambda: scan_remat(X, lambda c, x: (c, x), X), "a Tensor", "lambda carry, x"),
    "a scan without a length": (lambda: scan_remat(lambda c, x: (c, None), X), "no tensor", "length="),
    "a loop without a bound": (
        lambda: while_remat(lambda c: c.sum() < 9, lambda c: c + 1, X), "while_remat", "max_steps="
    ),
    "a name and then the value": (
        lambda: checkpoint_name("h", X), "got a tensor", r"checkpoint_name\(x, 'attn'\)"
    ),
    "an op's name for save_ops": (lambda: save_ops("mm"), "'mm'", r"torch.ops.aten.mm"),
    "torch's checkpoint, arguments first": (
        lambda: interop.checkpoint(X, f), "got a Tensor", r"checkpoint\(fn, x\)"
    ),
    "static_argnums by name": (
        lambda: remat(f, static_argnums="x"), "'x'", r"static_argnums=\(1,\).*static_argnames"
    ),
    "determinism_check=True": (lambda: remat(f, determinism_check=True), "True", "'exact'"),
    "no region to plan": (lambda: library.fit(f, X, budget=0.5), "no region", "checkpoint_policy"),
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
    assert " at 0x" not in said, "nor do addresses"


def test_there_are_as_many_as_were_promised() -> None:
    assert len(MISTAKES) >= 48


def test_a_name_that_no_value_bears_warns_with_the_nearest() -> None:
    block = remat(lambda x: checkpoint_name(x @ x, "hidden").sin(), policy=save_names("hiden"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        block(X).sum().backward()
    assert "'hidden'" in str(said[0].message)


@pytest.mark.parametrize("op", ["matmul", "linear", "scaled_dot_product_attention"])
def test_an_op_that_is_made_of_others_warns(op: str) -> None:
    with pytest.warns(UserWarning, match=rf"save_ops\(aten.{op}\) saves nothing.*explain.*save_matmuls"):
        save_ops(getattr(torch.ops.aten, op))


def test_ops_that_are_met_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_ops(torch.ops.aten.mm, torch.ops.aten.matmul)
        save_ops()


@pytest.mark.slow
def test_names_that_messages_say_are_there() -> None:
    """In a fresh process, where nobody has imported the module that the message names."""
    said = "import remat; remat.jax_names.checkpoint_policies.dots_saveable, remat.stack_params"
    subprocess.run([sys.executable, "-c", said], check=True)


def test_importing_all_leaves_nn_alone() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("from remat import *", space)
    assert space["nn"] is nn and "remat" in space
