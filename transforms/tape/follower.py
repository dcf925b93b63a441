"""Holding a forward against the tape of an earlier one, op by op.

Each op is compared before it runs: the op, its operands by their numbers, its constants. While they are
those of the tape, what that teaches holds; a forward that leaves the tape is recorded from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import DispatchMode, function_modes_asked, functions_as_they_are, is_strided
from remat.transforms.context import active, untracked
from remat.transforms.ops import (
    Decisions,
    has_strides,
    is_shape_arithmetic,
    lies_as,
    memory_of,
    place,
    relaid,
    tensors_in,
    traits,
)
from remat.transforms.placeholders import mapped, without_data
from remat.transforms.pytree import constants_alike
from remat.transforms.state import first_draw
from remat.transforms.tape.program import call_of
from remat.transforms.tape.recorder import Recorder
from remat.transforms.tape.tape import RECOMPUTE, Node, Outside, Ref, Tape, ValueNumbering, refs_in

_weak, _references = weakref.ref, weakref.getweakrefcount


class Check(NamedTuple):
    """What a later call of an op is compared by, and how it runs."""

    op: Any
    count: int  # of arguments; -1 where positions do not tell all: keywords, or tensors in lists
    refs: tuple[tuple[int, int], ...]  # positions of tensors, and their numbers
    constants: tuple[
        tuple[int, Any, bool], ...
    ]  # positions and values of others, and whether == compares all
    watched: bool  # whether something has to be noted before it runs
    call: Callable[..., Any]
    first: int  # the number of its first result


def _gone() -> None:
    """Stands for the weak reference to a tensor that is not there."""


class TraceFollower(Recorder):
    """Expects the ops of `expected`, and keeps what was kept of them; records from the first other one on.

    Args:
        expected: the tape of an earlier forward.
        expected_kept: the ops whose results are kept.
        selector, inputs, casts, decisions: as for `Recorder`, once the forward has left the tape.

    Attributes:
        expected: None from then on.
        at, packs, named: how many ops have run, values were saved, and values were named.
    """

    # In slots, as Python looks them up faster than so many entries of a dict.
    __slots__ = (
        "_entered", "_kept_in", "_keys", "_memory", "_places", "_table", "_writes", "at", "casts",
        "checks", "contents", "decisions", "digest", "expected", "expected_kept", "held", "keeps_decisions",
        "kept", "kept_bytes", "leaving", "make_selector", "moved", "named", "op_in_parent", "outside",
        "packs", "random", "selector", "shown", "sizes", "snapshots", "tape", "there",
    )  # fmt: skip

    def __init__(
        self,
        expected: Tape,
        expected_kept: frozenset[int],
        selector: Callable[[], Any] | None,
        inputs: Sequence[torch.Tensor],
        casts: bool,
        decisions: bool,
        leaving: Callable[[], None],
    ) -> None:
        # Not the constructor of `Recorder`: most of it is for a forward that is recorded.
        DispatchMode.__init__(self)
        self.expected: Tape | None = expected
        self.tape = expected
        self.expected_kept, self.make_selector, self.casts = expected_kept, selector, casts
        # A forward that leaves the tape may read decisions that the tape had no use for.
        self.held = expected_kept | expected.decided if expected.decided else expected_kept
        if expected.offered:
            self.held -= expected.offered
        self.keeps_decisions, self.decisions, self.leaving = decisions, None, leaving
        self.at = self.packs = self.named = 0
        self.outside, self.kept, self.random, self.snapshots = list(inputs), {}, {}, {}
        self.shown, self.op_in_parent, self._memory, self._places, self._kept_in = {}, {}, {}, {}, {}
        self.selector, self.digest, self.kept_bytes, self.moved = None, None, 0, set()
        self.sizes, self.contents = {}, {}
        self.checks = expected.checks or checks_of(expected)
        # Whether memory from outside is written to; memories of what `outside` lists.
        self._writes, self._keys = bool(expected.last_write) and min(expected.last_write) < 0, []
        # What is there, by number: below zero counts from the end. It enters the table once somebody asks.
        self.there: list[Callable[[], Any]] = [_gone] * (len(expected.makers) + len(expected.outside))
        self._table, self._entered = ValueNumbering(), (0, 0)
        first: dict[int, int] = {}
        for at, tensor in enumerate(inputs):
            if first.setdefault(id(tensor), at) == at:
                self.there[-1 - at] = _weak(tensor)

    @property
    def position(self) -> int:
        return len(self.tape.nodes) if self.expected is None else self.at

    @property
    def _numbers(self) -> ValueNumbering:
        expected, at, (outside, results) = self.expected, self.at, self._entered
        if expected is not None:
            nodes = expected.nodes
            self._entered = len(self.outside), nodes[at].first if at < len(nodes) else len(expected.makers)
            new = (*range(-1 - outside, -1 - self._entered[0], -1), *range(results, self._entered[1]))
            for number in new:
                if (tensor := self.there[number]()) is not None:
                    self._table.add(tensor, number)
        return self._table

    @property
    def followed(self) -> bool:
        """Whether the forward, now over, was the one on the tape."""
        expected = self.expected
        return (
            expected is not None
            and self.at == len(expected.nodes)
            and self.packs == len(expected.saved_values)
            and self.named == len(expected.names)
            and self.kept.keys() >= self.expected_kept
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_modes_asked():  # an op of C++: the user's modes know nothing of it
            with functions_as_they_are():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if active.untracked:
            return func(*args, **kwargs) if kwargs else func(*args)
        if types and self.takes_apart(types, args):
            return NotImplemented
        expected, at = self.expected, self.at
        if expected is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if at < len(self.checks):
            op, count, refs, constants, watched, call, number = self.checks[at]
            if op is func and (
                self._is_just(refs, constants, args)
                if count == len(args) and not kwargs
                else self._matches(expected.nodes[at], args, kwargs)
            ):
                if watched or self.parent is not None:
                    out = self._run_watched(at, call, args, kwargs or {})
                else:
                    out = call(*args, **kwargs) if kwargs else call(*args)
                if isinstance(out, torch.Tensor):
                    self._enter(out, number, args, refs)
                else:
                    for i, tensor in enumerate(tensors_in(out)):
                        self._enter(tensor, number + i)
                self.at = at + 1
                if at in self.held:
                    node = expected.nodes[at]
                    self.kept[at] = self._hold(at, node, node.verdict, out)
                return out
        facts = traits(func)
        if facts.ignored or (not expected.meta and is_shape_arithmetic(args, kwargs)):
            return self._pass(func, facts, args, kwargs or {})
        self.start_recording()
        return self._record(func, facts, args, kwargs or {})

    # -- comparing -------------------------------------------------------------------------------------------

    def _is_just(self, refs: Any, constants: Any, args: Any) -> bool:
        """Whether an op without tensors in lists is called as on the tape: the usual case, in a hurry."""
        there, bound = self.there, len(self.outside)
        for i, want in refs:
            value = args[i]
            found = there[want]()
            if (found is not value or found is None) and not self._is(want, value):
                return self._unbind(bound)
        return not constants or constants_just(constants, args) or self._unbind(bound)

    def _matches(self, node: Node, args: Any, kwargs: Any) -> bool:
        """Whether an op is called as on the tape; binds what it reads from outside for the first time."""
        bound = len(self.outside)
        counted = len(args) == len(node.args) and (not kwargs) == (not node.kwargs)
        typed = node.default is None or node.default is torch.get_default_dtype()
        if counted and typed and self._lies_alike(node, args):
            alike = all(map(self._alike, node.args, args))
            if alike and (not kwargs or self._alike(node.kwargs, kwargs)):
                return True
        return self._unbind(bound)

    def _lies_alike(self, node: Node, args: Any) -> bool:
        """Whether what an op makes like its operand lies as it did: the recomputation makes it from the tape.

        Nothing else there tells how a tensor lies.
        """
        tensor: Any = args[0] if args else None
        if not node.shape_only or not _makes_alike(node) or not is_strided(tensor):
            return True
        return lies_as(tensor, self.tape.meta_of(node.args[0]))

    def _unbind(self, bound: int) -> bool:
        """Forget the tensors from outside that a call has bound which is another one after all."""
        for tensor in self.outside[bound:]:
            self.forget(tensor)
        del self.outside[bound:], self._keys[bound:]
        self._entered = min(bound, self._entered[0]), self._entered[1]
        return False

    def _is(self, want: int, value: Any) -> bool:
        """Whether a value has this number, or is the next tensor from outside, which has it from now on."""
        if not isinstance(value, torch.Tensor):
            return False
        number = self._number_of(value) if self.there[want]() is not value else want
        return self._binds(-1 - want, value) if number is None else number == want

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        # What has a number has a weak reference, and few others have.
        return self._numbers.of(tensor) if _references(tensor) else None

    def _enter(self, tensor: torch.Tensor, number: int, args: Any = (), refs: Any = ()) -> None:
        """Let a tensor have this number and no other: what is written in place had one."""
        there = self.there
        if _references(tensor):
            old = next((want for i, want in refs if args[i] is tensor), None)
            old = self._numbers.of(tensor) if old is None else old
            if old is not None and there[old]() is tensor:
                there[old] = _gone
        there[number] = _weak(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        if self.expected is not None and (number := self._number_of(tensor)) is not None:
            if self.there[number]() is tensor:
                self.there[number] = _gone
        super().forget(tensor)

    def _alike(self, want: Any, value: Any) -> bool:
        kind = type(want)
        if kind is Ref:
            return self._is(want, value)
        if kind is not type(value):
            return False
        if kind is list or kind is tuple:
            return len(want) == len(value) and all(map(self._alike, want, value))
        if kind is dict:
            return want.keys() == value.keys() and all(self._alike(want[k], value[k]) for k in want)
        return constants_alike(want, value)

    def _binds(self, at: int, tensor: torch.Tensor) -> bool:
        """Let an unknown tensor be the one from outside at this position, if it is the next one's turn."""
        assert self.expected is not None
        if at != len(self.outside) or at >= len(self.expected.outside):
            return False
        known = self.expected.outside[at]
        shape, stride, dtype, device = known.meta
        if dtype is not tensor.dtype or shape != tensor.shape or device != tensor.device:
            return False
        if has_strides(tensor) is (stride is None) or not lies_as(tensor, known.meta):
            return False
        if self._writes or known.root != -1 - at:
            # What is written to must share its memory with what it shared it with.
            keys = self._keys
            keys += map(place, (*self.outside[len(keys) :], tensor))
            first = keys.index(keys[at])
            # (Memory may have been freed, and others lie there now.)
            if first < at and place(self.outside[first]) != keys[at]:
                first = at
            if -1 - first != known.root:
                return False
        self.there[-1 - at] = _weak(tensor)
        self.outside.append(tensor)
        return True

    def met(self, tensor: torch.Tensor) -> int | None:
        number, at = self._numbers.of(tensor), len(self.outside)
        if number is None and self.expected is not None and self._binds(at, tensor):
            return -1 - at
        return number

    def shared(self, ops: Iterable[int]) -> list[torch.Tensor]:
        if self.expected is None or self._table:  # which may know other objects with the same numbers
            return super().shared(ops)
        nodes = map(self.tape.nodes.__getitem__, ops)
        numbers = (number for node in nodes for number in node.makes())
        return [tensor for number in numbers if (tensor := self.there[number]()) is not None]

    # -- following -------------------------------------------------------------------------------------------

    def _run_watched(self, at: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an op of which something is noted: what it is about to write or draw, or its place around."""
        node, parent = self.tape.nodes[at], self.parent
        for root in node.written:
            if root < 0 and root not in self.snapshots:
                self._snapshot(root, traits(node.op), args)
        if node.overwrites:
            self._copy_kept(node.overwrites)
        around = -1 if parent is None else parent.position
        if node.draws:
            self.random[at], out = first_draw(call, traits(node.op).native, args, kwargs)
        else:
            out = call(*args, **kwargs)
        if parent is not None:
            self._link(parent, at, around)
        return out

    def expects(self, tensor: torch.Tensor) -> bool:
        """Autograd saves `tensor`: whether the forward is still the one on the tape, and saved this too."""
        expected, at = self.expected, self.packs
        if expected is None or at >= len(expected.saved_values):
            return False
        number, position = expected.saved_values[at]
        if position != self.at or (self.there[number]() is not tensor and not self._is(number, tensor)):
            return False
        self.packs = at + 1
        return True

    def pack(self, tensor: torch.Tensor, owner: int | None) -> int:
        if self.expects(tensor):
            assert self.expected is not None
            return self.expected.saved_values[self.packs - 1][0]
        self.start_recording()
        return super().pack(tensor, owner)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        expected = self.expected
        if expected is not None:
            number = self._numbers.of(tensor)
            if number is None or number < 0:
                return
            if self.named < len(expected.names) and expected.names[self.named] == (number, name):
                self.named += 1
                return
            self.start_recording()
        super().name(tensor, name)

    def offer(self, at: int, value: Any, op: Any) -> None:
        expected = self.expected
        if expected is not None:
            node = expected.nodes[at]
            if node.op is op and node.verdict != RECOMPUTE:
                if at in self.expected_kept and at not in self.kept:
                    self.kept[at] = value
                return
            self.start_recording()
        super().offer(at, value, op)

    def expose(self, tensor: torch.Tensor, moved: bool = False) -> None:
        self.start_recording()
        super().expose(tensor, moved)

    def bind(self, tensor: torch.Tensor, number: int) -> None:
        self.start_recording()
        super().bind(tensor, number)

    def replaced_by(self, other: torch.Tensor, tensor: torch.Tensor, number: int) -> None:
        self.there[number] = _weak(other)

    # -- leaving ---------------------------------------------------------------------------------------------

    def start_recording(self) -> None:
        """Go on recording: the forward is not the one on the tape."""
        expected, count = self.expected, self.at
        if expected is None:
            return
        living = list(self._numbers.living())
        self.expected = None
        untracked(self.leaving)
        tape = expected.prefix(count, self.packs, self.named)
        # How values lie may be what made it leave the tape, and who shares memory may not have been asked.
        keys = [place(tensor) for tensor in self.outside]
        self._places = {key: keys.index(key) for key in keys}
        tape.outside = [
            Outside(relaid(known.meta, tensor), -1 - keys.index(key))
            for tensor, known, key in zip(self.outside, expected.outside, keys, strict=False)
        ]
        for tensor, number in living:
            tape.relay(tensor, number)
        for i, node in enumerate(tape.nodes):
            if (was := node.root) < 0:
                reads = (ref for ref in refs_in((node.args, node.kwargs)) if expected.root_of(ref) == was)
                node.root = tape.root_of(next(reads, was))
            node.verdict = node.verdict if i in self.kept else RECOMPUTE
            if i in self.kept:
                self._kept_in.setdefault(node.root, []).append(i)
        self.tape = tape
        for tensor, number in living:
            if (memory := memory_of(tensor)) is not None:
                self._remember(memory, root := tape.root_of(number), number, tensor)
                if root >= 0 and traits(tape.nodes[root].op).uninitialized and root not in tape.last_write:
                    self._watch(root, tensor)
        if self.keeps_decisions:
            self.decisions = Decisions(tape)
        if self.make_selector is not None:
            self.selector = self.make_selector()
            show_so_far(self.selector, tape, self.owner)
            # What the old tape had no use for was not kept, and calls were not watched: the next forward is
            # recorded from its start.
            self.tape.cacheable = False


def checks_of(tape: Tape) -> list[Check]:
    """What later calls of a tape's ops are compared by."""
    if tape.checks is None:
        tape.checks = [_check(node) for node in tape.nodes]
    return tape.checks


def constants_just(constants: Any, args: Any) -> bool:
    """Whether these arguments that are no tensors are those of the tape."""
    for i, want, plain in constants:
        value = args[i]
        if value is not want and not (
            (type(value) is type(want) and value == want) if plain else constants_alike(want, value)
        ):
            return False
    return True


def _check(node: Node) -> Check:
    refs = tuple([(i, int(arg)) for i, arg in enumerate(node.args) if type(arg) is Ref])
    others = tuple([(i, arg, _is_plain(arg)) for i, arg in enumerate(node.args) if type(arg) is not Ref])
    nested = any(refs_in(arg) for _, arg, _ in others)
    flat = not (node.kwargs or nested or node.default or _makes_alike(node))
    watched = bool(node.written) or node.draws
    count = len(node.args) if flat else -1
    return Check(node.op, count, refs, others, watched, call_of(node), node.first)


def _makes_alike(node: Node) -> bool:
    """Whether an op makes a tensor that lies in memory as its first operand does."""
    said = node.kwargs.get("memory_format")
    alike = traits(node.op).lies_alike and (said is None or said is torch.preserve_format)
    return node.shape_only and alike and type(node.args[0]) is Ref


def _is_plain(value: Any) -> bool:
    """Whether == is all that there is to compare: not for zeros with signs, nor for what is no number."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return not isinstance(value, complex) and (type(value) is not float or value * 0 == 0 != value)


# -- so far ----------------------------------------------------------------------------------------------


Owner = Callable[[Node, torch.Tensor], "int | None"]


def show_so_far(selector: Any, tape: Tape, owner: Owner) -> None:
    """Let a selector see the ops so far with their names: it may count them, or bar looks at a value.

    A policy that is asked from the middle of a forward on: it is shown the ops so far.

    A plan is followed op by op, and would refuse the rest of a forward. And what a rank does not keep because
    its call alone has left the trace, such as a collective's result, it would wait for in its backward, for
    ever.
    """
    names = dict[int, list[tuple[int, str]]]()
    for number, name in tape.names:
        names.setdefault(tape.makers[number], []).append((number, name))
    past = SimpleNamespace(tape=tape, owner=owner, judge=_no, judge_again=_no)
    for i, node in enumerate(tape.nodes):
        facts, node.name = traits(node.op), None
        if (not facts.writes or facts.conditional is not None) and not node.optional:
            selector.decide(i, node, *untracked(_described, tape, node))
        for number, name in names.get(i, ()):
            node.name = name
            selector.name(past, i, untracked(without_data, tape.meta_of(number)), name)


def _described(tape: Tape, node: Node) -> tuple[Any, Any, Any]:
    """The arguments and results of an op that has run, metadata in the place of tensors."""
    args, kwargs = mapped(Ref, lambda ref: without_data(tape.meta_of(ref)), (node.args, node.kwargs))
    return args, kwargs, without_data(node.outs)


def _no(*_: Any) -> None:
    """What was kept of ops that have run stays as it is, whatever is said of their names."""
