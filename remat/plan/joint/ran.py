"""The joint graph of a function that runs, on tensors with data: for functions that look at it.

Calls that the graph leaves out run as well: once in the forward, without a graph, and once more in the
backward, where their own graph is recorded. So a step takes little more memory than one that recomputes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from remat._torch import states_watched
from remat.plan.joint.graph import JointRecorder, differentiated, graph_of_run
from remat.plan.joint.holes import Opened, around, is_held, parts_of, tensors_given
from remat.plan.joint.ops import Joint
from remat.transforms import flatten, is_tensor, unflatten, wraps
from remat.transforms.closure import PythonState, reached
from remat.transforms.compat import hooks_aside, outside_all_modes, storage_key
from remat.transforms.intermediates import only
from remat.transforms.state import RandomState


class _AsTheyAre:
    """In the place of stand-ins: every tensor stands for itself."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def forget(self) -> None:
        """There is nothing to let go of."""


def _ones(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones_like(t) for t in results]


def record_run(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    cotangents: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = _ones,
    present: Collection[int] | None = None,
    backward: bool = True,
) -> tuple[Joint, dict[int, torch.Tensor]]:
    """Run `fn(*args, **kwargs)` and its backward; the joint graph, and gradients by identities of leaves.

    `present` is as for `record`, and `cotangents` makes the gradients of those. No gradient is added to
    `.grad`.
    """
    kwargs, recorder = kwargs or {}, JointRecorder(_AsTheyAre())
    token = around.set(recorder)
    try:
        with outside_all_modes(), only(()):
            given = tensors_given(args, kwargs)
            for t in given:
                recorder.add(t, "parameter" if is_held(t, args, kwargs) else "argument")
            watched = states_watched(recorder.take_state)
            with recorder, watched, torch.autograd.set_multithreading_enabled(False):
                run = fn, args, kwargs, recorder, given
                results = differentiated(*run, backward, cotangents=cotangents, present=present)
        return graph_of_run(recorder, results), dict(recorder.found)
    finally:
        around.reset(token)
        recorder.forget()


class Apart:
    """A call that runs in the forward, and again in the backward."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, tell: Callable[[Joint], None]) -> None:
        self.fn, self.tell, self.told = fn, tell, False
        self.leaves, self.spec = flatten((args, kwargs))
        self.given = tensors_given(args, kwargs)
        self.state, self.left, reach = RandomState(self.given), WeakIdKeyDictionary(), self._reach()
        self.known, self.python = {*_by_storage(reach)}, PythonState(reach)

    def _reach(self) -> list[Any]:
        return reached(self.fn, *self.leaves)

    def _copied(self) -> tuple[list[torch.Tensor], list[Any]]:
        """Tensors like those given, and the leaves of the arguments with them."""
        copies = {id(t): t if isinstance(t, torch.nn.Parameter) else _alias(t) for t in self.given}
        return list(copies.values()), [copies.get(id(leaf), leaf) for leaf in self.leaves]

    def run(self) -> Any:
        """The forward."""
        given = args, kwargs = unflatten(self._copied()[1], self.spec)
        # The recording around must not see what is saved here: it would hold that.
        with outside_all_modes(), hooks_aside(), torch.enable_grad():
            parts, fresh = parts_of(self.fn(*args, **kwargs), *given)
        graded, known = [t.requires_grad for t in fresh], {*self.known, *_by_storage(fresh)}
        with outside_all_modes():
            fresh[:] = [t.detach() for t in fresh]
        hole = Opened(around.get(), self.given)
        anchor = torch.empty(0, requires_grad=any(graded))
        hole.begin(anchor)
        operands = [t for t in self.given if t.requires_grad]
        made = _Ran.apply(self, hole, fresh, graded, anchor, *operands) if fresh else ()
        if not any(graded):
            self.finish()
        hole.give([*made, *self._left_behind(known)], ())
        found = parts.filled(self.given, made)
        self._hold()
        return found

    def _left_behind(self, known: set[int]) -> Iterator[torch.Tensor]:
        """Memory of the graph around for each other one that somebody holds now, such as a cache; it goes
        with that."""
        for key, tensor in _by_storage(self._reach()).items():
            if key not in known:
                self.left[tensor] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
                yield self.left[tensor]

    def _hold(self) -> None:
        """Hold the arguments as autograd does: nobody is to take these for handles of the user's."""
        recorder = around.get()
        with recorder.lives.keeping() if recorder else contextlib.nullcontext():
            self.given, self.leaves = self._copied()

    def backward(self, cotangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The forward again, and its backward: gradients of the operands."""
        present = [at for at, given in enumerate(cotangents) if given is not None]

        def begin(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            given = [c for c in cotangents if c is not None]
            return given if len(given) == len(results) else [torch.zeros_like(t) for t in results]

        found = self._recorded(cotangents=begin, present=present)
        self.leaves, self.given = [], []
        return found

    def finish(self) -> None:
        """Tell the graph of the forward, where no backward has come."""
        if not self.told:
            self._recorded(backward=False)

    def _recorded(self, **options: Any) -> list[torch.Tensor | None]:
        """Tell the graph of the call, which runs again as it ran; gradients of the operands."""
        copies, leaves = self._copied()
        now, held, self.told = RandomState(self.given), PythonState(self._reach()), True
        self.state.restore()
        self.python.restore_state()  # what it has found in a cache, and not what it has left there
        with outside_all_modes():
            joint, gradients = record_run(self.fn, *unflatten(leaves, self.spec), **options)
        held.restore_state()
        now.restore()
        self.tell(joint)
        return [gradients.get(id(t)) for t in copies if t.requires_grad]


def _by_storage(reach: Sequence[Any]) -> dict[int, torch.Tensor]:
    tensors = [t for t in reach if is_tensor(t) and t.layout is torch.strided and not wraps(t)]
    return {storage_key(t): t for t in tensors}


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Ran(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Apart, hole: Opened, fresh: list[torch.Tensor], graded: list[bool], *operands: Any
    ) -> Any:
        made = [_copied(t) for t in fresh]
        fresh.clear()
        ctx.mark_non_differentiable(*[t for t, graded in zip(made, graded, strict=True) if not graded])
        ctx.set_materialize_grads(False)
        ctx.call, ctx.hole = call, hole
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ctx.hole.come_back(cotangents)
        found = [None if g is None else _copied(g) for g in ctx.call.backward(cotangents)]
        return (None, None, None, None, None, *found)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory that an op of the graph around has made."""
    if tensor.layout is not torch.strided:
        return tensor.clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    with outside_all_modes():  # the graph has no write here, as if the call itself had made it
        return made.copy_(tensor)
