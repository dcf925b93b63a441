"""Generators that a function makes and seeds: each run has another object, in the same state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from remat import remat, save_matmuls, save_nothing, scan_remat

FUNC = torch.func
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def noise(x: Tensor, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return x.sin() * torch.randn(4, generator=made, dtype=x.dtype)


def chosen(x: Tensor, seed: int) -> Tensor:
    """An unused draw comes before one of decisions."""
    made = torch.Generator()
    made.manual_seed(seed)
    torch.rand(3, generator=made)
    rows = torch.multinomial(torch.ones(6), 3, generator=made)
    return (x[rows] * x[rows].exp()).sum(0) + x.cos()


def dropped(x: Tensor, seed: int) -> Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator().manual_seed(seed))
    return (x * mask).tanh() @ torch.empty(4, 4, dtype=x.dtype).random_(
        1, 5, generator=torch.Generator().manual_seed(seed)
    )


def reseeded(x: Tensor, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    first = torch.rand(4, generator=made, dtype=x.dtype)
    made.manual_seed(seed)
    return (x * first).exp() * torch.randperm(4, generator=made) + torch.normal(
        0.0, 1.0, (4,), generator=made, dtype=x.dtype
    )


PROGRAMS: dict[str, Any] = {f.__name__: f for f in (noise, chosen, dropped, reseeded)}


def twice(block: Any, x: Tensor) -> Tensor:
    return (block(x, 1) * block(x * 0.5, 2)).square().mean()


def backward(block: Any) -> Any:
    found = []
    for _ in range(3):
        x = X.clone().requires_grad_()
        twice(block, x).backward()
        found.append(x.grad)
    return found, torch.get_rng_state()


WAYS: dict[str, Any] = {
    "backward": backward,
    "grad": lambda block: [FUNC.grad(lambda x: twice(block, x))(X) for _ in range(2)],
    "vmap(grad)": lambda block: FUNC.vmap(
        FUNC.grad(lambda x: twice(block, x * torch.ones_like(X))), randomness="same"
    )(X),
    "jvp": lambda block: FUNC.jvp(lambda x: twice(block, x), (X,), (X,)),
    "hessian": lambda block: FUNC.jacfwd(FUNC.jacrev(lambda x: twice(block, x)), randomness="same")(X),
}


@pytest.mark.parametrize(
    "wrap", ["nothing", pytest.param("matmuls", marks=pytest.mark.slow), "nested", "shown"]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_is_as_without_remat(program: str, way: str, wrap: str) -> None:
    block = PROGRAMS[program]

    def shows(x: Tensor, seed: int) -> Tensor:
        if wrap == "shown" and way == "backward":
            x.detach().numpy()
        return block(x, seed)

    wrapped = remat(shows, policy=save_matmuls if wrap == "matmuls" else save_nothing)
    if wrap == "nested":
        wrapped = remat(lambda x, seed: remat(shows)(x, seed) * 1.0)
    torch.manual_seed(3)
    want = WAYS[way](block)
    torch.manual_seed(3)
    torch.testing.assert_close(WAYS[way](wrapped), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_in_a_step_of_a_scan(transform: str) -> None:
    def step(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(4)
        c = c.sin() + x * torch.randn(4, generator=made, dtype=x.dtype)
        return c, c

    def plain(x: Tensor) -> Tensor:
        c = X[0]
        for row in x:
            c, _ = step(c, row)
        return c.sum()

    def scanned(x: Tensor) -> Tensor:
        return scan_remat(step, X[0], x)[0].sum()

    want = FUNC.grad(plain)(X)
    if transform == "grad":
        torch.testing.assert_close(FUNC.grad(scanned)(X), want, rtol=1e-12, atol=1e-12)
        return
    x = X.clone().requires_grad_()
    scanned(x).backward()
    torch.testing.assert_close(x.grad, want, rtol=1e-12, atol=1e-12)


def test_a_seed_that_is_counted_up() -> None:
    """The recomputation draws what its forward drew, though the next call has counted since."""
    calls = [0]

    def block(x: Tensor) -> Tensor:
        made = torch.Generator().manual_seed(calls[0])
        return x.sin() * torch.randn(4, generator=made, dtype=x.dtype)

    def loss(r: Any) -> Any:
        def of(x: Tensor) -> Tensor:
            total = x.sum() * 0
            for calls[0] in range(3):
                total = total + r(block)(x).square().sum()
            return total

        return of

    torch.testing.assert_close(FUNC.grad(loss(remat))(X), FUNC.grad(loss(lambda f: f))(X))
