"""Scans in graphs that are being traced for a compiler.

Dynamo traces the user's body once, on the first row of xs, into a graph module. Its captured tensors are
operands (`torch`'s wrapper operator, as for regions). When AOTAutograd traces below autograd, `run` makes a
scan of that graph and calls it under whatever functorch levels are active. The rules are those of eager.
Below them forward and pull-back are one opaque op each (`custom_op`), whatever the number of steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import (
    DispatchMode,
    backend,
    below_levels,
    dual_level_known_if_any,
    example_bytes,
    example_of,
    fake_mode,
    hooks_as_they_are,
    in_cuda_graphs,
    in_transform,
    is_tracing,
    outside_all_modes,
)
from remat.transforms.compat import compiler as aot_compiler
from remat.transforms.context import active, scoped
from remat.transforms.entry import Graph, run_transparently
from remat.transforms.errors import RematError, user_line
from remat.transforms.ops import draws as ops_draws
from remat.transforms.ops import traits
from remat.transforms.pytree import merge
from remat.transforms.scan.body import unwritten
from remat.transforms.scan.compiled import UnrolledStep
from remat.transforms.scan.function import run as function_run
from remat.transforms.scan.instructions import Schedule
from remat.transforms.scan.spec import Leaves, ScanSpec, Tensors, make
from remat.transforms.scan.traced.custom_op import Opaque, fake
from remat.transforms.state import Ambient, can_seed, device_kinds, draw, refuse_generator

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
