"""Ops on tensors without data whose like has run before, without asking torch's own cache of them again."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F

from remat.transforms import BoundedCache, map_only, span

# What C++ asks of every fake tensor.
DEVICE: Any = torch.ops.prim.device.default
_aten = torch.ops.aten
_empty: Any = _aten.empty_strided.default
# Kernels of these write a contiguous gradient. Torch's rules for tensors without data give it the strides of
# an operand (2.11 to 2.14): what comes after would copy where no run does, or the other way round.
_CONTIGUOUS: frozenset[Any] = frozenset(
    getattr(_aten, f"{name}_backward").default
    for name in ("native_layer_norm", "glu", "mse_loss", "smooth_l1_loss", "huber_loss")
)
_PLAIN = frozenset((int, float, bool, str, type(None)))
_BY_VALUE = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def asking_nobody(function: Any) -> Any:
    """`F.multi_head_attention_forward` as it is written, for a mode that is to see what it calls.

    It asks by a name of its module whether somebody overrides it, and so would come back to that mode for
    ever (2.11 to 2.15). Other functions, and one that asks in another way, are given back.
    """
    ask = "has_torch_function"
    if function is not F.multi_head_attention_forward or ask not in function.__code__.co_names:
        return function
    inside = {**function.__globals__, ask: lambda tensors: False}
    made = types.FunctionType(function.__code__, inside, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _contiguous(fake: torch.Tensor) -> torch.Tensor:
    return fake if fake.is_contiguous() else _aten.new_empty.default(fake, fake.shape)


class _Unknown(Exception):
    """An argument whose like cannot be told."""


class Repeats:
    """Runs ops on fake tensors, those that torch's own cache was seen to answer from a shorter one.

    Torch says of an op whether what it returns depends on metadata alone (private counters, 2.11 to 2.15:
    where they are missing nothing is remembered). Remembered are those that return new memory, and views.
    """

    def __init__(self) -> None:
        from torch._subclasses import fake_tensor

        self.kind, self.mode = fake_tensor.FakeTensor, fake_tensor.FakeTensorMode
        self.within = fake_tensor.in_kernel_invocation_manager
        self.known: BoundedCache[Any, Any] = BoundedCache(4096)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`."""
        if func is DEVICE and type(args[0]) is self.kind:
            return args[0].fake_device
        fakes: list[Any] = []
        try:
            key = func, torch.get_default_dtype(), self._part((args, *kwargs.items()), fakes)
        except _Unknown:
            return func(*args, **kwargs)
        if not fakes or torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        mode = fakes[0].fake_mode
        if (make := self.known.get(key)) is not None:
            return make(mode, args, kwargs)
        before = self._counts()
        out = func(*args, **kwargs)
        after = self._counts()
        if func in _CONTIGUOUS:
            out = map_only(torch.Tensor, _contiguous, out)
        # One answer from torch's cache, and none that it could not give.
        if before is not None and after == (before[0] + 1, *before[1:]):
            self._learn(func, key, out, fakes)
        return out

    def _counts(self) -> tuple[int, ...] | None:
        mode: Any = self.mode
        try:
            return mode.cache_hits, mode.cache_misses, sum(mode.cache_bypasses.values())
        except AttributeError:
            return None

    def _part(self, value: Any, fakes: list[Any]) -> Any:
        """What a part of the arguments counts as; tensors are added to `fakes`."""
        kind = type(value)
        if kind is self.kind:
            if value._has_symbolic_sizes_strides or value.constant is not None or value.is_sparse:
                raise _Unknown
            fakes.append(value)
            where = value.storage_offset(), value.dtype, value.fake_device
            return value.shape, value.stride(), where, value.requires_grad, value.is_conj(), value.is_neg()
        if kind in _PLAIN:
            return kind, value
        if kind is tuple or kind is list:
            return kind, *[self._part(one, fakes) for one in value]
        if issubclass(kind, _BY_VALUE):
            return value
        raise _Unknown

    def _learn(self, func: Any, key: Any, out: Any, fakes: list[Any]) -> None:
        """Remember how to make the like of what torch has made."""
        outs = [out] if (single := type(out) is self.kind) else list(out) if type(out) is tuple else []
        if not outs or any(type(t) is not self.kind or t.layout is not torch.strided for t in outs):
            return
        devices = [t.fake_device for t in outs]
        if single and func.is_view:

            def make(mode: Any, args: Any, kwargs: Any) -> Any:
                with self.within(mode):
                    alias = func(*args, **kwargs)
                return self.kind(mode, alias, devices[0])
        else:
            metas = [(t.shape, t.stride(), t.dtype) for t in outs]
            memories = {t.untyped_storage()._cdata for t in (*fakes, *outs)}
            if len(memories) < len({t.untyped_storage()._cdata for t in fakes}) + len(outs):
                return
            # Those of a slice of something larger have more memory than they show.
            if any(
                t.untyped_storage().nbytes() != span(*m[:2]) * m[2].itemsize
                for t, m in zip(outs, metas, strict=True)
            ):
                return

            def make(mode: Any, args: Any, kwargs: Any) -> Any:
                with self.within(mode):
                    made = [
                        _empty(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in metas
                    ]
                found = [self.kind(mode, one, device) for one, device in zip(made, devices, strict=True)]
                return found[0] if single else tuple(found)

        self.known[key] = make
