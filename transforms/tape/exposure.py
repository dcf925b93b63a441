"""Noticing that user code looks at the memory of a tensor itself, past torch's dispatcher.

A raw kernel (Triton, ctypes, NumPy on shared memory) writes without an op and without a new version. Every
door to raw memory that Python code has is a torch function. What lies in memory that was shown is unknown
from then on. (An extension that asks for the pointer in C++ is not seen.) `tensor.data = x` is no op either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat.transforms.tape.recorder import Recorder

_DOORS = frozenset(
    {
        "data_ptr",
        "numpy",
        "__array__",
        "untyped_storage",
        "storage",
        "__dlpack__",
        "to_dlpack",
        "const_data_ptr",
    }
)
_DATA = torch.Tensor.data


class ExposureWatch(TorchFunctionMode):
    """Tells a recorder of the tensors whose memory is shown while it records."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _DOORS and args and isinstance(args[0], torch.Tensor):
            self.recorder.expose(args[0])
        if getattr(func, "__self__", None) is _DATA and func.__name__ == "__set__":
            self.recorder.tape.open = "it replaces the data of a tensor"
        return func(*args, **(kwargs or {}))
