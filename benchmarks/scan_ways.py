"""The ways to run a scan that benchmarks.scan_memory compares: ours, torch's, and JAX's on the same weights.

A way takes (cell, n) and returns a function that computes one gradient. JAX and equinox are imported only by
their own ways: the extra `jax` brings them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remat._scan import scan_remat
from remat.policies import save_everything

Run = Callable[[], Any]
BATCH = 4
SLOTS: dict[str, Any] = {"all": "all", "sqrt": "sqrt", "8 carries": 8, "32 carries": 32}


@dataclass(frozen=True)
class Cell:
    """A recurrent cell: its width, its weights, and `h -> h` in torch and in JAX."""

    width: int
    weights: tuple[Tensor, ...]
    step: Callable[..., Any]

    @property
    def start(self) -> Tensor:
        return torch.randn(BATCH, self.width, generator=torch.Generator().manual_seed(1))


def rnn(ops: Any, weights: Any, h: Any) -> Any:
    """tanh(h w + b): three matrix products a step, forward and backward."""
    w, b = weights
    return ops.tanh(h @ w + b)


def gru(ops: Any, weights: Any, h: Any) -> Any:
    """A gated cell without input: many small ops."""
    w, b = weights
    r, z, n = ops.split(h @ w + b)
    r, z = ops.sigmoid(r), ops.sigmoid(z)
    return (1 - z) * ops.tanh(r * n) + z * h


class TorchOps:
    tanh, sigmoid = torch.tanh, torch.sigmoid

    @staticmethod
    def split(x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(3, -1)


def cell(name: str) -> Cell:
    """`rnn` (width 64) or `gru` (width 16)."""
    draw = torch.Generator().manual_seed(0)
    width, gates, step = (64, 1, rnn) if name == "rnn" else (16, 3, gru)
    w = torch.randn(width, gates * width, generator=draw) / width**0.5
    b = torch.randn(gates * width, generator=draw) / 10
    return Cell(width, (w.requires_grad_(), b.requires_grad_()), step)


def ways() -> dict[str, Callable[[Cell, int], Run]]:
    """Name -> how to make the gradient."""
    ours = {name: _ours(checkpoints=slots) for name, slots in SLOTS.items()}
    return {
        "loop": _loop(lambda f, h: f(h)),
        "loop, each step again": _again,
        "torch checkpoint": _loop(lambda f, h: checkpoint(f, h, use_reentrant=False)),
        **ours,
        "all, everything saved": _ours(checkpoints="all", policy=save_everything),
        "all, compiled": _ours(checkpoints="all", compile=True),
        "torch scan, compiled": _torch_scan,
        "jax scan + checkpoint": _jax,
        "equinox, 8 carries": _equinox(8),
        "equinox, 32 carries": _equinox(32),
    }


def _gradient(cell: Cell, forward: Callable[[Tensor], Tensor]) -> Run:
    return lambda: torch.autograd.grad(forward(cell.start).sum(), cell.weights)


def _loop(wrap: Callable[..., Any]) -> Callable[[Cell, int], Run]:
    def way(cell: Cell, n: int) -> Run:
        def step(h: Tensor) -> Tensor:
            return cell.step(TorchOps, cell.weights, h)

        def forward(h: Tensor) -> Tensor:
            for _ in range(n):
                h = wrap(step, h)
            return h

        return _gradient(cell, forward)

    return way


def _again(cell: Cell, n: int) -> Run:
    """What "all" does, by hand and for this cell alone: carries kept, each step evaluated again."""

    def run() -> Any:
        carries, h = [], cell.start
        with torch.no_grad():
            for _ in range(n):
                carries.append(h)
                h = cell.step(TorchOps, cell.weights, h)
        ct, totals = torch.ones_like(h), [torch.zeros_like(w) for w in cell.weights]
        while carries:
            h = carries.pop().requires_grad_()
            with torch.enable_grad():
                out = cell.step(TorchOps, cell.weights, h)
            ct, *grads = torch.autograd.grad(out, [h, *cell.weights], ct)
            for total, grad in zip(totals, grads, strict=True):
                total.add_(grad)
        return totals

    return run


def _ours(**options: Any) -> Callable[[Cell, int], Run]:
    def way(cell: Cell, n: int) -> Run:
        weights, step = cell.weights, cell.step

        def body(h: Tensor, _: Any) -> tuple[Tensor, None]:
            return step(TorchOps, weights, h), None

        return _gradient(cell, lambda h: scan_remat(body, h, length=n, **options)[0])

    return way


def _torch_scan(cell: Cell, n: int) -> Run:
    from torch._higher_order_ops.scan import scan

    def whole(h: Tensor, xs: Tensor) -> Tensor:
        # The operator refuses (in 2.13, under Inductor) ys that could alias: hence rows that are added.
        return scan(lambda h, x: (cell.step(TorchOps, cell.weights, h) + x, x + 1), h, xs)[0]

    compiled: Any = torch.compile(whole, fullgraph=True)
    return _gradient(cell, lambda h: compiled(h, torch.zeros(n, 1)))


def _on_jax(cell: Cell, n: int, scan: Callable[..., Any]) -> Run:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    class Ops:
        tanh, sigmoid = jnp.tanh, jax.nn.sigmoid

        @staticmethod
        def split(x: Any) -> Any:
            return jnp.split(x, 3, -1)

    h = jnp.asarray(cell.start.numpy())
    weights = tuple(jnp.asarray(w.detach().numpy()) for w in cell.weights)
    gradient = jax.jit(jax.grad(lambda weights: scan(lambda h: cell.step(Ops, weights, h), h, n).sum()))
    return lambda: jax.block_until_ready(gradient(weights))


def _jax(cell: Cell, n: int) -> Run:
    import jax  # pyright: ignore[reportMissingImports]

    def scan(step: Any, h: Any, n: int) -> Any:
        return jax.lax.scan(jax.checkpoint(lambda h, _: (step(h), None)), h, None, length=n)[0]

    return _on_jax(cell, n, scan)


def _equinox(slots: int) -> Callable[[Cell, int], Run]:
    def way(cell: Cell, n: int) -> Run:
        import equinox.internal as eqxi  # pyright: ignore[reportMissingImports]

        def scan(step: Any, h: Any, n: int) -> Any:
            body = lambda h, _: (step(h), None)  # noqa: E731
            return eqxi.scan(body, h, None, length=n, kind="checkpointed", checkpoints=min(slots, n))[0]

        return _on_jax(cell, n, scan)

    return way
