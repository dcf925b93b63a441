"""Values that autograd saves for their shape alone. A stand-in of stride 0 serves the backward, so nothing is
kept or run again for them.

torch's formulas ask a pooling's input for its sizes, and read no number of it. Which formulas do so is known
by trial: `tests/regions/only_shapes.py` puts NaN in the place of each saved value, and compares derivatives
of first and second order. What it has not shown for an op, dtype, device or version of torch is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from remat.transforms.compat import dual_level_open, memory_is_real
from remat.transforms.context import node_of
from remat.transforms.ops import traits
from remat.transforms.placeholders import Meta
from remat.transforms.tape.tape import Tape, nodes_behind

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


def read_for_shape(tape: Tape, outs: Sequence[torch.Tensor], start: int) -> frozenset[int]:
    """The saved values whose shape is all that the nodes behind `outs` read, by their places.

    `start`: the number of the first node.
    """
    facts = [traits(node.op) for node in tape.nodes]
    if not any([known.name in _OPS for known in facts]) or not (_SHOWN and memory_is_real()):
        return frozenset()
    if any([known.changes_shape for known in facts]):
        return frozenset()
    nodes = nodes_behind([node_of(t) for t in outs], start)
    names = {node._sequence_nr() - start: type(node).__name__ for node in nodes}
    saved: dict[int, list[int]] = {}
    for place, owner in enumerate(tape.owners):
        if owner is not None and names.get(owner) in NODES:
            meta = tape.meta_of(tape.packed[place][0])
            if meta[2].is_floating_point or meta[2].is_complex:
                saved.setdefault(owner, []).append(place)
    return frozenset(
        [places[0] for places in saved.values() if len(places) == 1 and _is_shown(tape, places[0])]
    )


def _is_shown(tape: Tape, place: int) -> bool:
    shape, stride, dtype, device = tape.meta_of(tape.packed[place][0])
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
