"""Running a region again under a settled trace: needed ops run, kept values are handed out."""

from __future__ import annotations

from typing import Any

import torch

from remat.transforms.context import Mode, active, quiet
from remat.transforms.errors import RematError
from remat.transforms.offload import Away
from remat.transforms.ops import is_shape_arithmetic, traits
from remat.transforms.placeholders import Separate, Shared, alike, metadata
from remat.transforms.tape.tape import KEPT, RUN, Node, Stop, Trace, map_tensors, not_repeated, targets


class Replay(Mode):
    """Runs a region again: needed ops run, kept values are handed out, all else is skipped.

    Args:
        trace: a settled trace.
        early_stop: raise `Stop` at the first op after the last needed one; otherwise ops beyond that end
            pass through unseen (they belong to the backward).
        check: compare shape, dtype and device of what runs.
        digest: as for `Record`.
        part: skip what is not in this part of the trace (see `Trace.part`).
        spend: let go of kept values as they are handed out: nobody will ask again.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        early_stop: bool,
        check: bool = True,
        digest: Any = None,
        part: tuple[set[int], int] | None = None,
        spend: bool = False,
    ) -> None:
        super().__init__()
        self.trace, self.spend = trace, spend
        self.needed, self.end = part or (None, trace.end)
        self.early_stop = early_stop
        self.check = check
        self.digest = digest
        self.position_ = 0
        # Outside of a frame the nodes that are made of this run are for real, and storages tell them apart.
        self.blanks = Shared() if early_stop else Separate()
        self._scratch = {key: quiet(torch.clone, t) for key, t in trace.snapshots.items()}

    @property
    def position(self) -> int:
        return self.position_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = traits(func)
        if active.quiet or facts.ignored:
            return func(*args, **kwargs)
        if not self.trace.meta and is_shape_arithmetic(args):
            return func(*args, **kwargs)
        if self.uncached is not None and self._cached_cast(func, args):
            return func(*args, **kwargs)
        if self.trace.sharded:
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
            self._pass_by()
        at = self.position_
        if self.early_stop and at >= self.end:
            raise Stop
        if at >= len(self.trace.nodes):
            return func(*args, **kwargs)
        self.position_ = at + 1
        node = self.trace.nodes[at]
        if node.op is not func:
            raise RematError(self._differs(at, f"the forward ran {node.op}, the recomputation runs {func}"))
        if self._scratch:
            args, kwargs = _swap((args, kwargs), self._scratch)
        if self.needed is None or at in self.needed:
            if node.action == RUN:
                return self._run(at, node, func, args, kwargs)
            if node.action == KEPT:
                out = _hand_out(node)
                if self.spend:
                    node.kept = None
                return out
        if facts.reshapes or (facts.view and node.root in self.trace.written):
            # `squeeze_` and the like change the tensor object itself, which later ops look at. A view that is
            # written through tells autograd, by its offset, where in its base the gradient belongs.
            return func(*args, **kwargs)
        if facts.inplace:
            return next(iter(targets(facts, args, kwargs)))
        return quiet(self.blanks, node.outs)

    def _pass_by(self) -> None:
        nodes = self.trace.nodes
        while self.position_ < len(nodes) and self.trace.passes(nodes[self.position_]):
            self.position_ += 1

    def forward_done(self) -> None:
        """What follows belongs to the backward."""
        if self.position_ < self.end:
            raise RematError(
                self._differs(
                    self.position_,
                    f"the recomputation ends where the forward ran {self.trace.nodes[self.position_].op}",
                )
            )
        self.position_ = len(self.trace.nodes)

    def _run(self, at: int, node: Node, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self.check and not alike(metadata(out), node.outs):
            raise RematError(
                self._differs(at, f"{func} made {node.outs} in the forward and now makes {metadata(out)}")
            )
        if node.digest is not None and quiet(self.digest, out) != node.digest:
            raise RematError(self._differs(at, f"{func} gave other numbers than in the forward, bit for bit"))
        return out

    def _differs(self, at: int, what: str) -> str:
        return not_repeated(self.trace.region, f"at op {at}, {what}")


def _hand_out(node: Node) -> Any:
    def fresh(value: Any) -> torch.Tensor:
        if isinstance(value, Away):
            return value.get(alone=node.copied)
        # A new tensor object each time: autograd writes its own record on it.
        return value.clone() if node.copied else value.detach()

    return quiet(map_tensors, fresh, node.kept)


def _swap(tree: Any, table: dict[int, torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return table.get(id(tree), tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([_swap(v, table) for v in tree])
    if isinstance(tree, dict):
        return {k: _swap(v, table) for k, v in tree.items()}
    return tree
