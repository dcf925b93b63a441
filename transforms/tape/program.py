"""Running a part of a tape again: ops, not the user's function.

Modules, autograd, hooks and user code stay out of it, so that it costs little more than its kernels, and
nothing that the user's code counts, draws or stores happens twice. Autograd takes plain data for a saved
value and reattaches its history itself.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from remat.transforms.compat import direct_call, outside_all_modes, set_grad_enabled
from remat.transforms.context import active, untracked
from remat.transforms.errors import RematError, not_repeated
from remat.transforms.ops import tensors_in, traits, updates
from remat.transforms.placeholders import Meta, mapped
from remat.transforms.tape.snapshots import handed_out
from remat.transforms.tape.tape import KEPT, RUN, SKIP, Node, RecomputeSteps, Ref, Tape, refs_in

Values = dict[int, Any]
_at = attrgetter("at")


@dataclass(init=False, eq=False, repr=False, slots=True)
class Step:
    """One op of a program.

    Attributes:
        at: its number on the tape.
        call: the op, None where a kept result is handed out.
        args, kwargs: its arguments, with a `Ref` for each tensor.
        flat: positions among the arguments and the numbers of the tensors there.
        nested: positions of arguments that hold tensors inside.
        outs: the numbers of its results, None for those that nobody reads.
        single: whether it returns one tensor.
        gone: values that nobody reads after it.
        graded: whether gradients were on: some kernels return more then, such as that of `nn.LSTM` on CPUs.
        before, after: saved values that are taken before it (as copies), and after it.
    """

    at: int
    call: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flat: list[tuple[int, int]]
    nested: list[int]
    outs: list[int | None]
    single: bool
    gone: tuple[int, ...]
    before: tuple[tuple[int, int], ...]
    after: tuple[tuple[int, int], ...]
    draws: bool
    graded: bool


class Program:
    """What of a tape has to run for some of the values that autograd saved.

    Args:
        tape: of a forward whose ops tell all that was computed.
        needs: what runs, what is handed out.
        wanted: the values to make, as positions in `tape.saved_values`.

    Attributes:
        outside: positions of the tensors from outside that it reads.
        direct: saved values that are tensors from outside: the positions of those.
        kept: the ops whose kept results it takes, in order.
        draws: whether it draws random numbers.
    """

    __slots__ = (
        "_unkept",
        "_wanted",
        "copied",
        "direct",
        "draws",
        "first",
        "kept",
        "outside",
        "steps",
        "tape",
    )

    def __init__(self, tape: Tape, needs: RecomputeSteps, wanted: Sequence[int]) -> None:
        self.tape, self.copied = tape, needs.copied
        runs = [at for at, action in enumerate(needs.actions) if action == RUN]
        unread = _unread(tape, runs, wanted)
        self.steps = [
            _step(tape, needs, at, unread) for at, action in enumerate(needs.actions) if action != SKIP
        ]
        self.kept = dict.fromkeys([step.at for step in self.steps if step.call is None])
        self.draws = any(step.draws for step in self.steps)
        self.direct, self._wanted = tape.direct(), wanted
        self.first: list[tuple[int, int]] = []  # wanted values that are there before any step
        self._unkept: Program | None = None
        self._take(wanted)
        self.outside = self._free()

    @property
    def unkept(self) -> Program:
        """What makes the same values where nothing is kept any more; made once, since an inner backward asks
        for it in each pass."""
        if self._unkept is None:
            needs = RecomputeSteps(self.tape, self.tape.sources_of(self._wanted), {})
            self._unkept = Program(self.tape, needs, self._wanted)
        return self._unkept

    def _take(self, wanted: Iterable[int]) -> None:
        """Note for every wanted value when it is taken: as soon as it is there and as it was when saved."""
        tape = self.tape
        makers = {step.at: step for step in self.steps}
        writers: dict[int, list[Step]] = {}  # by the memory that they write, in order
        for step in self.steps:
            for root in tape.nodes[step.at].written if step.call else ():
                writers.setdefault(root, []).append(step)
        for place in wanted:
            number, position = tape.saved_values[place]
            pair = (place, number)
            sources = [i for i in tape.sources(number, position) if i in makers]
            writes = writers.get(tape.root_of(number), ())
            later = bisect_left(writes, position, key=_at)
            if later < len(writes):
                writes[later].before += (pair,)
            elif sources:
                makers[max(sources)].after += (pair,)
            else:
                self.first.append(pair)

    def _free(self) -> tuple[int, ...]:
        """Let values go with the last step that reads them; returns what is read from outside."""
        read: set[int] = set()
        taken = [number for _, number in self.first]
        for step in reversed(self.steps):
            uses = {number for _, number in step.after}
            mine = {n for n in step.outs if n is not None}
            step.outs = [n if n in read or n in uses else None for n in step.outs]
            reads = set(refs_in((step.args, step.kwargs))) | {
                number for _, number in (*step.before, *step.after)
            }
            step.gone = tuple(sorted((reads | (mine & uses)) - read))
            read |= reads
        return tuple(sorted({-1 - n for n in (*read, *taken) if n < 0}))

    def run(
        self,
        outside: Mapping[int, torch.Tensor],
        take: Callable[[int], Any],
        random: Mapping[int, Any],
        digest: Callable[[Any], Any] | None = None,
    ) -> dict[int, torch.Tensor]:
        """The wanted values, by their positions in `tape.saved_values`. Runs below autograd, and
        turns grad mode.

        Args:
            outside: the tensors from outside that are read, by their positions.
            take: gives what was kept of an op.
            random: the generator's state before each op that draws; an op without one draws anew.
            digest: checks the results bitwise.
        """
        values: Values = {-1 - at: tensor for at, tensor in outside.items()}
        made = {place: values[n] for place, n in self.first}
        nodes, watched, graded = self.tape.nodes, bool(active.listeners), None
        for step in self.steps:
            if watched:
                active.place = nodes[step.at].place
            if step.before:
                made.update([(place, values[number].clone()) for place, number in step.before])
            call = step.call
            if call is None:
                out = handed_out(take(step.at), step.at in self.copied)
            else:
                if step.graded is not graded:
                    graded = step.graded
                    set_grad_enabled(graded)
                if step.draws and (state := random.get(step.at)) is not None:
                    call = functools.partial(state.draw_again, self.tape.region, call)
                args = list(step.args)
                for at, number in step.flat:
                    args[at] = values[number]
                for at in step.nested:
                    args[at] = mapped(Ref, values.__getitem__, args[at])
                try:
                    keywords = step.kwargs and mapped(Ref, values.__getitem__, step.kwargs)
                    out = call(*args, **keywords) if keywords else call(*args)
                except (RuntimeError, IndexError, ValueError, TypeError) as error:
                    if isinstance(error, (RematError, torch.OutOfMemoryError)):
                        raise
                    raise self._failed(step, error) from error
                if digest is not None:
                    self._compare(step, digest, out)
            if step.single:
                if (number := step.outs[0]) is not None:
                    values[number] = out
            else:
                for number, tensor in zip(step.outs, tensors_in(out), strict=True):
                    if number is not None:
                        values[number] = tensor
                # It would live until the next op of several results: a part of a product keeps all of it.
                tensor = None
            for place, number in step.after:
                made[place] = values[number]
            for number in step.gone:
                del values[number]
        active.place = None
        return made

    def _failed(self, step: Step, error: Exception) -> Exception:
        """What is said of an op that ran in the forward and fails now."""
        what = f"{self.tape.say(step.at)} ran in the forward and now says: {error}"
        return RematError(not_repeated(self.tape.region, what))

    def _compare(self, step: Step, digest: Callable[[Any], Any], out: Any) -> None:
        node = self.tape.nodes[step.at]
        if node.digest is not None and untracked(digest, out) != node.digest:
            what = f"at op {step.at}, {node.op} gave other numbers than in the forward, bit for bit"
            raise RematError(not_repeated(self.tape.region, what))


def call_of(node: Node) -> Callable[..., Any]:
    """What calls the op of a node with its arguments, tensors in their places."""
    first = itertools.takewhile(lambda arg: type(arg) is Ref, () if node.kwargs else node.args)
    return direct_call(node.op, len(list(first)))


def _unread(tape: Tape, runs: Iterable[int], wanted: Iterable[int]) -> set[int]:
    """The memories that the ops which run do no more than bring up to date: others bring them in vain."""
    nodes = [tape.nodes[at] for at in runs]
    updated = [updates(traits(node.op), node.args) for node in nodes]
    found = {tape.root_of(n) for numbers in updated for n in numbers if type(n) is Ref}
    if not found:
        return found
    read = (n for node, own in zip(nodes, updated, strict=True) for n in node.reads() if n not in own)
    return found.difference(map(tape.root_of, (*read, *[tape.saved_values[place][0] for place in wanted])))


def _step(tape: Tape, needs: RecomputeSteps, at: int, unread: set[int]) -> Step:
    node, step = tape.nodes[at], Step()
    step.at, step.before, step.after, step.gone = at, (), (), ()
    end = tape.nodes[at + 1].first if at + 1 < len(tape.nodes) else len(tape.makers)
    step.outs = list(range(node.first, end))
    step.single = isinstance(node.outs, Meta)
    step.draws, step.graded = node.draws, node.graded
    step.call, step.args, step.kwargs = None, (), {}
    step.flat, step.nested = [], []
    if needs.actions[at] == KEPT:
        step.draws = False
        return step
    step.call, step.args, step.kwargs = call_of(node), node.args, node.kwargs
    if unread.issuperset(node.written) and (own := updates(traits(node.op), node.args)):
        step.args = tuple([None if type(arg) is Ref and arg in own else arg for arg in node.args])
    if traits(node.op).changes_shape:
        step.call = functools.partial(_on_alias, step.call)
    if node.shape_only:
        step.call, step.args, step.kwargs = _like(tape, at, step.call)
    if node.default is not None:
        step.call = functools.partial(_by_default, node.default, step.call)
    step.flat = [(i, int(arg)) for i, arg in enumerate(step.args) if type(arg) is Ref]
    step.nested = [i for i, arg in enumerate(step.args) if isinstance(arg, (list, tuple)) and refs_in(arg)]
    return step


def _on_alias(call: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Let an op change the shape of one tensor of those that share a value: `k = h.detach(); k.t_()`."""
    return call(tensor.data, *args, **kwargs)


def _by_default(dtype: torch.dtype, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an op with the default dtype that it had."""
    if (before := torch.get_default_dtype()) is dtype:
        return call(*args, **kwargs)
    torch.set_default_dtype(dtype)
    try:
        return call(*args, **kwargs)
    finally:
        torch.set_default_dtype(before)


def _like(tape: Tape, at: int, call: Callable[..., Any]) -> tuple[Callable[..., Any], Any, Any]:
    """The call of a factory that takes shape, dtype and device from a tensor, and not its numbers."""
    node = tape.nodes[at]
    number = node.args[0]
    if type(number) is not Ref:
        return call, node.args, node.kwargs
    if node.op is torch.ops.aten.empty_like.default and not node.kwargs.get("pin_memory"):
        # As it lay: torch works that out in Python for a tensor without numbers.
        shape, stride, dtype, device = tape.meta_of(node.first)
        if stride is not None:
            return torch.empty_strided, (shape, stride), {"dtype": dtype, "device": device}
    shape, stride, dtype, device = tape.meta_of(number)
    with outside_all_modes():
        stand_in = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    kwargs = dict(node.kwargs)
    if kwargs.get("device") is None:
        kwargs["device"] = device
    return call, (stand_in, *node.args[1:]), kwargs
