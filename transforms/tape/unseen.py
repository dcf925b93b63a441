"""Memory that a raw kernel fills, past torch: what tells of it is an op that reads what none has filled."""

from __future__ import annotations

from typing import Any

from remat.transforms.ops import traits

# Torch's own ops that write into what they are given and do not read it. Some leave a part of it as it is.
_FILLS = frozenset(
    "copy_ fill_ zero_ set_ resize_ resize_as_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ "
    "cauchy_ log_normal_ index_copy_ index_fill_ index_put_ _index_put_impl_ masked_fill_ masked_scatter_ "
    "put_ scatter_ fill_diagonal_ _foreach_copy_ _foreach_zero_ _foreach_fill_".split()
)


def is_read_first(tape: Any, empty: int) -> bool:
    """Whether the first op that touches the memory that op `empty` made reads it.

    So does one in place: `SobolEngine.draw` fills memory past torch, and scales it by `mul_`.
    """
    for node in tape.nodes[empty + 1 :]:
        facts = traits(node.op)
        if empty in node.written:
            if not facts.changes_shape:
                return _reads_target(tape, node, facts, empty)
        elif not facts.view and any(tape.root_of(n) == empty for n in node.reads()):
            return True
    return False


def _reads_target(tape: Any, node: Any, facts: Any, root: int) -> bool:
    """Whether an op that writes to a memory reads it, too. Others' ops count as if they did not."""
    targets = node.args[0] if node.args and isinstance(node.args[0], (list, tuple)) else node.args[:1]
    if not facts.native or not any(isinstance(n, int) and tape.root_of(n) == root for n in targets):
        return False
    # `index_put_(..., accumulate=True)` adds.
    return facts.name not in _FILLS or any(arg is True for arg in node.args)
