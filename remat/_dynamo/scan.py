"""`scan_remat` in code that `torch.compile` traces: what Dynamo sees of a scan.

One call of the operator that regions use. Its function evaluates the body once, on the first row of xs, and
gives the shapes of the results of all steps. What becomes of the graph that Dynamo makes of it is decided at
trace time (`remat.transforms.scan.traced.entry`).
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from remat._dynamo.intermediates import refusing, sessions
from remat._dynamo.region import bypass, describe as region_describe, rebuild as region_rebuild
from remat._overrides import overrides
from remat._torch import hooks_guarded, share_floats
from remat.policies import Policy, PolicySelector, save_nothing
from remat.schedules import Schedule, as_schedule
from remat.transforms import (
    BoundedCache,
    RematError,
    active,
    flatten,
    map_leaves,
    map_only,
    paths,
    split,
    unflatten,
)
from remat.transforms.compat import is_tracing
from remat.transforms.entry import Graph
from remat.transforms.scan import ScanSpec, carry_of, pair_of, structure_of, ys_of
from remat.transforms.scan.traced import TracedBody, Whole, run, run_whole, showing, shown


def call_scan(
    name: str,
    body: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    n: int,
    reverse: bool,
    checkpoints: Any,
    offload: bool,
    on_step: Any,
    policy: Policy = save_nothing,
    joined: int | None = None,
    unroll: int | None = None,
) -> Any:
    """`scan_remat` while Dynamo traces, of what it has checked."""
    if sessions():
        body = refusing(name, body)
    share_floats()
    _refuse(name, checkpoints, on_step)
    carry, spec = flatten(init)
    rows, x_spec = flatten(xs)
    tensors, at = split(carry)
    stacks, x_at = split(rows)
    if n == 0:
        row = _merged(rows, x_at, [x.new_zeros(x.shape[1:]) for x in stacks], x_spec)
        _, y = body(init, row)
        return init, map_leaves(lambda t: None if t is None else t.new_empty((0, *t.shape)), y)

    def first(*operands: torch.Tensor) -> Any:
        # Dynamo's graph has operands in the order of their first use, and looks up an attribute (`h.mT`) of
        # what it is given outside. A region in the body that is given an alias returns one of its own.
        aliases = [t.view_as(t) for t in operands]
        own, more = aliases[: len(tensors)], aliases[len(tensors) :]
        row = _merged(rows, x_at, [x[0] for x in more], x_spec)
        before = _merged(carry, at, own, spec)
        given = structure_of(before)  # here: Dynamo's trees are not those of eager, where this may run too
        state, y = pair_of(name, body(before, row))
        new = carry_of(name, state, given)
        _check_constants(name, carry, new)
        ys_of(name, y)
        ends = [new[i].view_as(new[i]) for i in at]
        # Of the right shape; the number of dimensions that one row stands for.
        return list(operands), ends, map_leaves(lambda leaf: _repeated(leaf, n), y)

    where = paths(init)
    facts = (name, tuple([where[i] for i in at]), len(stacks), reverse, offload, joined, unroll)
    # Operands of their own: one tensor may be carry, row and captured at once.
    own = [t.view_as(t) for t in (*tensors, *stacks)]
    plan = describe(checkpoints), None if policy == save_nothing else region_describe(policy)
    enter_here = functools.partial(enter, facts, n if not stacks else None, plan)
    _, ends, ys = bypass(enter_here, first, *own)
    return _merged(carry, at, ends, spec), ys


def _merged(leaves: list[Any], at: list[int], tensors: Any, spec: Any) -> Any:
    full = list(leaves)
    for i, tensor in zip(at, tensors):  # noqa: B905  Dynamo of 2.11 knows no strict=
        full[i] = tensor
    return unflatten(full, spec)


def _repeated(y: Any, n: int) -> Any:
    return None if y is None else y.unsqueeze(0).expand(n, *y.shape)


def _refuse(name: str, checkpoints: Any, on_step: Any) -> None:
    if on_step is not None:
        raise RematError(f"{name}: on_step is not called from a compiled graph; leave it out there.")
    if isinstance(checkpoints, str) and checkpoints == "auto":
        raise RematError(
            f"{name}: checkpoints='auto' measures a step, which cannot be done while torch.compile traces; "
            "write the number of carries, 'sqrt' or 'all'."
        )


def _check_constants(name: str, carry: list[Any], new: list[Any]) -> None:
    for i in range(len(carry)):
        if not isinstance(carry[i], torch.Tensor) and carry[i] != new[i]:
            raise RematError(
                f"{name}: leaf {i} of the carry is {carry[i]!r} and changes from step to step. A compiled "
                "step takes Python numbers for constants; make it a tensor: torch.tensor(...)."
            )


def describe(checkpoints: Any) -> Any:
    """A schedule in values that Dynamo takes for constants."""
    if not isinstance(checkpoints, Schedule):
        return checkpoints
    kind: Any = type(checkpoints)
    if not hasattr(kind, "__match_args__"):
        raise RematError(
            f"checkpoints: {kind.__name__} is not a dataclass, so a compiled graph cannot make it anew; "
            "write @dataclass(frozen=True), with the schedule's constants as its fields."
        )
    names = [n for n in kind.__match_args__ if n != "slots" or kind.__name__ != "Multilevel"]
    return kind, tuple([(n, describe(getattr(checkpoints, n))) for n in names])


def rebuild(description: Any) -> Any:
    """The schedule that `describe` described."""
    if not isinstance(description, tuple):
        return description
    kind, fields = description
    return kind(**{name: rebuild(value) for name, value in fields})


def enter(facts: tuple[Any, ...], n: int | None, plan: Any, graph: Any) -> Callable[..., Any]:
    """The function of flat operands that runs the scan whose step is `graph`."""
    return functools.partial(_run, facts, n, plan, graph)


def _run(facts: Any, n: int | None, plan: Any, graph: Any, *operands: Any) -> Any:
    name, where, rows, reverse, offload, joined, unroll = facts
    schedule = rebuild(plan[0])
    policy = overrides.traced
    if policy is None:
        policy = save_nothing if plan[1] is None else region_rebuild(plan[1])
    if not isinstance(graph, torch.fx.GraphModule):
        # Dynamo gave the scan up for a graph break and now calls it with what it was given, in eager.
        options = {"length": n, "reverse": reverse, "offload": offload, "policy": policy}
        return _in_eager(graph, operands, len(where), checkpoints=schedule, **options)
    body = TracedBody(Graph(graph), where, rows)
    if is_tracing():
        body.graph.fix(operands)
    _, carry, xs = body.split(operands)
    n = int(xs[0].shape[0]) if n is None else n
    options = (as_schedule(schedule), reverse, policy, offload)
    spec = ScanSpec(name, n, structure_of(carry), structure_of(xs), *options, joined=joined, unroll=unroll)
    selector = None
    if policy != save_nothing:
        selector = functools.partial(
            PolicySelector, policy.bind(body.graph, operands, {}).interleaved(), name
        )
    whole = None if active.evaluating or is_tracing() else shown()
    if whole is not None:
        return run_whole(whole, body, operands, selector)
    return run(spec, body, operands, selector)


# Dynamo counts recompilations by code object: every body gets a copy of its own, for each shape of operands.
_entries: weakref.WeakKeyDictionary[Any, BoundedCache[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def run_compiled(body: Callable[..., Any], init: Any, xs: Any, whole: Whole) -> Any:
    """`scan_remat(compile=True)` in eager: Dynamo traces one step, and guards what the body closes over.

    What it is shown are stand-ins of one row, so that nothing depends on the number of steps. Its graph then
    runs the scan itself (`scan.traced.entry.run_whole`).
    """
    spec = whole.spec
    code = getattr(body, "__code__", None) or type(body).__call__.__code__
    shapes = tuple([(t.shape, t.dtype, t.device) for t in (*whole.carry, *(x[:1] for x in whole.xs))])
    key = spec.compile, spec.unroll, spec.name, shapes, spec.policy if spec.policy != save_nothing else None
    entries = _entries.setdefault(code, BoundedCache(64))
    if key not in entries:
        entries[key] = torch.compile(
            types.FunctionType(_traced.__code__.replace(), globals()),
            backend="eager",
            fullgraph=True,
            dynamic=False,
        )
    standing = map_only(torch.Tensor, torch.Tensor.detach, init)
    rows = map_only(torch.Tensor, lambda x: x.detach()[:1], xs)
    with torch.enable_grad(), showing(whole), hooks_guarded():
        return entries[key](spec.name, body, standing, rows, spec.reverse, spec.policy)


def _traced(name: str, body: Any, init: Any, xs: Any, reverse: bool, policy: Policy) -> Any:
    return call_scan(name, body, init, xs, 1, reverse, "all", False, None, policy)


# `scan_remat` itself, which imports this file.
_eager: list[Callable[..., Any]] = []


def runs_in_eager(scan: Callable[..., Any]) -> None:
    """Let `scan` run the scans that Dynamo gave up."""
    _eager[:] = [scan]


def _in_eager(first: Any, operands: tuple[torch.Tensor, ...], count: int, **options: Any) -> Any:
    def body(carry: Any, x: Any) -> Any:
        _, ends, ys = first(*carry, *[t.unsqueeze(0) for t in x or ()])
        return ends, map_leaves(lambda y: None if y is None else y[0], ys)

    end, ys = _eager[0](body, list(operands[:count]), list(operands[count:]) or None, **options)
    return operands, end, ys
