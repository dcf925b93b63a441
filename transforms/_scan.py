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
from remat.transforms._pull import is_float, pull
from remat.transforms._state import Ambient, RandomState, device_kinds, without_autocast_cache

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
    final: Leaves = field(default_factory=list)


@dataclass(frozen=True)
class Scan:
    """The constants of one scan; its operands are `consts`, the tensors of the carry, `xs`, in this order."""

    step: Step
    n: int
    schedule: Schedule
    sizes: tuple[int, int, int]
    carry: tuple[Any, ...]  # the carry's leaves, None in place of tensors
    reverse: bool = False
    offloaded: Callable[[int], bool] | None = None
    on_step: Callable[[str, int], None] | None = None
    name: str = "scan_remat"
    tensors: tuple[int, ...] = ()  # positions of tensors in `carry`
    plain: bool = False  # no functorch level at the call: states lie in `record`, not among the outputs
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

    def at(self, step: int) -> int:
        """The row of xs and ys that `step` works on."""
        return self.n - 1 - step if self.reverse else step

    def moved(self, tensors: Leaves, slot: int | None, back: Tensors | None = None) -> Leaves:
        """The carry of a slot brought to the host, or back to the devices of `back`."""
        if self.offloaded is None or slot is None or not self.offloaded(slot):
            return tensors
        if back is None:
            return [t.to("cpu") if isinstance(t, torch.Tensor) else t for t in tensors]
        return [t.to(b.device) if isinstance(t, torch.Tensor) else t for t, b in zip(tensors, back, strict=True)]


def make(
    step: Step, consts: Tensors, carry: Leaves, xs: Tensors, n: int, schedule: Schedule, **options: Any
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
    scan = replace(scan, plain=not _torch.in_transform(), record=Record())
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
    consts, carry, xs = scan.split(flat)
    place, hand, last = scan.schedule.place(scan.n), scan.schedule.hand(scan.n), scan.n - 1
    record = scan.record
    record.states.clear()
    record.ambient, record.start = Ambient(device_kinds(flat)), RandomState(flat)
    now = record.start
    stacks: list[torch.Tensor] = []
    with without_autocast_cache() if record.ambient.casts else contextlib.nullcontext():
        for k in range(scan.n):
            slot = place(k) if k < last else None
            if slot is not None or k == hand:
                now = _now(now)
            if slot is not None:
                record.states[slot] = State(k, scan.moved(_compact(carry), slot), now)
            if k == hand:
                record.states[None] = State(k, carry, now)
            at = scan.at(k)
            carry, ys = numbered(scan, k, consts, carry, [x.select(0, at) for x in xs])
            if k == 0:
                stacks = [y.new_empty((scan.n, *y.shape)) for y in ys]
            for stack, y in zip(stacks, ys, strict=True):
                stack.select(0, at).copy_(y)
            if scan.on_step is not None:
                scan.on_step("forward", k)
    record.random = _now(record.start) is not record.start
    return carry, stacks


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
        error.add_note(f"in step {k} of {scan.name} (length {scan.n})")
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
        self.hand = states.pop(None)
        self.const_grads: list[torch.Tensor | None] = [None] * a
        self.owned = [False] * a
        self.x_grads: list[torch.Tensor | None] = [None] * len(self.xs)
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
        random = self.hand.random.again() if self.scan.record.random and self.hand.random else None
        self.hand = State(stop, carry, random)

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
            elif self.owned[i]:
                total.add_(grad)
            else:  # the first gradient may be an alias of a cotangent: not ours to write into
                self.const_grads[i], self.owned[i] = total + grad, True

    def _put(self, at: int, row: list[torch.Tensor | None]) -> None:
        for i, grad in enumerate(row):
            if grad is None:
                continue
            if self.x_grads[i] is None:
                self.x_grads[i] = torch.zeros_like(self.xs[i], memory_format=torch.contiguous_format)
            self.x_grads[i].select(0, at).copy_(grad)  # type: ignore[union-attr]

    def grads(self) -> list[torch.Tensor | None]:
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
    with torch.no_grad(), _as_in_forward(scan):
        execute(scan.schedule.actions(scan.n, stored), machine)
    grads = machine.grads()
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


@contextlib.contextmanager
def _as_in_forward(scan: Scan, *, seeded: bool = False) -> Iterator[None]:
    """Autocast, switches and generators as in the forward; the generators are put back afterwards."""
    record = scan.record
    assert record.ambient is not None and record.start is not None
    with contextlib.ExitStack() as stack:
        if record.ambient.differs():
            stack.enter_context(record.ambient.restored())
        if record.ambient.casts:
            stack.enter_context(without_autocast_cache())
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
            if not (_torch.in_transform() or torch.is_grad_enabled()):
                # The slots' tensors must be ours alone, so that a freed slot is freed memory.
                states = _states(scan, flat, kept)
                if not _torch.graph_kept():
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
        zeros = (_zero_like(t) if g is None else g for g, t in zip(grads, flat, strict=True))
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
            primals, duals = tuple(tensors[i] for i in at), tuple(given[i] for i in at)
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


def _zero_like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)


def _expand(tensor: torch.Tensor, dim: int | None, size: int, to: int = 0) -> torch.Tensor:
    if dim is not None:
        return tensor.movedim(dim, to)
    shape = list(tensor.shape)
    shape.insert(to, size)
    return tensor.unsqueeze(to).expand(shape)


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
            full, ys = scan.step(consts, full, x)
            static[:] = [None if i in scan.tensors else leaf for i, leaf in enumerate(full)]
            return [full[i] for i in scan.tensors], ys

        over = (list(const_dims), [0] * b, list(x_dims))
        tensors, ys = torch.vmap(one, in_dims=over, randomness=info.randomness)(
            list(consts), [carry[i] for i in scan.tensors], list(x)
        )
        for i, tensor in zip(scan.tensors, tensors, strict=True):
            static[i] = tensor
        return static, ys

    return replace(scan, step=step), moved
