"""Noticing, in plain autograd, that user code looks at memory itself (see `context.notice`)."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from remat.transforms.context import notice


class ExposureWatch(TorchFunctionMode):
    """Tells the recording around of tensors whose memory is shown, or whose data is replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        notice(func, args)
        return func(*args, **(kwargs or {}))
