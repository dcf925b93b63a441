"""A mistake in a scan has one text, wherever the scan runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from remat import RematError, scan_layers, scan_remat, while_remat

H, X = torch.ones(3), torch.ones(5, 3)
wrong: Any = scan_remat  # called with what its types forbid
wrong_loop: Any = while_remat


def stays(carry, x):
    return carry, None


def writes_into_x(carry, x):
    return carry + x.mul_(2), None


# What a user may get wrong, and a part of what is said about it.
MISTAKES: dict[str, tuple[Any, str]] = {
    # -- what is given
    "a negative length": (lambda h: wrong(stays, h, length=-1), "got length=-1; a number of steps"),
    "a length that is no int": (lambda h: wrong(stays, h, length=2.5), "got length=2.5"),
    "no length": (lambda h: wrong(stays, h), "xs has no tensor; write length="),
    "lengths of xs differ": (
        lambda h: wrong(stays, h, {"a": X, "b": X[:3]}),
        "xs['a'] has 5, xs['b'] has 3; all must be the same",
    ),
    "another length": (lambda h: wrong(stays, h, X, length=3), "xs has 5, length has 3"),
    "numbers as xs": (lambda h: wrong(stays, h, {"n": [X, 2]}), "xs['n'][1] is int; xs are tensors"),
    "xs without dimensions": (lambda h: wrong(stays, h, H.sum()), "xs is a tensor without dimensions"),
    "an unknown word": (lambda h: wrong(stays, h, X, checkpoints="log"), "got 'log'; write 'all', 'sqrt'"),
    "no carries": (lambda h: wrong(stays, h, X, checkpoints=0), "got 0; at least one carry"),
    "carries that are no int": (
        lambda h: wrong(stays, h, X, checkpoints=True),
        "a number of carries is an int",
    ),
    "auto without a budget": (lambda h: wrong(stays, h, X, checkpoints="auto"), "write budget='64MiB'"),
    "a budget without auto": (
        lambda h: wrong(stays, h, X, budget=3),
        "budget=3 goes with checkpoints='auto'",
    ),
    # -- what the body returns
    "no pair": (lambda h: wrong(lambda c, x: c, h, X), "the body returned Tensor; it must return a pair"),
    "three results": (lambda h: wrong(lambda c, x: (c, x, x), h, X), "returned a tuple of length 3"),
    "another structure": (
        lambda h: wrong(lambda c, x: ((c["a"], [x]), None), {"a": h}, X),
        "a carry of structure (*, [*]), but the carry that came in has {'a': *}",
    ),
    "another shape": (
        lambda h: wrong(lambda c, x: ((c[0], c[1][:2]), x), (h, h), X),
        "carry[1] came in as float32[3] and was returned as float32[2]",
    ),
    "another dtype": (
        lambda h: wrong(lambda c, x: ({"a": c["a"].double()}, x), {"a": h}, X),
        "carry['a'] came in as float32[3] and was returned as float64[3]",
    ),
    "another type": (
        lambda h: wrong(lambda c, x: ((c[0], 1.5), x), (h, 1), X),
        "carry[1] came in as int and was returned as float",
    ),
    "a tensor that becomes None": (
        lambda h: wrong(lambda c, x: (None, x), h, X),
        "carry came in as float32[3] and was returned as NoneType",
    ),
    "numbers as y": (lambda h: wrong(lambda c, x: (c, {"n": 3}), h, X), "y['n'] is int; the ys are stacked"),
    # -- what the body does
    "writes into the carry": (
        lambda h: wrong(lambda c, x: ({"a": c["a"], "b": c["b"].add_(x)}, x), {"a": h, "b": h + 0}, X),
        "wrote into its carry['b'] in place",
    ),
    "writes into xs": (lambda h: wrong(writes_into_x, h, X + 0), "wrote into xs in place"),
    # -- loops and layers
    "a loop without a bound": (
        lambda h: wrong_loop(lambda c: True, stays, h),
        "write checkpoints=..., or max_steps",
    ),
    "a negative bound": (
        lambda h: wrong_loop(lambda c: True, stays, h, max_steps=-1),
        "got max_steps=-1; a number of steps",
    ),
    "a schedule that needs a length": (
        lambda h: wrong_loop(lambda c: True, stays, h, checkpoints="all"),
        "needs a number of carries or an Online schedule",
    ),
    "layers of another shape": (
        lambda h: scan_layers(lambda p, x: x[:2], X, h),
        "carry came in as float32[3] and was returned as float32[2]",
    ),
}


def message(mistake: Any) -> str:
    try:
        mistake(H + 0)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", MISTAKES)
def test_eager_and_traced_scans_say_the_same(case):
    mistake, part = MISTAKES[case]
    eager = message(mistake)
    assert part in eager
    if list(MISTAKES).index(case) % 4:
        return  # Compiling takes a second.
    torch._dynamo.reset()
    traced = message(torch.compile(mistake, backend="aot_eager", fullgraph=True))
    # Where Dynamo itself finds it, the error is part of its own, as Python shows it.
    assert any(eager.translate(quoted) in traced for quoted in ({}, {39: "\\'"}))


def test_weights_that_hooks_drop_to_empty_tensors():
    """The scan's node knows what they were when it was called."""
    layer, x = nn.Linear(3, 3), torch.ones(3, requires_grad=True)
    home = {name: p.data for name, p in layer.named_parameters()}

    def give(values):
        for name, value in values.items():
            getattr(layer, name).data = value

    def drop(*_):
        give(dict.fromkeys(home, torch.empty(0)))

    drop()
    layer.register_forward_pre_hook(lambda *_: give(home))
    layer.register_forward_hook(drop)
    out = scan_remat(lambda c, _: (layer(c), None), x, length=2)[0]
    with pytest.raises(RematError, match="has another shape there than when the scan was called"):
        out.sum().backward()
