"""A policy that is asked from the middle of a forward on: it is shown the ops so far.

A plan is followed op by op, and would refuse the rest of a forward. And what a rank does not keep because its
call alone has left the trace, such as a collective's result, it would wait for in its backward, for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from remat.transforms.context import untracked
from remat.transforms.ops import traits
from remat.transforms.placeholders import without_data
from remat.transforms.tape.tape import Node, Tape
from remat.transforms.tape.template import Ref

Owner = Callable[[Node, torch.Tensor], "int | None"]


def show_so_far(selector: Any, tape: Tape, owner: Owner) -> None:
    """Let a selector see the ops so far with their names: it may count them, or bar looks at a value."""
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

    def show(value: Any) -> Any:
        if isinstance(value, Ref):
            return without_data(tape.meta_of(value))
        if isinstance(value, (list, tuple)):
            return type(value)([show(v) for v in value])
        return value

    return show(node.args), {k: show(v) for k, v in node.kwargs.items()}, without_data(node.outs)


def _no(*_: Any) -> None:
    """What was kept of ops that have run stays as it is, whatever is said of their names."""
