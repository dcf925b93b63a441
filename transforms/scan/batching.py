"""The scan of a vmapped step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.transforms.scan.spec import Leaves, Scan, Tensors


def expand(tensor: torch.Tensor, dim: int | None, size: int, to: int = 0) -> torch.Tensor:
    if dim is not None:
        return tensor.movedim(dim, to)
    shape = list(tensor.shape)
    shape.insert(to, size)
    return with_memory(tensor.unsqueeze(to).expand(shape))


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Forward-mode AD refuses tensors whose elements share memory, such as a sum's cotangent."""
    shared = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shared else tensor


def batch(
    scan: Scan, info: Any, dims: Sequence[int | None], flat: Tensors, every: Sequence[bool]
) -> tuple[Scan, list[torch.Tensor]]:
    """The scan of the vmapped step, and its operands; `every` marks those that must be batched.

    The carry is always batched: whether a step batches it is known only after the step.
    """
    a, b, _ = scan.sizes
    moved: list[torch.Tensor] = []
    inner: list[int | None] = []
    for i, (tensor, dim) in enumerate(zip(flat, dims, strict=True)):
        to = 1 if i >= a + b else 0
        if dim is None and not every[i] and not a <= i < a + b:
            moved.append(tensor)
            inner.append(None)
        else:
            moved.append(expand(tensor, dim, info.batch_size, to))
            inner.append(0)
    const_dims, x_dims = inner[:a], inner[a + b :]

    def step(consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        static: Leaves = []

        def one(
            consts: Tensors, tensors: Tensors, x: Tensors
        ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            before = scan.whole(tensors, carry)
            full, ys = scan.step(consts, before, x)
            if scan.proceed is not None:  # an example that is done keeps its carry
                more = torch.as_tensor(scan.proceed(consts, before))
                full = [
                    torch.where(more, b, a) if i in scan.tensors else b
                    for i, (a, b) in enumerate(zip(before, full, strict=True))
                ]
            static[:] = [None if i in scan.tensors else leaf for i, leaf in enumerate(full)]
            return [full[i] for i in scan.tensors], ys

        over = (list(const_dims), [0] * b, list(x_dims))
        tensors, ys = torch.vmap(one, in_dims=over, randomness=info.randomness)(
            list(consts), [carry[i] for i in scan.tensors], list(x)
        )
        return scan.whole(tensors, static), ys

    proceed = None if scan.proceed is None else _batch_condition(scan, const_dims)
    return replace(scan, step=step, proceed=proceed, blocks=None), moved


def _batch_condition(scan: Scan, const_dims: list[int | None]) -> Callable[[Tensors, Leaves], Any]:
    """Go on while any example does."""

    def proceed(consts: Tensors, carry: Leaves) -> Any:
        def one(consts: Tensors, tensors: Tensors) -> torch.Tensor:
            assert scan.proceed is not None
            return torch.as_tensor(scan.proceed(consts, scan.whole(tensors, carry)))

        over = (list(const_dims), [0] * len(scan.tensors))
        return torch.vmap(one, in_dims=over)(list(consts), [carry[i] for i in scan.tensors]).any()

    return proceed


def kept_batched(scan: Scan, kept: Tensors, size: int) -> tuple[list[torch.Tensor], list[int]]:
    """What a batched forward keeps, as results of the rule, and where the batch dimension of each is."""
    carries = len(scan.tensors) if scan.taped else len(kept)
    # What a selector keeps of a batched step has its batch dimension anywhere or nowhere: one that says
    # nothing is put before it, so that a pull-back can tell whether its forward was batched.
    others = [t.unsqueeze(0).expand(size, *t.shape) for t in kept[carries:]]
    return [*kept[:carries], *others], [_carries_dim(scan)] * carries + [0] * len(others)


def kept_for_batch(scan: Scan, kept: Tensors, dims: Sequence[int | None], size: int) -> list[torch.Tensor]:
    """What the forward kept, as the batched pull-back takes it: carries alone if that was not batched."""
    carries, to = len(scan.tensors) if scan.taped else len(kept), _carries_dim(scan)
    pairs = list(zip(kept, dims, strict=True))
    found = [expand(t, d, size, to) for t, d in pairs[:carries]]
    if any(d is None for _, d in pairs[carries:]):
        return found
    return found + [t.select(d, 0) for t, d in pairs[carries:] if d is not None]


def _carries_dim(scan: Scan) -> int:
    """Where kept carries have their batch dimension: an opaque scan's are stacks, of blocks if taped."""
    return 0 if scan.opaque is None else 2 if scan.taped else 1
