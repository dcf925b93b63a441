"""`scan_remat` in code that `torch.compile` traces: what Dynamo sees of a scan.

One call of the operator that regions use, of a function that evaluates the body once, on the first row of
xs, and says of which shapes the results of all steps are. What becomes of the graph that Dynamo makes of it
is decided at trace time (`remat.transforms.scan.traced.entry`).
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from remat._dynamo.intermediates import refusing, sessions
from remat._dynamo.region import bypass
from remat._dynamo.region import describe as region_describe
from remat._dynamo.region import rebuild as region_rebuild
from remat.policies import Policy, PolicySelector, save_nothing
from remat.schedules import Schedule, as_schedule
from remat.transforms import BoundedCache, RematError
from remat.transforms.compat import is_tracing
from remat.transforms.entry import Graph
from remat.transforms.scan.traced import Facts, Whole, evaluating, run, run_whole, showing, shown


def call_scan(
    body: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    checkpoints: Any,
    budget: Any,
    offload: bool,
    on_step: Any,
    policy: Policy = save_nothing,
) -> Any:
    """`scan_remat` while Dynamo traces."""
    name = f"scan_remat({getattr(body, '__qualname__', type(body).__name__)})"
    if sessions():
        body = refusing(name, body)
    _refuse(name, checkpoints, budget, on_step)
    carry, spec = pytree.tree_flatten(init)
    rows, x_spec = pytree.tree_flatten(xs)
    tensors, at = _tensors(carry)
    stacks, x_at = _tensors(rows)
    n = _length(stacks, length, name)
    if n == 0:
        row = _merged(rows, x_at, [x.new_zeros(x.shape[1:]) for x in stacks], x_spec)
        _, y = body(init, row)
        return init, pytree.tree_map(lambda t: None if t is None else t.new_empty((0, *t.shape)), y)

    def first(*operands: torch.Tensor) -> Any:
        # A region in the body that is given an operand returns it, as a result of its own.
        aliases = [t.view_as(t) for t in operands]
        own, given = aliases[: len(tensors)], aliases[len(tensors) :]
        row = _merged(rows, x_at, [x[0] for x in given], x_spec)
        out = body(_merged(carry, at, own, spec), row)
        new, ys = _checked(name, out, init, carry, spec)
        ends = [new[i].view_as(new[i]) for i in at]
        # Of the right shape; the number of dimensions that one row stands for.
        return list(operands), ends, pytree.tree_map(lambda y: _repeated(y, n), ys)

    facts = (name, len(tensors), len(stacks), bool(reverse), bool(offload))
    # Operands of their own: one tensor may be carry, row and captured at once.
    own = [t.view_as(t) for t in (*tensors, *stacks)]
    spec_of_policy = None if policy == save_nothing else region_describe(policy)
    plan = describe(checkpoints), spec_of_policy
    enter_here = functools.partial(enter, facts, n if not stacks else None, plan)
    _, ends, ys = bypass(enter_here, first, *own)
    return _merged(carry, at, ends, spec), ys


def _tensors(leaves: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return [leaves[i] for i in at], at


def _merged(leaves: list[Any], at: list[int], tensors: Any, spec: Any) -> Any:
    full = list(leaves)
    for i, tensor in zip(at, tensors):  # noqa: B905  Dynamo of 2.11 knows no strict=
        full[i] = tensor
    return pytree.tree_unflatten(full, spec)


def _repeated(y: Any, n: int) -> Any:
    return None if y is None else y.unsqueeze(0).expand(n, *y.shape)


def _length(stacks: list[torch.Tensor], length: int | None, name: str) -> int:
    sizes = [x.shape[0] for x in stacks if x.dim() > 0]
    if len(sizes) < len(stacks):
        raise TypeError(f"{name}: xs are tensors of shape [length, ...], and one has no dimensions.")
    if length is not None:
        sizes.append(length)
    if not sizes:
        raise ValueError(f"{name}: xs has no tensor; write length=...")
    for size in sizes:
        if size != sizes[0]:
            raise ValueError(f"{name}: the numbers of steps differ: {sizes}; all must be the same.")
    return sizes[0]


def _refuse(name: str, checkpoints: Any, budget: Any, on_step: Any) -> None:
    if on_step is not None:
        raise RematError(f"{name}: on_step is not called from a compiled graph; leave it out there.")
    if checkpoints == "auto" or budget is not None:
        raise RematError(
            f"{name}: checkpoints='auto' measures a step, which cannot be done while torch.compile traces; "
            "write the number of carries, 'sqrt' or 'all'."
        )


def _checked(name: str, out: Any, init: Any, carry: list[Any], spec: Any) -> tuple[list[Any], Any]:
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"{name}: the body must return a pair (carry, y).")
    new, new_spec = pytree.tree_flatten(out[0])
    if new_spec != spec:
        raise TypeError(
            f"{name}: the body returned a carry of another structure than the one that came in; both must be "
            "the same at every step."
        )
    for i in range(len(carry)):
        before, after = carry[i], new[i]
        if isinstance(before, torch.Tensor):
            if not isinstance(after, torch.Tensor):
                raise TypeError(
                    f"{name}: leaf {i} of the carry came in as a tensor and was returned as none."
                )
            if before.shape != after.shape or before.dtype != after.dtype:
                raise TypeError(
                    f"{name}: leaf {i} of the carry came in as {before.dtype}{list(before.shape)} and was "
                    f"returned as {after.dtype}{list(after.shape)}; shape and dtype of the carry must be the "
                    "same at every step."
                )
        elif isinstance(after, torch.Tensor) or before != after:
            raise RematError(
                f"{name}: leaf {i} of the carry is {before!r} and changes from step to step. A compiled step "
                "takes Python numbers for constants; make it a tensor: torch.tensor(...)."
            )
    for leaf in pytree.tree_leaves(out[1]):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{name}: ys are stacked, so they must be tensors; write torch.as_tensor(...).")
    return new, out[1]


def describe(checkpoints: Any) -> Any:
    """A schedule in values that Dynamo takes for constants."""
    if not isinstance(checkpoints, Schedule):
        return checkpoints
    kind: Any = type(checkpoints)
    if not hasattr(kind, "__match_args__"):
        raise RematError(
            f"checkpoints: {kind.__name__} is no dataclass, so a compiled graph cannot make it anew; write "
            "@dataclass(frozen=True), with the schedule's constants as its fields."
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
    name, carry, rows, reverse, offload = facts
    schedule, policy = rebuild(plan[0]), None if plan[1] is None else region_rebuild(plan[1])
    if not isinstance(graph, torch.fx.GraphModule):
        # Dynamo gave the scan up for a graph break and now calls it with what it was given, in eager.
        return _in_eager(facts, n, schedule, policy, graph, operands)
    body = Graph(graph)
    if n is None:
        at = body.returned[carry]
        assert at is not None
        n = int(operands[at].shape[0])
    known = Facts(name, n, carry, rows, reverse, offload)
    selector = None
    if policy is not None:
        selector = functools.partial(PolicySelector, policy.bind(body, operands, {}).interleaved(), name)
    whole = None if evaluating() or is_tracing() else shown()
    if whole is not None:
        return run_whole(whole, known, body, operands, selector)
    return run(known, as_schedule(schedule), body, operands, selector)


# Dynamo counts recompilations by code object: every body gets a copy of its own, for each shape of operands.
_entries: weakref.WeakKeyDictionary[Any, BoundedCache[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def run_compiled(body: Callable[..., Any], init: Any, xs: Any, whole: Whole, policy: Policy) -> Any:
    """`scan_remat(compile=True)` in eager: Dynamo traces one step, and guards what the body closes over.

    What it is shown are stand-ins of one row, so that nothing depends on the number of steps. Its graph then
    runs the scan itself (`scan.traced.entry.run_whole`).
    """
    code = getattr(body, "__code__", None) or type(body).__call__.__code__
    shapes = tuple([(t.shape, t.dtype, t.device) for t in (*whole.carry, *(x[:1] for x in whole.xs))])
    key = whole.backend, whole.options["name"], shapes, policy if policy != save_nothing else None
    entries = _entries.setdefault(code, BoundedCache(64))
    if key not in entries:
        entries[key] = torch.compile(
            types.FunctionType(_traced.__code__.replace(), globals()),
            backend="eager",
            fullgraph=True,
            dynamic=False,
        )
    standing = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, init)
    rows = pytree.tree_map_only(torch.Tensor, lambda x: x.detach()[:1], xs)
    with torch.enable_grad(), showing(whole):
        return entries[key](body, standing, rows, whole.options["reverse"], policy)


def _traced(body: Any, init: Any, xs: Any, reverse: bool, policy: Policy) -> Any:
    return call_scan(body, init, xs, 1, reverse, "all", None, False, None, policy)


# `scan_remat` itself, which imports this file.
_eager: list[Callable[..., Any]] = []


def runs_in_eager(scan: Callable[..., Any]) -> None:
    """Let `scan` run the scans that Dynamo gave up."""
    _eager[:] = [scan]


def _in_eager(
    facts: Any, n: Any, checkpoints: Any, policy: Any, first: Any, operands: tuple[torch.Tensor, ...]
) -> Any:
    _, carry, _, reverse, offload = facts

    def body(carry: Any, x: Any) -> Any:
        _, ends, ys = first(*carry, *[t.unsqueeze(0) for t in x or ()])
        return ends, pytree.tree_map(lambda y: None if y is None else y[0], ys)

    init, xs = list(operands[:carry]), list(operands[carry:]) or None
    options: dict[str, Any] = {"reverse": reverse, "offload": offload, "checkpoints": checkpoints}
    options["policy"] = policy or save_nothing
    (scan_remat,) = _eager
    end, ys = scan_remat(body, init, xs, length=n, **options)
    return operands, end, ys
