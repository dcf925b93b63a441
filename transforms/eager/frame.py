"""Recomputation under plain autograd: one graph, kept through saved-tensor hooks.

The forward runs as it is; what autograd would save is replaced by a number. When the backward asks for the
first of them the function runs again, under hooks that collect the values in the same order. Hooks, FSDP,
in-place ops on results and captured tensors behave as without remat, because the autograd graph is the one
without remat. The idea is that of torch.utils.checkpoint (non-reentrant); bookkeeping, selection and checks
are our own.

`Frame` is what all ways of doing so share; `Plain` adds nothing to it and is the quickest.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from remat.transforms.compat import (
    at_backward_end,
    below_levels,
    graph_kept,
    graph_task,
    in_transform,
    pop_hooks,
    push_hooks,
    set_grad_enabled,
    top_hooks,
)
from remat.transforms.eager.inputs import Inputs
from remat.transforms.eager.saved import Held, Packer, belongs_to_region
from remat.transforms.errors import RematError
from remat.transforms.region import Plan, recomputing
from remat.transforms.tape import Stop, not_repeated, written

Meta = tuple[torch.Size, torch.dtype, torch.device, int]
# In C throughout: between the ops each step of Python costs several times what it does in a loop.
_describe = operator.attrgetter("shape", "dtype", "device", "_version")


class Frame(Packer):
    """One forward of a region, and whatever it takes to run it again."""

    __slots__ = ("__weakref__", "early", "metas", "region", "settled", "task")

    inputs: Inputs

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.region = inputs, inputs.region
        self.metas: list[Meta] = []  # what the forward packed: shape, dtype, device, version
        self.task = -1  # the backward pass for which values were recomputed
        self.inner = 0
        self.settled = False  # whether the forward is over
        self.early = False  # whether the function asked before that, by a backward pass of its own

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def get(self, at: int) -> torch.Tensor:
        """The value packed as number `at`, recomputed if need be."""
        raise NotImplementedError

    def repack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Take the next value that the recomputation packs."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of recomputed values."""
        raise NotImplementedError

    def add_modes(self, contexts: list[AbstractContextManager[Any]], args: Any, kwargs: Any) -> None:
        """Add the dispatch modes that the recomputation runs under."""

    def check_unwritten(self) -> None:
        """Raise when something the recomputation reads was written since the forward."""

    @property
    def complete(self) -> bool:
        """Whether the recomputation under way has seen all it was started for."""
        return False

    def pack(self, tensor: torch.Tensor) -> int:
        metas = self.metas
        metas.append(_describe(tensor))
        return len(metas) - 1

    def recompute(self, task: int) -> None:
        """Run the function again and collect what it packs."""
        if not in_transform():
            return self._recompute(task)
        with below_levels():
            self._recompute(task)

    def _recompute(self, task: int) -> None:
        self.forget()
        self.task = task
        if not self.settled:
            # The function, still running, goes backward itself: through what it has packed so far.
            self.early = self.region.memory.differentiates = True
        inputs = self.inputs
        args, kwargs = inputs.rebuild()
        self.check_unwritten()
        passing.add(self, task)
        now = None if inputs.random is None else inputs.random.again()
        inner, self.inner = self.inner, 0
        try:
            if inputs.random is not None:
                inputs.random.restore()
            contexts = inputs.contexts()
            self.add_modes(contexts, args, kwargs)
            if contexts:
                with entered(contexts):
                    self._run_again(args, kwargs)
            else:
                self._run_again(args, kwargs)
        except Stop:
            pass
        finally:
            self.inner = inner
            if now is not None:
                now.restore()

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        graded = torch.is_grad_enabled()
        set_grad_enabled(True)
        push_hooks(self.repack, _identity)
        end = recomputing(self.region.name)
        try:
            self.region.run(args, kwargs)
        finally:
            end()
            pop_hooks()
            set_grad_enabled(graded)

    def check(self, at: int, tensor: torch.Tensor, seen: int) -> None:
        """Compare what was packed as number `at` now, at the version `seen`, with what was in the forward."""
        if self.region.determinism_check == "none":
            return
        shape, dtype, device, version = self.metas[at]
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            now = f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
            then = f"{dtype}{list(shape)} on {device}"
            raise RematError(
                self.differs(
                    f"value {at} that it packs for the backward is {now}, in the forward it was {then}"
                )
            )
        if seen != version:
            self.check_version(tensor)

    def check_version(self, tensor: torch.Tensor) -> None:
        """Raise for a packed value whose version is another than in the forward."""
        raise RematError(written(self.region.name, tensor))

    def too_many(self) -> RematError:
        return RematError(self.differs(f"it packs more than the {len(self.metas)} values of the forward"))

    def too_few(self) -> RematError:
        return RematError(
            self.differs(f"it packed fewer values for the backward than the {len(self.metas)} of the forward")
        )

    def differs(self, what: str) -> str:
        return not_repeated(self.region.name, what)


class Plain(Frame):
    """A frame that keeps the arguments and recomputes all, up to the last value packed.

    For calls of which an earlier trace showed that there is nothing to gain from another one: nothing kept,
    nothing dead, every argument needed.
    """

    __slots__ = ("fresh", "last", "now", "plan", "seen", "versions")

    def __init__(self, inputs: Inputs, plan: Plan) -> None:
        super().__init__(inputs)
        self.plan = plan
        self.versions = inputs.near_versions(plan.read)
        self.fresh: list[torch.Tensor | None] = []  # recomputed, waiting for the backward to ask
        self.now: list[torch.Tensor | None] = []  # what the recomputation has packed so far
        self.seen: list[Meta] = []  # what it was at that point
        self.last = -1  # the number of the value from which on packing takes more than noting it

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        push_hooks(self.pack, self.get)
        try:
            return self.region.run(args, kwargs)
        finally:
            pop_hooks()
            self.settled = True

    def get(self, at: int) -> torch.Tensor:
        # What an earlier pass has left, were it to fail, is as good as what this one would make.
        fresh = self.fresh
        value = fresh[at] if at < len(fresh) else None
        if value is None:
            return self._get_again(at)
        fresh[at] = None
        return value

    def _get_again(self, at: int) -> torch.Tensor:
        task = graph_task()
        self.last = len(self.metas) - 1 if self.settled and not self.early else -1
        self.recompute(task)
        self._check_all()
        if at >= len(self.fresh):
            raise self.too_few()
        value, self.fresh[at] = self.fresh[at], None
        if task == -1:
            self.fresh = []
        assert value is not None
        return value

    def repack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        now = self.now
        now.append(tensor)
        self.seen.append(_describe(tensor))
        return self._repack_last(tensor) if len(now) > self.last else None

    def _repack_last(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if len(self.now) == len(self.metas) and not (self.inner and self.settled):
            raise Stop
        # Nobody goes backward through the graph that the recomputation builds, unless the function does. (The
        # tensor itself would hold on to the op that made it: nothing frees that cycle.)
        return tensor.detach() if self.early else None

    def _check_all(self) -> None:
        """Compare what was packed with what the forward packed, and have it ready for the backward.

        It stays in the recomputation's graph, whose nodes hold nothing; autograd detaches what it gets.
        """
        now, metas, seen = self.now, self.metas, self.seen
        self.now, self.seen = [], []
        if len(now) > len(metas):
            raise self.too_many()
        if seen != metas[: len(seen)]:
            for at, (tensor, is_, was) in enumerate(zip(now, seen, metas, strict=False)):
                if is_ != was and tensor is not None:
                    self.check(at, tensor, is_[3])
        self.fresh = now

    def forget(self) -> None:
        self.fresh, self.now, self.seen = [], [], []

    def check_unwritten(self) -> None:
        self.inputs.check_near(self.plan.read, self.versions)

    @property
    def complete(self) -> bool:
        return len(self.now) == len(self.metas) and not self.inner


class Selective(Frame):
    """Keeps some packed values as they are and recomputes others, told apart by their numbers."""

    __slots__ = ("count", "direct", "spent", "values")

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.spent = False  # whether kept values were let go of
        self.count = 0  # how many values the recomputation has packed
        self.direct: dict[int, Held | None] = {}  # packed values that are kept as they are, None when spent
        self.values: dict[int, torch.Tensor] = {}  # recomputed, waiting for the backward to ask

    def get(self, at: int) -> torch.Tensor:
        held = self.direct.get(at)
        if held is not None:
            if self.spends():
                self.spent = True
                self.direct[at] = None
            return held.get(self.inputs)
        if at in self.direct:
            del self.direct[at]
        task = graph_task()
        if task != self.task or at not in self.values:
            self.fill(at, task)
            if at not in self.values:
                raise self.too_few()
        value = self.values.pop(at)
        if task == -1:
            self.values = {}
        return value

    def spends(self) -> bool:
        """Whether kept values go as they are read, like autograd's own saved values.

        A pass that keeps no graph reads each of them once. Should one be asked for again after all, as by
        another such pass through other nodes, everything is recomputed; that takes all arguments.
        """
        if not self.settled or graph_kept():
            return False
        return self.spent or self.inputs.readable()

    def check_readable(self) -> None:
        """Raise when what was let go of cannot be computed again."""
        if self.spent and not self.inputs.readable():
            raise RematError(
                f"region {self.region.name!r}: a backward asks again for values that an earlier one let go "
                "of, and an argument is gone or was written to. Say retain_graph=True in the earlier one."
            )

    def fill(self, at: int, task: int) -> None:
        """Recompute value `at` among others."""
        self.recompute(task)

    def forget(self) -> None:
        self.values, self.count = {}, 0

    def next_packed(self) -> int:
        """The number of the value that the recomputation is packing."""
        at = self.count
        self.count = at + 1
        if at >= len(self.metas):
            raise self.too_many()
        return at


def enclosed() -> bool:
    """Whether the saved-tensor hooks in force are those of a region."""
    hooks = top_hooks()
    return hooks is not None and belongs_to_region(hooks[0])


def stop_enclosing(inputs: Inputs) -> None:
    """End the recomputation of the enclosing region if this region was the last thing it needed."""
    frame = getattr(inputs.hooks[0], "__self__", None) if inputs.hooks else None
    if isinstance(frame, Frame) and frame.complete:
        raise Stop


class _Passing(threading.local):
    """The frames that the backward pass at hand has recomputed values for, to be forgotten at its end.

    What a partial backward leaves unread must not outlive it. By weak reference: what a region keeps goes
    when its own nodes are through, not with the pass.
    """

    task = -1
    frames: Any = ()

    def add(self, frame: Frame, task: int) -> None:
        """Note that `frame` recomputes values for the backward pass `task`, -1 outside of any."""
        if task == -1:
            return
        if task != self.task:
            frames: list[weakref.ref[Frame]] = []
            self.task, self.frames = task, frames
            at_backward_end(lambda: _forget(frames))
        self.frames.append(weakref.ref(frame))


passing = _Passing()


def _forget(frames: list[weakref.ref[Frame]]) -> None:
    for frame in frames:
        alive = frame()
        if alive is not None:
            alive.forget()


@contextlib.contextmanager
def entered(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside all these contexts, the last one innermost."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
