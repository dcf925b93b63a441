"""Hooks on what autograd saves in one run of a function, as a region's are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from remat.transforms import of_a_look
from remat.transforms.compat import hook_saved, next_node, pop_hooks
from remat.transforms.eager import Yielding, hook
from remat.transforms.tape import nodes_behind


class Packing(Yielding):
    """Sees what autograd saves. Transforms of torch.func refuse hooks: what is saved there is seen when the
    function is through.

    Attributes:
        start: the number of the first node.
        late: whether a transform has begun.
        owner: the node that has saved what is packed, where it is not the last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start, self.late = next_node(), False
        self.owner: int | None = None

    def stood_back(self) -> None:
        self.late = True

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """What autograd keeps: an op's own result would hold on to the op that holds it, a cycle that nothing
        collects."""
        return tensor.detach()

    @of_a_look
    def unpack(self, kept: torch.Tensor) -> torch.Tensor:
        """What a node reads, as a handle of its own that goes when the node lets go of it."""
        return kept.detach()

    @contextlib.contextmanager
    def packing(self) -> Iterator[None]:
        """Within, these hooks are in force, and none of those around."""
        hook((self.pack, self.unpack))
        try:
            yield
        finally:
            pop_hooks()

    def hook_late(self, results: Sequence[torch.Tensor]) -> None:
        """See what transforms have saved, as a frame does."""
        roots = [t.grad_fn for t in results if t.requires_grad]
        for node in nodes_behind(roots, self.start) if self.late else ():
            self.owner = node._sequence_nr()
            hook_saved(node, self.pack, self.unpack)
        self.owner = None
