"""One training step of a model in each mode: plain autograd, a functional gradient, per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from remat.cli.measure import Mark
from remat.cli.models import Model, Params, Wrap
from remat.transforms import map_only, tree_leaves, value_and_grad

Mode = Literal["backward", "func", "vmap"]
# step(params, tokens, mark) -> (loss, gradients); `mark` is called between forward and backward.
Step = Callable[[Params, Tensor, Mark], tuple[Tensor, Params]]


def unmarked() -> None:
    """What `mark` is where nobody measures."""


def make_step(mode: Mode, model: Model, wrap: Wrap) -> Step:
    """The step of `mode`; in mode `vmap` loss and gradients have a leading dimension, the sample."""
    return {"backward": backward, "func": functional, "vmap": per_sample}[mode](model, wrap)


def backward(model: Model, wrap: Wrap) -> Step:
    """`loss.backward()`; gradients are read from the leaves."""

    def step(params: Params, tokens: Tensor, mark: Mark) -> tuple[Tensor, Params]:
        leaves = model.leaves(params)
        loss = model.loss(leaves, tokens, wrap)
        mark()
        loss.backward()
        return loss.detach(), map_only(Tensor, taken, leaves)

    return step


def taken(leaf: Tensor) -> Tensor | None:
    """The gradient of a leaf, which no longer holds it."""
    gradient, leaf.grad = leaf.grad, None
    return gradient


def functional(model: Model, wrap: Wrap) -> Step:
    """`value_and_grad` of the loss."""

    def step(params: Params, tokens: Tensor, mark: Mark) -> tuple[Tensor, Params]:
        return value_and_grad(marked(model, wrap, mark))(params, tokens)

    return step


def per_sample(model: Model, wrap: Wrap) -> Step:
    """`vmap` of `value_and_grad`: losses and gradients of each sample."""

    def step(params: Params, tokens: Tensor, mark: Mark) -> tuple[Tensor, Params]:
        # A batch of one stays inside: attention then sees the four dimensions that its fused kernels need.
        gradient = value_and_grad(marked(model, wrap, mark))
        return torch.vmap(gradient, (None, 0))(params, tokens[:, None])

    return step


def marked(model: Model, wrap: Wrap, mark: Mark) -> Callable[[Params, Tensor], Tensor]:
    """The loss, which calls `mark` when its forward is over."""

    def loss(params: Params, tokens: Tensor) -> Tensor:
        value = model.loss(params, tokens, wrap)
        mark()
        return value

    return loss


@dataclass
class Trainer:
    """Parameters of one row and the optimizer that moves them."""

    params: Params
    optimizer: torch.optim.Optimizer

    @classmethod
    def start(cls, params: Params) -> Trainer:
        """Copies of the parameters, which AdamW will move."""
        own = map_only(Tensor, lambda t: t.detach().clone(), params)
        return cls(own, torch.optim.AdamW(tensors(own)))

    def update(self, gradients: Params) -> None:
        """One step of AdamW; gradients with a leading dimension of samples are averaged over it first."""
        for parameter, gradient in zip(tensors(self.params), tensors(gradients), strict=True):
            parameter.grad = gradient.mean(0) if gradient.dim() > parameter.dim() else gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def tolerance(eps: float) -> float:
    """Largest relative gradient difference that rounding explains, of a dtype's `eps`: eps ** (2/3).

    4e-11 in float64, 2e-5 in float32, 1e-2 in float16, 4e-2 in bfloat16: far above the error of one
    rounding, since kernels may add in another order, and far below that of a wrong term.
    """
    return eps ** (2 / 3)


def difference(got: Params, expected: Params) -> float:
    """Largest |got - expected| over largest |expected|, worst parameter; inf where missing or not finite."""
    pairs = zip(tree_leaves(got), tree_leaves(expected), strict=True)
    return max(_relative(a, b) for a, b in pairs if b is not None)


def _relative(got: Tensor | None, expected: Tensor) -> float:
    if got is None:
        return float("inf")
    apart = (got.double() - expected.double()).abs().max()
    # NaN compares as small: a step that lost its numbers must not pass for one that kept them.
    if not torch.isfinite(apart):
        return float("inf")
    # A parameter without gradient is compared on the scale of one.
    scale = expected.double().abs().max()
    return float(apart / scale) if scale > 0 else float(apart)
