"""A scan's constants, what its forward leaves for the pull-back, and the surroundings of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.transforms.compat import unseen
from remat.transforms.scan.body import Leaves, Step
from remat.transforms.scan.instructions import Schedule
from remat.transforms.state import Ambient, RandomState

Tensors = Sequence[torch.Tensor]


@dataclass
class State:
    """A carry, with the generators as they stood before its step."""

    step: int
    carry: Leaves
    random: RandomState | None


@dataclass
class Record:
    """What the forward leaves for the pull-back beside tensors that autograd tracks."""

    ambient: Ambient | None = None
    start: RandomState | None = None
    random: bool = False
    # slot -> state; None is the slot of the state in hand. Tensors are integers where autograd holds them:
    # i >= 0 the i-th operand, i < 0 the kept tensor ~i.
    states: dict[int | None, State] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    count: int = 0  # kept tensors
    length: int = 0
    tapes: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # of compiled blocks, by first step
    final: Leaves = field(default_factory=list)


@dataclass(frozen=True)
class Scan:
    """The constants of one scan; its operands are `consts`, the tensors of the carry, `xs`, in this order.

    A loop has a `proceed(consts, carry)` that says whether another step follows, and `n` is the most steps or
    None.
    """

    # Tensors without a derivative that the body captures are no operands: nobody is told of them.
    reads_more = True

    step: Step
    n: int | None
    schedule: Schedule
    sizes: tuple[int, int, int]
    carry: tuple[Any, ...]  # the carry's leaves, None in place of tensors
    reverse: bool = False
    offloaded: Callable[[int], bool] | None = None
    on_step: Callable[[str, int], None] | None = None
    name: str = "scan_remat"
    tensors: tuple[int, ...] = ()  # positions of tensors in `carry`
    proceed: Callable[[Tensors, Leaves], bool] | None = None
    around: Callable[[], contextlib.AbstractContextManager[None]] | None = (
        None  # entered by every recomputation
    )
    plain: bool = (
        False  # neither functorch level nor hooks at the call: states lie in `record`, not in outputs
    )
    levels: bool = False  # called under functorch: its backward may meet tensors of levels that are gone
    record: Record = field(default_factory=Record, compare=False)
    blocks: Any = None  # compiled `Blocks` of steps, for a schedule whose segments are whole blocks
    taped: bool = False  # whether the forward keeps the tape of every block
    selector: Callable[[], Any] | None = None  # makes what selects the values that tapes hold beside carries
    opaque: Any = None  # in a graph that is being traced: makes one op of the forward, one of the pull-back

    @property
    def in_blocks(self) -> bool:
        """Whether blocks may be run: nobody watches, and no step draws random numbers."""
        return self.blocks is not None and self.plain and not self.record.random

    def block(self, xs: Tensors, start: int, count: int) -> list[torch.Tensor]:
        """The rows of xs (or ys) that steps `start .. start + count - 1` work on, in the order of xs."""
        low = self.length - start - count if self.reverse else start
        return [x.narrow(0, low, count) for x in xs]

    def split(self, flat: Tensors) -> tuple[list[torch.Tensor], Leaves, list[torch.Tensor]]:
        a, b, c = self.sizes
        carry = list(self.carry)
        for i, tensor in zip(self.tensors, flat[a : a + b], strict=True):
            carry[i] = tensor
        return list(flat[:a]), carry, list(flat[a + b : a + b + c])

    @property
    def extra(self) -> int:
        """Kept tensors among the outputs."""
        if self.opaque is not None:
            return self.opaque.kept(self)
        return 0 if self.plain else self.record.count

    @property
    def length(self) -> int:
        """The number of steps; of a loop, once it has run."""
        return self.record.length if self.proceed is not None or self.n is None else self.n

    def at(self, step: int) -> int:
        """The row of xs and ys that `step` works on."""
        return self.n - 1 - step if self.reverse and self.n is not None else step

    def moved(self, tensors: Leaves, slot: int | None, back: Tensors | None = None) -> Leaves:
        """The carry of a slot brought to the host, or back to the devices of `back`."""
        if self.offloaded is None or slot is None or not self.offloaded(slot):
            return tensors
        if back is None:
            return [to_host(t) if isinstance(t, torch.Tensor) else t for t in tensors]
        return [
            t.to(b.device, non_blocking=True) if isinstance(t, torch.Tensor) else t
            for t, b in zip(tensors, back, strict=True)
        ]

    def stowed(self, tape: Tensors, host: Sequence[bool]) -> list[torch.Tensor]:
        """A tape as it lies between forward and pull-back."""
        every = self.offloaded is not None
        return [to_host(t) if every or out else t for t, out in zip(tape, host, strict=True)]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, made while the device goes on; on the CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    # Copies to and from the device go through its current stream, one after the other: no waiting here.
    return host.copy_(tensor, non_blocking=tensor.is_cuda)


def make(
    step: Step, consts: Tensors, carry: Leaves, xs: Tensors, n: int | None, schedule: Schedule, **options: Any
) -> tuple[Scan, list[torch.Tensor]]:
    """A scan and its operands."""
    at = tuple(i for i, leaf in enumerate(carry) if isinstance(leaf, torch.Tensor))
    static = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in carry)
    scan = Scan(step, n, schedule, (len(consts), len(at), len(xs)), static, tensors=at, **options)
    return scan, [*consts, *(carry[i] for i in at), *xs]


def now(before: RandomState) -> RandomState:
    """The generators' state: `before` itself where nothing was drawn since, so that steps share one copy."""
    now = before.again()
    with unseen(now.cpu):  # real tensors, also where a plan is made on fake ones
        same = torch.equal(now.cpu, before.cpu) and all(
            torch.equal(a, b) for (_, a), (_, b) in zip(now.devices, before.devices, strict=True)
        )
    return before if same else now


def numbered(
    scan: Scan, k: int, consts: Tensors, carry: Leaves, x: Tensors
) -> tuple[Leaves, list[torch.Tensor]]:
    """One step; an exception says which."""
    try:
        return scan.step(consts, carry, x)
    except Exception as error:
        error.add_note(f"in step {k} of {scan.name}")
        raise


def compact(carry: Leaves) -> Leaves:
    """Copies of views that would keep more than themselves alive."""
    return [
        t.clone()
        if isinstance(t, torch.Tensor) and t._is_view() and t.untyped_storage().nbytes() > t.nbytes
        else t
        for t in carry
    ]


def index_states(scan: Scan, flat: Tensors) -> None:
    """Replace the tensors of the kept states by their numbers, each tensor kept once."""
    known = {id(t): i for i, t in enumerate(flat)}
    kept: list[torch.Tensor] = []
    for state in scan.record.states.values():
        for i in scan.tensors:
            tensor = state.carry[i]
            if id(tensor) not in known:
                known[id(tensor)] = ~len(kept)
                kept.append(tensor)
        state.carry = [known[id(t)] if i in scan.tensors else t for i, t in enumerate(state.carry)]
    scan.record.kept, scan.record.count = kept, len(kept)


def lift_states(scan: Scan, flat: Tensors, kept: Tensors) -> dict[int | None, State]:
    """The kept states with their tensors back in place."""

    def lift(i: int) -> torch.Tensor:
        return flat[i] if i >= 0 else kept[~i]

    return {
        slot: State(s.step, [lift(v) if i in scan.tensors else v for i, v in enumerate(s.carry)], s.random)
        for slot, s in scan.record.states.items()
    }


@contextlib.contextmanager
def uncached_casts() -> Iterator[None]:
    """Autocast without its cache: a cast kept from one step would hang on that step's graph, or on none."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def as_in_forward(scan: Scan, *, seeded: bool = False) -> Iterator[None]:
    """Autocast, switches and generators as in the forward; the generators are put back afterwards."""
    record = scan.record
    assert record.ambient is not None
    with contextlib.ExitStack() as stack:
        if record.ambient.differs():
            stack.enter_context(record.ambient.restored())
        if record.ambient.casts:
            stack.enter_context(uncached_casts())
        if scan.around is not None:
            stack.enter_context(scan.around())
        if record.random:
            assert record.start is not None
            stack.callback(record.start.again().restore)
            if seeded:
                record.start.restore()
        yield
