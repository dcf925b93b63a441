"""A forward as it is expected again, and the part of it that its recomputation takes, as a program.

A program runs ops, not the Python function: modules, autograd and hooks stay out of it, so that it costs
little more than its kernels. It holds for a later forward only if that one runs the same ops on the same
values with the same constants, which `eager.guarded.Follow` makes sure of.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat import direct_call
from remat.transforms.ops import instances
from remat.transforms.placeholders import Meta
from remat.transforms.tape.tape import KEPT, RUN, Trace
from remat.transforms.tape.values import Calls, Ref, Unknown

Recompute = Callable[[dict[int, torch.Tensor], Sequence[Any], Callable[[int], Any]], dict[int, torch.Tensor]]


class Program:
    """What a settled trace teaches of later forwards that are the same.

    Args:
        trace: of a forward in which nothing was written, nested or left out.
        calls: how its ops were called; the tensors from outside are arguments and those in `Bindings.near`.
        arguments: how many of them are arguments.
        direct: which of the values that autograd saved stay as they are.

    Raises:
        Unknown: it cannot be written down.

    Attributes:
        ops, made: the ops in order, and for each its arguments and keyword arguments, with a `Ref` in the
            place of every tensor.
        keeps: positions of the ops whose results are kept.
        packed, direct: the number of each value that autograd saves, and the positions of those that stay as
            they are.
        reads: which arguments the recomputation reads.
        draws: whether it draws random numbers.
        source: what it does, as Python.
    """

    __slots__ = (
        "_function",
        "_label",
        "_names",
        "direct",
        "draws",
        "keeps",
        "made",
        "ops",
        "packed",
        "reads",
        "source",
    )

    def __init__(self, trace: Trace, calls: Calls, arguments: int, direct: frozenset[int]) -> None:
        wanted = {at: number for at, number in enumerate(calls.packed) if at not in direct}
        if not calls.complete or None in wanted.values():
            raise Unknown
        self.ops = [node.op for node in trace.nodes]
        self.made, self.packed, self.direct = calls.made, calls.packed, direct
        self.keeps = frozenset(at for at, node in enumerate(trace.nodes) if node.action == KEPT)
        self.draws = any(node.draws and node.action == RUN for node in trace.nodes)
        writer = _Writer(trace, calls, arguments)
        self.source = writer.source(wanted)
        self.reads, self._names = writer.reads, writer.names
        self._label = f"<recomputation of region {trace.region!r}>"
        self._function: Recompute | None = None

    def recompute(
        self, arguments: dict[int, torch.Tensor], near: Sequence[Any], take: Callable[[int], Any]
    ) -> dict[int, torch.Tensor]:
        """The values that autograd saved and that do not stay, by their positions.

        Args:
            arguments: those that it reads.
            near: as in `Bindings.near`.
            take: gives what was kept of the op at a position.
        """
        if self._function is None:
            self._function = self._compiled()
        return self._function(arguments, near, take)

    def _compiled(self) -> Recompute:
        exec(compile(self.source, self._label, "exec"), self._names)
        return self._names["recompute"]


class _Writer:
    """Writes the Python source of a recomputation; `names` are the globals it refers to."""

    def __init__(self, trace: Trace, calls: Calls, arguments: int) -> None:
        self.nodes, self.calls, self.count = trace.nodes, calls, arguments
        self.names: dict[str, Any] = {}
        self.reads: list[int] = []
        self._known: dict[int, str] = {}

    def source(self, wanted: dict[int, Any]) -> str:
        lines = "".join([f"    {line}\n" for line in self._lines(wanted)])
        return f"def recompute(arguments, near, take):\n{lines}"

    def _lines(self, wanted: dict[int, int]) -> Iterator[str]:
        steps = [at for at, node in enumerate(self.nodes) if node.action in (RUN, KEPT)]
        last: dict[int, int] = {}  # the last step that reads a value
        for at in steps:
            last.update((number, at) for number in self._read(at))
        needed = set(wanted.values())
        yield from self._outside({number for number in (*last, *needed) if number < 0})
        bounds = [*self.calls.first, self.calls.values.count]
        for at in steps:
            node, outs = self.nodes[at], range(bounds[at], bounds[at + 1])
            call = f"take({at})" if node.action == KEPT else self._call(node.op, *self.calls.made[at])
            yield f"{_targets(node.outs, outs)}{call}"
            # What nobody reads any more goes at once.
            gone = {n for n in self._read(at) if last[n] == at} | {n for n in outs if n not in last}
            if gone := gone - needed:
                yield f"del {', '.join(map(_name, sorted(gone)))}"
        yield f"return {{{', '.join(f'{at}: {_name(number)}' for at, number in wanted.items())}}}"

    def _read(self, at: int) -> set[int]:
        return set(instances(Ref, self.calls.made[at])) if self.nodes[at].action == RUN else set()

    def _outside(self, numbers: set[int]) -> Iterator[str]:
        for number in sorted(numbers, reverse=True):
            at = -1 - number
            if at < self.count:
                self.reads.append(at)
            where = f"arguments[{at}]" if at < self.count else f"near[{at - self.count}]"
            yield f"{_name(number)} = {where}"

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if any(keyword.iskeyword(key) for key in kwargs):
            raise Unknown
        given = [self._text(value) for value in args]
        given += [f"{key}={self._text(value)}" for key, value in kwargs.items()]
        return f"{self._constant(direct_call(op), 'op')}({', '.join(given)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Ref):
            return _name(value)
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is list:
            return f"[{', '.join(map(self._text, value))}]"
        if any(True for _ in instances(Ref, value)):
            raise Unknown
        return self._constant(value, "constant")

    def _constant(self, value: Any, kind: str) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"{kind}{len(self.names)}"
            self.names[name] = value
        return name


def _targets(outs: Any, numbers: range) -> str:
    """What an op's results are assigned to."""
    return f"{_pattern(outs, iter(numbers))} = " if numbers else ""


def _pattern(outs: Any, numbers: Iterator[int]) -> str:
    if isinstance(outs, Meta):
        return _name(next(numbers))
    if isinstance(outs, (tuple, list)):
        return f"[{', '.join([_pattern(value, numbers) for value in outs])}]"
    return "_"


def _name(number: int) -> str:
    return f"v{number}" if number >= 0 else f"t{-1 - number}"
