"""Memory that others fill or share, past torch.

A raw kernel is no op: what tells of it is an op that reads what none has filled. What tells of a second
storage around one memory is its address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from remat.transforms.compat import memory_is_real
from remat.transforms.ops import address, memory_of, traits

# Torch's own ops that do not read what they write into, either, and may leave a part of it as it is.
_FILL_PARTS = frozenset(
    "set_ resize_ resize_as_ index_copy_ index_fill_ index_put_ _index_put_impl_ masked_fill_ "
    "masked_scatter_ put_ scatter_ fill_diagonal_".split()
)

# Dropout under levels of torch.func is drawn for a tensor without numbers.
_DRAWS_OVER = torch.ops.aten.bernoulli.p


def is_read_first(tape: Any, empty: int) -> bool:
    """Whether the first op that touches the memory that op `empty` made reads it.

    So does one in place: `SobolEngine.draw` fills memory past torch, and scales it by `mul_`.
    """
    for node in tape.nodes[empty + 1 :]:
        facts = traits(node.op)
        if empty in node.written:
            if not facts.changes_shape:
                return _reads_target(tape, node, facts, empty)
        elif not (facts.view or facts.only_shape) and any(tape.root_of(n) == empty for n in node.reads()):
            return True
    return False


def _reads_target(tape: Any, node: Any, facts: Any, root: int) -> bool:
    """Whether an op that writes to a memory reads it, too. Others' ops count as if they did not."""
    targets = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else node.args[:1]
    if not facts.native or not any(isinstance(n, int) and tape.root_of(n) == root for n in targets):
        return False
    # `index_put_(..., accumulate=True)` adds.
    fills = facts.fills or facts.name in _FILL_PARTS
    return not fills or any(arg is True for arg in node.args)


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
