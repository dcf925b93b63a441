"""Writes of a region: what they overwrite is held as it was, in memory from outside and in what is kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from remat.transforms.context import quiet
from remat.transforms.errors import RematError, user_line
from remat.transforms.offload import Elsewhere, away_in
from remat.transforms.ops import Traits, targets
from remat.transforms.tape.snapshots import Snapshot
from remat.transforms.tape.tape import map_tensors
from remat.transforms.tape.verdicts import Verdicts


class WriteWatch(Verdicts):
    """The part of a recorder that is asked before a write (see `recorder.Recorder`)."""

    outside: list[torch.Tensor]
    snapshots: dict[int, Snapshot]
    shown: dict[int, Snapshot]

    def root(self, tensor: torch.Tensor) -> int:
        """The memory that a tensor lies in."""
        raise NotImplementedError

    def _before_write(self, func: Any, facts: Traits, args: Any, kwargs: Any) -> None:
        if facts.collective or (self.tape.sharded and not torch.is_grad_enabled()):
            return
        for tensor in targets(facts, args, kwargs):
            root = self.root(tensor)
            if root >= 0:
                self._copy_kept(self._kept_in.get(root, ()))
            elif any(self.tape.outside[i].root == root for i in range(self.tape.arguments)):
                raise RematError(self._refusal(func, tensor))
            elif root not in self.snapshots:
                self._snapshot(root)

    def _snapshot(self, root: int) -> None:
        """Hold memory from outside as it is before the region writes to it, for the recomputation."""
        self.snapshots[root] = quiet(Snapshot, self.outside[-1 - root])

    def raw_writes(self) -> list[tuple[torch.Tensor, Snapshot]]:
        """Memories from outside that user code wrote to past torch's dispatcher, as they were before."""
        found = []
        for root, before in self.shown.items():
            tensor = self.outside[-1 - root]
            if not quiet(before.differs, tensor):
                continue
            if any(self.tape.outside[i].root == root for i in range(self.tape.arguments)):
                raise RematError(self._refusal("a raw kernel or NumPy", tensor))
            self.tape.open = self.tape.open or "raw memory from outside is written to"
            # The function runs again, on that memory itself: there is no scratch copy that it could find.
            self.snapshots.pop(root, None)
            found.append((tensor.detach(), before))
        return found

    def _copy_kept(self, kept: Iterable[int]) -> None:
        """What is kept is about to be overwritten."""
        for i in kept:
            value = self.kept.get(i)
            if value is not None:
                self.kept[i] = quiet(map_tensors, _copied, value)
                for away in away_in(value):
                    away.parcel.wait()

    def _refusal(self, func: Any, tensor: torch.Tensor) -> str:
        return (
            f"region {self.tape.region!r} writes with {func} at {user_line()} into a "
            f"{tuple(tensor.shape)} {tensor.dtype} tensor from outside the region, which is an argument. A "
            "recomputation would write again. Write out of place, or into a `.clone()` made in the region."
        )


def _copied(value: Any) -> Any:
    return value if isinstance(value, Elsewhere) else value.clone()
