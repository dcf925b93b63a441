"""Sums of gradients over the blocks of a scan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from remat.transforms.scan.spec import Tensors

# Bytes of factors that are multiplied at once.
_WAITING = 1 << 19


class Sums:
    """The sums of the consts' gradients.

    Of some a block gives factors, whose product is the gradient: those of several blocks are multiplied at
    once.

    Args:
        consts: what every step reads besides.
        before: what there is of each sum, None for nothing.
    """

    def __init__(self, consts: Tensors, before: Sequence[torch.Tensor | None]) -> None:
        self.consts, self.before = consts, before
        self.found: dict[int, torch.Tensor] = {}
        self.waiting: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.bytes = 0

    def of(self, i: int) -> torch.Tensor:
        """The sum for a const as it stands, without what waits."""
        if i not in self.found:
            before, const = self.before[i], self.consts[i]
            if before is None:
                before = torch.zeros(const.shape, dtype=const.dtype, device=const.device)
            self.found[i] = before.contiguous()
        return self.found[i]

    def later(self, consts: list[int], factors: Sequence[torch.Tensor]) -> None:
        """Add a^T b to the sums for some consts, in good time; `factors`: a and b for each."""
        for i, a, b in zip(consts, factors[::2], factors[1::2], strict=True):
            self.waiting.setdefault(i, []).append((a, b))
            self.bytes += a.nbytes + b.nbytes
        if self.bytes > _WAITING:
            self.multiply()

    def multiply(self) -> None:
        """Add the products that wait."""
        for i, pairs in self.waiting.items():
            a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
            self.found[i] = torch.addmm(self.of(i), a.t(), b)
        self.waiting, self.bytes = {}, 0

    def result(self) -> list[torch.Tensor | None]:
        """The sums for all consts."""
        self.multiply()
        return [self.found.get(i, old) for i, old in enumerate(self.before)]
