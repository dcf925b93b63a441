"""What a scan is, what one run of it works with, and what its forward leaves for the pull-back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import (
    VMAP,
    add_batch_dim,
    below_levels,
    every_level,
    functions_as_they_are,
    is_wrapped,
    modes_active,
    no_view,
    unseen,
    unwrapped,
)
from remat.transforms.errors import RematError
from remat.transforms.objects import is_tensor
from remat.transforms.offload import Copy, to_device, to_host
from remat.transforms.ops import memory_of
from remat.transforms.pytree import Spec, flatten, merge, smooth
from remat.transforms.scan.instructions import Schedule
from remat.transforms.state import Ambient, Fingerprint, RandomState, refuse_traced_draws
from remat.transforms.tape import Kept, report

Tensors = Sequence[torch.Tensor]
Leaves = list[Any]
# Tensors on their way to a device: to be called when they are needed.
Coming = Callable[[], Leaves]
Step = Callable[[Tensors, Leaves, Tensors], tuple[Leaves, list[torch.Tensor]]]


class Structure(NamedTuple):
    """The structure of a tree, and of each leaf the shape and dtype, or the type if it is not a tensor."""

    spec: Spec
    kinds: tuple[Any, ...]


def kind_of(leaf: Any) -> Any:
    """What must be the same of a leaf at every step."""
    return (leaf.shape, leaf.dtype) if is_tensor(leaf) else type(leaf)


def structure_of(tree: Any) -> Structure:
    """The structure of a tree as it stands."""
    leaves, spec = flatten(tree)
    return Structure(spec, tuple([kind_of(leaf) for leaf in leaves]))


@dataclass(frozen=True)
class ScanSpec:
    """What a scan is: all that its call says, and no tensor. Eager and traced scans have the same.

    Attributes:
        name: how messages call it.
        length: the number of steps; of a loop the most steps, or None.
        carry: the structure of the carry, the same at every step.
        xs: the structure of xs. That of ys is known after the first step (`Body.ys`).
        schedule: which carries are kept, and in which order steps are evaluated again.
        reverse: whether steps go from the last row to the first.
        policy: what is kept inside steps.
        offload: whether all kept carries lie on the host.
        compile: the backend that compiles steps, None where they run as they are.
        on_step: called after each evaluation.
        joined: of a scan over tiles, the dimension of a y along which ys are joined. Their stack lies in
            memory so that joining them copies nothing.
        unroll: how many steps compiled blocks have; None lets sizes decide.
    """

    name: str
    length: int | None
    carry: Structure
    xs: Structure
    schedule: Schedule
    reverse: bool = False
    policy: Any = None
    offload: bool = False
    compile: str | None = None
    on_step: Callable[[str, int], None] | None = None
    joined: int | None = None
    unroll: int | None = None

    def stack(self, y: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Room for the y of every step."""
        at = 0 if self.joined is None else self.joined if self.joined >= 0 else max(0, y.dim() + self.joined)
        assert self.length is not None  # a loop has no ys
        shape = [*y.shape[:at], self.length, *y.shape[at:]]
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        strides.insert(0, strides.pop(at))
        return y.new_empty_strided((shape[at], *y.shape), strides, device=device)

    @property
    def offloaded(self) -> Callable[[int], bool] | None:
        """Which slots lie on the host, None for none."""
        return (lambda slot: True) if self.offload else getattr(self.schedule, "offloaded", None)


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
    # slot -> state. Tensors are integers where autograd holds them:
    # i >= 0 the i-th operand, i < 0 the kept tensor ~i.
    states: dict[int, State] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    count: int = 0  # kept tensors
    length: int = 0
    tapes: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # of compiled blocks, by first step
    final: Leaves = field(default_factory=list)
    made: tuple[torch.Tensor, ...] | None = None  # the results, where the forward ran before its node
    compared: bool = False  # whether a backward may come, which is to find the numbers of the forward again
    seen: dict[int, list[Fingerprint]] = field(default_factory=dict)  # by the number of steps done

    def begin(self) -> None:
        """Forget what a run has left, as another one begins."""
        for left in (self.states, self.tapes, self.seen):
            left.clear()


@dataclass
class Primals:
    """How many operands and results of a scan over dual numbers are values: the first ones of each kind,
    which depend on values alone."""

    consts: int
    carry: int  # of its tensors
    xs: int
    ys: int = 0  # known after the first step


@dataclass(frozen=True)
class Scan:
    """One run of a scan; its operands are `consts`, the tensors of the carry, `xs`, in this order.

    A loop has a `proceed(consts, carry)` that says whether another step follows. Rules (tangent, pull-back,
    batch) run a scan with the `spec` of the user's, and with a step and a carry of its own.
    """

    step: Step
    spec: ScanSpec
    sizes: tuple[int, int, int]
    carry: tuple[Any, ...]  # the carry's leaves, None in place of tensors
    offloaded: Callable[[int], bool] | None = None
    tensors: tuple[int, ...] = ()  # positions of tensors in `carry`
    proceed: Callable[[Tensors, Leaves], bool] | None = None
    # Entered by every recomputation.
    around: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    # Neither functorch level nor hooks at the call: states lie in `record`, not in outputs.
    plain: bool = False
    levels: bool = False  # called under functorch: its backward may meet tensors of levels that are gone
    record: Record = field(default_factory=Record, compare=False)
    buffered: bool = False  # what the forward keeps is written into buffers, which lie where it belongs
    blocks: Any = None  # compiled `UnrolledStep` of steps, for a schedule whose segments are whole blocks
    taped: bool = False  # whether the forward keeps the tape of every block
    selector: Callable[[], Any] | None = None  # makes what selects the values that tapes hold beside carries
    opaque: Any = None  # in a graph that is being traced: makes one op of the forward, one of the pull-back
    # Sizes and randomness of vmaps that only a pull-back's cotangents see, which have these as leading
    # dimensions. (jacrev is such a vmap.) Steps are evaluated again without them; only pulling is batched.
    # With every step batched the peak of 64 rows over 64 steps is 2.6 times as high, of jacfwd 1.9 times.
    over: tuple[tuple[int, str], ...] = ()
    values: Primals | None = None

    @property
    def reverse(self) -> bool:
        """Whether steps go from the last row to the first."""
        return self.spec.reverse

    @property
    def in_blocks(self) -> bool:
        """Whether blocks may be run: nobody watches, and no step draws random numbers."""
        return self.blocks is not None and self.plain and not self.record.random

    def block(self, xs: Tensors, start: int, count: int) -> list[torch.Tensor]:
        """The rows of xs (or ys) that steps `start .. start + count - 1` work on, in the order of xs."""
        low = self.length - start - count if self.reverse else start
        return [x.narrow(0, low, count) for x in xs]

    def split(self, flat: Tensors) -> tuple[list[torch.Tensor], Leaves, list[torch.Tensor]]:
        """The consts, the carry's leaves, the xs."""
        a, b, c = self.sizes
        return list(flat[:a]), self.whole(flat[a : a + b]), list(flat[a + b : a + b + c])

    def whole(self, tensors: Tensors, carry: Sequence[Any] | None = None) -> Leaves:
        """The carry's leaves, these tensors in their places; the others as in `carry`."""
        return merge(self.carry if carry is None else carry, self.tensors, tensors)

    def parts(self, present: Sequence[bool], tensors: Tensors) -> tuple[Any, Any, list[torch.Tensor | None]]:
        """Operands, kept states and cotangents (None where absent), which a pull-back takes in this order."""
        total, last = sum(self.sizes), len(tensors) - sum(present)
        rest = iter(tensors[last:])
        return tensors[:total], tensors[total:last], [next(rest) if p else None for p in present]

    @property
    def extra(self) -> int:
        """Kept tensors among the outputs."""
        if self.opaque is not None:
            return self.opaque.kept(self)
        return 0 if self.plain else self.record.count

    @property
    def length(self) -> int:
        """The number of steps; of a loop, once it has run."""
        known = None if self.proceed is not None else self.spec.length
        return self.record.length if known is None else known

    def at(self, step: int) -> int:
        """The row of xs and ys that `step` works on."""
        return step if not self.spec.reverse else self.length - 1 - step

    def zeros(self, like: torch.Tensor, rows: bool = False) -> torch.Tensor:
        """A gradient of zero of an operand, or of a row; `rows`: of all rows."""
        sizes = [size for size, _ in self.over]
        if not sizes:
            return torch.zeros_like(like)  # laid out as the rows are
        return like.new_zeros((*like.shape[:rows], *sizes, *like.shape[rows:]))

    def or_zero(self, grad: torch.Tensor | None, like: torch.Tensor, rows: bool = False) -> torch.Tensor:
        """A gradient, without None."""
        return self.zeros(like, rows) if grad is None else grad

    def with_zeros(self, grads: Sequence[torch.Tensor | None], flat: Tensors) -> Iterator[torch.Tensor]:
        """Gradients of the operands `flat`, without None."""
        first_x = len(flat) - self.sizes[2]
        for i, (grad, t) in enumerate(zip(grads, flat, strict=True)):
            yield self.or_zero(grad, t, rows=i >= first_x)

    def tell(self, phase: str, steps: range) -> None:
        """Tell the user's `on_step` of evaluations."""
        if self.spec.on_step is not None:
            for k in steps:
                self.spec.on_step(phase, k)

    def sent(self, tensors: Leaves, slot: int) -> Leaves:
        """The carry as it is to lie in a slot, on its way to the host if it belongs there."""
        if self.buffered or self.offloaded is None or not self.offloaded(slot):
            return tensors
        return [to_host(t).tensor if is_tensor(t) else t for t in tensors]

    def fetched(self, tensors: Leaves, slot: int, like: Leaves) -> Coming:
        """The carry of a slot on the devices of `like`, on its way there."""
        if self.offloaded is None or not self.offloaded(slot):
            return lambda: tensors
        return fetch(tensors, [is_tensor(t) and t.device for t in like])

    def stowed(self, tape: Tensors, host: Sequence[bool]) -> list[torch.Tensor]:
        """A tape as it lies between forward and pull-back."""
        if self.buffered:
            return list(tape)
        every = self.offloaded is not None
        return [to_host(t).tensor if every or out else t for t, out in zip(tape, host, strict=True)]


def fetch(tensors: Leaves, devices: Sequence[torch.device | bool]) -> Coming:
    """Begin to bring tensors to devices, where they are not False."""
    pairs = zip(tensors, devices, strict=True)
    coming = [to_device(t, d) if isinstance(d, torch.device) else t for t, d in pairs]
    return lambda: [t.arrived() if isinstance(t, Copy) else t for t in coming]


def make(
    step: Step, spec: ScanSpec, consts: Tensors, carry: Leaves, xs: Tensors, **options: Any
) -> tuple[Scan, list[torch.Tensor]]:
    """A run of a scan, and its operands."""
    at = tuple([i for i, leaf in enumerate(carry) if is_tensor(leaf)])
    static = tuple([None if is_tensor(leaf) else leaf for leaf in carry])
    scan = Scan(step, spec, (len(consts), len(at), len(xs)), static, tensors=at, **options)
    return scan, [*consts, *(carry[i] for i in at), *xs]


def now(before: RandomState) -> RandomState:
    """The generators' state: `before` itself where nothing was drawn since, so that steps share one copy."""
    now = before.again()
    pairs = zip(now.states, before.states, strict=True)
    return before if all(_is_state(a.state, b.state) for a, b in pairs) else now


def _is_state(state: Any, other: Any) -> bool:
    if not isinstance(state, torch.Tensor):
        return state.same(other)
    # Real tensors, also where a plan is made on fake ones.
    with unseen(state) if modes_active() else contextlib.nullcontext(), functions_as_they_are():
        return torch.equal(state, other)


def with_step_note(
    scan: Scan, k: int, consts: Tensors, carry: Leaves, x: Tensors
) -> tuple[Leaves, list[torch.Tensor]]:
    """One step; an exception says which."""
    try:
        return scan.step(consts, carry, x)
    except Exception as error:
        error.add_note(f"in step {k} of {scan.spec.name}")
        raise


def own(tensor: torch.Tensor, taken: Container[int]) -> torch.Tensor:
    """A result of a Function: none of the tensors `taken` (by identity), and no view."""
    if id(tensor) not in taken and not tensor._is_view():
        return tensor
    return no_view(tensor.clone())


def compact(carry: Leaves) -> Leaves:
    """Copies of what would keep more than itself alive."""
    return [t.clone() if is_tensor(t) and _is_part(t) else t for t in carry]


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


def lift_states(scan: Scan, flat: Tensors, kept: Tensors) -> dict[int, State]:
    """The kept states with their tensors back in place."""

    def lift(i: int) -> torch.Tensor:
        return flat[i] if i >= 0 else kept[~i]

    return {
        slot: State(s.step, [lift(v) if i in scan.tensors else v for i, v in enumerate(s.carry)], s.random)
        for slot, s in scan.record.states.items()
    }


def report_kept(scan: Scan, flat: Tensors, out: Tensors) -> None:
    """Report what a scan holds until its backward."""
    consts = scan.sizes[0]
    for i, tensor in enumerate(flat):
        why = "captured" if i < consts else "argument"
        report(Kept(why, unwrapped(tensor), scan.spec.name, i))
    for i, tensor in enumerate(scan.record.kept if scan.plain else out[len(out) - scan.extra :]):
        report(Kept("policy", unwrapped(tensor), scan.spec.name, i))


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
            stack.enter_context(record.ambient.restored(called=True))
        if record.ambient.casts:
            stack.enter_context(uncached_casts())
        if scan.around is not None:
            stack.enter_context(scan.around())
        if record.random:
            assert record.start is not None
            refuse_traced_draws(scan.spec.name)
            stack.callback(record.start.again().restore)
            if seeded:
                record.start.restore()
        yield


@contextlib.contextmanager
def accumulating_nothing(scan: Scan) -> Iterator[None]:
    """Raise where leaves that the body captures accumulate gradients within.

    A step that goes backward inside gives them theirs when it is pulled back through. A derivative of that
    pulls back through steps again, as often as its schedule says.
    """
    consts = getattr(scan.step, "captured", ())
    leaves = [t for t in consts if not is_wrapped(t) and t.is_leaf and t.requires_grad]
    before = [t.grad for t in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
        if any([leaf.grad is not None for leaf in leaves]):
            raise RematError(
                f"{scan.spec.name}: a step goes backward inside and accumulates gradients there. This is a "
                "second derivative, which evaluates steps again and would accumulate them again. Return them "
                "by torch.autograd.grad, or write a loop."
            )
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in more memory than it fills."""
    memory = memory_of(tensor)
    return memory is not None and memory.nbytes() > tensor.nbytes


def drawing_apart(scan: Scan, flat: Tensors) -> Tensors:
    """The operands, of which one has a batch for each vmap around in which every example draws for itself:
    without, torch takes a Function off that level, and it draws once for all. One of the carry, if any will
    do: all of that gets a batch, and torch writes no batch into memory that has none."""
    apart = [level for level in every_level() if level.key() == VMAP and level.randomness() == "different"]
    carry = range(scan.sizes[0], sum(scan.sizes[:2]))
    places = (i for i in (*carry, *range(len(flat))) if smooth(flat[i]))
    if not apart or (at := next(places, None)) is None:
        return flat
    tensor = flat[at]
    for level in apart:
        with below_levels():
            zeros = torch.zeros(level.batch_size(), dtype=tensor.dtype, device=tensor.device)
        tensor = tensor - add_batch_dim(zeros, 0, level.level())
    return [*flat[:at], tensor, *flat[at + 1 :]]
