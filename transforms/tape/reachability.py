"""Which results of a forward a backward starts from, and which autograd nodes that leaves idle."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import dual_level_open, engine_runs, memory_is_real, running_node
from remat.transforms.context import node_of
from remat.transforms.ops import traits, updates
from remat.transforms.placeholders import Meta
from remat.transforms.tape.tape import Tape, nodes_behind


class Ends(NamedTuple):
    """The nodes that made the results of a forward, -1 for those of others, and the nodes behind each."""

    numbers: tuple[int, ...]
    behind: tuple[frozenset[int], ...]


class Reachability:
    """The results of one forward with the autograd nodes behind each, counted from the region's first.

    A backward may start from some results only; what only the others need is then not recomputed.
    Saved-tensor hooks do not tell for which autograd node a value is packed. But nodes are numbered in the
    order in which they are made, and a node packs right after it was made.

    Args:
        outs: tensors among the results.
        start: the number of the first node that the region made.
        known: what is behind the results of a forward with the same nodes.
    """

    __slots__ = ("behind", "ends", "everything", "outs", "start")

    def __init__(self, outs: Sequence[torch.Tensor], start: int, known: Ends | None = None) -> None:
        self.outs, self.start = [weakref.ref(t) for t in outs], start
        numbers = tuple([_number(node_of(t), start) for t in outs])
        if known is None or known.numbers != numbers:  # the same nodes, and other results of them
            known = Ends(numbers, tuple([_behind(node_of(t), start) for t in outs]))
        self.ends, self.behind = known, known.behind
        self.everything: frozenset[int] = frozenset().union(*self.behind)

    @property
    def differ(self) -> bool:
        """Whether some result needs less than all of them together."""
        return sum(1 for nodes in self.behind if nodes) > 1 and any(
            nodes and nodes != self.everything for nodes in self.behind
        )

    def idle_now(self) -> frozenset[int]:
        """Nodes that the backward pass under way does not reach from any result."""
        present = []
        for i, ref in enumerate(self.outs):
            out = ref()
            # Of a result that is gone nobody knows whether something was computed from it.
            node = None if out is None else node_of(out)
            if node is None or engine_runs(node):
                present.append(i)
        # The engine does not say so of the node that the pass started from, if it is a single one.
        node = running_node()
        number = None if node is None else node._sequence_nr() - self.start
        if not any(number in self.behind[i] for i in present):
            present += [i for i, nodes in enumerate(self.behind) if number in nodes]
        return self.everything - frozenset().union(*[self.behind[i] for i in present])


def _number(node: Any, start: int) -> int:
    return -1 if node is None else max(node._sequence_nr() - start, -1)


def _behind(node: Any, start: int) -> frozenset[int]:
    return frozenset([found._sequence_nr() - start for found in nodes_behind([node], start)])


# -- shapes ----------------------------------------------------------------------------------------------


_VERSIONS, _DEVICES = ("2.13",), ("cpu",)
_SHOWN = torch.__version__.startswith(tuple(f"{version}." for version in _VERSIONS))
_REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DTYPES = frozenset({*_REAL, torch.complex64, torch.complex128})
# The nodes that save one floating tensor, by the op below autograd that each belongs to.
NODES = {
    "AdaptiveAvgPool2DBackward0": "_adaptive_avg_pool2d",
    "AdaptiveAvgPool3DBackward0": "_adaptive_avg_pool3d",
    "AdaptiveMaxPool2DBackward0": "adaptive_max_pool2d",
    "AdaptiveMaxPool3DBackward0": "adaptive_max_pool3d",
    "AvgPool2DBackward0": "avg_pool2d",
    "AvgPool3DBackward0": "avg_pool3d",
    "CummaxBackward0": "cummax",
    "CumminBackward0": "cummin",
    "FftR2CBackward0": "_fft_r2c",
    "FractionalMaxPool2DBackward0": "fractional_max_pool2d",
    "FractionalMaxPool3DBackward0": "fractional_max_pool3d",
    "GatherBackward0": "gather",
    "IndexAddBackward0": "index_add",
    "IndexCopyBackward0": "index_copy",
    "MaskedSelectBackward0": "masked_select",
    "MaxPool2DWithIndicesBackward0": "max_pool2d_with_indices",
    "MaxPool3DWithIndicesBackward0": "max_pool3d_with_indices",
    "PutBackward0": "put",
    "ReflectionPad1DBackward0": "reflection_pad1d",
    "ReflectionPad2DBackward0": "reflection_pad2d",
    "ReflectionPad3DBackward0": "reflection_pad3d",
    "ReplicationPad1DBackward0": "replication_pad1d",
    "ReplicationPad2DBackward0": "replication_pad2d",
    "ReplicationPad3DBackward0": "replication_pad3d",
    "TakeBackward0": "take",
}
_OPS = frozenset(NODES.values())
_NORM = "NativeBatchNormBackward0"
_SAVING = _OPS | {"native_batch_norm"}


def read_for_shape(tape: Tape, outs: Sequence[torch.Tensor], start: int) -> frozenset[int]:
    """The saved values whose shape is all that the nodes behind `outs` read, by their places.

    Values that autograd saves for their shape alone. A stand-in of stride 0 serves the backward, so nothing
    is kept or run again for them.

    torch's formulas ask a pooling's input for its sizes, and read no number of it. Which formulas do so is
    known by trial: `tests/regions/only_shapes.py` puts NaN in the place of each saved value, and compares
    derivatives of first and second order. What it has not shown for an op, dtype, device or version of torch
    is kept.

    `start`: the number of the first node.
    """
    if not (any([traits(node.op).name in _SAVING for node in tape.nodes]) and memory_is_real()):
        return frozenset()
    saved = [(owner, tape.meta_of(tape.saved_values[at][0])) for at, owner in enumerate(tape.owners)]
    ops = [node.op for node in tape.nodes]
    return shapes_read(ops, outs, start, saved) | _statistics(tape, outs, start, saved)


def _statistics(
    tape: Tape, outs: Sequence[torch.Tensor], start: int, saved: Sequence[tuple[int | None, Meta]]
) -> frozenset[int]:
    """The running statistics that batch norms save which train: no derivative of them reads those."""
    found = [
        place
        for place, (number, at) in enumerate(tape.saved_values)
        if at < len(tape.nodes) and number in updates(traits((node := tape.nodes[at]).op), node.args)
    ]
    if not (_SHOWN and found):
        return frozenset()
    norms = {
        node._sequence_nr() - start
        for node in nodes_behind([node_of(t) for t in outs], start)
        if type(node).__name__ == _NORM
    }
    return frozenset([place for place in found if saved[place][0] in norms and _is_shown(saved[place][1])])


def shapes_read(
    ops: Sequence[Any],
    outs: Sequence[torch.Tensor],
    start: int,
    saved: Sequence[tuple[int | None, Meta]],
) -> frozenset[int]:
    """Of the values that autograd `saved`, for which node and with what metadata: the places of those whose
    shape is all that the nodes behind `outs` read, in a run of these ops on tensors with memory.

    `start`: the number of the first node; those of `saved` count from there.
    """
    facts = [traits(op) for op in ops]
    if not (_SHOWN and any([known.name in _OPS for known in facts])):
        return frozenset()
    if any([known.changes_shape for known in facts]):
        return frozenset()
    nodes = nodes_behind([node_of(t) for t in outs], start)
    names = {node._sequence_nr() - start: type(node).__name__ for node in nodes}
    places: dict[int, list[int]] = {}
    for place, (owner, meta) in enumerate(saved):
        if owner is not None and names.get(owner) in NODES:
            if meta[2].is_floating_point or meta[2].is_complex:
                places.setdefault(owner, []).append(place)
    return frozenset([one[0] for one in places.values() if len(one) == 1 and _is_shown(saved[one[0]][1])])


def _is_shown(meta: Meta) -> bool:
    shape, stride, dtype, device = meta
    if dtype not in _DTYPES or device.type not in _DEVICES or stride is None:
        return False
    # The layout of gradients may be that of the input.
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return False
        step *= size
    return step > 1


def standing_for(meta: Meta, shape: torch.Size) -> torch.Tensor:
    """A tensor of this shape in the memory of one element: NaN, so that a formula that reads it shows.

    Forward mode lays tangents out as their primals, and writes into them: there it has memory of its own.
    """
    if dual_level_open():
        return torch.full(shape, float("nan"), dtype=meta[2], device=meta[3])
    return torch.full((), float("nan"), dtype=meta[2], device=meta[3]).expand(shape)
