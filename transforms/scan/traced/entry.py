"""Scans in graphs that are being traced for a compiler.

Dynamo traces the user's body once, on the first row of xs, into a graph module. Its captured tensors are
operands (`torch`'s wrapper operator, as for regions). When AOTAutograd traces below autograd, `run` makes a
scan of that graph and calls it under whatever functorch levels are active. The rules are those of eager.
Below them forward and pull-back are one opaque op each, whatever the number of steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import (
    DispatchMode,
    above_all,
    backend,
    below_levels,
    compiler as aot_compiler,
    dual_level_known_if_any,
    example_bytes,
    example_of,
    fake_mode,
    hooks_as_they_are,
    in_cuda_graphs,
    in_transform,
    is_tracing,
    level_of,
    live_with_graph,
    outside_all_modes,
    stands_on,
    tangent_of,
)
from remat.transforms.context import active, scoped, untracked
from remat.transforms.entry import Graph, run_transparently
from remat.transforms.errors import RematError, user_line
from remat.transforms.offload import pinned_for, to_host
from remat.transforms.ops import draws as ops_draws, traits
from remat.transforms.pytree import merge
from remat.transforms.scan.backward import pull_back
from remat.transforms.scan.body import unwritten
from remat.transforms.scan.compiled import UnrolledStep, dense
from remat.transforms.scan.function import run as function_run, run_forward
from remat.transforms.scan.instructions import Schedule
from remat.transforms.scan.spec import Leaves, Record, Scan, ScanSpec, State, Tensors, compact, make
from remat.transforms.state import Ambient, RandomState, can_seed, device_kinds, draw, refuse_generator

# -- custom op -------------------------------------------------------------------------------------------

_library = torch.library.Library("remat", "FRAGMENT")
# They ask generators for their state, which a GPU refuses while a CUDA graph is captured.
_tags = (torch.Tag.cudagraph_unsafe,)
_library.define("scan_forward(str scan, Tensor[] operands) -> Tensor[]", tags=_tags)
_library.define("scan_pull(str scan, bool[] needs, bool[] present, Tensor[] tensors) -> Tensor[]", tags=_tags)
_numbers = itertools.count()
# Tensors of tapes that are results of their own at most: each is a node or two of a graph.
_RESULTS = 512
# A graph holds a string only. What it stands for lives with the code that Dynamo makes of the graph, with the
# blocks of steps that hold the graph, or, where neither is known, for good.
_entries: weakref.WeakValueDictionary[str, Entry] = weakref.WeakValueDictionary()
_for_good: list[Entry] = []


@dataclass
class Opaque:
    """What makes a scan opaque: how its ops are called and its steps compiled.

    A scan's forward and its pull-back as one opaque op each, for graphs of compilers.

    A compiler sees two ops, however many steps there are. When they run, they execute the schedule as in
    eager, on steps that the same compiler compiled: one graph that runs a block of steps, one that pulls back
    through it. Both are made at the first run, from the step as the levels around the scan have transformed
    it.

    The ops are functions of their operands. Random numbers come from seeds in xs. The kept carries are
    results of the forward: one tensor of shape [carries, ...] for every tensor of the carry.

    Attributes:
        name: how graphs show the scan.
        compiler: (graph, inputs) -> callable; None runs steps as they are.
        size: steps compiled at a time.
        ambient: the surroundings in which the steps' ops are traced.
        stacked: whether the tapes of all blocks are rows of stacks. A vmap around counts on that, and in CUDA
            graphs a block's results may lie where those of the next one will.
    """

    name: str
    compiler: Callable[..., Any] | None
    size: int
    ambient: Ambient
    stacked: bool
    entries: dict[int, Entry] = field(default_factory=dict)

    @property
    def elsewhere(self) -> torch.device | None:
        """Where steps are traced, if code is made for a device that need not be there."""
        return stands_on(self.compiler)

    def entry(self, scan: Scan) -> Entry:
        """What the ops of this scan run; a scan that a level transformed has a step of its own."""
        found = self.entries.get(id(scan.step))
        if found is None:
            key = f"{next(_numbers)} {self.name}"
            found = self.entries[id(scan.step)] = _entries[key] = Entry(key, scan, self)
            if active.owner is not None:
                active.owner.append(found)
            elif not live_with_graph(found):
                _for_good.append(found)
        return found

    def kept(self, scan: Scan) -> int:
        """How many results of the forward are kept carries."""
        if scan.taped:
            return self.entry(scan).tape or 0
        return len(scan.tensors) if rows_kept(scan) else 0

    def moving(self, scan: Scan, flat: Tensors, given: Sequence[bool]) -> list[bool]:
        """Which tensors of the carry have a tangent at some step, `given` saying which operands have one.

        One that has none keeps none: ops inside may take no tangents, or not while a compiler traces them
        (2.13: `layer_norm` with a weight that has none).
        """
        a, b, _ = scan.sizes
        moves = list(given[a : a + b])
        while not all(moves):
            more = self._moved(scan, flat, [*given[:a], *moves, *given[a + b :]])
            if more == moves:
                break
            moves = more
        return moves

    def _moved(self, scan: Scan, flat: Tensors, given: Sequence[bool]) -> list[bool]:
        """Which tensors of the carry have a tangent after one more step."""
        a, b, _ = scan.sizes
        found = list(given[a : a + b])

        def step(*moving: torch.Tensor) -> torch.Tensor:
            new, _ = scan.step(*scan.split(merge(operands, at, moving)))
            for i, place in enumerate(scan.tensors):
                found[i] |= level_of(new[place]) == 1 and tangent_of(new[place]) is not None
            return moving[0]

        rows = [*flat[: a + b], *(t.select(0, 0) for t in flat[a + b :])]
        with dual_level_known_if_any(), outside_all_modes(), fake_mode([]), torch.no_grad():
            operands = [fake(t) for t in rows]
            at = [i for i, moves in enumerate(given) if moves]
            primals = tuple([operands[i] for i in at])
            with self.surroundings(), scoped(evaluating=True):
                torch.func.jvp(step, primals, tuple(map(torch.empty_like, primals)))
        return found

    def surroundings(self) -> contextlib.AbstractContextManager[None]:
        """Autocast and switches as they were where the scan was traced."""
        return self.ambient.restored() if self.ambient.must_be_restored() else contextlib.nullcontext()

    def forward(self, scan: Scan, flat: Tensors) -> list[torch.Tensor]:
        """The tensors of the last carry, ys, and the kept carries."""
        entry = self.entry(scan)
        found = torch.ops.remat.scan_forward.default(entry.key, list(flat))
        if scan.taped and entry.tape is None:
            # A region around that repeats its forward has handed out what the op returned there.
            untracked(torch.ops.remat.scan_forward.default, entry.key, list(flat))
        return found

    def pull(
        self,
        scan: Scan,
        flat: Tensors,
        kept: Tensors,
        needs: Sequence[bool],
        cts: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Gradients of `flat`, None where not needed."""
        present = [ct is not None for ct in cts]
        tensors = [*flat, *kept, *(ct for ct in cts if ct is not None)]
        key = self.entry(scan).key
        found = iter(torch.ops.remat.scan_pull.default(key, list(needs), present, tensors))
        return [next(found) if need else None for need in needs]


@functools.lru_cache(maxsize=256)
def layout(schedule: Any, n: int) -> dict[int, tuple[int, int]]:
    """Slot -> (step, row among the kept carries), as the forward leaves them.

    The first carry is an operand and has no row: -1.
    """
    rows = itertools.count()
    return {slot: (step, next(rows) if step else -1) for step, slot in schedule.forward(n).items()}


def rows_kept(scan: Scan) -> int:
    """How many carries the forward keeps besides the first."""
    return sum(row >= 0 for _, row in layout(scan.spec.schedule, scan.length).values())


class _Slots(dict[Any, State]):
    """The states that a forward keeps, each written into its row at once."""

    def __init__(self, rows: dict[int, tuple[int, int]], buffers: Tensors) -> None:
        super().__init__()
        self.rows, self.buffers = rows, buffers

    def __setitem__(self, slot: int, state: State) -> None:
        row = self.rows[slot][1] if slot in self.rows and self.rows[slot][0] == state.step else -1
        if row >= 0:
            rows = [b.select(0, row) for b in self.buffers]
            carry = [_put(r, t) for r, t in zip(rows, state.carry, strict=True)]
            state = State(state.step, carry, state.random)
        super().__setitem__(slot, state)


class _Tapes(dict[int, Any]):
    """The tapes of the blocks, `rows` having those of each: rows of stacks, or what the blocks return."""

    def __init__(self, size: int, rows: list[list[torch.Tensor]], device: torch.device) -> None:
        super().__init__()
        self.size, self.rows, self.device = size, rows, device

    def __len__(self) -> int:
        return len(self.rows)

    def __setitem__(self, step: int, tape: list[torch.Tensor]) -> None:
        row = self.rows[step // self.size]
        if not row:
            row += compact(tape)  # a carry may lie in a block's ys
            return
        for place, tensor in zip(row, tape, strict=True):
            _put(place, tensor)

    def pop(self, step: int, *_: Any) -> list[torch.Tensor]:
        return list(self.rows[step // self.size])

    def carry(self, step: int, count: int) -> list[torch.Tensor]:
        """The carry before a block: the last one of the block before."""
        before = self.rows[step // self.size - 1][:count]
        return [t.select(0, -1).to(self.device) for t in before]


class Entry:
    """What a scan's two ops do."""

    def __init__(self, key: str, scan: Scan, opaque: Opaque) -> None:
        self.key, self.opaque = key, opaque
        scan = replace(scan, plain=True, levels=False, opaque=None, around=None)
        if opaque.compiler is not None:
            blocks = UnrolledStep(scan.step, opaque.size, scan.reverse, opaque.compiler, scan.selector)
            scan = replace(scan, blocks=blocks)
        self.scan = scan
        self.tape: int | None = None  # how many results of the forward are of tapes, once that is known

    @property
    def blocks(self) -> int:
        return self.scan.length // self.opaque.size

    def _tape(self, flat: Tensors) -> tuple[list[tuple[torch.Tensor, bool]], bool]:
        """What a block's tape has of each step, and which of it belongs on the host; whether every block's
        are results of their own. A stack of large ones would cost a copy of each."""
        if not self.scan.taped:
            return [], False
        consts, carry, xs = self.scan.split(flat)
        found = self.scan.blocks.at(consts).tape_of(carry, xs)
        own = self.opaque.size == 1 and not self.opaque.stacked and len(found) * self.blocks <= _RESULTS
        own &= self.scan.offloaded is None and not any(away for _, away in found)
        self.tape = len(found) * (self.blocks if own else 1)
        return found, own

    def _buffers(self, flat: Tensors, tape: list[tuple[torch.Tensor, bool]], own: bool) -> list[torch.Tensor]:
        """Where what the forward keeps is to lie; `tape` and `own`: as `_tape` has them."""
        _, carry, _ = self.scan.split(flat)
        host = self.scan.offloaded is not None
        if not self.scan.taped:
            count = rows_kept(self.scan)
            return [_buffer(t, (count,), host) for t in carry if count]
        size, device = self.opaque.size, self._device(flat)
        if own:
            return [_buffer(t, (size,), False, device) for _ in range(self.blocks) for t, _ in tape]
        return [_buffer(t, (self.blocks, size), host or away, device) for t, away in tape]

    def _device(self, flat: Tensors) -> torch.device:
        """That of the carry; a scan that only maps its rows has no tensor there."""
        return (flat[self.scan.sizes[0] :] or flat)[0].device

    def _tapes(self, flat: Tensors, rows: list[list[torch.Tensor]]) -> _Tapes:
        return _Tapes(self.opaque.size, rows, self._device(flat))

    def forward(self, flat: Tensors) -> list[torch.Tensor]:
        if self.opaque.elsewhere is not None and self.scan.length % self.opaque.size:
            raise _left_over(self.scan, self.opaque.size)
        flat = dense(flat)
        record, taped = Record(self.opaque.ambient, RandomState(flat)), self.scan.taped
        tape, own = self._tape(flat)
        buffers = [] if own else self._buffers(flat, tape, own)
        rows = _unstacked(buffers, self.blocks) if taped else []
        if taped:
            record.tapes = self._tapes(flat, rows)
        else:
            record.states = _Slots(layout(self.scan.spec.schedule, self.scan.length), buffers)
        scan = replace(self.scan, record=record, buffered=True)
        with torch.no_grad(), self.opaque.surroundings():
            carry, ys = run_forward(scan, flat)
        if own:
            buffers = [t for row in rows for t in row]
        # What is kept comes first, so that it is not what is copied.
        found = _apart([*buffers, *carry], flat)
        buffers, found = found[: len(buffers)], [*found[len(buffers) :], *ys]
        for buffer in buffers:
            buffer.scan = self  # type: ignore[attr-defined]  the backward may outlive the compiled code
        return [*found, *buffers]

    def pull(self, flat: Tensors, kept: Tensors, needs: Any, cts: Any) -> list[torch.Tensor]:
        flat = dense(flat)
        cts = [None if ct is None else ct.contiguous() for ct in cts]
        a, b, _ = self.scan.sizes
        record, tapes = Record(self.opaque.ambient, RandomState(flat)), None
        if self.scan.taped:
            tape, own = self._tape(flat)
            tapes = self._tapes(flat, (_in_turn if own else _unstacked)(kept, self.blocks))
            if len(tapes.rows[0]) == len(tape):
                record.tapes = tapes

        def kept_carry(step: int, row: int) -> list[torch.Tensor]:
            if row < 0:
                return list(flat[a : a + b])
            return [t.select(0, row) for t in kept] if tapes is None else tapes.carry(step, b)

        rows = layout(self.scan.spec.schedule, self.scan.length) if tapes is not record.tapes else {}
        states = {slot: State(step, kept_carry(step, row), None) for slot, (step, row) in rows.items()}
        record.states = states
        scan = replace(self.scan, record=record)
        with torch.no_grad():
            grads = pull_back(scan, flat, states, needs, cts)
        wanted = [
            torch.zeros_like(t) if g is None else g
            for g, t, need in zip(grads, flat, needs, strict=True)
            if need
        ]
        return _apart(wanted, [*flat, *(ct for ct in cts if ct is not None)])

    def fake_forward(self, flat: Tensors) -> list[torch.Tensor]:
        scan = self.scan
        # A step that is traced elsewhere may have that place written into its ops.
        elsewhere = self.opaque.elsewhere
        own = flat if elsewhere is None else [torch.empty_like(t, device=elsewhere) for t in flat]
        device = None if elsewhere is None else flat[0].device
        consts, carry, xs = scan.split(own)
        first = [x.select(0, 0) for x in xs]
        with (
            torch.no_grad(),
            self.opaque.surroundings(),
            scoped(evaluating=True),
            unwritten(scan.spec.name, (), carry, first, consts),
        ):
            new, ys = run_transparently(scan.step, (consts, carry, first), {})
        stacks = [scan.spec.stack(y, device) for y in ys]
        return [
            *(t.new_empty(t.shape, device=device) for t in new),
            *stacks,
            *self._buffers(flat, *self._tape(flat)),
        ]


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """Its like without data, of the sizes that one example has; in a fake mode, below all levels."""
    shape = [example_of(size) for size in tensor.shape]
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def _unstacked(buffers: Tensors, count: int) -> list[list[torch.Tensor]]:
    """Of `count` blocks, the row of each stack."""
    columns = [buffer.unbind(0) for buffer in buffers]
    return [[column[k] for column in columns] for k in range(count)]


def _in_turn(kept: Tensors, count: int) -> list[list[torch.Tensor]]:
    """Of `count` blocks, what each has kept."""
    each = len(kept) // count
    return [list(kept[i * each : (i + 1) * each]) for i in range(count)]


def _left_over(scan: Scan, size: int) -> RematError:
    n = scan.length
    return RematError(
        f"{scan.spec.name}: its {n} steps are small and are compiled {size} at a time. The {n % size} left "
        f"over run op by op, and what they take is in no code. Take {n - n % size} steps, or "
        f"{n - n % size + size}."
    )


def _buffer(
    like: torch.Tensor, rows: tuple[int, ...], host: bool, device: torch.device | None = None
) -> torch.Tensor:
    device = device or like.device
    pinned = host and pinned_for(like, device)
    device = torch.device("cpu") if host else device
    return torch.empty((*rows, *like.shape), dtype=like.dtype, device=device, pin_memory=pinned)


def _put(row: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into a row of a buffer."""
    return row.copy_(tensor) if row.device == tensor.device else to_host(tensor, row).tensor


def _apart(outs: Sequence[torch.Tensor], operands: Tensors) -> list[torch.Tensor]:
    """Results that share memory neither with operands nor with each other, as an op's results must not."""
    taken = {t.untyped_storage()._cdata for t in operands}
    found = []
    for out in outs:
        key = out.untyped_storage()._cdata
        out = out.detach()
        if key in taken or not out.is_contiguous() or out._is_view():
            out = out.clone(memory_format=torch.contiguous_format)
        taken.add(out.untyped_storage()._cdata)
        found.append(out)
    return found


def living_with(owner: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Within, what the graphs that are traced name lives as long as `owner`, not as long as their code."""
    return scoped(owner=owner)


def _entry(key: str) -> Entry:
    if key not in _entries:
        raise RematError(
            f"scan {key!r} was compiled by another process, or its compiled code is gone "
            "(torch._dynamo.reset). A compiled graph with a scan_remat in it cannot be taken from one "
            "process to another, nor be run without its code. Compile it here, reset after the backward."
        )
    return _entries[key]


def _forward(key: str, operands: Tensors) -> list[torch.Tensor]:
    with above_all():
        return _entry(key).forward(operands)


def _pull(key: str, needs: Sequence[bool], present: Sequence[bool], tensors: Tensors) -> list[torch.Tensor]:
    entry = _entry(key)
    flat, kept, cts = entry.scan.parts(present, tensors)
    with above_all():
        return entry.pull(flat, kept, needs, cts)


def _fake_forward(key: str, operands: Tensors) -> list[torch.Tensor]:
    with above_all(fake=True):
        return _entry(key).fake_forward(operands)


def _fake_pull(
    key: str, needs: Sequence[bool], present: Sequence[bool], tensors: Tensors
) -> list[torch.Tensor]:
    flat, _, _ = _entry(key).scan.parts(present, tensors)
    return [t.new_empty(t.shape) for t, need in zip(flat, needs, strict=True) if need]


# What the two ops run, by op.
KERNELS: dict[Any, Callable[..., list[torch.Tensor]]] = {
    torch.ops.remat.scan_forward.default: _forward,
    torch.ops.remat.scan_pull.default: _pull,
}
_library.impl("scan_forward", _forward, "CompositeExplicitAutograd")
_library.impl("scan_pull", _pull, "CompositeExplicitAutograd")
torch.library.register_fake("remat::scan_forward", _fake_forward, lib=_library)
torch.library.register_fake("remat::scan_pull", _fake_pull, lib=_library)

# Steps whose graph and operands are small are compiled several at a time: a call takes longer than they do.
# They are as many in a short scan as in a long one, and so compiling takes as long.
BLOCK = 8
_SMALL_GRAPH = 64
_SMALL_ROW = 1 << 16


class TracedBody:
    """A body as Dynamo's graph, and which of the graph's operands are what.

    Attributes:
        places: the operands that are tensors of the carry and of xs, in order.
        keys: how messages call the tensors of the carry, `['a']` for carry['a'].
    """

    def __init__(self, graph: Graph, keys: tuple[str, ...], rows: int) -> None:
        self.graph, self.keys = graph, keys
        places = graph.returned[: len(keys) + rows]
        self.places = [i for i in places if i is not None]
        assert len(self.places) == len(places) == len(keys) + rows

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Captured tensors, the tensors of the carry, those of xs."""
        own, taken = [operands[i] for i in self.places], set(self.places)
        consts = [t for i, t in enumerate(operands) if i not in taken and isinstance(t, torch.Tensor)]
        return consts, own[: len(self.keys)], own[len(self.keys) :]


class Whole(NamedTuple):
    """A scan in eager whose step Dynamo is to trace: what it is shown are stand-ins of one row."""

    spec: ScanSpec
    carry: list[torch.Tensor]
    xs: list[torch.Tensor]
    graded: bool


_made: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def showing(whole: Whole) -> contextlib.AbstractContextManager[None]:
    """Within, the next scan that runs from a graph of Dynamo's is this one."""
    return scoped(shown=[whole])


def shown() -> Whole | None:
    """The scan that Dynamo was shown stand-ins of, once."""
    return active.shown.pop() if active.shown else None


def run(spec: ScanSpec, body: TracedBody, operands: tuple[Any, ...], selector: Any = None) -> tuple[Any, ...]:
    """The results of Dynamo's node: the tensors of carry and xs as they are, the last carry, the ys.

    The graph takes what it reads of the tensors of the carry, of xs (all rows) and of captured ones. It
    returns the tensors of the carry and of xs, the next carry, and ys of which only the first row counts.
    `selector` makes what selects the values that are kept inside steps.
    """
    end, ys = _run(spec, body, operands, selector)
    return (*(operands[i] for i in body.places), *end, *ys)


def _run(spec: ScanSpec, body: TracedBody, operands: tuple[Any, ...], selector: Any) -> tuple[Any, Any]:
    step = _GraphStep(body, spec.name, operands)
    consts, carry, xs = body.split(operands)
    _refuse_layouts(body, spec.name, [*consts, *carry, *xs])
    traced, n = is_tracing() or active.evaluating, spec.length
    assert n is not None  # a loop is a graph break
    if traced and step.draws(operands):
        step.seeded = True
        xs = [*xs, _seeds(n, operands)]
    options: dict[str, Any] = {"offloaded": spec.offloaded if spec.offload else None}
    if traced:
        size, compiler = 1, aot_compiler()
        if compiler is not None:
            size, schedule = in_blocks(spec.schedule, spec.unroll or _block(body.graph, carry, xs), n)
            spec = replace(spec, schedule=schedule)
            options |= {"taped": schedule.keeps_tapes, "selector": selector}
        ambient = Ambient(device_kinds([*consts, *carry, *xs]))
        stacked = in_transform() or in_cuda_graphs()
        options["opaque"] = Opaque(spec.name, compiler, size, ambient, stacked)
    scan, flat = make(step, spec, consts, carry, xs, **options)
    with dual_level_known_if_any():
        return function_run(scan, flat)


def run_whole(whole: Whole, body: TracedBody, operands: tuple[Any, ...], selector: Any) -> tuple[Any, ...]:
    """As `run`, in eager: on the scan that `operands` stand in for, its steps compiled in blocks."""
    step = _GraphStep(body, whole.spec.name, operands)
    consts, carry, xs = body.split(operands)
    _refuse_layouts(body, whole.spec.name, [*consts, *whole.carry, *whole.xs])
    kept = _made.get(body.graph.module)
    if kept is None:
        kept = _made[body.graph.module] = step.draws(operands), {}
    draws, made = kept
    # What Dynamo left open besides tensors is a constant of what is compiled.
    made = made.setdefault(tuple([whole.spec.unroll, *[v for v in step.fixed if v is not None]]), {})
    spec = whole.spec
    options: dict[str, Any] = {"offloaded": spec.offloaded}
    compiler = spec.compile
    assert spec.length is not None and compiler is not None
    if not draws:
        size, schedule = in_blocks(spec.schedule, spec.unroll or _block(body.graph, carry, xs), spec.length)
        spec = replace(spec, schedule=schedule)
        options["blocks"] = UnrolledStep(step, size, spec.reverse, backend(compiler), selector, made)
        options["taped"] = schedule.keeps_tapes
    scan, flat = make(step, spec, consts, whole.carry, whole.xs, **options)
    with torch.set_grad_enabled(whole.graded):
        end, ys = function_run(scan, flat)
    return (*(operands[i] for i in body.places), *end, *ys)


def _refuse_layouts(body: TracedBody, name: str, tensors: Tensors) -> None:
    """Compiled steps are given contiguous tensors, and a step may read memory by the layout that it had."""
    parts = [part for part in body.graph.module.modules() if isinstance(part, torch.fx.GraphModule)]
    reads = any(["as_strided" in str(node.target) for part in parts for node in part.graph.nodes])
    if reads and not all([t.is_contiguous() for t in tensors]):
        raise RematError(
            f"{name}: the body calls as_strided, which reads memory by its layout, and a tensor that it is "
            "given is not contiguous. Compiled steps are given contiguous ones. Pass `x.contiguous()`."
        )


def _block(graph: Graph, carry: Tensors, xs: Tensors) -> int:
    sizes = [example_bytes(t) for t in carry] + [
        example_bytes(t) // max(1, example_of(t.shape[0])) for t in xs
    ]
    small = len(graph.module.graph.nodes) <= _SMALL_GRAPH and sum(sizes) <= _SMALL_ROW
    return BLOCK if small else 1


def in_blocks(schedule: Schedule, size: int, n: int) -> tuple[int, Schedule]:
    """How many steps are compiled at a time, and the schedule of such blocks."""
    for count in (size, 1):
        if count <= n and (blocks := schedule.in_blocks(count, n)) is not None:
            return count, blocks
    return 1, schedule


class _GraphStep:
    """A graph of Dynamo's as a step of a scan: `step(consts, carry, x) -> (carry, ys)`.

    Attributes:
        seeded: whether the last x is the step's seed, from which its random numbers are drawn.
    """

    def __init__(self, body: TracedBody, name: str, operands: tuple[Any, ...]) -> None:
        self.body, self.name, self.seeded = body, name, False
        _drop_aliases(body.graph.module.graph)
        taken = set(body.places)
        self.consts = [i for i, t in enumerate(operands) if i not in taken and isinstance(t, torch.Tensor)]
        # Sizes that Dynamo left open are settled: a schedule, and compiled steps, are for certain ones.
        self.fixed = [
            None if isinstance(t, torch.Tensor) else int(t) if isinstance(t, torch.SymInt) else t
            for t in operands
        ]

    def __call__(self, consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        if not self.seeded:
            return self._evaluated(consts, carry, x)
        with _Seeding(self.name, x[-1]):
            return self._evaluated(consts, carry, x[:-1])

    def _evaluated(self, consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        full = merge(self.fixed, self.consts, consts)
        full = merge(full, self.body.places, [*carry, *(row.unsqueeze(0) for row in x)])
        outs = self._graded(full)[len(self.body.places) :]
        count = len(self.body.keys)
        return list(outs[:count]), [y.select(0, 0) for y in outs[count:]]

    def _graded(self, operands: list[Any]) -> Sequence[Any]:
        # Where the body uses torch.func, the graph leaves saved-tensor hooks as Dynamo found them.
        with hooks_as_they_are():
            if torch.is_grad_enabled():
                return self.body.graph(*operands)
            # And it lacks what turns gradients on inside: they were.
            given = [_ungraded(t) for t in operands]
            with torch.enable_grad():
                return [_ungraded(t) for t in self.body.graph(*given)]

    def draws(self, operands: Sequence[Any]) -> bool:
        """Whether a step draws random numbers, found out on tensors without data; refuses writes."""
        with outside_all_modes():
            mode = fake_mode([])
            with mode, torch.no_grad():
                fakes = [fake(t) if isinstance(t, torch.Tensor) else t for t in operands]
                consts, carry, xs = self.body.split(fakes)
                look = _Looking()
                with scoped(evaluating=True), look:
                    rows = [x.select(0, 0) for x in xs]
                    with unwritten(self.name, self.body.keys, carry, rows, consts):
                        run_transparently(self._evaluated, (consts, carry, rows), {})
        return look.found


def _drop_aliases(graph: torch.fx.Graph) -> None:
    """Take out the views of a tensor as itself that told operands apart for Dynamo: dual numbers of unlike
    layouts refuse them."""
    for node in graph.find_nodes(op="call_method", target="view_as"):
        if node.args[0] is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _ungraded(value: Any) -> Any:
    # Not where it does nothing: detach takes tangents away, too.
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _seeds(n: int, operands: Sequence[Any]) -> torch.Tensor:
    """A seed a step, drawn from the default generator: eight bytes a step that the backward keeps."""
    device = next((t.device for t in operands if isinstance(t, torch.Tensor)), None)
    # Below the levels: vmap may refuse draws, and batches what the steps draw from these.
    with below_levels():
        return (torch.rand(n, dtype=torch.float64, device=device) * _LARGEST).to(torch.int64)


_LARGEST = 2**31 - 1
_STRIDE = 0x9E3779B1  # odd, and far from small multiples: seeds of one step's draws lie apart


class _Seeding(DispatchMode):
    """Draws a step's random numbers from its seed."""

    def __init__(self, name: str, seed: torch.Tensor) -> None:
        super().__init__()
        self.name, self.seed, self.count = name, seed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (traits(func).random and ops_draws(func, args, kwargs)):
            return func(*args, **kwargs)
        self.count += 1
        seed = (self.seed + self.count * _STRIDE) % _LARGEST
        if active.seeding:  # a region in the body wants a seed of its own
            return seed
        refuse_generator(self.name, func, args, kwargs)
        if not can_seed(func, args, kwargs):
            raise RematError(
                f"{self.name}: the body draws with {func}, at {user_line()}, which cannot be drawn "
                "again from a seed in a compiled graph. Draw outside of the scan and pass the numbers in xs."
            )
        return draw(seed, func, args, kwargs)


class _Looking(DispatchMode):
    """Notes whether anything draws."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.found |= traits(func).random and ops_draws(func, args, kwargs)
        return func(*args, **kwargs)
