"""How JAX's tests look at a region: what runs in its backward, and whether derivatives are right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from remat import save_everything, save_nothing, save_ops, saved_residuals
from tests.helpers import OpCounter, scalar, vjp


def backward_ops(fn: Callable[..., Any], *args: Tensor) -> OpCounter:
    """The ops of the backward pass of plain autograd."""
    out = fn(*[a.detach().clone().requires_grad_() for a in args])
    loss = scalar(out)
    with OpCounter() as ops:
        loss.backward()
    return ops


def pullback_ops(fn: Callable[..., Any], *args: Tensor) -> OpCounter:
    """The ops of the function that torch.func.vjp returns."""
    out, pullback = vjp(fn, *args)
    cotangents = pytree.tree_map(torch.ones_like, out)
    with OpCounter() as ops:
        pullback(cotangents)
    return ops


# JAX looks at the linearized function, whose counts are those of either backward.
BACKWARDS = pytest.mark.parametrize("ops_of", [backward_ops, pullback_ops])

COMPILES = pytest.mark.skipif(
    importlib.util.find_spec("remat._dynamo.region") is None, reason="this build has no torch.compile support"
)


def check_grads(fn: Callable[..., Any], *args: Tensor, forward: bool = True) -> None:
    """JAX's jtu.check_grads of order 2: numerical derivatives, backward and forward mode."""
    leaves = [a.detach().double().requires_grad_() for a in args]
    torch.autograd.gradcheck(fn, leaves)
    torch.autograd.gradgradcheck(fn, leaves)
    if forward:
        tangents = tuple(torch.ones_like(a) for a in leaves)
        inputs = tuple(a.detach() for a in leaves)
        _, forwards = torch.func.jvp(fn, inputs, tangents)  # type: ignore[misc]
        _, pull = vjp(fn, *inputs)
        gradients = pull(torch.ones_like(forwards))
        torch.testing.assert_close(forwards.sum(), sum(g.sum() for g in gradients))


def residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """What is kept, as text."""
    return [str(r) for r in saved_residuals(fn, *args, **kwargs)]


class Given(torch.autograd.Function):
    """`sin` or `cos` as JAX linearizes it: the derivative is a value of the forward, to be saved or not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Any, x: Tensor, factor: Tensor) -> Tensor:
        return op(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = inputs[0]
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        slope = g * ctx.saved_tensors[0]
        return None, -slope if ctx.op is torch.cos else slope, None


class Factor(torch.autograd.Function):
    """The value that `Given` is given, with a derivative for where a second one is asked for."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Any, x: Tensor) -> Tensor:
        return op(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:  # type: ignore[override]
        if g is None:
            return None, None
        (x,) = ctx.saved_tensors
        return None, -g * smooth_sin(x) if ctx.op is torch.cos else g * smooth_cos(x)


def jax_sin(x: Tensor, apply: Any = lambda f, x: f(x)) -> Tensor:
    """A sine whose cosine, which `apply` calls for, counts as it does in JAX, and has no derivative."""
    return Given.apply(torch.sin, x, apply(torch.cos, x.detach()))  # type: ignore[return-value]


def jax_cos(x: Tensor) -> Tensor:
    return Given.apply(torch.cos, x, torch.sin(x.detach()))  # type: ignore[return-value]


def smooth_sin(x: Tensor, apply: Any = lambda f, x: f(x)) -> Tensor:
    """The same, to be differentiated twice: for that its argument is kept as well."""
    cosine = apply(lambda x: Factor.apply(torch.cos, x), x)
    return Given.apply(torch.sin, x, cosine)  # type: ignore[return-value]


def smooth_cos(x: Tensor) -> Tensor:
    return Given.apply(torch.cos, x, Factor.apply(torch.sin, x))  # type: ignore[return-value]


aten = torch.ops.aten
# JAX's policies by a primitive's name.
save_sin, save_cos = save_ops(aten.sin), save_ops(aten.cos)
# The policies of JAX's "funky" tests, with the sines and cosines that each leaves to the backward.
FUNKY = pytest.mark.parametrize(
    ("policy", "left"),
    [(save_cos, (0, 0)), (save_sin, (0, 1)), (save_everything, (0, 0)), (save_nothing, (0, 1))],
    ids=["save_cos", "save_sin", "everything", "nothing"],
)


def sines(ops: OpCounter) -> tuple[int, int]:
    return ops["sin"], ops["cos"]
