"""Offload by names beside keeping and recomputing: 16 Llama blocks, every byte on the device and on the host.

    python -m benchmarks.offload

On a CPU the host is where the device's values are, too: what is sent there is told apart by the lane that it
takes. The bytes are exact, and the same at every run. Seconds mean something on a GPU only, where the case
`panel llama3-8b depth=16 backward eager` of the suite `card` measures them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
import tyro
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.models import Problem, named
from benchmarks.common.peers import KEPT_NAMES, OFFLOADED_NAMES, peer
from benchmarks.common.records import Record, Target, conclude
from benchmarks.common.steps import eager, make_step
from remat.cli.steps import difference, tolerance, unmarked
from remat.transforms.offload import transfer

MIB = 1 << 20
POLICIES = ("none", KEPT_NAMES, OFFLOADED_NAMES, "save_nothing")


@dataclass
class Offload:
    """Bytes on the device and on the host, of values that are kept, sent away, or computed again."""

    depth: int = 16
    """Blocks."""
    width: int = 128
    """Width of the model."""
    seq: int = 512
    """Tokens of a sequence."""
    save: bool = True
    """Write results/offload.csv."""

    def __call__(self) -> int:
        records = self.run()
        title = f"{self.depth} Llama blocks, width {self.width}, {self.seq} tokens"
        return conclude("offload", title, records, targets(records, self.depth), self.save)

    def run(self) -> list[Record]:
        """All figures of every policy, gradients checked against no remat first."""
        model = named("llama3-8b", depth=self.depth, width=self.width, seq=self.seq, batch=1)
        problem = model.problem(torch.device("cpu"), torch.float32, 0)
        expected = step(problem, "none", unmarked)
        return [record for policy in POLICIES for record in measure(problem, policy, expected)]


def step(problem: Problem, policy: str, mark: Any) -> Any:
    loss, leaves = problem.bind(peer(policy).around)
    return make_step("backward", loss, leaves, eager)(problem.params, problem.batch, mark)


def measure(problem: Problem, policy: str, expected: Any) -> list[Record]:
    apart = difference(step(problem, policy, unmarked), expected)
    if not apart <= tolerance(torch.finfo(torch.float32).eps):
        error = f"wrong gradient, off by {apart:.1e}"
        return [Record("offload", "backward", policy, "gradients", "", error=error)]
    ledger = Ledger()
    with ledger.watching():
        step(problem, policy, ledger.mark)
    figures = {
        "device, kept": ledger.kept[False],
        "host, kept": ledger.kept[True],
        "device, peak": ledger.peak[False],
        "host, peak": ledger.peak[True],
        "sent": ledger.sent,
        "fetched": ledger.fetched,
        "fetched and not read, peak": ledger.ahead,
    }
    return [
        Record("offload", "backward", policy, metric, "MiB", bytes_ / MIB)
        for metric, bytes_ in figures.items()
        if bytes_ or metric.endswith("kept")
    ]


class Ledger(TorchDispatchMode):
    """Bytes of the storages made while it is on, those of the host's copies and the others.

    Attributes:
        kept: bytes at the mark, between forward and backward; by whether they are the host's.
        peak: the most there were at once.
        sent, fetched: bytes of all copies in each direction.
        ahead: the most bytes that were fetched and not read yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.hosts: set[int] = set()
        self.kept = {True: 0, False: 0}
        self.peak = {True: 0, False: 0}
        self.sent = self.fetched = self.ahead = self.unread = 0
        self.sending = False  # whether what is made now is the host's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {key(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and key(tensor) not in given and key(tensor) not in self.live:
                storage = tensor.untyped_storage()
                self.live[key(tensor)] = StorageWeakRef(storage), storage.nbytes()
                if self.sending:
                    self.hosts.add(key(tensor))
        self.peak = {host: max(most, self.bytes(host)) for host, most in self.peak.items()}
        return out

    def bytes(self, host: bool) -> int:
        """Those that are alive now."""
        gone = [at for at, (ref, _) in self.live.items() if ref.expired()]
        for at in gone:
            del self.live[at]
            self.hosts.discard(at)
        return sum(size for at, (_, size) in self.live.items() if (at in self.hosts) == host)

    def mark(self) -> None:
        """The forward is over, the backward has not begun."""
        self.kept = {host: self.bytes(host) for host in self.kept}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within, all is counted; the lane of devices without streams tells what becomes the host's."""
        before, transfer._at_once = transfer._at_once, _Counted(self)
        try:
            with self:
                yield
        finally:
            transfer._at_once = before


class _Counted(transfer.Lane):
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def send(self, tensor: Tensor, into: Tensor | None = None) -> tuple[Tensor, Any]:
        self.ledger.sending = True
        try:
            host, _ = super().send(tensor, into)
        finally:
            self.ledger.sending = False
        self.ledger.sent += host.nbytes
        return host, None

    def fetch(self, host: Tensor, into: Tensor) -> tuple[Tensor, Any]:
        ledger = self.ledger
        ledger.fetched += host.nbytes
        ledger.unread += host.nbytes
        ledger.ahead = max(ledger.ahead, ledger.unread)
        tensor, _ = super().fetch(host, into)
        return tensor, [host.nbytes]

    def arrived(self, tensor: Tensor, mark: Any) -> Tensor:
        self.ledger.unread -= mark.pop() if mark else 0
        return tensor


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def targets(records: list[Record], depth: int) -> list[Target]:
    """What exact accounting means: nothing is held twice, and no more comes back at once than two blocks'."""
    found = {(record.policy, record.metric): record.value for record in records}

    def of(policy: str, *metrics: str) -> float | None:
        values = [found.get((policy, metric)) for metric in metrics]
        return None if None in values else sum(value for value in values if value is not None)

    def over(above: float | None, below: float | None) -> float | None:
        return None if above is None or not below else above / below

    kept, sent = of(KEPT_NAMES, "device, kept"), of(OFFLOADED_NAMES, "device, kept", "host, kept")
    return [
        Target("device and host with offload over the device when kept", over(sent, kept), 1.0),
        Target(
            "device with offload over the device when computed again",
            over(of(OFFLOADED_NAMES, "device, kept"), of("save_nothing", "device, kept")),
            1.0,
        ),
        Target("fetched over sent", over(of(OFFLOADED_NAMES, "fetched"), of(OFFLOADED_NAMES, "sent")), 1.0),
        Target(
            "fetched and not read over what one block sent",
            over(
                of(OFFLOADED_NAMES, "fetched and not read, peak"), (of(OFFLOADED_NAMES, "sent") or 0) / depth
            ),
            2.0,
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Offload)())
