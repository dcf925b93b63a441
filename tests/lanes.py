"""A lane that makes its copies as late as it may, for tests of what is sent, fetched and read when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from remat.transforms.context import untracked
from remat.transforms.offload import transfer
from remat.transforms.scan import function as forward


class Late(transfer.Lane):
    """A stream that does nothing before somebody waits for it; it writes down what is asked of it.

    Attributes:
        log: "send", "fetch" and "use" with the last size of the tensor, which tells the regions apart.
        most: how many fetched tensors of how many regions there were at once that nobody had read yet.
    """

    def __init__(self) -> None:
        self.pending: list[Callable[[], Any]] = []
        self.done = 0
        self.log: list[str] = []
        self.hosts: list[weakref.ref[Tensor]] = []
        self.unread: list[weakref.ref[Tensor]] = []
        self.most = 0

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> Late:
        """One that everything travels by for the time of a test."""
        made = cls()
        for module in (transfer, forward):
            monkeypatch.setattr(module, "lane", lambda *_: made)
        return made

    def send(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, int]:
        self.log.append(f"send {_size(tensor)}")
        host = torch.full_like(tensor, torch.nan) if into is None else into
        self.hosts.append(weakref.ref(host))
        return host, self._later(host, tensor)

    def fetch(self, host: Tensor, into: Tensor) -> tuple[Tensor, int]:
        self.log.append(f"fetch {_size(host)}")
        tensor = into.fill_(torch.nan)
        self.unread.append(weakref.ref(tensor))
        self.most = max(self.most, len(self.waiting()))
        return tensor, self._later(tensor, host)

    def wait(self, mark: int) -> None:
        while self.done < mark:
            untracked(self.pending.pop(0))
            self.done += 1

    def finish(self) -> None:
        """Make all copies that were asked for."""
        self.wait(self.done + len(self.pending))

    def arrived(self, tensor: Tensor, mark: int) -> Tensor:
        self.wait(mark)
        self.log.append(f"use {_size(tensor)}")
        self.unread = [ref for ref in self.unread if ref() is not tensor]
        return tensor

    def _later(self, to: Tensor, source: Tensor) -> int:
        # A stream's memory is not used anew before its copies are through; what nobody holds any more needs
        # no copy, so that what is held can be told by what is alive.
        target, held = weakref.ref(to), source if to is not source else None
        self.pending.append(lambda: None if target() is None else target().copy_(held))  # type: ignore[union-attr]
        return self.done + len(self.pending)

    def waiting(self) -> set[int]:
        """The sizes of what was fetched and is neither read nor gone."""
        return {_size(tensor) for ref in self.unread if (tensor := ref()) is not None}

    def held(self) -> set[int]:
        """The sizes of what is in host memory."""
        self.finish()
        gc.collect()
        return {_size(tensor) for ref in self.hosts if (tensor := ref()) is not None}

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log


def _size(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() else 1
