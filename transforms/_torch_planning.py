"""The private names of torch that joint-graph capture stands on, each with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Step out of every dispatch mode and functorch level, so that tracing leaves no trace in theirs.

    There is no public way (private names as of 2.11 to 2.13).
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def fake_mode(leaves: list[Any]) -> Any:
    """The fake mode of the first fake tensor among `leaves`, else a new one that takes real tensors too.

    `torch._subclasses` is where `FakeTensorMode` is documented to live; the flag lets parameters that a
    function captures stay real (tried on 2.13).
    """
    from torch._subclasses import FakeTensor, FakeTensorMode

    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            leaf.fake_mode.allow_non_fake_inputs = True
            return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no data because it is fake."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, also for fake tensors (their `data_ptr` raises)."""
    return tensor.untyped_storage()._cdata
