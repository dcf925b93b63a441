"""Compiled regions that write in place to what they were not given, or to what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import checkpoint_policy, remat, save_everything, save_matmuls
from tests.compiled import compiled

X = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
START = torch.arange(1.0, 5.0, dtype=torch.float64)


def scaled(r: Any) -> Any:
    state = START.clone()

    def block(x: Tensor) -> Tensor:
        state.mul_(0.5)
        return (x @ W).sin() * state

    return r(block), [state]


class Averaged(torch.nn.Module):
    """A buffer of a module, which a partitioner takes for free to save, and for what it was."""

    mean: Tensor

    def __init__(self, r: Any) -> None:
        super().__init__()
        self.register_buffer("mean", START.clone())
        self.r = r

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return (x @ W).sin() * self.mean.exp()

        return self.r(block)(x)


def averaged(r: Any) -> Any:
    module = Averaged(r)
    return module, [module.mean]


def two_steps(step: Any, state: list[Tensor], fn: Any) -> list[Tensor]:
    found = []
    for shift in range(2):
        x = (X + shift).requires_grad_()
        out = fn(x)
        found += [out.detach().clone(), torch.autograd.grad(out.sum(), x)[0]]
    return [*found, *[t.detach().clone() for t in state]]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "policy"), [(scaled, None), (averaged, save_matmuls)])
def test_inductor_gives_the_backward_what_was_there_before(case: Any, policy: Any) -> None:
    step, state = case(lambda fn: fn)
    expected = two_steps(step, state, step)
    step, state = case(lambda fn: remat(fn, policy=policy))
    made = two_steps(step, state, compiled(step, "inductor"))
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_kept_value_is_not_computed_again_from_what_was_written() -> None:
    def block(x: Tensor, state: Tensor) -> Tensor:
        out = x.sin() * state.cos() + (x * state.exp()).sin()
        state.mul_(0.5)
        return out.exp()

    def gradient(fn: Any) -> Tensor:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(fn(x, START.clone()).sum(), x)[0]

    # torch's partitioner, without remat, is off by 0.8 here.
    kept = compiled(remat(block, policy=lambda info: True), "inductor")
    bound = START.clone()
    (expected,) = torch.autograd.grad(
        ((x := X.clone().requires_grad_()).sin() * bound.cos() + (x * bound.exp()).sin()).exp().sum(), x
    )
    torch.testing.assert_close(gradient(kept), expected, rtol=0, atol=1e-12)


def fills(x: Tensor, r: Any) -> Tensor:
    state = torch.zeros_like(x)

    def block(x: Tensor) -> Tensor:
        state.copy_(x * 2)
        return hidden(x)

    return (r(block)(x) + state).sum()


def adds(x: Tensor, r: Any) -> Tensor:
    def block(x: Tensor, state: Tensor) -> Tensor:
        state += x
        return hidden(x)

    state = torch.zeros_like(x)
    return (r(block)(x, state) * state).sum()


def doubles(x: Tensor, r: Any) -> Tensor:
    moved = x * 2

    def block(x: Tensor) -> Tensor:
        moved.mul_(3.0)
        return hidden(x)

    return (r(block)(x) + moved).sum()


def hidden(x: Tensor) -> Tensor:
    return (x @ W).sin()


@pytest.mark.parametrize("case", [fills, adds, doubles])
def test_a_write_that_gradients_flow_through_is_refused(case: Any) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(Exception, match="writes with .* into a tensor from outside the region"):
        compiled(lambda x: case(x, remat))(x).backward()


@pytest.mark.slow
@pytest.mark.parametrize("inner", [True, False])
def test_a_write_to_zeros_of_forward_mode(inner: bool) -> None:
    """Such zeros have no memory: they are not kept, or the recomputation would write to ordinary ones."""

    def loss(x: Tensor, r: Any) -> Tensor:
        def step(moving: Tensor, still: Tensor) -> Tensor:
            made = still.sin()
            made[0, 1:3] = moving[1, :2]
            return made * 2 + moving

        def block(x: Tensor) -> Tensor:
            part = r(step) if inner else step
            found: Any = torch.func.jvp(lambda moving: part(moving, x), (x.cos(),), (x * 3,))
            return found[0].sin() * found[1]

        return r(block)(x).sum()

    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x, lambda fn: fn), x)
    keeping = lambda fn: remat(fn, policy=save_everything if fn.__name__ == "step" else save_matmuls)  # noqa: E731
    for region in (remat, keeping, remat(policy=checkpoint_policy(lambda info: info.index % 2 == 0))):
        torch.compiler.reset()
        (made,) = torch.autograd.grad(compiled(lambda x, region=region: loss(x, region))(x), x)
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)
