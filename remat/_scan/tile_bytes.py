"""How many tiles a peak takes: what a call holds throughout, and what a tile takes, measured on two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat._core import format_bytes
from remat._inspect.report import Watch, followed
from remat.transforms import WrongValue, flatten, is_tensor

_PROBE = 64  # tokens of the smaller one


def tiles_within(
    name: str,
    peak: int,
    tokens: int,
    run: Callable[[list[torch.Tensor]], Any],
    rows: Callable[[int], list[torch.Tensor]],
    captured: Sequence[torch.Tensor],
) -> int:
    """The fewest tiles with which a call and its backward stay within `peak` bytes.

    Args:
        run: the function of the tensors that are split.
        rows: the first tokens of these tensors.
        captured: what it reads besides and has gradients for.

    Raises:
        RematError: (also a `ValueError`) not even tiles of one token do; says what they take.
    """
    small = max(1, min(_PROBE, tokens // 2))
    one, two = (_step(run, rows(count)) for count in (small, 2 * small))
    slope = max(1, -(-(two[0] - one[0]) // small))
    weights = sum(t.nbytes for t in captured)
    joined = (two[1] - one[1]) * tokens // small
    fixed, first = weights + joined, max(0, one[0] - slope * small)
    longest = (peak - fixed - first) // slope
    if longest >= 1:
        # Where tiles do not divide the tokens, what is joined lies there twice.
        count = -(-tokens // longest)
        longest = max(1, (peak - fixed - joined - first) // slope)
        return next((n for n in range(count, 2 * count) if tokens % n == 0), -(-tokens // longest))
    raise WrongValue(
        f"{name}: a peak of {peak:,} bytes cannot hold its result and gradients ({format_bytes(fixed)}) and "
        f"a tile of one token ({format_bytes(first + slope)}). At least {fixed + first + slope:,} bytes are "
        "needed; or take fewer tokens in a call."
    )


def _step(run: Callable[[list[torch.Tensor]], Any], rows: list[torch.Tensor]) -> tuple[int, int]:
    """Bytes that forward and backward of a tile hold at their peak; of its results and rows' gradients."""
    rows, sizes = [t.detach().requires_grad_(t.requires_grad) for t in rows], list[int]()

    def called(run: Callable[[list[torch.Tensor]], Any], rows: list[torch.Tensor]) -> Any:
        out = run(rows)
        sizes.append(sum(t.nbytes for t in flatten(out)[0] if is_tensor(t)))
        return out

    followed(run, called, (rows,), {}, watch := Watch())
    return watch.blocks.peak, sizes[0] + sum(t.nbytes for t in rows if t.requires_grad)
