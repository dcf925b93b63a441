"""Losses whose largest values never lie in memory whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from remat._scan import Tiled, check_tiles
from remat.transforms import WrongType, WrongValue, is_tensor, recordings, wraps
from remat.transforms.compat import (
    forward_ad_active,
    graph_kept,
    in_transform,
    is_batched_anyhow,
    traced_as_it_runs,
)
from remat.transforms.region import is_recomputing

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    tiles: int | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets)`, the logits of one tile of tokens at a time.

    A loss that is reduced, and that plain autograd differentiates, makes its gradients in the forward: three
    products a tile, as without tiles. Its backward multiplies them by one number. Elsewhere (and in float16,
    where gradients that are not scaled yet would be lost) a tile's logits are made again in the backward, and
    the loss composes as `tiled` does: `create_graph=True`, `torch.func`, forward mode, per-sample gradients,
    regions around it, one op each way in compiled graphs.

    Args:
        hidden: [..., width], float. Under autocast it is cast, as `F.linear` would.
        weight: [classes, width].
        targets: [...], integers from 0 to classes - 1, or `ignore_index`.
        bias: [classes], or None.
        tiles: the number of tiles. By default the logits of one take up to half of what `weight` takes where
            gradients are made in the forward, and as much as that where it runs again in the backward.
        reduction: "mean" (over the tokens that are not ignored), "sum", or "none".
        ignore_index: tokens with this target have a loss and a gradient of zero.
        label_smoothing: from 0 to 1: the share of a target that is spread over all classes.
        z_loss: a factor of logsumexp(logits)**2, which is added to the loss of each token.
        softcap: logits are `softcap * tanh(logits / softcap)`.

    Returns:
        A number, or [...] with "none": float64 for operands in float64, else float32.

    Raises:
        RematError: (also a `ValueError`) shapes that do not fit, an unknown reduction, options out of range.
        RematError: (also a `TypeError`) operands that are no tensors of floats, targets that are no integers.

    Example:
        >>> import torch
        >>> from remat.losses import linear_cross_entropy
        >>> hidden, weight = torch.randn(6, 4), torch.randn(100, 4, requires_grad=True)
        >>> targets = torch.tensor([3, 99, -100, 0, 5, 7])
        >>> loss = linear_cross_entropy(hidden, weight, targets, tiles=3)
        >>> whole = torch.nn.functional.cross_entropy(hidden @ weight.mT, targets)
        >>> torch.allclose(loss, whole)
        True
        >>> loss.backward()  # no more than two rows of logits at a time
    """
    _check_shapes(hidden, weight, targets, bias)
    loss = _Loss(reduction, ignore_index, label_smoothing, z_loss, softcap, tiles)
    loss.check()
    device = hidden.device.type
    operands: list[Any] = [hidden, weight, bias]
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        operands = [t if t is None or t.dtype == torch.float64 else t.to(kind) for t in operands]
    hidden, weight, bias = operands
    # In a byte an `ignore_index` of -100 would be class 156.
    rows, own = hidden.flatten(0, -2) if hidden.dim() != 1 else hidden[None], targets.flatten().long()
    with torch.autocast(device, enabled=False):
        if own.numel() and _plain([t for t in operands if t is not None]):
            made = _Forward.apply(loss, rows, weight, bias, own)
        else:
            made = loss.tiled(rows, weight, bias, own)
    return made.view(targets.shape) if reduction == "none" else made


def _check_shapes(hidden: Any, weight: Any, targets: Any, bias: Any) -> None:
    for what, value in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        if not is_tensor(value):
            raise WrongType(f"linear_cross_entropy: {what} is {type(value).__name__}, and must be a tensor.")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise WrongType(
            f"linear_cross_entropy: targets are {targets.dtype}; write the index of a class for each token. "
            "For probabilities write F.cross_entropy in remat.tiled."
        )
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise WrongType(
            f"linear_cross_entropy: hidden is {hidden.dtype} and weight {weight.dtype}; both must be floats."
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1:] != weight.shape[1:]:
        raise WrongValue(f"linear_cross_entropy: {shapes}: hidden is [..., width], weight [classes, width].")
    if hidden.shape[:-1] != targets.shape:
        raise WrongValue(f"linear_cross_entropy: {shapes}: a target is needed for each row of hidden.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise WrongValue(f"linear_cross_entropy: bias {tuple(bias.shape)} is not [{weight.shape[0]}].")


def _plain(operands: Sequence[torch.Tensor]) -> bool:
    """Whether plain autograd alone will differentiate, and nothing runs the loss again."""
    if torch.compiler.is_compiling() or in_transform() or traced_as_it_runs():
        return False
    if recordings() or is_recomputing():  # both runs of a region's function are to be alike
        return False
    if any(map(wraps, operands)):  # by placements, which products into given memory do not have
        return False
    if operands[0].dtype == torch.float16:  # whose gradients need their scale, which the backward is given
        return False
    graded = torch.is_grad_enabled() and any([t.requires_grad for t in operands])
    return graded and not forward_ad_active(operands)


class _Loss(NamedTuple):
    """What the loss of a call is, and no tensor."""

    reduction: str
    ignore_index: int
    smoothing: float
    z: float
    cap: float | None
    tiles: int | None

    def check(self) -> None:
        """Raise for options out of range."""
        if self.reduction not in ("mean", "sum", "none"):
            raise WrongValue(
                f"linear_cross_entropy: reduction={self.reduction!r} is none of 'mean', 'sum', 'none'."
            )
        if not 0.0 <= self.smoothing <= 1.0 or self.z < 0.0 or (self.cap is not None and self.cap <= 0.0):
            raise WrongValue(
                f"linear_cross_entropy: label_smoothing={self.smoothing!r} must be from 0 to 1, "
                f"z_loss={self.z!r} at least 0, softcap={self.cap!r} above 0 or None."
            )
        check_tiles("linear_cross_entropy", self.tiles)

    def counted(self, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The factor of each token's loss."""
        there = targets != self.ignore_index
        return there / there.sum(dtype=dtype).clamp(min=1) if self.reduction == "mean" else there.to(dtype)

    def tiled(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        """The loss by tiles that run again in the backward, and that anything may differentiate."""

        def each(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = F.linear(hidden, weight, bias)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            if self.cap is not None:
                logits = self.cap * torch.tanh(logits / self.cap)
            own = torch.where(targets == self.ignore_index, 0, targets)
            total = logits.logsumexp(-1)
            loss = total - (1 - self.smoothing) * logits.gather(-1, own.unsqueeze(-1)).squeeze(-1)
            if self.smoothing:
                loss = loss - self.smoothing * logits.mean(-1)
            return loss + self.z * total.square() if self.z else loss

        count = targets.shape[0]
        # Logits as large as the weight: a gradient of the weight is made, and added, for every tile.
        size = max(1, min(count, weight.shape[1]) if self.tiles is None else -(-count // self.tiles))
        # Ignored rows fill the last tile: a smaller one would hold another gradient of the weight.
        extra = -count % size
        hidden = F.pad(hidden, (0, 0, 0, extra)) if extra else hidden
        filled = F.pad(targets, (0, extra), value=self.ignore_index) if extra else targets
        tiles = Tiled(each, "linear_cross_entropy", 0, -(-count // size), checked=True)
        return self.reduced(tiles((hidden, filled), {})[:count], targets)

    def reduced(self, losses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The losses of tokens as they are returned: not a number for a mean over none, as in torch."""
        there = targets != self.ignore_index
        losses = torch.where(there, losses, 0.0)
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / there.sum()

    def by_hand(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        factors: torch.Tensor,
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """The losses of tokens, and the gradients of hidden, weight and bias of these times `factors`."""
        (count, width), classes = hidden.shape, weight.shape[0]
        size = self._rows(count, width, classes) if self.tiles is None else -(-count // self.tiles)
        losses = factors.new_empty(count)
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs[0] else None
        d_weight = torch.zeros_like(weight) if needs[1] else None
        d_bias = factors.new_zeros(classes) if needs[2] else None
        filled = torch.where(targets == self.ignore_index, 0, targets)
        columns = hidden, filled[:, None], factors[:, None], losses, hidden if d_hidden is None else d_hidden
        for h, own, factor, room, d_h in zip(*[t.split(size) for t in columns], strict=True):
            logits = None  # those of the tile before go first
            logits = F.linear(h, weight, bias).to(factors.dtype)
            slope = None
            if self.cap is not None:
                logits = logits.div_(self.cap).tanh_()
                slope = 1 - logits.square()
                logits.mul_(self.cap)
            most, at = logits.max(-1, keepdim=True)
            loss = -(1 - self.smoothing) * logits.gather(-1, own)
            if self.smoothing:
                loss -= self.smoothing * logits.mean(-1, keepdim=True)
            torch.softmax(logits, -1, out=logits)
            # The probability of the likeliest class is never too small for its logarithm.
            total = most - logits.gather(-1, at).log()
            loss += total + self.z * total.square() if self.z else total
            room.copy_(loss.squeeze(-1))
            if not any(needs):
                continue
            logits.mul_(factor * (1 + 2 * self.z * total) if self.z else factor)
            if self.smoothing:
                logits.sub_(factor * (self.smoothing / classes))
            logits.scatter_add_(-1, own, factor * (self.smoothing - 1))
            if slope is not None:
                logits.mul_(slope)
            if d_bias is not None:
                d_bias += logits.sum(0)
            logits = logits.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_h)
            if d_weight is not None:
                d_weight.addmm_(logits.mT, h)
        return losses, [d_hidden, d_weight, d_bias]

    def _rows(self, count: int, width: int, classes: int) -> int:
        """Tokens of a tile. Its logits take about half of what all hidden rows take, as in torch's chunks. Of
        a loss that is reduced, where those hold a second gradient of the weight, they may take half of that:
        products of few rows are slow."""
        share = -(-count // max(1, -(-classes // width)))
        rows = (1 << max(0, share - 1).bit_length()) // 2
        return max(1, min(count, rows if self.reduction == "none" else max(rows, width // 2)))


class _Forward(torch.autograd.Function):
    """The loss under plain autograd alone. One that is reduced makes its gradients in the forward."""

    @staticmethod
    def forward(ctx: Any, loss: _Loss, hidden: Any, weight: Any, bias: Any, targets: Any) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        needs = [False] * 3 if loss.reduction == "none" else ctx.needs_input_grad[1:4]
        factors, ctx.loss = loss.counted(targets, dtype), loss
        losses, ctx.made = loss.by_hand(hidden, weight, bias, targets, factors, needs)
        return loss.reduced(losses, targets)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> tuple[Any, ...]:
        (ct,), loss = cts, ctx.loss
        *operands, targets = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:4]
        create = torch.is_grad_enabled()
        if create or in_transform() or is_batched_anyhow(ct):
            with torch.enable_grad():
                # Views: one operand may be made of another, as hidden states are of tied embeddings.
                views: list[Any] = [None if t is None else t.view_as(t) for t in operands]
                value = loss.tiled(views[0], views[1], views[2], targets)
                wanted = [t for t, need in zip(views, needs, strict=True) if need]
                found = iter(torch.autograd.grad(value, wanted, ct, create_graph=create))
            return (None, *[next(found) if need else None for need in needs], None)
        if loss.reduction == "none":
            factors = loss.counted(targets, ct.dtype) * ct
            return (
                None,
                *loss.by_hand(operands[0], operands[1], operands[2], targets, factors, needs)[1],
                None,
            )
        if graph_kept():
            return (None, *[g if g is None else g * ct.to(g.dtype) for g in ctx.made], None)
        made, ctx.made = ctx.made, None
        return (None, *[g if g is None else g.mul_(ct.to(g.dtype)) for g in made], None)
