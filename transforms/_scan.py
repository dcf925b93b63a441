"""A scan as one differentiable function of flat tensors, its pull-back run by a checkpointing schedule.

The forward keeps the carries that the schedule names. The pull-back executes the schedule's actions: it advances
without tape, and reverses a step (or a segment) by evaluating it with its tape and pulling back at once. Both are
`autograd.Function`s with vjp, vmap and jvp rules, so that torch.func composes with them; a rule never opens the
recomputation to the level it serves. Higher orders differentiate the pull-back in its mathematical form, two
scans: one that lists the states, one that runs over them in reverse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.transforms import _torch
from remat.transforms._actions import Schedule, execute
from remat.transforms._body import Leaves, Step
from remat.transforms._capture import Missed
from remat.transforms._errors import RematError
from remat.transforms._pull import is_float, pull
from remat.transforms._state import Ambient, RandomState, device_kinds

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
    final: Leaves = field(default_factory=list)


@dataclass(frozen=True)
class Scan:
    """The constants of one scan; its operands are `consts`, the tensors of the carry, `xs`, in this order.

    A loop of unknown length has `n` None and a `proceed(consts, carry)` that says whether another step follows.
    """

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
    around: Callable[[], contextlib.AbstractContextManager[None]] | None = None  # entered by every recomputation
    plain: bool = False  # neither functorch level nor hooks at the call: states lie in `record`, not in outputs
    levels: bool = False  # called under functorch: its backward may meet tensors of levels that are gone
    record: Record = field(default_factory=Record, compare=False)

    def split(self, flat: Tensors) -> tuple[list[torch.Tensor], Leaves, list[torch.Tensor]]:
        a, b, c = self.sizes
        carry = list(self.carry)
        for i, tensor in zip(self.tensors, flat[a : a + b], strict=True):
            carry[i] = tensor
        return list(flat[:a]), carry, list(flat[a + b : a + b + c])

    @property
    def extra(self) -> int:
        """Kept tensors among the outputs."""
        return 0 if self.plain else self.record.count

    @property
    def length(self) -> int:
        """The number of steps; of a loop, once it has run."""
        return self.record.length if self.n is None else self.n

    def at(self, step: int) -> int:
        """The row of xs and ys that `step` works on."""
        return self.n - 1 - step if self.reverse and self.n is not None else step

    def moved(self, tensors: Leaves, slot: int | None, back: Tensors | None = None) -> Leaves:
        """The carry of a slot brought to the host, or back to the devices of `back`."""
        if self.offloaded is None or slot is None or not self.offloaded(slot):
            return tensors
        if back is None:
            return [t.to("cpu") if isinstance(t, torch.Tensor) else t for t in tensors]
        return [t.to(b.device) if isinstance(t, torch.Tensor) else t for t, b in zip(tensors, back, strict=True)]


def make(
    step: Step, consts: Tensors, carry: Leaves, xs: Tensors, n: int | None, schedule: Schedule, **options: Any
) -> tuple[Scan, list[torch.Tensor]]:
    """A scan and its operands."""
    at = tuple(i for i, leaf in enumerate(carry) if isinstance(leaf, torch.Tensor))
    static = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in carry)
    scan = Scan(step, n, schedule, (len(consts), len(at), len(xs)), static, tensors=at, **options)
    return scan, [*consts, *(carry[i] for i in at), *xs]


def run(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """The final carry and the stacked ys, differentiable with respect to `flat`."""
    if torch._C._len_torch_function_stack():
        # A mode that swaps captured tensors sees torch functions, not Functions: let it see these operands.
        flat = [t.view_as(t) if is_float(t) and _torch_differentiable(t) else t for t in flat]
    # Whoever watches (an enclosing region, offloading hooks) must see the states as saved tensors.
    levels = _torch.in_transform()
    scan = replace(scan, plain=not (levels or _torch.watched()), levels=levels, record=Record())
    out = _Scan.apply(scan, *flat)
    carry = list(scan.record.final)
    for i, tensor in zip(scan.tensors, out, strict=False):
        carry[i] = tensor
    count = len(scan.tensors)
    return carry, list(out[count : len(out) - scan.extra])


def _torch_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or _torch.is_wrapped(tensor)


# -- the forward -----------------------------------------------------------------------------------------


def sweep(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """Run all steps at the bottom of the functorch stack, leaving the scheduled states in `scan.record`."""
    record = scan.record
    record.states.clear()
    record.ambient, record.start = Ambient(device_kinds(flat)), RandomState(flat)
    with _uncached_casts() if record.ambient.casts else contextlib.nullcontext():
        forward = _sweep_known if scan.proceed is None else _sweep_open
        carry, stacks = forward(scan, flat)
        random = _now(record.start) is not record.start
        if random and not record.random:
            # The first step drew nothing, so no generator states were noted, but a later one did: once more.
            record.random = True
            record.states.clear()
            record.start.restore()
            carry, stacks = forward(scan, flat)
    return carry, stacks


def _sweep_known(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    consts, carry, xs = scan.split(flat)
    record = scan.record
    n, states, now = scan.length, record.states, record.start
    place, hand = scan.schedule.place(n), scan.schedule.hand(n)
    stacks: list[torch.Tensor] = []
    rows: list[list[torch.Tensor]] = []
    assert now is not None
    for k in range(n):
        slot = place(k) if k < n - 1 else None
        if record.random and (slot is not None or k == hand):
            now = _now(now)
        if slot is not None:
            states[slot] = State(k, scan.moved(_compact(carry), slot), now)
        if k == hand:
            states[None] = State(k, carry, now)
        at = scan.at(k)
        carry, ys = numbered(scan, k, consts, carry, [x.select(0, at) for x in xs])
        if not scan.plain:
            rows.append(ys)
        elif k == 0:
            stacks = [y.new_empty((n, *y.shape)) for y in ys]
        for stack, y in zip(stacks, ys, strict=scan.plain):
            stack.select(0, at).copy_(y)
        if k == 0:
            record.random = record.random or _now(now) is not now
        if scan.on_step is not None:
            scan.on_step("forward", k)
    if not scan.plain:
        # An enclosing region records ops and must not meet writes into parts of a tensor.
        stacks = [torch.stack(column) for column in zip(*rows[:: -1 if scan.reverse else 1], strict=True)]
    return carry, stacks


def _sweep_open(scan: Scan, flat: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """A loop: a state is placed only when another step follows, the newest one stays in hand."""
    consts, carry, _ = scan.split(flat)
    record = scan.record
    states, now, k = record.states, record.start, 0
    place, hand = scan.schedule.place(None), None
    assert now is not None and scan.proceed is not None
    while (scan.n is None or k < scan.n) and scan.proceed(consts, carry):
        if hand is not None and (slot := place(k - 1)) is not None:
            states[slot] = State(k - 1, scan.moved(_compact(hand.carry), slot), hand.random)
        if record.random:
            now = _now(now)
        hand = State(k, carry, now)
        carry, _ = numbered(scan, k, consts, carry, [])
        if k == 0:
            record.random = record.random or _now(now) is not now
        if scan.on_step is not None:
            scan.on_step("forward", k)
        k += 1
    scan.record.length = k
    if hand is not None:
        states[None] = hand
    return carry, []


def _now(before: RandomState) -> RandomState:
    """The generators' state: `before` itself where nothing was drawn since, so that steps share one copy."""
    now = before.again()
    same = torch.equal(now.cpu, before.cpu) and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(now.devices, before.devices, strict=True)
    )
    return before if same else now


def numbered(scan: Scan, k: int, consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
    """One step; an exception says which."""
    try:
        return scan.step(consts, carry, x)
    except Exception as error:
        error.add_note(f"in step {k} of {scan.name}")
        raise


def _compact(carry: Leaves) -> Leaves:
    """Copies of views that would keep more than themselves alive."""
    return [
        t.clone() if isinstance(t, torch.Tensor) and t._is_view() and t.untyped_storage().nbytes() > t.nbytes else t
        for t in carry
    ]


def _index(scan: Scan, flat: Tensors) -> None:
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


def _states(scan: Scan, flat: Tensors, kept: Tensors) -> dict[int | None, State]:
    """The kept states with their tensors back in place."""

    def lift(i: int) -> torch.Tensor:
        return flat[i] if i >= 0 else kept[~i]

    return {
        slot: State(s.step, [lift(v) if i in scan.tensors else v for i, v in enumerate(s.carry)], s.random)
        for slot, s in scan.record.states.items()
    }


# -- the pull-back ---------------------------------------------------------------------------------------


class _Reversal:
    """The machine that executes a schedule's actions on tensors."""

    def __init__(self, scan: Scan, flat: Tensors, states: dict[int | None, State], needs: Sequence[bool]) -> None:
        self.scan, self.slots = scan, states
        self.consts, _, self.xs = scan.split(flat)
        a, b, _ = scan.sizes
        self.needs = list(needs[:a]), list(needs[a : a + b]), list(needs[a + b :])
        self.devices = scan.split(flat)[1]
        self.hand = states.pop(None, State(0, [], None))
        self.const_grads: list[torch.Tensor | None] = [None] * a
        self.owned = [False] * a
        self.x_grads: list[torch.Tensor | None] = [None] * len(self.xs)
        self.x_rows: dict[int, dict[int, torch.Tensor]] = {}
        self.carry_cts: list[torch.Tensor | None] = []
        self.y_cts: list[torch.Tensor | None] = []

    def _x(self, step: int) -> list[torch.Tensor]:
        at = self.scan.at(step)
        return [x.select(0, at) for x in self.xs]

    def _seed(self) -> None:
        if self.scan.record.random and self.hand.random is not None:
            self.hand.random.restore()

    def advance(self, start: int, stop: int) -> None:
        self._seed()
        carry = self.hand.carry
        with torch.no_grad():
            for k in range(start, stop):
                carry, _ = numbered(self.scan, k, self.consts, carry, self._x(k))
                if self.scan.on_step is not None:
                    self.scan.on_step("advance", k)
        drew = self.scan.record.random and self.hand.random is not None
        self.hand = State(stop, carry, self.hand.random.again() if drew else None)  # type: ignore[union-attr]

    def store(self, step: int, slot: int) -> None:
        moved = self.scan.moved(_compact(self.hand.carry), slot)
        self.slots[slot] = State(step, moved, self.hand.random)

    def restore(self, step: int, slot: int) -> None:
        state = self.slots[slot]
        self.hand = State(step, self.scan.moved(state.carry, slot, self.devices), state.random)

    def free(self, slot: int) -> None:
        del self.slots[slot]

    def reverse(self, start: int, stop: int) -> None:
        self._seed()
        scan, carry, rows = self.scan, self.hand.carry, [self._x(k) for k in range(start, stop)]
        cts = [[None if ct is None else ct.select(0, scan.at(k)) for ct in self.y_cts] for k in range(start, stop)]
        self.hand = State(start, [], None)  # the tape holds what it needs of the carry

        def steps(consts: Tensors, carry: Leaves, rows: list[list[torch.Tensor]]) -> tuple[Leaves, list[Any]]:
            ys = []
            for k, x in enumerate(rows, start):
                carry, y = numbered(scan, k, consts, carry, x)
                ys.append(y)
            return carry, ys

        grads = pull(steps, self.consts, carry, rows, self.carry_cts, cts, (self.needs[0], self.needs[2]))
        self.carry_cts = grads[1]
        self._add_consts(grads[0])
        for k, row in zip(range(start, stop), grads[2], strict=True):
            self._put(scan.at(k), row)
        if scan.on_step is not None:
            for k in range(stop - 1, start - 1, -1):
                scan.on_step("reverse", k)

    def _add_consts(self, grads: list[torch.Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            total = self.const_grads[i]
            if total is None:
                self.const_grads[i] = grad
            elif self.owned[i] and not _torch.is_batched_anyhow(grad):
                total.add_(grad)
            else:  # the first gradient may be an alias of a cotangent: not ours to write into
                self.const_grads[i], self.owned[i] = total + grad, True

    def _put(self, at: int, row: list[torch.Tensor | None]) -> None:
        for i, grad in enumerate(row):
            if grad is None:
                continue
            if _torch.is_batched_anyhow(grad):  # batched cotangents: rows are kept apart and stacked at the end
                self.x_rows.setdefault(i, {})[at] = grad
                continue
            if self.x_grads[i] is None:
                self.x_grads[i] = torch.zeros_like(self.xs[i], memory_format=torch.contiguous_format)
            self.x_grads[i].select(0, at).copy_(grad)  # type: ignore[union-attr]

    def grads(self) -> list[torch.Tensor | None]:
        for i, rows in self.x_rows.items():
            zero = torch.zeros_like(self.xs[i].select(0, 0))
            self.x_grads[i] = torch.stack([rows.get(at, zero) for at in range(self.scan.length)])
        return [*self.const_grads, *self.carry_cts, *self.x_grads]


def pull_back(
    scan: Scan,
    flat: Tensors,
    states: dict[int | None, State],
    needs: Sequence[bool],
    cts: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Gradients of `flat` (None: zero or not needed) from the cotangents of the carry's tensors and the ys."""
    machine = _Reversal(scan, flat, states, needs)
    count = len(scan.tensors)
    machine.carry_cts, machine.y_cts = list(cts[:count]), list(cts[count:])
    stored = {state.step: slot for slot, state in states.items() if slot is not None}
    try:
        with torch.no_grad(), _as_in_forward(scan):
            execute(scan.schedule.actions(scan.length, stored), machine)
    except Missed as missed:
        raise RematError(
            f"{scan.name}: evaluated again, the body reads a tensor ({tuple(missed.tensor.shape)}) that it did not "
            "read in the forward; its gradient would be lost. A global or attribute that changes between forward "
            "and backward must be an argument: put it in the carry or in xs."
        ) from None
    grads = machine.grads()
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


@contextlib.contextmanager
def _uncached_casts() -> Iterator[None]:
    """Autocast without its cache: a cast kept from one step would hang on that step's graph, or on none."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _as_in_forward(scan: Scan, *, seeded: bool = False) -> Iterator[None]:
    """Autocast, switches and generators as in the forward; the generators are put back afterwards."""
    record = scan.record
    assert record.ambient is not None and record.start is not None
    with contextlib.ExitStack() as stack:
        if record.ambient.differs():
            stack.enter_context(record.ambient.restored())
        if record.ambient.casts:
            stack.enter_context(_uncached_casts())
        if scan.around is not None:
            stack.enter_context(scan.around())
        if record.random:
            stack.callback(record.start.again().restore)
            if seeded:
                record.start.restore()
        yield


class _Scan(torch.autograd.Function):
    """scan, *operands -> tensors of the carry, ys, and under functorch the kept states."""

    @staticmethod
    def forward(scan: Scan, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            carry, ys = sweep(scan, flat)
        scan.record.final = [None if i in scan.tensors else v for i, v in enumerate(carry)]
        _index(scan, flat)
        taken = {id(t) for t in (*flat, *scan.record.kept)}
        outs = []
        for out in (*(carry[i] for i in scan.tensors), *ys):
            # An output that is an operand or a state would be one tensor with two histories.
            outs.append(out.clone() if id(out) in taken or out._is_view() else out)
            taken.add(id(outs[-1]))
        if scan.plain:
            return tuple(outs)
        kept, scan.record.kept = scan.record.kept, []
        return (*outs, *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        scan, *flat = inputs
        ctx.scan = scan
        kept = output[len(output) - scan.extra :]
        ctx.mark_non_differentiable(*kept, *(t for t in output if not is_float(t)))
        ctx.save_for_backward(*flat, *kept)
        ctx.save_for_forward(*flat)
        ctx.set_materialize_grads(False)
        ctx.outputs = len(output) - len(kept)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor | None) -> tuple[Any, ...]:
        scan: Scan = ctx.scan
        total, needs = sum(scan.sizes), tuple(ctx.needs_input_grad[1:])
        flat, kept = ctx.saved_tensors[:total], list(ctx.saved_tensors[total:])
        cts = cts[: ctx.outputs]
        if scan.plain:
            kept = scan.record.kept
        if not (scan.levels or _torch.in_transform() or torch.is_grad_enabled()):
            states = _states(scan, flat, kept)
            if not _torch.graph_kept():
                # The slots' tensors must be the machine's alone, so that a freed slot is freed memory.
                scan.record.kept, kept = [], []
            return (None, *pull_back(scan, flat, states, needs, cts))
        present = tuple(ct is not None for ct in cts)
        out = _PullBack.apply(scan, needs, present, *flat, *kept, *(ct for ct in cts if ct is not None))
        rest = iter(out)
        return (None, *(next(rest) if need else None for need in needs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], scan: Scan, *flat: torch.Tensor) -> tuple[Any, Any]:
        batched, flat = _batch(scan, info, in_dims[1:], flat, [False] * len(flat))
        out = _Scan.apply(batched, *flat)
        carry, kept = len(scan.tensors), scan.extra
        dims = [0] * carry + [1] * (len(out) - carry - kept) + [0] * kept
        return out, tuple(dims)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        from remat.transforms._scan_rules import tangents_of

        scan: Scan = ctx.scan
        flat = ctx.saved_tensors[: sum(scan.sizes)]
        outs = tangents_of(scan, flat, tangents[1:])
        return (*outs, *([None] * scan.extra))


class _PullBack(torch.autograd.Function):
    """scan, needs, present, *operands, *kept, *cotangents -> gradients of the needed operands."""

    @staticmethod
    def forward(scan: Scan, needs: Any, present: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat, kept, cts = _parts(scan, present, tensors)
        grads = pull_back(scan, flat, _states(scan, flat, kept), needs, cts)
        zeros = (torch.zeros_like(t) if g is None else g for g, t in zip(grads, flat, strict=True))
        # Cotangents passed through unchanged would be outputs that are operands.
        given = {id(t) for t in tensors}
        return tuple(g.clone() if id(g) in given else g for g, need in zip(zeros, needs, strict=True) if need)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scan, ctx.needs, ctx.present, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> tuple[Any, ...]:
        from remat.transforms._scan_rules import pull_back_of

        wanted = ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors
        at = [i for i, want in enumerate(wanted) if want and i not in _kept_range(ctx, tensors)]
        with _as_in_forward(ctx.scan, seeded=True):

            def differentiable(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
                full = list(tensors)
                for i, value in zip(at, values, strict=True):
                    full[i] = value
                return pull_back_of(ctx.scan, ctx.needs, *_parts_without_kept(ctx.scan, ctx.present, full))

            _, vjp = torch.func.vjp(differentiable, *(tensors[i] for i in at))
            grads = dict(zip(at, vjp(tuple(cts)), strict=True))
        return (None, None, None, *(grads.get(i) for i in range(len(tensors))))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], scan: Scan, needs: Any, present: Any, *tensors: torch.Tensor
    ) -> tuple[Any, Any]:
        dims = in_dims[3:]
        flat, kept, cts = _parts(scan, present, tensors)
        total, last = len(flat), len(tensors) - sum(present)
        batched, flat = _batch(scan, info, dims[:total], flat, list(needs))
        kept = [_expand(t, d, info.batch_size) for t, d in zip(kept, dims[total:last], strict=True)]
        ct_dims = iter(dims[last:])
        moved = []
        for i, ct in enumerate(cts):
            if ct is not None:
                moved.append(_expand(ct, next(ct_dims), info.batch_size, 0 if i < len(scan.tensors) else 1))
        out = _PullBack.apply(batched, needs, present, *flat, *kept, *moved)
        a, b, c = scan.sizes
        where = [0] * (a + b) + [1] * c
        return out, tuple(d for d, need in zip(where, needs, strict=True) if need)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        from remat.transforms._scan_rules import pull_back_of

        tensors, given = ctx.saved_tensors, tangents[3:]
        skip = _kept_range(ctx, tensors)
        at = [i for i, t in enumerate(given) if t is not None and i not in skip]

        def differentiable(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(tensors)
            for i, value in zip(at, values, strict=True):
                full[i] = value
            return pull_back_of(ctx.scan, ctx.needs, *_parts_without_kept(ctx.scan, ctx.present, full))

        with _as_in_forward(ctx.scan, seeded=True):
            primals, duals = tuple(_dense(tensors[i]) for i in at), tuple(given[i] for i in at)
            return torch.func.jvp(differentiable, primals, duals)[1]


def _kept_range(ctx: Any, tensors: Tensors) -> range:
    """Positions of kept states among the pull-back's tensors: functions of the operands, never differentiated."""
    return range(sum(ctx.scan.sizes), len(tensors) - sum(ctx.present))


def _parts(scan: Scan, present: Any, tensors: Tensors) -> tuple[Any, Any, list[torch.Tensor | None]]:
    total, last = sum(scan.sizes), len(tensors) - sum(present)
    rest = iter(tensors[last:])
    return tensors[:total], tensors[total:last], [next(rest) if p else None for p in present]


def _parts_without_kept(scan: Scan, present: Any, tensors: Tensors) -> tuple[Any, list[torch.Tensor | None]]:
    flat, _, cts = _parts(scan, present, tensors)
    return flat, cts


def _expand(tensor: torch.Tensor, dim: int | None, size: int, to: int = 0) -> torch.Tensor:
    if dim is not None:
        return tensor.movedim(dim, to)
    shape = list(tensor.shape)
    shape.insert(to, size)
    return _dense(tensor.unsqueeze(to).expand(shape))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Forward-mode AD refuses tensors whose elements share memory, such as a sum's cotangent."""
    shared = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shared else tensor


def _batch(
    scan: Scan, info: Any, dims: Sequence[int | None], flat: Tensors, every: Sequence[bool]
) -> tuple[Scan, list[torch.Tensor]]:
    """The scan of the vmapped step, and its operands; `every` marks those that must be batched.

    The carry is always batched: whether a step batches it is known only after the step.
    """
    a, b, _ = scan.sizes
    moved: list[torch.Tensor] = []
    inner: list[int | None] = []
    for i, (tensor, dim) in enumerate(zip(flat, dims, strict=True)):
        to = 1 if i >= a + b else 0
        if dim is None and not every[i] and not a <= i < a + b:
            moved.append(tensor)
            inner.append(None)
        else:
            moved.append(_expand(tensor, dim, info.batch_size, to))
            inner.append(0)
    const_dims, x_dims = inner[:a], inner[a + b :]

    def step(consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        static: Leaves = []

        def one(consts: Tensors, tensors: Tensors, x: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            full = list(carry)
            for i, tensor in zip(scan.tensors, tensors, strict=True):
                full[i] = tensor
            before = full
            full, ys = scan.step(consts, full, x)
            if scan.proceed is not None:  # an example that is done keeps its carry
                more = torch.as_tensor(scan.proceed(consts, before))
                full = [
                    torch.where(more, b, a) if i in scan.tensors else b
                    for i, (a, b) in enumerate(zip(before, full, strict=True))
                ]
            static[:] = [None if i in scan.tensors else leaf for i, leaf in enumerate(full)]
            return [full[i] for i in scan.tensors], ys

        over = (list(const_dims), [0] * b, list(x_dims))
        tensors, ys = torch.vmap(one, in_dims=over, randomness=info.randomness)(
            list(consts), [carry[i] for i in scan.tensors], list(x)
        )
        for i, tensor in zip(scan.tensors, tensors, strict=True):
            static[i] = tensor
        return static, ys

    proceed = None if scan.proceed is None else _batch_condition(scan, const_dims)
    return replace(scan, step=step, proceed=proceed), moved


def _batch_condition(scan: Scan, const_dims: list[int | None]) -> Callable[[Tensors, Leaves], bool]:
    """Go on while any example does."""

    def proceed(consts: Tensors, carry: Leaves) -> Any:
        return _conditions(scan, const_dims, consts, carry).any()

    return proceed


def _conditions(scan: Scan, const_dims: list[int | None], consts: Tensors, carry: Leaves) -> torch.Tensor:
    def one(consts: Tensors, tensors: Tensors) -> torch.Tensor:
        full = list(carry)
        for i, tensor in zip(scan.tensors, tensors, strict=True):
            full[i] = tensor
        assert scan.proceed is not None
        return torch.as_tensor(scan.proceed(consts, full))

    over = (list(const_dims), [0] * len(scan.tensors))
    return torch.vmap(one, in_dims=over)(list(consts), [carry[i] for i in scan.tensors])
