"""The tape of a region's forward: its ops, numbered once. `RecomputeSteps` says which of them a backward
needs for the values that it reads, and `Reachability` for the results that it starts from.

A tape is pure structure. It names values by number, and holds neither tensors nor user code, so that it may
outlive the call that wrote it. `recorder.Recorder` writes a tape, or holds a later forward against one;
`program.Program` runs a part of it again; `replay.Replay` follows it where the user's function runs again.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from remat.transforms.context import untracked
from remat.transforms.offload import Elsewhere, away_in
from remat.transforms.ops import (
    ByTensor,
    Traits,
    is_inexact,
    memory_of,
    metas,
    numel,
    place,
    relaid,
    storage,
    tensors_in,
    traits,
    version_of,
)
from remat.transforms.placeholders import Meta, mapped
from remat.transforms.pytree import constants_alike

# Bytes of what is from outside, or filled past torch, that a region may hold without being told to.
SMALL = 1 << 20
RECOMPUTE, OFFLOAD, SAVE = 0, 1, 2
RUN, KEPT, SKIP = 0, 1, 2


class Stop(BaseException):
    """Ends a recomputation once everything that was asked for is there."""


# -- templates of calls: the arguments of an op with numbers in the place of tensors ------------------------


class Ref(int):
    """Stands for the value of this number in the template of a call: 0, 1, ... are results of ops, in their
    order; -1, -2, ... come from outside."""

    __slots__ = ()


def same_constants(want: Any, value: Any) -> bool:
    """Whether the arguments of a call are those of the forward, tensors aside."""
    if type(want) is Ref or isinstance(value, torch.Tensor):
        return type(want) is Ref and isinstance(value, torch.Tensor)
    if isinstance(want, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(want) == len(value) and all(map(same_constants, want, value))
    if isinstance(want, dict):
        return want.keys() == value.keys() and all(same_constants(want[k], value[k]) for k in want)
    return type(want) is not type(value) or constants_alike(want, value)


def refs_in(template: Any) -> list[int]:
    """The numbers in a template, in their order."""
    found: list[int] = []
    stack = [template]
    while stack:
        value = stack.pop()
        if type(value) is Ref:
            found.append(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            stack.extend(reversed(value.values()))
    return found


def pairs(want: Any, value: Any) -> Iterator[tuple[int, Any]]:
    """The numbers in a template, each with the tensor in its place."""
    if type(want) is Ref:
        yield want, value
    elif isinstance(want, (tuple, list)):
        # (Nobody has compared their lengths under determinism_check="none".)
        for one, other in zip(want, value, strict=False):
            yield from pairs(one, other)
    elif isinstance(want, dict):
        for key in want.keys() & value.keys():
            yield from pairs(want[key], value[key])


# -- ops and tapes -------------------------------------------------------------------------------------------


@dataclass(init=False, eq=False, repr=False, slots=True)
class Node:
    """One op of a region: how it was called, where its operands came from, what its results were."""

    op: Any
    args: tuple[Any, ...]  # with a `Ref` in the place of every tensor
    kwargs: dict[str, Any]
    first: int  # the number of its first result
    deps: list[int]  # ops whose values, or whose writes, this op reads
    external: tuple[int, ...]  # the tensors from outside that it reads, by their positions in `Tape.outside`
    outs: Any  # results as placeholders can be made of them: metadata, or plain values
    root: int  # the memory its results lie in: the op that made it, or -1, -2, ... for one from outside
    written: tuple[int, ...]  # the memories that it writes to
    overwrites: tuple[int, ...]  # ops whose kept results lie in those, and are copied before
    graded: bool  # whether gradients were on
    shape_only: bool  # whether it makes a tensor like its first operand, whose numbers it does not read
    default: torch.dtype | None  # the default dtype, where its results have their dtype from that
    draws: bool  # whether it advances a random number generator
    optional: bool  # whether a recomputation by user code may lack it, or have it where the forward had not
    verdict: int  # RECOMPUTE, OFFLOAD or SAVE
    name: str | None  # its checkpoint_name
    place: str | None  # the user's line, where somebody wants to know, or may want to
    digest: Any  # checksum of its results, for bitwise comparison

    def makes(self) -> range:
        """The numbers of its results."""
        return range(self.first, self.first + len(metas(self.outs)))

    def reads(self) -> list[int]:
        """The numbers of the values that it reads."""
        # Of an op that makes a tensor like its first operand, that operand's numbers do not matter.
        return refs_in((self.args[1:], self.kwargs) if self.shape_only else (self.args, self.kwargs))


class Outside:
    """A tensor from outside the region, as its tape knows it."""

    __slots__ = ("meta", "root")

    def __init__(self, meta: Any, root: int) -> None:
        self.meta = meta  # its metadata
        self.root = root  # -1 - the position of the first tensor from outside in the same memory


class Tape:
    """The ops of one run of a region.

    Attributes:
        nodes: the ops, in order.
        makers: the op that made each value, by the value's number.
        outside: the tensors from outside in the order in which they were met, arguments first.
        arguments: how many of them are arguments.
        saved_values: for each value that autograd saved its number, and how many ops had run by then.
        owners: for each of those the autograd node it was saved for, counted from the region's first; None
            where that is not certain.
        names: (value, name) for every `checkpoint_name`, in order.
        inner: the ops of regions inside this one.
        last_write: the last op that wrote to a memory.
        raw_accessed: memories made inside that user code has looked at itself: what lies there is unknown.
        rerun_reason: why the ops do not tell all that was computed, None where they do.
        told: how many ops had run when they first did not tell all, None as long as they do.
        loose: forward-mode derivatives inside: torch leaves out tangents known to be zero, by rules that
            differ between the passes. Where user code runs again, its ops cannot be compared.
        scanned: a scan runs inside.
        sharded: parameters are gathered inside, without gradients, and not in both passes (FSDP2's hooks see
            to it that they are there). Where user code runs again, what runs without gradients is left out.
        groups: names of the groups of collectives inside that are no functional ops.
        bookkeeping: ops by which modules gather parameters: no policy is asked about them.
        decided: ops that are kept as decisions, whatever the policy says.
        lent: ops whose kept results regions inside rely on.
        writes_arguments: whether it writes to an argument: which of them share memory is then a part of it.
        offered: ops whose results regions inside keep, and for that reason this one.
        sized_by_data: whether another call may have values of other shapes, its arguments being alike.
        meta: whether the region itself computes on the meta device.
        tangents: whether forward mode was on around the region.
    """

    def __init__(self, region: str) -> None:
        self.region, self.tangents = region, False
        self.nodes: list[Node] = []
        self.makers: list[int] = []
        self.outside: list[Outside] = []
        self.arguments = 0
        self.saved_values: list[tuple[int, int]] = []
        self.owners: list[int | None] = []
        self.names: list[tuple[int, str]] = []
        self.inner: list[tuple[int, int]] = []
        self.last_write: dict[int, int] = {}
        self.raw_accessed: set[int] = set()
        self.decided: set[int] = set()
        self.lent: set[int] = set()
        self.offered: set[int] = set()
        self.groups: set[str] = set()
        self.bookkeeping: set[int] = set()
        self.rerun_reason: str | None = None
        self.told: int | None = None
        self.loose = self.scanned = self.sharded = self.meta = self.sized_by_data = False
        self.writes_arguments = False
        self.cacheable = True  # whether another forward may be held against it
        self.checks: Any = None  # what that one's ops are compared by, once one was

    def run_again_whole(self, reason: str) -> None:
        """From now on the ops do not tell all that is computed: the function is to run again."""
        self.rerun_reason = self.rerun_reason or reason
        self.told = len(self.nodes) if self.told is None else self.told

    def show(self, root: int) -> None:
        """From now on what lies in this memory is unknown."""
        self.raw_accessed.add(root)
        self.told = len(self.nodes) if self.told is None else self.told

    def root_of(self, number: int) -> int:
        """The memory that a value lies in."""
        return self.nodes[self.makers[number]].root if number >= 0 else self.outside[-1 - number].root

    def meta_of(self, number: int) -> Any:
        """The metadata of a value."""
        if number < 0:
            return self.outside[-1 - number].meta
        node = self.nodes[self.makers[number]]
        return metas(node.outs)[number - node.first]

    def say(self, at: int) -> str:
        """An op, for messages."""
        node = self.nodes[at]
        return f"op {at}, {node.op}" if node.place is None else f"op {at}, {node.op} at {node.place},"

    def sources(self, number: int, position: int) -> list[int]:
        """The ops whose results a value is, as it was when so many ops had run."""
        found = [self.makers[number]] if number >= 0 else []
        write = self.last_write.get(self.root_of(number))
        if write is not None and write >= position:
            root = self.root_of(number)
            write = next((i for i in reversed(range(position)) if root in self.nodes[i].written), None)
        if write is not None and (not found or write > found[0]):
            found.append(write)
        return found

    def sources_of(self, saved: Iterable[int]) -> set[int]:
        """The ops whose results these saved values are; none of those that are simply there."""
        return {at for i in saved for at in self.sources(*self.saved_values[i])}

    def is_outside(self, number: int, position: int) -> bool:
        """Whether a saved value is simply there: from outside, and not written to by the region."""
        return number < 0 and self.outside[-1 - number].root not in self.last_write

    def direct(self) -> dict[int, int]:
        """The saved values that are simply there: for each the position of the tensor from outside."""
        pairs = enumerate(self.saved_values)
        return {i: -1 - number for i, (number, at) in pairs if self.is_outside(number, at)}

    def shares_alike(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether arguments share memory among themselves as those of this run did."""
        first: dict[int, int] = {}
        roots = [first.setdefault(place(tensor), -1 - at) for at, tensor in enumerate(arguments)]
        return roots == [known.root for known in self.outside[: self.arguments]]

    def prefix(self, count: int, packed: int, names: int) -> Tape:
        """A tape of its own with the first ops of this one, to be written on."""
        made = copy.copy(self)
        made.nodes = [copy.copy(node) for node in self.nodes[:count]]
        last = self.nodes[count].first if count < len(self.nodes) else len(self.makers)
        made.makers, made.lent, made.offered = self.makers[:last], set(self.lent), set(self.offered)
        made.outside, made.checks = [], None
        made.saved_values, made.owners = self.saved_values[:packed], self.owners[:packed]
        made.names, made.inner = self.names[:names], [pair for pair in self.inner if pair[1] <= count]
        made.raw_accessed, made.decided = set(self.raw_accessed), {i for i in self.decided if i < count}
        made.last_write = {root: i for i, node in enumerate(made.nodes) for root in node.written}
        return made

    def relay(self, tensor: torch.Tensor, number: int) -> None:
        """Note how a value of an op lies in this forward: `tensor` is that value."""
        if number < 0 or (now := relaid(was := self.meta_of(number), tensor)) == was:
            return
        node = self.nodes[self.makers[number]]
        numbers = iter(node.makes())
        node.outs = mapped(Meta, lambda meta: now if next(numbers) == number else meta, node.outs)

    def passes(self, node: Node) -> bool:
        """Whether an op is left out of the sequence where user code runs again (see `sharded`)."""
        return self.sharded and not node.graded


def is_graded(tape: Tape, node: Node, facts: Traits, args: Any) -> bool:
    """Whether an op that runs now does so with gradients on."""
    # A look at what was made without gradients belongs to it.
    return torch.is_grad_enabled() and not (
        facts.view
        and bool(node.deps)
        and not any([tape.nodes[i].graded for i in node.deps])
        and not any([t.requires_grad for t in tensors_in(args)])
    )


def default_of(node: Node, args: Any, kwargs: Any) -> torch.dtype | None:
    """The default dtype, where the results of an op that ran now may have theirs from it.

    User code may turn it inside of a region. (No op with an operand of floating point asks for it.)
    """
    asks = type(node.outs) is Meta and is_inexact(node.outs[2]) and kwargs.get("dtype") is None
    given = asks and any(is_inexact(t.dtype) for t in tensors_in((args, kwargs)))
    return torch.get_default_dtype() if asks and not given else None


class RecomputeSteps:
    """Which ops of a tape run again, given the ops whose values the backward reads.

    Attributes:
        actions: RUN, KEPT or SKIP for every op.
        copied: ops whose kept results the recomputation overwrites, so that it needs copies.
        outside: positions of the tensors from outside that it reads.
        must_rerun: whether user code must run, as a whole.

    `so_far`: of a function that still runs, so that only ops before `Tape.told` can be told again.
    """

    __slots__ = ("actions", "copied", "live", "outside", "must_rerun")

    def __init__(
        self, tape: Tape, wanted: Iterable[int], kept: Mapping[int, Any], so_far: bool = False
    ) -> None:
        nodes = tape.nodes
        self.live = live = _reach(tape, wanted, kept)
        unseen = any(live.values()) and _fills_unseen(tape, live)
        # A raw kernel may have written to memory that user code has looked at.
        raw_accessed = bool(tape.raw_accessed) and any(nodes[i].root in tape.raw_accessed for i in live)
        untold = tape.rerun_reason is not None or raw_accessed
        if so_far and tape.told is not None:
            untold = max(live, default=-1) >= tape.told
        self.must_rerun = untold or unseen
        if self.must_rerun:
            self.live = live = {i: not _handed_out(tape, i, kept) for i in range(len(nodes))}
        written = {root for i, runs in live.items() if runs for root in nodes[i].written}
        self.actions = [SKIP] * len(nodes)
        self.copied: set[int] = set()
        outside: set[int] = set()
        for i, runs in live.items():
            self.actions[i] = RUN if runs else KEPT
            if runs:
                outside.update(nodes[i].external)
            elif nodes[i].root in written:
                self.copied.add(i)
        self.outside = frozenset(outside)


def _handed_out(tape: Tape, i: int, kept: Mapping[int, Any]) -> bool:
    """Whether the kept result of an op stands for the op."""
    node = tape.nodes[i]
    # A view that is handed out would no longer alias what is written through others. Nor is one of a tensor
    # from outside told of later writes to it, if it is no copy on the host.
    return (
        i in kept
        and (node.root >= 0 or any(True for _ in away_in(kept[i])))
        and node.root not in tape.raw_accessed
        and (node.root == i or tape.last_write.get(node.root, -1) <= i)
    )


def _reach(tape: Tape, wanted: Iterable[int], kept: Mapping[int, Any]) -> dict[int, bool]:
    """The ops that the values of those in `wanted` depend on, up to kept ones: True runs, False is kept."""
    live: dict[int, bool] = {}
    stack = list(wanted)
    while stack:
        i = stack.pop()
        if i in live:
            continue
        live[i] = runs = not _handed_out(tape, i, kept)
        if runs:
            stack.extend(tape.nodes[i].deps)
    return live


def _fills_unseen(tape: Tape, live: Iterable[int]) -> bool:
    """Whether a needed value came about unseen: a raw kernel, such as Triton's, fills what `empty` made."""
    made = [i for i in live if traits(tape.nodes[i].op).uninitialized and numel(tape.nodes[i].outs)]
    unwritten = (i for i in made if i not in tape.last_write or is_read_first(tape, i))
    return any(not is_drawn_over(tape, i) for i in unwritten)


# A raw kernel is no op: what tells of it is an op that reads what none has filled.
# Torch's own ops that do not read what they write into, either, and may leave a part of it as it is.
_FILL_PARTS = frozenset(
    "set_ resize_ resize_as_ index_copy_ index_fill_ index_put_ _index_put_impl_ masked_fill_ "
    "masked_scatter_ put_ scatter_ fill_diagonal_".split()
)

# Dropout under levels of torch.func is drawn for a tensor without numbers.
_DRAWS_OVER = torch.ops.aten.bernoulli.p


def is_read_first(tape: Any, empty: int) -> bool:
    """Whether the first op that touches the memory that op `empty` made reads it."""
    for node in tape.nodes[empty + 1 :]:
        if reads(tape, node.op, node.args, node.kwargs, empty):
            return True
        if empty in node.written and not traits(node.op).changes_shape:
            return False
    return False


def reads(tape: Any, op: Any, args: Any, kwargs: Any, root: int, left: bool = False) -> bool:
    """Whether a call reads numbers in the memory `root`; `args` and `kwargs` are its template; `left`: or may
    leave some as they are (it fills a part).

    So do ops in place: `SobolEngine.draw` fills memory past torch, and scales it by `mul_`. Others' ops count
    as if they did not read what they write.
    """
    facts = traits(op)
    if facts.view or facts.only_shape:
        return False
    # `index_put_(..., accumulate=True)` adds.
    fills = facts.fills or facts.name in _FILL_PARTS
    fills = not facts.native or (fills and not any(arg is True for arg in args))
    unread = {at for at in facts.writes if not left and (fills or isinstance(at, str))}
    given = [arg for at, arg in enumerate(args) if at not in unread and not (facts.shape_only and at == 0)]
    given += [arg for name, arg in kwargs.items() if name not in unread]
    return any(tape.root_of(number) == root for number in refs_in(given))


def is_drawn_over(tape: Any, empty: int) -> bool:
    """Whether all that is read of what op `empty` made is its shape, for a draw."""
    drawn = False
    for node in tape.nodes[empty + 1 :]:
        facts = traits(node.op)
        if not (facts.view or facts.only_shape) and any(tape.root_of(n) == empty for n in node.reads()):
            if node.op is not _DRAWS_OVER:
                return False
            drawn = True
    return drawn and all(tape.root_of(number) != empty for number, _ in tape.saved_values)


def nodes_behind(roots: list[Any], start: int, ends: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes behind `roots`, those included, with numbers from `start` on, up to `ends`."""
    seen: set[Any] = {None, *ends}
    while roots:
        node = roots.pop()
        # Nodes that accumulate into leaves have the largest number there is.
        if node in seen or node._sequence_nr() < start:
            continue
        seen.add(node)
        yield node
        roots.extend([following for following, _ in node.next_functions])


class ValueNumbering(ByTensor[int]):
    """Numbers of tensor objects."""


class Given(NamedTuple):
    """A tensor from outside, held by whoever else holds it."""

    ref: weakref.ref[torch.Tensor]
    memory: weakref.ref[Any]  # which may outlive the tensor
    version: int
    storage: int
    snapshot: Any  # what its memory was before the region wrote to it, or None
    alias: torch.Tensor | None  # of what is small: numbers to compare, should the tensor be gone

    def there(self) -> torch.Tensor | None:
        """The tensor, or what has its numbers."""
        tensor = self.ref()
        return self.alias if tensor is None else tensor


def let_go(recorder: Any) -> list[Given]:
    """The tensors from outside; afterwards nobody holds them for it, but small ones without derivatives.

    Those may be what Python made of its own random numbers: another run may make others."""
    given, tape = list[Given](), recorder.tape
    # (A tape that was followed may know more of them, which no op has read: something was detached.)
    for at, (t, known) in enumerate(zip(recorder.outside, tape.outside, strict=False)):
        memory, before = memory_of(t), recorder.snapshots.get(known.root)
        small = type(t) is torch.Tensor and memory is not None and 0 < t.nbytes <= SMALL
        alias = untracked(t.detach) if small and at >= tape.arguments and not t.requires_grad else None
        there = weakref.ref(memory or t)
        given.append(Given(weakref.ref(t), there, version_of(t), storage(t), before, alias))
    recorder.outside = []
    return given


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """`value`, the result of an op or what is kept of it, with `function` applied to its tensors."""
    return mapped((torch.Tensor, Elsewhere), function, value)
