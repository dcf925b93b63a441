"""Memory that others fill or share, past torch.

A raw kernel is no op: what tells of it is an op that reads what none has filled. What tells of a second
storage around one memory is its address.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from remat.transforms.compat import memory_is_real
from remat.transforms.ops import address, memory_of, octets, traits
from remat.transforms.tape.template import refs_in

# Torch's own ops that do not read what they write into, either, and may leave a part of it as it is.
_FILL_PARTS = frozenset(
    "set_ resize_ resize_as_ index_copy_ index_fill_ index_put_ _index_put_impl_ masked_fill_ "
    "masked_scatter_ put_ scatter_ fill_diagonal_".split()
)

# Dropout under levels of torch.func is drawn for a tensor without numbers.
_DRAWS_OVER = torch.ops.aten.bernoulli.p


class Contents:
    """What lies in a memory of a region's own that others may fill past torch: samplers, NumPy, raw kernels.

    Attributes:
        known: its numbers, as far as ops tell; None where nothing has told of any.
        shown: whether user code has looked at it.
    """

    __slots__ = ("_memory", "known", "shown")

    def __init__(self, memory: torch.UntypedStorage, filled: bool, shown: bool) -> None:
        self._memory, self.shown = weakref.ref(memory), shown
        self.known = memory.clone() if filled else None

    def now(self) -> torch.UntypedStorage | None:
        """The memory, None where its numbers are known, or nobody has it any more."""
        memory = self._memory()
        if memory is None or (self.known is not None and torch.equal(octets(memory), octets(self.known))):
            return None
        return memory

    def written(self) -> bool:
        """An op has written to it; whether others may still fill it unseen."""
        if self.known is not None and (memory := self._memory()) is not None:
            self.known = memory.clone()
        return self.shown


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
    return drawn and all(tape.root_of(number) != empty for number, _ in tape.packed)


def memory_around(known: Iterable[Any], tensor: torch.Tensor) -> tuple[Any, int]:
    """The known memory in which `tensor` lies, and where, though its storage is another.

    DLPack and extensions make storages of their own around memory that they are given.
    """
    memory = memory_of(tensor)
    if memory is None or type(tensor) is not torch.Tensor or not tensor.numel() or not memory_is_real():
        return None, 0
    if (first := address(memory)) is None:
        return None, 0
    first += int(tensor.storage_offset()) * tensor.element_size()
    for entry in known:
        there = entry[0]() if entry[1] >= 0 else None
        if there is None or there.device != memory.device or (start := address(there)) is None:
            continue
        if start <= first < start + there.nbytes():
            return entry, (first - start) // tensor.element_size()
    return None, 0
