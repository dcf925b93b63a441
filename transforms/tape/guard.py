"""Holding a forward against the tape of an earlier one, op by op.

Each op is compared before it runs: the op, its operands by their numbers, its constants. While they are
those of the tape, what that teaches holds; a forward that leaves the tape is recorded from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import DispatchMode, direct_call
from remat.transforms.context import active, quiet
from remat.transforms.offload import send
from remat.transforms.ops import Decisions, is_shape_arithmetic, memory_of, storage, tensors_in, traits
from remat.transforms.placeholders import without_data
from remat.transforms.pytree import constants_alike
from remat.transforms.state import GeneratorState
from remat.transforms.tape.recorder import Recorder
from remat.transforms.tape.tape import (
    OFFLOAD,
    RECOMPUTE,
    Node,
    Outside,
    Ref,
    Tape,
    ValueNumbering,
    map_tensors,
    refs_in,
)

_weak = weakref.ref


class GuardMode(Recorder):
    """Expects the ops of `expected`, and keeps what was kept of them; records from the first other one on.

    Args:
        expected: the tape of an earlier forward.
        expected_kept: the ops whose results are kept.
        selector, inputs, casts, decisions: as for `Recorder`, once the forward has left the tape.

    Attributes:
        expected: None from then on.
        at, packs, named: how many ops have run, values were saved, and values were named.
    """

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
        self.keeps_decisions, self.decisions, self.leaving = decisions, None, leaving
        self.at = self.packs = self.named = 0
        self.outside, self.kept, self.random, self.snapshots = list(inputs), {}, {}, {}
        self.shown, self.outer, self.alive, self._memory, self._kept_in = {}, {}, {}, {}, {}
        self.selector, self.digest, self.kept_bytes, self.moved = None, None, 0, set()
        self._numbers = ValueNumbering()
        numbers = self._numbers
        for at, tensor in enumerate(inputs):
            numbers.setdefault(id(tensor), (weakref.ref(tensor), -1 - at))

    @property
    def position(self) -> int:
        return len(self.tape.nodes) if self.expected is None else self.at

    @property
    def followed(self) -> bool:
        """Whether the forward, now over, was the one on the tape."""
        expected = self.expected
        return (
            expected is not None
            and self.at == len(expected.nodes)
            and self.packs == len(expected.packed)
            and self.named == len(expected.names)
            and self.kept.keys() >= self.expected_kept
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if active.quiet:
            return func(*args, **kwargs) if kwargs else func(*args)
        if types and self.takes_apart(types, args):
            return NotImplemented
        expected = self.expected
        if expected is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        at = self.at
        if at < len(expected.nodes):
            node = expected.nodes[at]
            if node.op is func:
                check = node.check or _prepared(node)
                if (
                    self._is_just(check, args)
                    if check.flat and not kwargs
                    else self._matches(node, args, kwargs)
                ):
                    return self._follow(at, node, check, args, kwargs)
        facts = traits(func)
        if facts.ignored or (not expected.meta and is_shape_arithmetic(args, kwargs)):
            return self._pass(func, facts, args, kwargs or {})
        self.leave()
        return self._record(func, facts, args, kwargs or {})

    # -- comparing -------------------------------------------------------------------------------------------

    def _is_just(self, check: Check, args: Any) -> bool:
        """Whether an op without tensors in lists is called as on the tape: the usual case, in a hurry."""
        if len(args) != check.count:
            return False
        table, bound = self._numbers, len(self.outside)
        for i, want in check.refs:
            value = args[i]
            found = table.get(id(value))
            if found is None or found[0]() is not value:
                if want < 0 and isinstance(value, torch.Tensor) and self._binds(-1 - want, value):
                    continue
                return self._unbind(bound)
            if found[1] != want:
                return self._unbind(bound)
        for i, want, plain in check.constants:
            value = args[i]
            if value is not want and not (
                (type(value) is type(want) and value == want) if plain else constants_alike(want, value)
            ):
                return self._unbind(bound)
        return True

    def _matches(self, node: Node, args: Any, kwargs: Any) -> bool:
        """Whether an op is called as on the tape; binds what it reads from outside for the first time."""
        bound = len(self.outside)
        if len(args) == len(node.args) and (not kwargs) == (not node.kwargs):
            alike = all(map(self._alike, node.args, args))
            if alike and (not kwargs or self._alike(node.kwargs, kwargs)):
                return True
        return self._unbind(bound)

    def _unbind(self, bound: int) -> bool:
        """Forget the tensors from outside that a call has bound which is another one after all."""
        for tensor in self.outside[bound:]:
            self._numbers.pop(id(tensor), None)
        del self.outside[bound:]
        return False

    def _alike(self, want: Any, value: Any) -> bool:
        kind = type(want)
        if kind is Ref:
            if not isinstance(value, torch.Tensor):
                return False
            found = self._numbers.get(id(value))
            if found is not None and found[0]() is value:
                return found[1] == want
            return self._binds(-1 - want, value)
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
        shape, _, dtype, device = known.meta
        if dtype is not tensor.dtype or shape != tensor.shape or device != tensor.device:
            return False
        if self.expected.last_write:
            # What is written to must share its memory with what it shared it with.
            key = storage(tensor)
            first = next((i for i, other in enumerate(self.outside) if storage(other) == key), at)
            if -1 - first != known.root:
                return False
        self._numbers[id(tensor)] = weakref.ref(tensor), -1 - at
        self.outside.append(tensor)
        return True

    def bound(self, tensor: torch.Tensor) -> int | None:
        number = self._numbers.of(tensor)
        if number is None and self.expected is not None:
            at = len(self.outside)
            return -1 - at if self._binds(at, tensor) else None
        return number

    # -- following -------------------------------------------------------------------------------------------

    def _follow(self, at: int, node: Node, check: Check, args: Any, kwargs: Any) -> Any:
        """Run an op that is the one on the tape."""
        if check.watched:
            self._before(at, node, args, kwargs or {})
        around = -1 if self.parent is None else self.parent.position
        out = check.call(*args, **kwargs) if kwargs else check.call(*args)
        if around >= 0:
            self._link(self.parent, at, around)
        self.at = at + 1
        number, table = node.first, self._numbers
        if isinstance(out, torch.Tensor):
            table[id(out)] = _weak(out), number
        else:
            for tensor in tensors_in(out):
                table[id(tensor)] = _weak(tensor), number
                number += 1
        if at in self.held:
            self.kept[at] = self._hold_again(node, out)
        return out

    def _hold_again(self, node: Node, out: Any) -> Any:
        """What is kept of an op's results, as it was kept before."""
        assert self.expected is not None
        if node.verdict != OFFLOAD:
            return quiet(map_tensors, torch.Tensor.detach, out)
        # A look at what was sent lies in the copy, unless the memory is written to at some time.
        whole = node.root < 0 or node.root in self.expected.last_write
        root = None if whole else self.kept.get(node.root)
        return quiet(map_tensors, lambda tensor: send(tensor, root), out)

    def _before(self, at: int, node: Node, args: Any, kwargs: Any) -> None:
        if node.draws:
            self.random[at] = quiet(GeneratorState, args, kwargs)
        for root in node.written:
            if root < 0 and root not in self.snapshots:
                self._snapshot(root)
        if node.overwrites:
            self._copy_kept(node.overwrites)

    def expects(self, tensor: torch.Tensor) -> bool:
        """Autograd saves `tensor`: whether the forward is still the one on the tape, and saved this too."""
        expected, at = self.expected, self.packs
        if expected is None or at >= len(expected.packed):
            return False
        number, position = expected.packed[at]
        if position != self.at:
            return False
        found = self._numbers.get(id(tensor))
        if found is None or found[0]() is not tensor:
            if not self._binds(-1 - number, tensor):
                return False
        elif found[1] != number:
            return False
        self.packs = at + 1
        return True

    def pack(self, tensor: torch.Tensor, owner: int | None) -> int:
        if self.expects(tensor):
            assert self.expected is not None
            return self.expected.packed[self.packs - 1][0]
        self.leave()
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
            self.leave()
        super().name(tensor, name)

    def offer(self, at: int, value: Any, op: Any) -> None:
        expected = self.expected
        if expected is not None:
            node = expected.nodes[at] if at < len(expected.nodes) else None
            if node is not None and node.op is op and node.verdict != RECOMPUTE:
                if at in self.expected_kept:
                    self.kept[at] = value  # which a write since then has copied
                return
            self.leave()
        super().offer(at, value, op)

    def expose(self, tensor: torch.Tensor, moved: bool = False) -> None:
        self.leave()
        super().expose(tensor, moved)

    def bind(self, tensor: torch.Tensor, number: int) -> None:
        self.leave()
        super().bind(tensor, number)

    # -- leaving ---------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Go on recording: the forward is not the one on the tape."""
        expected, count = self.expected, self.at
        if expected is None:
            return
        self.expected = None
        quiet(self.leaving)
        tape = expected.prefix(count, self.packs, self.named)
        tape.outside = [Outside(known.meta, known.root) for known in expected.outside[: len(self.outside)]]
        for i, node in enumerate(tape.nodes):
            node.verdict = node.verdict if i in self.kept else RECOMPUTE
            if i in self.kept:
                self._kept_in.setdefault(node.root, []).append(i)
        self.tape = tape
        for tensor, number in self._numbers.living():
            if (memory := memory_of(tensor)) is not None:
                self._remember(memory, tape.root_of(number), number, tensor)
        if self.keeps_decisions:
            self.decisions = Decisions(tape)
        if self.make_selector is not None:
            self.selector = self.make_selector()
            self._show(self.selector)
            # What the old tape had no use for was not kept, and calls were not watched: the next forward is
            # recorded from its start.
            self.tape.cacheable = False

    def _show(self, selector: Any) -> None:
        """Let a selector see the ops so far with their names: it may count them, or bar looks at a value."""
        tape, names = self.tape, dict[int, list[tuple[int, str]]]()
        for number, name in tape.names:
            names.setdefault(tape.makers[number], []).append((number, name))
        past = _Past(tape, self.owner)
        for i, node in enumerate(tape.nodes):
            facts, node.name = traits(node.op), None
            if (not facts.writes or facts.conditional is not None) and not node.optional:
                selector.decide(i, node, *quiet(self._described, node))
            for number, name in names.get(i, ()):
                node.name = name
                selector.name(past, i, quiet(without_data, tape.meta_of(number)), name)

    def _described(self, node: Node) -> tuple[Any, Any, Any]:
        """The arguments and results of an op that has run, metadata in the place of tensors."""
        tape = self.tape

        def show(value: Any) -> Any:
            if isinstance(value, Ref):
                return without_data(tape.meta_of(value))
            if isinstance(value, (list, tuple)):
                return type(value)([show(v) for v in value])
            return value

        return show(node.args), {k: show(v) for k, v in node.kwargs.items()}, without_data(node.outs)


@dataclass(frozen=True)
class _Past:
    """The recorder to a selector that is told of names given before: what was kept stays as it is."""

    tape: Tape
    owner: Callable[[Node, torch.Tensor], int | None]

    def judge(self, at: int, verdict: int, value: torch.Tensor) -> None: ...

    def judge_again(self, at: int, verdict: int, value: torch.Tensor) -> None: ...


class Check(NamedTuple):
    """What a later call of an op is compared by.

    Attributes:
        flat: whether positions tell all: no keywords, and no tensors in lists.
        count: of arguments.
        refs: positions of tensors, and their numbers.
        constants: positions and values of the others, and whether == is all that there is to compare.
        watched: whether something has to be noted before the op runs.
        call: what runs it.
    """

    flat: bool
    count: int
    refs: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, Any, bool], ...]
    watched: bool
    call: Callable[..., Any]


def _prepared(node: Node) -> Check:
    refs = tuple([(i, int(arg)) for i, arg in enumerate(node.args) if type(arg) is Ref])
    others = tuple([(i, arg, _is_plain(arg)) for i, arg in enumerate(node.args) if type(arg) is not Ref])
    flat = not node.kwargs and not any(refs_in(arg) for _, arg, _ in others)
    watched = bool(node.written) or node.draws
    node.check = Check(flat, len(node.args), refs, others, watched, direct_call(node.op))
    return node.check


def _is_plain(value: Any) -> bool:
    """Whether == is all that there is to compare: not for floats."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return not isinstance(value, (float, complex))
