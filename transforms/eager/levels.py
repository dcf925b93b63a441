"""The frame under torch.func, where one level differentiates in reverse, with vmaps and forward mode inside
of it and around; or plain autograd does, below these, and what is saved is no wrapper.

The tape lies below all levels and sees batched ops, and those that push tangents forward. What autograd
saves at the level is a wrapper, detached at every level below. Its number on the tape tells what it is, and
its wrappers are put around it again when it is read; a tangent has a number of its own. The level's own
backward is recorded (`create_graph=True`), and nothing differentiates that: so no node that reads recomputed
values is recorded. Torch sets grad mode anew for each node. (Of a few formulas, such as group norm's, it then
takes the first-order kernel, whose last digits differ.) Under forward mode, which goes through the
backward, too, nodes are recorded and hold nothing.

What this does not serve takes the primitive: a level or a tensor below that is differentiated, too; functions
that run again as a whole; forward mode inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from remat.transforms.closure import PythonState, as_operands
from remat.transforms.compat import (
    GRAD,
    JVP,
    VMAP,
    add_batch_dim,
    allow_hooks,
    batched_grads_around,
    below_levels,
    dual_level_open,
    graph_task,
    has_no_level_rule,
    hooks_disabled,
    in_pass_of_func,
    in_transform,
    is_dead,
    is_wrapped,
    level_of,
    level_stack,
    made_dual,
    parts_of,
    push_hooks,
    refuse_hooks,
    running_node,
    set_grad_enabled,
    state_of,
    top_hooks,
    uncompiled_calls,
    unwrap_once,
    wrap_for_grad,
    wrapped_dead,
    wrappers_of,
)
from remat.transforms.context import active, node_of, untracked
from remat.transforms.eager.frame import Frame
from remat.transforms.eager.inputs import Inputs
from remat.transforms.eager.settle import early_value
from remat.transforms.errors import RematError
from remat.transforms.ops import lies, version_of
from remat.transforms.pytree import flatten, split
from remat.transforms.region import Region
from remat.transforms.state import RandomState
from remat.transforms.tape import CARRIES, Held, Recorder

_PROBE = torch.empty(0)
# What torch.func does not run at its levels, and the primitive runs below them.
_REFUSED = (
    "attempting to call Tensor.requires_grad_()",
    "Tensor that doesn't have storage",
    "must override the setup_context staticmethod",
    "does not have vmap support",
)


class Unserved(BaseException):
    """A forward that the primitive must run."""


NOTHING_REVERSED, NOT_BELOW = 0, -1  # no levels have these numbers


def served_level() -> int | None:
    """The level that differentiates, if it is the only one and a frame serves what runs here.

    Where vmaps and forward mode are all that torch.func does around here: NOTHING_REVERSED if a frame serves
    what plain autograd differentiates below, else NOT_BELOW.
    """
    number, forward = NOTHING_REVERSED, False
    for level in level_stack() or ():
        key = level.key()
        if key == GRAD and number == NOTHING_REVERSED:
            number = level.level()
        elif key == JVP:
            forward = True
        elif key != VMAP:
            return None
    unserved = None if number else NOT_BELOW
    # (A plain dual level pushes tangents forward below all levels.)
    if (dual_level_open() and not forward) or torch.is_inference_mode_enabled():
        return unserved
    if forward and batched_grads_around():
        return unserved  # by a vmap that does not know of tangents
    hooks = top_hooks() if number else None
    if hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), LevelFrame):
        return None
    return number if not number or all([mode.level for mode in active.stack]) else None


class LevelInputs(Inputs):
    """The arguments of one call at a level.

    Attributes:
        level: the number of the one that differentiates; NOTHING_REVERSED for plain autograd below all.
        forward: the numbers of those of forward mode, each with a wrapper that tells whether it has ended.
        around: the wrappers of each argument.
        graded: the arguments that it differentiates.
    """

    def __init__(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], level: int) -> None:
        super().__init__(region, args, kwargs)
        if active.swaps:  # what a region around captures may be of levels that are not there
            self.tensors = as_operands(self.tensors)
        self.level = level
        numbers = [one.level() for one in level_stack() or () if one.key() == JVP]
        self.forward = {number: wrap_for_grad(_PROBE, number) for number in numbers}
        if self.forward:
            parts = [untracked(parts_of, t, self.forward) for t in self.tensors]
            # Tangents come after all the arguments.
            tops = [tops[0] for tops, _, _ in parts] + [t for tops, _, _ in parts for t in tops[1:]]
            self.local = [below[0] for _, below, _ in parts] + [t for _, below, _ in parts for t in below[1:]]
            self.around = tuple([around for _, _, around in parts])
        else:
            tops, pairs = self.tensors, [wrappers_of(t) for t in self.tensors]
            self.local, self.around = [bottom for bottom, _ in pairs], tuple([around for _, around in pairs])
        self.inference = any([t.is_inference() for t in self.local])
        self.graded = [
            i for i, t in enumerate(tops) if (t if level_of(t) <= level else at_level(t, level)).requires_grad
        ]
        self.undo: Any = None

    def signature(self) -> Any:
        own = tuple([(t.shape, t.dtype, lies(t)) for t in self.local])
        return own, self.around, tuple(self.graded), self.level, super().signature()

    def note_random(self, of: Callable[[torch.Generator], Any] = state_of) -> None:
        with below_levels():
            super().note_random(of)

    def note_world(self, reach: Any) -> None:
        """Note what a forward changes that may turn out to be the primitive's."""
        self.undo = PythonState(reach), RandomState(self.tensors, own=reach)

    def restore_state(self, recorder: Recorder | None) -> None:
        """Let the world be as it was before the forward that `recorder` has watched."""
        if self.undo is not None:
            self.undo[0].restore_state()
        if recorder is not None:
            with torch.no_grad(), below_levels():
                recorder.restore_state()
        if self.undo is not None:
            self.undo[1].restore()


class LevelFrame(Frame):
    """A frame at one level of torch.func.

    Attributes:
        probe: a wrapper of the level, which tells whether that has ended.
        ends: the results as the level sees them.
        saved: what autograd saves in a first call, with versions, until it is known that a frame serves it.
        whole: whether all of that is held after all: what is to run again takes the primitive.
        pass_of_func: the last pass that was found to be that of a transform.
        unserved: whether it was found that the primitive must run this.
    """

    inputs: LevelInputs

    def __init__(self, inputs: LevelInputs) -> None:
        super().__init__(inputs)
        self.plain = inputs.level == NOTHING_REVERSED
        self.probe = _PROBE if self.plain else wrap_for_grad(_PROBE, inputs.level)
        self.watcher: Recorder | None = None
        self.ends: list[torch.Tensor] = []
        self.saved: list[tuple[torch.Tensor, int]] | None = None
        self.whole = self.unserved = False
        self.pass_of_func = -1

    def forward(self, args: Any, kwargs: Any, known: Any) -> Any:
        message = hooks_disabled()
        allow_hooks()
        if known is None:
            self.saved = []
        try:
            with uncompiled_calls():
                out = super().forward(args, kwargs, known)
        except (RuntimeError, KeyError) as error:
            refused = has_no_level_rule(error) or any(part in str(error) for part in _REFUSED)
            if self.unserved or (known is None and refused):  # (TorchScript makes other exceptions of ours.)
                raise Unserved from None
            raise
        else:
            self.watcher = self.inputs.undo = None
            return out
        finally:
            self.ends, self.saved = [], None
            if message is not None:
                refuse_hooks(message)

    def begin(self, recorder: Recorder) -> None:
        recorder.level, recorder.graded = self.inputs.level, self.inputs.graded
        self.watcher = recorder

    def watching(self, recorder: Recorder) -> Any:
        return recorder.selector.watching(levels=True)

    def break_off(self, recorder: Recorder, error: BaseException) -> None:
        with below_levels():
            super().break_off(recorder, error)

    def end(self, known: Any, recorder: Recorder, out: Any) -> None:
        bottoms = self._see(out)
        with below_levels():
            super().end(known, recorder, bottoms)

    def _see(self, out: Any) -> list[torch.Tensor]:
        """Note the results as the level sees them; what lies below all levels."""
        out, forward = as_operands(out) if active.swaps else out, self.inputs.forward
        results = split(flatten(out)[0])[0]
        if forward:
            parts = [untracked(parts_of, t, forward) for t in results]
            results, bottoms = (
                [t for tops, _, _ in parts for t in tops],
                [t for _, ts, _ in parts for t in ts],
            )
        else:
            bottoms = [wrappers_of(t)[0] for t in results]
        level = self.inputs.level
        self.ends = [t if level_of(t) <= level else at_level(t, level) for t in results]
        return bottoms

    def hook_late(self, pack: Any, out: Any) -> None:
        if self.elsewhere():
            # Whose nodes these are is not known here; later calls take the primitive.
            self.region.cache.unframed = True
        else:
            self._see(out)
            super().hook_late(pack, out)

    def differentiated(self, out: Any) -> list[torch.Tensor]:
        return [t for t in self.ends if node_of(t) is not None]

    def hold_whole(self) -> bool:
        if self.saved is None:
            raise Unserved
        for ref, (tensor, version) in zip(self.handles, self.saved, strict=True):
            if ref is not None and (handle := ref()) is not None:
                handle.value = Held(tensor, self.region.name, None)
                handle.value.version = version
        self.whole = True
        # (The primitive has no place for such a derivative, and none sees what plain autograd lets a function
        # fill past torch.)
        self.region.cache.unframed = self.tape.rerun_reason != CARRIES and not self.plain
        return True

    def _not_served(self) -> Unserved:
        """What plain autograd saves is of a level, or there is one beside it that differentiates."""
        self.unserved = True
        return Unserved()

    def pack(self, tensor: torch.Tensor) -> Any:
        if self.plain and is_wrapped(tensor):
            raise self._not_served()  # of a Function, which torch's checkpoint has: no op at a level
        if self.inner or self.plain:  # a region inside hands over what it reads
            with below_levels():
                return self._packed(tensor)
        parts, around = self._parts(tensor)
        with below_levels():
            handles = [self._packed(part) for part in parts]
        return (handles[0] if len(handles) == 1 else handles), around

    def pack_expected(self, tensor: torch.Tensor) -> Any:
        if self.inner or self.plain:
            return super().pack_expected(tensor)
        if self.inputs.forward or not in_transform():
            parts, around = self._parts(tensor)
            handles = [self._expected(part) for part in parts]
            return (handles[0] if len(handles) == 1 else handles), around
        bottom, around = wrappers_of(tensor)
        recorder: Any = self.recorder
        at = recorder.packs
        return at if recorder.expects(bottom) else self._unexpected(bottom, at), around

    def _parts(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        if not in_transform():
            raise self._not_served()
        if self.inputs.forward:
            return untracked(parts_of, tensor, self.inputs.forward)[1:]
        bottom, around = wrappers_of(tensor)
        return [bottom], around

    def _packed(self, bottom: torch.Tensor) -> Any:
        if self.saved is not None:
            self.saved.append((bottom, version_of(bottom)))
        return Frame.pack(self, bottom)

    def _expected(self, bottom: torch.Tensor) -> Any:
        recorder: Any = self.recorder
        at = recorder.packs
        return at if recorder.expects(bottom) else self._unexpected(bottom, at)

    def _unexpected(self, bottom: torch.Tensor, at: int) -> Any:
        self.handles += [None] * (at - len(self.handles))
        with below_levels():
            return self._packed(bottom)

    def unpack(self, handle: Any) -> torch.Tensor:
        if type(handle) is not tuple:
            early = self.plain and self.recorder is not None and self.owner is None
            return self._early(handle) if early else super().unpack(handle)
        at, around = handle
        task = graph_task()
        if type(at) is list:
            values = [self._value(one) for one in at]
        elif self.recorder is not None or not in_transform():
            values = [self._value(at)]
        elif type(at) is int and (there := self.direct.get(at)) in self.held and not self.held[there].unpack:
            values = [self.held[there].get(self.inputs, there)]  # it is there: no op runs
        else:
            with below_levels():
                values = [super().unpack(at)]
        dead = is_dead(self.probe)
        if not (dead or self.whole or self.recorder) and torch.is_grad_enabled() and task != -1:
            if task != self.pass_of_func and in_pass_of_func():
                self.pass_of_func = task
            if task != self.pass_of_func:
                raise RematError(
                    f"region {self.region.name!r} is differentiated inside a torch.func transform by "
                    "torch.autograd.grad(create_graph=True). Nest the transforms instead: torch.func.grad of "
                    "a function that calls torch.func.grad."
                )
            if self.inputs.forward and isinstance(running_node(), BackwardCFunction):
                pass  # it may differentiate itself
            elif self.inputs.forward:
                # A formula goes another way where nothing is recorded: one that forward mode does not know
                # (that of `solve` gives wrong tangents).
                allow_hooks()
                push_hooks(self.left, self.not_held)
            else:
                set_grad_enabled(False)
        if not dead and len(around) == 1 and around[0][1] is None:
            return wrap_for_grad(values[0], around[0][0])
        value = self._wrapped(values, 0, around, dead)
        if dead:
            # (Autograd gives what it unpacks a history, which a wrapper of an ended level hides.)
            return wrapped_dead(value)
        return wrap_for_grad(value, self.inputs.level) if around and around[0][1] is not None else value

    def left(self, tensor: torch.Tensor) -> None:
        """What the recorded backward would save of a node: nothing differentiates that."""

    def not_held(self, _: None) -> torch.Tensor:
        raise RematError(
            f"region {self.region.name!r} is differentiated twice by one torch.func transform. Nest two."
        )

    def _value(self, at: Any) -> torch.Tensor:
        if self.recorder is not None:
            return self._early(at)
        if not in_transform():
            return super().unpack(at)
        with below_levels():
            return super().unpack(at)

    def _wrapped(self, values: list[torch.Tensor], at: int, around: Any, dead: bool) -> torch.Tensor:
        """A value with the wrappers that it had; `dead`: but for those of grad's level."""
        value = values[at]
        for level, dim in reversed(around):
            if type(dim) is tuple:
                # (Of an ended level torch, too, reads the primal alone.)
                if not is_dead(self.inputs.forward[level]):
                    part, inside = dim
                    tangent = self._wrapped(values, part, inside, dead)
                    value = untracked(made_dual, value, tangent, level)
            elif dim is not None:
                value = add_batch_dim(value, dim, level)
            elif not dead:
                value = wrap_for_grad(value, level)
        return value

    def _early(self, at: Any) -> torch.Tensor:
        """What a backward inside the forward reads. Later calls take the primitive."""
        assert self.recorder is not None
        with below_levels():
            return early_value(self, at if type(at) is int else at.at, self.recorder)


def at_level(tensor: torch.Tensor, level: int) -> torch.Tensor:
    """A tensor as a level sees it, without the wrappers of levels inside."""
    while level_of(tensor) > level:
        tensor = unwrap_once(tensor)
    return tensor
