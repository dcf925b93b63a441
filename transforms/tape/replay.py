"""Running a region's function again under the tape of its forward: kept values are handed out.

For recomputations that need a history (`torch.func` levels, rules of their own) or whose tape is open. What
user code can see is real: an op that it could observe runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from remat.transforms.context import Mode, active, quiet
from remat.transforms.errors import RematError
from remat.transforms.offload import Elsewhere
from remat.transforms.ops import is_cast_of_leaf, is_shape_arithmetic, traits
from remat.transforms.placeholders import Separate
from remat.transforms.tape.snapshots import Snapshot
from remat.transforms.tape.tape import KEPT, SKIP, Needs, Node, Tape, not_repeated
from remat.transforms.tape.values import (
    Ref,
    alike,
    constants_alike,
    map_tensors,
    metadata,
    storage,
    targets,
)


class Replay(Mode):
    """Runs a region again: needed ops run, kept values are handed out, nobody sees what is skipped.

    Args:
        tape: of the forward.
        needs: what runs.
        kept: what is kept, by op.
        random: the generator's state before each op that draws.
        snapshots: (storage of a tensor from outside, what was in it before the forward wrote to it).
        check: compare ops' constants, and shape, dtype and device of their results.
        digest: as for `Recorder`.
        casts: as for `Recorder`.
    """

    def __init__(
        self,
        tape: Tape,
        needs: Needs,
        kept: Mapping[int, Any],
        *,
        random: Mapping[int, Any],
        snapshots: list[tuple[int, Snapshot]],
        check: bool = True,
        digest: Callable[[Any], Any] | None = None,
        casts: bool = False,
    ) -> None:
        super().__init__()
        self.tape, self.needs, self.kept, self.random = tape, needs, kept, random
        self.check, self.digest, self.casts = check, digest, casts
        self.at = 0
        self.done = False
        self.blanks = Separate()
        copies = {id(snapshot): quiet(snapshot.copy) for _, snapshot in snapshots}
        # Memory from outside that the forward wrote to, by its storage: the outside sees a write once.
        self._scratch = {key: copies[id(snapshot)] for key, snapshot in snapshots}

    @property
    def position(self) -> int:
        return self.at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = traits(func)
        if active.quiet or facts.ignored or self.done:
            return func(*args, **kwargs)
        if not self.tape.meta and is_shape_arithmetic(args, kwargs):
            return func(*args, **kwargs)
        if self.casts and is_cast_of_leaf(func, args):
            return func(*args, **kwargs)
        if self.tape.sharded and not torch.is_grad_enabled():
            return func(*args, **kwargs)
        at = self._next()
        if at >= len(self.tape.nodes):
            if self.tape.inner:
                return func(*args, **kwargs)  # of a region inside, of whose names gradients are wanted
            raise self._differs(at, f"the forward was over, the recomputation runs {func}")
        self.at = at + 1
        node = self.tape.nodes[at]
        if node.op is not func:
            raise self._differs(at, f"the forward ran {node.op}, the recomputation runs {func}")
        if self.check and not (_same_constants(node.args, args) and _same_constants(node.kwargs, kwargs)):
            raise self._differs(at, f"{func} is called with other constants than in the forward")
        if self._scratch:
            args, kwargs = self._on_scratch((args, kwargs))
        action = self.needs.actions[at]
        if action == KEPT:
            return self._hand_out(at)
        # A view is made: one that is written through tells autograd where in its base the gradient belongs.
        # So are `squeeze_` and the like: they change the tensor object itself, which later ops look at.
        if action == SKIP and not facts.view and not facts.reshapes:
            return (
                next(iter(targets(facts, args, kwargs))) if facts.inplace else quiet(self.blanks, node.outs)
            )
        return self._run(at, node, func, args, kwargs)

    def _next(self) -> int:
        """The number of the op that is to come, past those that need not occur."""
        at, nodes = self.at, self.tape.nodes
        while at < len(nodes) and (nodes[at].optional or self.tape.passes(nodes[at])):
            at += 1
        return at

    def has_run(self, count: int) -> bool:
        """Whether so many ops of the forward have had their turn, those aside that need not occur."""
        here, self.at = self.at, count
        there = self._next()
        self.at = here
        return self._next() == there

    def forward_done(self) -> None:
        """What follows belongs to the backward, which goes through this pass: no op may be missing."""
        at = self._next()
        if at < len(self.tape.nodes):
            what = f"the recomputation ends where the forward ran {self.tape.nodes[at].op}"
            raise self._differs(at, what)
        self.done = True

    def _run(self, at: int, node: Node, func: Any, args: Any, kwargs: Any) -> Any:
        if node.draws and (state := self.random.get(at)) is not None:
            quiet(state.restore)
        out = func(*args, **kwargs)
        if self.check and not alike(metadata(out), node.outs):
            made = metadata(out)
            raise self._differs(at, f"{func} made {node.outs} in the forward and now makes {made}")
        if node.digest is not None and self.digest is not None and quiet(self.digest, out) != node.digest:
            raise self._differs(at, f"{func} gave other numbers than in the forward, bit for bit")
        return out

    def _hand_out(self, at: int) -> Any:
        copied = at in self.needs.copied

        def fresh(value: Any) -> torch.Tensor:
            if isinstance(value, Elsewhere):
                return value.get(alone=copied)  # pyright: ignore[reportAttributeAccessIssue]
            # A new tensor object each time: autograd writes its own record on it.
            return value.clone() if copied else value.detach()

        return quiet(map_tensors, fresh, self.kept[at])

    def _on_scratch(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            scratch = self._scratch.get(storage(value))
            return value if scratch is None else quiet(scratch.view, value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._on_scratch(v) for v in value])
        if isinstance(value, dict):
            return {k: self._on_scratch(v) for k, v in value.items()}
        return value

    def _differs(self, at: int, what: str) -> RematError:
        return RematError(not_repeated(self.tape.region, f"at op {at}, {what}"))


def _same_constants(want: Any, value: Any) -> bool:
    """Whether the arguments of a call are those of the forward, tensors aside."""
    if type(want) is Ref or isinstance(value, torch.Tensor):
        return type(want) is Ref and isinstance(value, torch.Tensor)
    if isinstance(want, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(want) == len(value) and all(map(_same_constants, want, value))
    if isinstance(want, dict):
        return want.keys() == value.keys() and all(_same_constants(want[k], value[k]) for k in want)
    return type(want) is not type(value) or constants_alike(want, value)


__all__ = ["Replay"]
