"""One step of a model in each mode, eager and compiled.

`backward` is plain autograd, `func` is `torch.func.grad`, `vmap` per-sample gradients, `step` forward,
gradient and update in one graph, and `scan` is plain autograd through stacked layers. `blocks` is `backward`
with every block compiled by itself, as torchtitan trains: one compilation for any depth. A step takes
parameters, a batch and `mark`, which it calls between forward and backward where it can, and gives gradients.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from benchmarks.common.models import Leaves, Loss
from remat.cli.measure import Mark
from remat.cli.steps import taken
from remat.transforms import value_and_grad

Step = Callable[[Any, Tensor, Mark], Any]
# Compiles a function, or leaves it as it is.
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
MODES = ("backward", "blocks", "func", "vmap", "step", "scan")


def eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler that leaves a function as it is."""
    return fn


def make_step(mode: str, loss: Loss, leaves: Leaves, compiler: Compiler) -> Step:
    """The step of `mode`; `compiler` compiles as much of it as can be one graph."""
    makers = {"func": functional, "vmap": per_sample, "step": whole}
    if mode in makers:
        return makers[mode](loss, compiler)
    return backward(loss, leaves, compiler)


def backward(loss: Loss, leaves: Leaves, compiler: Compiler) -> Step:
    forward = compiler(loss)

    def step(params: Any, batch: Tensor, mark: Mark) -> Any:
        own = leaves(params)
        value = forward(own, batch)
        mark()
        value.backward()
        return pytree.tree_map(taken, own)

    return step


def functional(loss: Loss, compiler: Compiler) -> Step:
    if compiler is eager:
        return lambda params, batch, mark: torch.func.grad(marked(loss, mark))(params, batch)
    gradient = compiler(torch.func.grad(loss))
    return lambda params, batch, mark: gradient(params, batch)


def per_sample(loss: Loss, compiler: Compiler) -> Step:
    def gradient(loss: Loss) -> Callable[..., Any]:
        return torch.vmap(torch.func.grad(loss), (None, 0))

    # A batch of one stays inside: attention then sees the four dimensions that its fused kernels need.
    if compiler is eager:
        return lambda params, batch, mark: gradient(marked(loss, mark))(params, batch[:, None])
    run = compiler(gradient(loss))
    return lambda params, batch, mark: run(params, batch[:, None])


def marked(loss: Loss, mark: Mark) -> Loss:
    """`loss` that says when it is known and its backward has not begun; a graph has no such moment."""

    def call(params: Any, batch: Tensor) -> Tensor:
        value = loss(params, batch)
        mark()
        return value

    return call


def whole(loss: Loss, compiler: Compiler) -> Step:
    """Plain gradient descent, written into the parameters by one graph."""

    def update(params: Any, batch: Tensor, rate: Tensor) -> Tensor:
        value, gradients = value_and_grad(loss)(params, batch)
        pairs = zip(pytree.tree_leaves(params), pytree.tree_leaves(gradients), strict=True)
        for weight, gradient in pairs:
            weight.sub_((rate * gradient).to(weight.dtype))
        return value

    run = compiler(update)

    def step(params: Any, batch: Tensor, mark: Mark) -> Any:
        if mark is not checking:
            # At rate 0 every step is the same step: all peers can share the parameters.
            return run(params, batch, torch.zeros((), device=batch.device))
        own = pytree.tree_map(torch.clone, params)
        run(own, batch, torch.full((), HUGE, device=batch.device))
        return pytree.tree_map(lambda after, before: (before.float() - after.float()) / HUGE, own, params)

    return step


# A power of two beside which a weight vanishes: the update itself can be read off the weights.
HUGE = 2.0**40


def checking() -> None:
    """The mark of a step whose gradients are looked at."""


def own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` under a code object of its own: Dynamo counts recompilations, and tries guards, for each alone."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)
