"""Seconds by roofline: FLOPs over what a device attains, or bytes moved over its bandwidth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from remat._core import DEVICES, causal_share, has_formula_of_ours, op_name
from remat.plan.graph.flops import bytes_sent, flops_of, is_heavy
from remat.plan.graph.processors import card_like
from remat.plan.graph.speeds import NARROW, Speeds, speeds_of
from remat.plan.graph.traffic import is_view, traffic
from remat.plan.joint import Joint, Op
from remat.policies import kind_of
from remat.transforms import RematError, traits

# What ops that have no FLOPs are as fast as, by their names; the others are copies.
_LIGHT = {
    "math": "gelu silu sigmoid exp log erf erfinv sin cos tan logsumexp _softmax _log_softmax gelu_backward "
    "silu_backward _log_softmax_backward_data avg_pool2d_backward "
    "upsample_nearest2d_backward max_pool2d_with_indices index index_put index_add "
    "index_reduce scatter scatter_add scatter_reduce",
    "tanh": "avg_pool2d upsample_nearest2d tanh softplus mish atan2 pow elu celu expm1 log1p "
    "log_sigmoid_forward logaddexp mish_backward softplus_backward elu_backward log_sigmoid_backward",
    "norm": "native_layer_norm native_group_norm native_batch_norm var var_mean "
    "std cumsum _native_batch_norm_legit _fused_rms_norm sort topk native_layer_norm_backward "
    "native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward",
    "clone": "clone copy_ contiguous _reshape_copy",
}
# Exponents for which torch multiplies, divides, or takes roots.
_PLAIN_POWERS = (0.5, 1, 2, 3, -0.5, -1, -2)
# What it takes until a collective begins to send.
LATENCY = 10e-6
# What factorizations and FFTs attain of a matmul's rate: 0.1 to 0.5 on a CPU (torch 2.13.0, 64 to 512 rows).
_LINALG_SHARE = 0.2
_SPEED_OF = {name: kind for kind, names in _LIGHT.items() for name in names.split()}


@dataclass(frozen=True)
class Roofline:
    """An op costs seconds: the larger of FLOPs over peak and bytes over bandwidth of a device.

    Attributes:
        device: a key of `DEVICES`, for the speeds that its vendor gives. A device of this machine ("cpu",
            "cuda", "cuda:1"), for the speeds of the nearest one known, or its own once
            `python -m remat env --measure` has measured them. None means that of the op's tensors. The speeds
            of tensors without data are those of an h100.
        fused: price as a compiler runs it: a pointwise chain costs the traffic of its ends only, and one call
            where speeds are probed. An op whose every reader is pointwise moves nothing.

    Example:
        >>> from remat.plan import Roofline
        >>> Roofline("a100", fused=True)
        Roofline(device='a100', fused=True)
    """

    device: str | None = None
    fused: bool = False
    unit: str = field(default="s", init=False, repr=False)
    accuracy: ClassVar[float] = 0.01

    def __post_init__(self) -> None:
        if self.device is None or self.device in DEVICES or _at_hand(self.device):
            return
        raise RematError(
            f"No roofline for device {self.device!r}: write one of {', '.join(sorted(DEVICES))}, or a device "
            "of this machine."
        )

    def price(self, joint: Joint, op: Op) -> float:
        device = self.device or _device_of(joint, op)
        if sent := bytes_sent(joint, op):
            # The link between devices of this machine is not probed.
            return LATENCY + sent / DEVICES[device if device in DEVICES else "h100"].link
        flops, heavy = flops_of(joint, op), is_heavy(joint, op)
        moved = _fused_traffic(joint, op) if self.fused and not heavy else traffic(joint, op)
        if _at_hand(device):
            if (speeds := speeds_of(device)).known:
                return self._probed(joint, op, speeds, flops if heavy else 0.0, moved)
            device = card_like(device)
        speed = DEVICES[device]
        if has_formula_of_ours(op.target) and kind_of(op.target) is None:
            flops /= _LINALG_SHARE
        half = any(joint.values[o].dtype.itemsize <= 2 for o in op.outputs)
        return speed.seconds(flops, moved, half)

    def _probed(self, joint: Joint, op: Op, speeds: Speeds, flops: float, moved: int) -> float:
        """The price on a device whose speeds were probed."""
        dtype = joint.values[op.outputs[0]].dtype if op.outputs else torch.float32
        if flops:
            busy = max(
                speeds.seconds(_heavy_kind(joint, op), dtype, flops * _computed(joint, op, speeds.device)),
                speeds.seconds("copy", torch.float32, traffic(joint, op)),
            )
            return (speeds.call() if self.fused else speeds.op()) + busy
        whole, kind = traffic(joint, op), _light_kind(op)
        busy = speeds.seconds(kind, dtype, whole)
        if not self.fused:
            return speeds.op() + busy if whole else 0.0
        # Fused, an op moves nothing through memory but at the chain's ends; it computes what it computes.
        computed = max(busy - speeds.seconds("copy", dtype, whole), 0.0)
        # A chain is one launch, which the op pays whose result leaves it.
        launch = speeds.call() if whole and any(_to_memory(joint, v) for v in op.outputs) else 0.0
        return launch + speeds.seconds("copy", dtype, moved) + computed


def _fused_traffic(joint: Joint, op: Op) -> int:
    """Only what comes from or goes to an op that does not fuse touches memory."""
    read = (v for v in op.reads if _from_memory(joint, v))
    made = (v for v in op.outputs if _to_memory(joint, v))
    return 0 if is_view(joint, op) else sum(joint.values[v].bytes for v in (*read, *made))


def _from_memory(joint: Joint, value: int) -> bool:
    """Whether no fused op makes it: views fuse with what they look at."""
    maker = joint.producers.get(value)
    if maker is None or is_heavy(joint, maker):
        return True
    return is_view(joint, maker) and any(_from_memory(joint, v) for v in maker.reads)


def _to_memory(joint: Joint, value: int) -> bool:
    """Whether an op that does not fuse reads it, or a view of it."""
    return any(
        is_heavy(joint, op) or (is_view(joint, op) and any(_to_memory(joint, v) for v in op.outputs))
        for op in joint.readers.get(value, ())
    )


def _at_hand(device: str) -> bool:
    """Whether it is a device of this machine, whose speeds can be probed."""
    kind = device.partition(":")[0]
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def _device_of(joint: Joint, op: Op) -> str:
    """The device of an op's tensors; an h100 where they have no data or are not of this machine."""
    for number in (*op.outputs, *op.reads):
        device = str(joint.values[number].device)
        return device if _at_hand(device) else "h100"
    return "cpu"


def _heavy_kind(joint: Joint, op: Op) -> str:
    kind = kind_of(op.target)
    if kind is None and has_formula_of_ours(op.target):
        return "linalg"
    if kind != "attention":
        return "convolution" if kind == "convolution" else "matmul"
    narrow = "narrow " if joint.values[op.reads[0]].shape[-1] < NARROW else ""
    return f"{narrow}attention backward" if "backward" in op_name(op.target) else f"{narrow}attention"


def _computed(joint: Joint, op: Op, device: str) -> float:
    """The share of an op's FLOPs that its kernel computes: a causal mask hides whole blocks of keys."""
    *_, rows, _ = (1, 1, *joint.values[op.reads[0]].shape)
    return causal_share(op.target, op.args, op.kwargs, rows, on_cpu=device == "cpu")


def _light_kind(op: Op) -> str:
    if traits(op.target).random:
        return "random"
    name = op_name(op.target).rpartition("::")[2]
    if name.rstrip("_") == "pow" and op.args[-1] in _PLAIN_POWERS:
        return "copy"
    if "tanh" in (*op.args, *op.kwargs.values()) and name.startswith("gelu"):
        return "tanh"
    return _SPEED_OF.get(name, _SPEED_OF.get(name.rstrip("_"), "copy"))
