"""Running a region's function again, as a whole, where its tape does not tell all that was computed.

Every value that the function can see is real. Ops run, and kept values are handed out. Arguments that were
one tensor are one tensor. Ops and their constants are compared with those of the forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from remat.transforms.closure import PythonState, reached, standing_in
from remat.transforms.compat import pop_hooks, set_grad_enabled, unseen
from remat.transforms.context import run_innermost, untracked
from remat.transforms.eager.saved import hook
from remat.transforms.errors import RematError, not_repeated
from remat.transforms.ops import Operands, memory_of, storage
from remat.transforms.pytree import flatten
from remat.transforms.region import recomputing
from remat.transforms.state import Called, Fingerprint, alike, drawing_again, fingerprints_of, same_numbers
from remat.transforms.tape import (
    RecomputeSteps,
    Replay,
    Stop,
    but_written,
    data_again,
    freed_again,
    lent,
    versions_again,
)

if TYPE_CHECKING:
    from remat.transforms.eager.frame import Frame
    from remat.transforms.eager.inputs import Inputs


class Rerun:
    """Recomputes the saved values of one frame by its function.

    Args:
        prints: those of the forward's results, where ops cannot be compared.
    """

    __slots__ = ("absent", "count", "frame", "lent", "needs", "prints", "replay", "values")

    def __init__(self, needs: RecomputeSteps, absent: Any, prints: list[Fingerprint] | None) -> None:
        self.needs, self.absent, self.prints = needs, absent, prints
        # Only while it runs: the frame holds this, and what it holds must go when autograd lets it go.
        self.frame: Frame = None  # type: ignore[assignment]
        self.count = -1  # how many values the run under way has saved
        self.values: dict[int, torch.Tensor] = {}
        self.replay: Replay | None = None
        self.lent: set[int] = set()  # memories that hold what they held before for this run only

    @property
    def complete(self) -> bool:
        """Whether the run under way has saved all that the forward did, and need not go on.

        Where ops are not compared, one that saves more has saved other values than the forward.
        """
        frame = self.frame
        if frame is None or frame.tape.loose or (self.replay is not None and self.replay.astray):
            return False
        return self.count == len(frame.tape.saved_values) and not frame.inner

    def run(self, frame: Frame) -> dict[int, torch.Tensor]:
        """All saved values, by their numbers."""
        self.frame = frame
        try:
            return self._run(frame, frame.inputs)
        finally:
            self.frame = None  # type: ignore[assignment]

    def _run(self, frame: Frame, inputs: Inputs) -> dict[int, torch.Tensor]:
        count = range(frame.tape.arguments)
        given = [frame.held[at].get(inputs, at).detach() for at in count]
        args, kwargs = inputs.rebuild(given)
        # Captured tensors were not written to, and the function has to find the same.
        for at, held in frame.held.items():
            if held.unpack is None:
                held.get(inputs, at)
        inner, frame.inner = frame.inner, 0
        # What the function stores is stored by its forward; a later call may have stored other things since.
        stored = PythonState(reached(frame.region.function), frame.tape.sharded)
        self.values, self.count = {}, 0
        again = [*frame.raw, *(self._written() if frame.tape.loose and not self._fetches else ())]
        self.lent = {storage(tensor) for tensor, _ in again}
        try:
            with contextlib.ExitStack() as stack:
                unheld = frame.region.name if frame.tape.loose else None
                stack.enter_context(drawing_again(inputs.random, frame.random.values(), unheld))
                stack.enter_context(data_again([known[:2] for known in frame.replaced]))
                stack.enter_context(freed_again(self._freed()))
                stack.enter_context(lent(frame.raw))
                real = frame.tape.loose or self._fetches
                stack.enter_context((lent if real else versions_again)(self._written()))
                for context in inputs.contexts():
                    stack.enter_context(context)
                if frame.store is not None:
                    stack.enter_context(frame.store.fetched(None))
                self.replay = None if frame.tape.loose else stack.enter_context(self._replay(given))
                self._call(args, kwargs)
        except Stop:
            pass
        finally:
            frame.inner, self.replay = inner, None
            stored.restore_state()
        values, self.values = self.values, {}
        count, self.count = self.count, -1
        if count < len(frame.tape.saved_values):
            raise self._differs(
                f"it packed fewer values for the backward than the {len(frame.tape.saved_values)} of it"
            )
        return values

    def _written(self) -> list[tuple[torch.Tensor, Any]]:
        """The memories from outside that ops of the function write to, as they were before."""
        frame = self.frame
        roots = {frame.tape.outside[at].root: held.packed for at, held in frame.held.items()}
        return [(roots[root], before) for root, before in frame.snapshots.items() if root in roots]

    @property
    def _fetches(self) -> bool:
        """Whether the function gives tensors from outside other memory, or frees and fills theirs. It does so
        again, and writes to that memory itself: autograd saves what lies there, and not a copy."""
        return bool(self.frame.replaced or self.frame.freed)

    def _freed(self) -> list[tuple[torch.UntypedStorage, Any]]:
        """The memories from outside that it frees and fills, with what is known of how it has found them."""
        frame, found = self.frame, {}
        for root, tensor in self._outside() if frame.freed else ():
            if root not in frame.freed or root in found:
                continue
            if (memory := memory_of(tensor)) is not None:
                found[root] = memory, frame.freed[root]
        return list(found.values())

    def _was(self, at: int) -> torch.Tensor | None:
        """What the forward read from outside, as the region knows it; hooks may give a copy."""
        held = self.frame.held.get(at)
        if held is None or (found := held.given()) is not None or at < self.frame.tape.arguments:
            return found if held is not None else None
        return held.get(self.frame.inputs, at)

    def _replay(self, given: list[torch.Tensor]) -> Replay:
        frame, region = self.frame, self.frame.region
        check, tape, casts = region.determinism_check != "none", frame.tape, frame.inputs.ambient.casts
        written = set() if self._fetches else set(frame.snapshots)
        # A function that gives a tensor other memory does so again.
        compared = check and not self._fetches
        same = functools.partial(untracked, functools.partial(same_numbers, casts=casts))
        needs, kept = self.needs, frame.kept
        if kept and (sound := but_written(kept, tape)) is not None:
            # The caller has written to a result that is kept: its op runs again.
            needs, kept = RecomputeSteps(tape, range(len(tape.nodes)), sound), sound
        if self._fetches:
            # Should its ops be others from some point on, nothing before that may have been left out.
            needs = RecomputeSteps(tape, range(len(tape.nodes)), kept)
        replay = Replay(
            tape,
            needs,
            kept,
            random=frame.random if region.preserve_rng_state else {},
            snapshots=[
                (storage(frame.held[at].packed), frame.snapshots[root])
                for at, root in ((at, tape.outside[at].root) for at in frame.held)
                if root in written
            ],
            check=check,
            digest=region.digest,
            casts=casts,
            absent=self.absent,
            freed=[memory._cdata for memory, _ in self._freed()],
            fetches=self._fetches,
            operands=Operands(tape, given, self._was, written, same) if compared else None,
        )
        replay.local = {}
        return replay

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        graded = torch.is_grad_enabled()
        set_grad_enabled(True)
        hook((self.frame.repack, lambda tensor: tensor))
        region = self.frame.region
        end = recomputing(region.name)
        try:
            with standing_in(region.function, self.frame.inputs.given(args, kwargs)) as function:
                function = Called(function, self.frame.inputs.levels)
                out = run_innermost(function, region.selector is not None, args, kwargs)
        finally:
            end()
            pop_hooks()
            set_grad_enabled(graded)
        casts = self.frame.inputs.ambient.casts
        if self.prints is not None and not alike(self.prints, fingerprints_of(flatten(out)[0]), casts):
            raise self._differs("it returned other numbers")

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the next value that the function saves."""
        tape, at = self.frame.tape, self.count
        if self.frame.inner and self._made_inside(tensor, at):
            return tensor
        self.count += 1
        if at >= len(tape.saved_values):
            raise self._differs(f"it packs more than the {len(tape.saved_values)} values of the forward")
        # An op's own result, packed as it is, would hold on to the op: nothing frees that cycle.
        with unseen(tensor):
            alias = tensor.detach()
        if self.lent and storage(tensor) in self.lent:
            alias = untracked(alias.clone)
        self._check(at, alias)
        if at not in self.frame.dead and at not in self.frame.hollow:
            self.values[at] = alias
        if self.complete:
            raise Stop
        return alias

    def _made_inside(self, tensor: torch.Tensor, at: int) -> bool:
        """Whether a region inside now holds what it has made itself in the forward (a cache has it since), or
        had from this one then: what this one keeps it need not make from its operands."""
        number, tape = self.absent().number_of(tensor), self.frame.tape
        wanted = tape.saved_values[at][0] if at < len(tape.saved_values) else None
        if number is not None or wanted is None:
            return number is not None and wanted != number
        place, lies = tape.root_of(wanted), storage(tensor)
        outside = [root for root, known in self._outside() if storage(known) == lies]
        return bool(outside) and place not in outside

    def _outside(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The memories from outside and tensors there."""
        for at, held in self.frame.held.items():
            tensor = held.packed if held.unpack is None else held.given()
            if tensor is not None:
                yield self.frame.tape.outside[at].root, tensor

    def _check(self, at: int, tensor: torch.Tensor) -> None:
        if self.frame.region.determinism_check == "none":
            return
        own = not self.frame.inner  # what regions inside hand over comes when they end
        ops = self.replay
        if (
            own
            and ops is not None
            and not ops.astray
            and not ops.has_run(self.frame.tape.saved_values[at][1])
        ):
            raise self._differs(f"value {at} that it packs for the backward comes after other ops")
        shape, _, dtype, device = self.frame.tape.meta_of(self.frame.tape.saved_values[at][0])
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            now = f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
            then = f"{dtype}{list(shape)} on {device}"
            raise self._differs(
                f"value {at} that it packs for the backward is {now}, in the forward it was {then}"
            )

    def _differs(self, what: str) -> RematError:
        return RematError(not_repeated(self.frame.region.name, what))


def stop_enclosing(hooks: Any) -> None:
    """End the run of the enclosing region's function if this region was the last thing it needed."""
    frame = getattr(hooks[0], "__self__", None) if hooks else None
    if getattr(frame, "complete", False):
        raise Stop
