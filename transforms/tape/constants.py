"""What of a program depends on nothing from outside, such as rotary tables: made once in a backward pass.

Regions that are alike would each compute it again. The first that runs in a pass computes it, others of the
same ops take it, and it goes when the pass ends. What autograd gets of it are copies, so that nobody outside
of the engine sees that anything is shared. The forward is the user's code, and computes it as it says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from remat.transforms.compat import at_backward_end, graph_task
from remat.transforms.ops import numel, traits
from remat.transforms.placeholders import Meta
from remat.transforms.state import Ambient
from remat.transforms.tape.tape import Ref, Tape, refs_in

# What constants may take until the pass ends, as a share of the largest tensor that the region is given.
_SHARE = 0.25
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Constants:
    """The constants of one program.

    Attributes:
        ops: those that make them, by their numbers on the tape; `steps` has one of each that are alike.
        numbers: of the values that they leave.
        stands: for each number that other steps, or autograd, read: which of `numbers` it is.
        roots: the memories that the values lie in.
    """

    __slots__ = ("devices", "key", "numbers", "ops", "roots", "stands", "steps")

    def __init__(self, tape: Tape, steps: Sequence[Any], read: Collection[int]) -> None:
        self.ops = {step.at for step in steps}
        self.steps: list[Any] = []
        alike: dict[str, int] = {}  # a step in words -> the number of its result
        same: dict[int, int] = {}
        for step in steps:
            node = tape.nodes[step.at]
            call = _told((node.args, node.kwargs), same)
            line = repr((str(node.op), call, tuple(node.outs), node.graded))
            if line not in alike:
                alike[line] = node.first
                self.steps.append(_reading(step, same))
            same[node.first] = alike[line]
        self.numbers = sorted({same[n] for n in read if n in same})
        self.stands = {n: self.numbers.index(same[n]) for n in read if n in same}
        self.roots = {tape.root_of(n) for n in (*self.stands, *self.numbers)}
        self.devices = {tape.meta_of(n)[3] for n in self.numbers}
        # What programs have in common whose constants are the same, whatever numbers they give them.
        place = {n: i for i, n in enumerate(alike.values())}
        order = {n: place[first] for n, first in same.items()}
        words = [_told((tape.nodes[s.at].args, tape.nodes[s.at].kwargs), order) for s in self.steps]
        heads = [(str(n.op), tuple(n.outs), n.graded) for n in (tape.nodes[s.at] for s in self.steps)]
        self.key: Hashable = repr((heads, words, [order[n] for n in self.numbers]))

    def values(self, make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """The values of `numbers`, which `make` makes where nobody has made them in this pass."""
        task = graph_task()
        if task == -1:
            return make()
        if task != _pass.task:
            _pass.task, _pass.made = task, {}
            at_backward_end(_Clearing(_pass.made))
        streams = [torch.accelerator.current_stream(d) for d in self.devices if d.type in _STREAMS]
        key = (self.key, tuple(Ambient(()).switches), tuple(streams))
        if key not in _pass.made:
            _pass.made[key] = make()
        return _pass.made[key]


_STREAMS = ("cuda", "xpu", "mtia")


class _MadeInPass(threading.local):
    task = -1
    made: dict[Hashable, list[torch.Tensor]]


_pass = _MadeInPass()


class _Clearing:
    """Lets go of what a pass has made, when it ends or when the engine, after an exception, forgets it."""

    __slots__ = ("made",)

    def __init__(self, made: dict[Hashable, list[torch.Tensor]]) -> None:
        self.made = made

    def __call__(self) -> None:
        self.made.clear()

    __del__ = __call__


def constants_of(tape: Tape, steps: Sequence[Any], wanted: Collection[int]) -> Constants | None:
    """What of these steps depends on nothing; None where that is nothing, or too much to be held.

    Args:
        wanted: numbers of the values that autograd gets.
    """
    # A copy of an expanded value would be larger than the value.
    copied = {tape.root_of(n) for n in wanted if n >= 0 and _overlaps(tape.meta_of(n))}
    fixed: set[int] = set()
    for step in steps:
        if _is_fixed(tape, step, fixed) and tape.nodes[step.at].root not in copied:
            fixed.add(step.at)
    rest = [step for step in steps if step.at not in fixed]
    # What looks into the memory of a constant must be one.
    if not fixed or any(tape.nodes[step.at].root in fixed for step in rest):
        return None
    read = {n for step in rest for n in refs_in((step.args, step.kwargs))} | set(wanted)
    found = Constants(tape, [step for step in steps if step.at in fixed], read)
    given = [_bytes(outside.meta) for outside in tape.outside]
    held = sum(_bytes(tape.nodes[at].outs) for at in {tape.root_of(n) for n in found.numbers})
    return found if found.numbers and held <= _SHARE * max(given, default=0) else None


def _is_fixed(tape: Tape, step: Any, fixed: set[int]) -> bool:
    node = tape.nodes[step.at]
    facts = traits(node.op)
    if step.call is None or node.external or node.shape_only or node.draws or not isinstance(node.outs, Meta):
        return False
    if facts.writes or facts.may_draw or facts.outside or facts.uninitialized or facts.higher_order:
        return False
    reads = refs_in((node.args, node.kwargs))
    known = all(n >= 0 and tape.makers[n] in fixed for n in reads) and fixed.issuperset(node.deps)
    if not known or not _is_plain((node.args, node.kwargs)):
        return False
    own = node.root == step.at or node.root in fixed
    return own and node.root not in tape.exposed and node.root not in tape.last_write


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return type(value) is Ref or type(value) in _PLAIN


def _reading(step: Any, names: Mapping[int, int]) -> Any:
    """The step itself, now reading the values of these names: of those that are alike one is made."""
    step.flat = [(at, names[n]) for at, n in step.flat]
    step.args, step.kwargs = _renamed(step.args, names), _renamed(step.kwargs, names)
    return step


def _renamed(value: Any, names: Mapping[int, int]) -> Any:
    if type(value) is Ref:
        return Ref(names[value])
    if isinstance(value, (tuple, list)):
        return type(value)([_renamed(v, names) for v in value])
    return {k: _renamed(v, names) for k, v in value.items()} if isinstance(value, dict) else value


def _told(value: Any, names: Mapping[int, int]) -> Any:
    """Arguments of an op in words, values by these names."""
    if type(value) is Ref:
        return f"%{names[value]}"
    if isinstance(value, (tuple, list)):
        return [_told(v, names) for v in value]
    return {k: _told(v, names) for k, v in value.items()} if isinstance(value, dict) else value


def _bytes(meta: Any) -> int:
    return numel(meta) * meta[2].itemsize if isinstance(meta, Meta) else 0


def _overlaps(meta: Any) -> bool:
    return meta[1] is None or any(step == 0 and size > 1 for step, size in zip(meta[1], meta[0], strict=True))
