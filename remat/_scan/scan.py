"""`scan_remat`: lax.scan for PyTorch, whose backward runs a checkpointing schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from remat._api import remat
from remat._dynamo import call_scan, run_compiled, runs_in_eager
from remat.policies import Policy, as_policy, save_everything, save_nothing
from remat.schedules import All, Schedule, Segmented, Sqrt, as_schedule, auto
from remat.transforms import flatten, paths, smooth, unflatten
from remat.transforms.closure import MOST_TRIES, Bindings, Missed, captured, changing
from remat.transforms.compat import (
    dynamo_errors,
    hooks_allowed,
    in_transform,
    storage_key,
    unwrapped,
    watched,
)
from remat.transforms.region import selecting
from remat.transforms.scan import Body, make, run
from remat.transforms.scan.traced import Whole

C = TypeVar("C")


def scan_remat(
    body: Callable[[C, Any], tuple[C, Any]],
    init: C,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    policy: Any = save_nothing,
    checkpoints: str | int | Schedule = "sqrt",
    budget: int | str | None = None,
    offload: bool = False,
    compile: bool | str = False,
    on_step: Callable[[str, int], None] | None = None,
) -> tuple[C, Any]:
    """Fold `body` over the leading axis of `xs`, keeping few carries for the backward.

    As `jax.lax.scan`: `body(carry, x) -> (carry, y)`; returns the last carry and the stacked ys. What the
    body closes over is differentiated, random numbers are the same when a step is evaluated again. Composes
    with plain autograd (double backward too) and with every `torch.func` transform, in any nesting.

    Args:
        body: a function of (carry, x). The carry keeps its structure, shapes, dtypes and Python types.
        init: the first carry, any pytree of tensors, numbers, bools and None.
        xs: a pytree of tensors of shape [length, ...] (None leaves allowed), or None.
        length: the number of steps; needed where `xs` has no tensor.
        reverse: go from the last row to the first; y of a row still lies at that row.
        policy: what is kept inside steps whose carry is kept. It speaks where several steps' values are
            alive at once: with "all" (the whole scan) and with "sqrt" (a segment), compiled or not. With a
            number of carries every step is reversed right after it is evaluated, and nothing is left to
            decide.
        checkpoints: "all" (every carry); "sqrt" (two levels: about 2 sqrt(length) carries, one sweep more);
            an int c (c carries, the initial one counted, and exactly the least number of evaluations:
            `Revolve`); "auto" (least work within `budget`); or a schedule of `remat.schedules`.
        budget: with "auto", bytes for carries and for what the backward of the steps in work keeps; an int
        or a
            string such as "64MiB".
        offload: kept carries lie in host memory between forward and backward.
        compile: compile blocks of steps, and their pull-back, with `torch.compile`'s backend (a string names
            another), whatever the length. Under `torch.func` steps run as they are.
        on_step: called with ("forward" | "advance" | "reverse", step) after each evaluation.

    Returns:
        The last carry, and the tree of ys, each of shape [length, ...].

    Raises:
        TypeError: a carry that changes structure, shape, dtype or type; ys or xs that are no tensors.
        ValueError: no length, lengths that differ, a number of carries below 1.
        RematError: a body that writes into its carry.
        An exception of the body's is passed on, with a note that names the step.

    Example:
        >>> import torch
        >>> from remat import scan_remat
        >>> w = torch.tensor(0.5, requires_grad=True)
        >>> def body(h, x):
        ...     return w * h + x, h
        >>> last, ys = scan_remat(body, torch.tensor(0.0), torch.ones(4), checkpoints=2)
        >>> last.item(), ys.tolist()
        (1.875, [0.0, 1.0, 1.5, 1.75])
        >>> last.backward()
        >>> w.grad
        tensor(2.7500)
    """
    if torch.compiler.is_dynamo_compiling():
        policy = as_policy(policy)
        return call_scan(body, init, xs, length, reverse, checkpoints, budget, offload, on_step, policy)
    name = f"scan_remat({getattr(body, '__qualname__', type(body).__name__)})"
    policy = as_policy(policy)
    rows, n = _rows(xs, length, name)
    if n == 0:
        return init, _no_ys(body, init, xs, rows, name)
    schedule = _schedule(checkpoints, budget, n, body, init, rows, xs, name)
    if policy == save_nothing and isinstance(schedule, All) and selecting():
        # The policy of the region around says of each step's values which are kept, as in JAX: the steps are
        # its own then, and it computes again what they lack.
        if not (offload or compile or on_step):
            policy = save_everything
    if compile and _compilable(init):
        backend = compile if isinstance(compile, str) else "inductor"
        return _compiled(body, init, xs, rows, n, schedule, name, reverse, offload, on_step, backend, policy)
    if policy != save_nothing:
        if isinstance(schedule, All):
            return _taped(body, init, xs, rows, n, reverse, policy, name)
        if isinstance(schedule, Sqrt):
            schedule = Segmented(schedule.stride(n))
        if isinstance(schedule, Segmented):
            body = _region(body, policy)
    return _with_captured(body, body, init, xs, rows, n, schedule, name, reverse, offload, on_step)


def _compilable(init: Any) -> bool:
    """Whether steps can be compiled: under functorch, or where somebody watches, they run as they are."""
    leaves = flatten(init)[0]
    # A number in the carry that changes would be a constant of the graph.
    plain = all(isinstance(t, torch.Tensor) and not t.is_complex() for t in leaves)
    return bool(leaves) and plain and not (in_transform() or watched())


def _compiled(
    body: Callable[..., Any],
    init: Any,
    xs: Any,
    rows: list[torch.Tensor],
    n: int,
    schedule: Schedule,
    name: str,
    reverse: bool,
    offload: bool,
    on_step: Callable[[str, int], None] | None,
    backend: str,
    policy: Policy,
) -> tuple[Any, Any]:
    options: dict[str, Any] = {"reverse": reverse, "on_step": on_step, "name": name}
    options["offloaded"] = (lambda slot: True) if offload else getattr(schedule, "offloaded", None)
    carry, graded = flatten(init)[0], torch.is_grad_enabled()
    whole = Whole(carry, rows, n, schedule, backend, graded, options)
    try:
        return run_compiled(body, init, xs, whole, policy)
    except dynamo_errors():
        # What is wrong with the body, if anything, is said better where it runs.
        step = Body(body, init, xs, [], name)
        step.trusted = True
        with torch.no_grad():
            step([], carry, [x.select(0, 0) for x in rows])
        raise


def _with_captured(
    body: Callable[..., Any],
    roots: Any,
    init: Any,
    xs: Any,
    rows: list[torch.Tensor],
    n: int | None,
    schedule: Schedule,
    name: str,
    reverse: bool = False,
    offload: bool = False,
    on_step: Callable[[str, int], None] | None = None,
    condition: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Run with the captured tensors as operands; one that the search missed is added and the scan starts
    again."""
    if torch.compiler.is_compiling():
        # Opaque to an enclosing torch.compile: traced, the loop would be unrolled and its graph grow with n.
        apart: Any = torch.compiler.disable(_with_captured)
        return apart(
            body,
            roots,
            init,
            xs,
            rows,
            n,
            schedule,
            name,
            reverse,
            offload,
            on_step,
            condition,
        )
    found = captured(roots)
    for _ in range(MOST_TRIES):
        step = Body(body, init, xs, found, name)
        options: dict[str, Any] = {"reverse": reverse, "on_step": on_step, "name": name}
        options["around"] = Bindings(body).restored
        if condition is not None:
            options["proceed"] = functools.partial(_proceed, step, condition)
        options["offloaded"] = (lambda slot: True) if offload else getattr(schedule, "offloaded", None)
        scan, operands = make(step, found, flatten(init)[0], rows, n, schedule, **options)
        try:
            end, ys = run(scan, operands)
        except Missed as missed:
            if any(tensor is missed.tensor for tensor in found):
                raise  # an enclosing region lacks it, not this scan
            found = [*found, missed.tensor]
            continue
        carry = unflatten(end, step.carry_spec)
        return carry, step.stacked(ys) if condition is None else None
    raise changing(name)


def _proceed(step: Body, condition: Callable[[Any], Any], consts: Any, carry: list[Any]) -> Any:
    with step.swapped(consts, carry):
        return condition(unflatten(carry, step.carry_spec))


def _rows(xs: Any, length: int | None, name: str) -> tuple[list[torch.Tensor], int]:
    """The tensors of xs and the number of steps."""
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
        raise ValueError(f"{name}: got length={length!r}; a number of steps is an int of at least 0.")
    rows: list[torch.Tensor] = []
    sizes: dict[str, int] = {}
    for path, row in zip(paths(xs), flatten(xs)[0], strict=True):
        if row is None:
            continue
        if not isinstance(row, torch.Tensor) or row.dim() == 0:
            got = (
                "a tensor without dimensions" if isinstance(row, torch.Tensor) else f"a {type(row).__name__}"
            )
            raise TypeError(
                f"{name}: xs{path} is {got}; xs are tensors of shape [length, ...]. A constant belongs in "
                "the carry or in a closure."
            )
        rows.append(row)
        sizes[f"xs{path}"] = row.shape[0]
    if length is not None:
        sizes["length"] = length
    if not sizes:
        raise ValueError(f"{name}: xs has no tensor; write length=...")
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{key} has {size}" for key, size in sizes.items())
        raise ValueError(f"{name}: the numbers of steps differ: {said}; all must be the same.")
    return rows, next(iter(sizes.values()))


def _no_ys(body: Callable[..., Any], init: Any, xs: Any, rows: list[torch.Tensor], name: str) -> Any:
    """The ys of a scan without steps: the body is evaluated on zeros to learn their shapes."""
    step = Body(body, init, xs, [], name)
    step.trusted = True
    with torch.no_grad():
        _, ys = step([], flatten(init)[0], [row.new_zeros(row.shape[1:]) for row in rows])
    return step.stacked([y.new_empty((0, *y.shape)) for y in ys])


def _schedule(
    checkpoints: Any,
    budget: Any,
    n: int,
    body: Callable[..., Any],
    init: Any,
    rows: list[torch.Tensor],
    xs: Any,
    name: str,
) -> Schedule:
    if checkpoints != "auto":
        if budget is not None:
            raise ValueError(f"{name}: budget={budget!r} goes with checkpoints='auto', not {checkpoints!r}.")
        return as_schedule(checkpoints)
    if budget is None:
        raise ValueError(f"{name}: checkpoints='auto' needs a budget in bytes: write budget='64MiB'.")
    state, tape = _sizes(body, init, rows, xs, name)
    return auto(n, _bytes(budget), state, tape)


def _sizes(
    body: Callable[..., Any], init: Any, rows: list[torch.Tensor], xs: Any, name: str
) -> tuple[int, int]:
    """Bytes of a carry, and of what the backward of one step keeps, from one evaluation of the first step."""
    carry = flatten(init)[0]
    mine = [t for t in (*carry, *rows, *captured(body)) if isinstance(t, torch.Tensor)]
    given = {storage_key(unwrapped(t)) for t in mine}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        plain = unwrapped(tensor)
        key = storage_key(plain)
        if key not in given:
            kept[key] = plain.untyped_storage().nbytes()
        return tensor

    step = Body(body, init, xs, [], name)
    step.trusted = True
    # Under functorch the carry is tracked as it is, or else its part of the tape is no part of the
    # derivative.
    mark = not in_transform()
    marked = [t.detach().requires_grad_() if mark and smooth(t) else t for t in carry]
    given |= {storage_key(unwrapped(t)) for t in marked if isinstance(t, torch.Tensor)}
    with (
        torch.enable_grad(),
        hooks_allowed(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        step([], marked, [row.select(0, 0) for row in rows])
    size = sum(unwrapped(t).nbytes for t in carry if isinstance(t, torch.Tensor))
    return size, size + sum(kept.values())


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(budget: Any) -> int:
    if isinstance(budget, str):
        text = budget.strip().upper()
        unit = next((u for u in sorted(_UNITS, key=len, reverse=True) if text.endswith(u)), "")
        try:
            return math.floor(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
        except ValueError:
            pass
    elif isinstance(budget, int) and not isinstance(budget, bool):
        return budget
    raise ValueError(f"budget: got {budget!r}; write bytes as an int, or '64MiB', '2GB'.")


def _region(body: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """The body as a rematerialized region of its own."""
    if policy == save_everything:
        return body
    return remat(body, policy=policy)


def _taped(
    body: Callable[..., Any],
    init: Any,
    xs: Any,
    rows: list[torch.Tensor],
    n: int,
    reverse: bool,
    policy: Policy,
    name: str,
) -> tuple[Any, Any]:
    """Every carry, and of every step what the policy keeps: a loop over regions, one graph."""
    step = Body(_region(body, policy), init, xs, [], name)
    step.trusted = True
    carry, ys = flatten(init)[0], []
    k, last = 0, n - 1
    try:
        for k in range(n):
            at = last - k if reverse else k
            carry, y = step([], carry, [row.select(0, at) for row in rows])
            ys.append(y)
    except Exception as error:
        error.add_note(f"in step {k} of {name}")
        raise
    ordered = ys[::-1] if reverse else ys
    stacked = [torch.stack(column) for column in zip(*ordered, strict=True)]
    return unflatten(carry, step.carry_spec), step.stacked(stacked)


runs_in_eager(scan_remat)
