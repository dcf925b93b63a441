"""`scan_remat`: lax.scan for PyTorch, whose backward runs a checkpointing schedule."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from remat._core import described, isolating, parse_bytes
from remat._dynamo import call_scan, run_compiled, runs_in_eager
from remat._region import with_policy
from remat._torch import dynamo_errors
from remat.policies import Policy, policy_given, save_everything, save_nothing
from remat.schedules import All, Schedule, Segmented, Sqrt, as_schedule, auto, check_checkpoints
from remat.transforms import (
    RematError,
    WrongType,
    WrongValue,
    changing,
    flatten,
    is_tensor,
    smooth,
    unflatten,
)
from remat.transforms.closure import (
    MOST_TRIES,
    Bindings,
    Missed,
    anew,
    broken_off,
    captured,
    known_around,
    places_of,
    reached,
    refuse_derivatives,
    swapping,
)
from remat.transforms.compat import (
    dual_level_open,
    functions_as_they_are,
    hooks_allowed,
    in_transform,
    is_hook_refusal,
    storage_key,
    unwrapped,
    watched,
)
from remat.transforms.region import selecting
from remat.transforms.scan import (
    Body,
    ScanSpec,
    Structure,
    check_budget,
    make,
    name_of,
    rows_of,
    run,
    structure_of,
    unwritten,
    with_step_note,
)
from remat.transforms.scan.traced import Whole
from remat.transforms.state import Called, RandomState, under_levels, users_aside

C = TypeVar("C")
Rows = list[torch.Tensor]


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
    unroll: int | None = None,
) -> tuple[C, Any]:
    """Fold `body` over the leading axis of `xs`, keeping few carries for the backward.

    As `jax.lax.scan`: `body(carry, x) -> (carry, y)`. Returns the last carry and the stacked ys. What the
    body closes over is differentiated. Random numbers are the same when a step is evaluated again. Composes
    with plain autograd (double backward too) and with every `torch.func` transform, in any nesting.

    Args:
        body: a function of (carry, x). The carry keeps its structure, shapes, dtypes and Python types.
        init: the first carry, any pytree of tensors, numbers, bools and None.
        xs: a pytree of tensors of shape [length, ...] (None leaves allowed), or None.
        length: the number of steps; needed where `xs` has no tensor.
        reverse: go from the last row to the first; y of a row still lies at that row.
        policy: what is kept inside steps. It applies if values of several steps are alive at once: with
            "all" (the whole scan) and with "sqrt" (a segment). It has no effect with a number of carries, as
            every step is then reversed right after it is evaluated.
        checkpoints: which carries are kept. "all", or "sqrt" (about 2 sqrt(length) carries, one sweep more).
            An int c keeps c carries, the initial one counted, and evaluates least (`Revolve`). "auto" does
            the least work within `budget`. Or a schedule of `remat.schedules`.
        budget: with "auto", bytes for carries and for the values of the steps in work; an int, or a string
            such as "64MiB".
        offload: kept carries lie in host memory between forward and backward.
        compile: compile blocks of steps and their pull-back with `torch.compile`. A string names a backend.
            The length makes no difference. Under `torch.func` steps run uncompiled.
        unroll: how many steps a compiled block has, here and in `torch.compile`; by default 8 small ones or a
            large one. Steps that run as they are are not grouped.
        on_step: called with ("forward" | "advance" | "reverse", step) after each evaluation.

    Returns:
        The last carry, and the tree of ys, each of shape [length, ...].

    Raises:
        RematError: (also a `TypeError`) a carry that changes structure, shape, dtype or type; ys or xs that
            are not tensors.
        RematError: (also a `ValueError`) no length, lengths that differ, a number of carries below 1.
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
    name = name_of("scan_remat", body)
    if not callable(body):
        raise WrongType(
            f"scan_remat(body, init, xs): the body comes first, got {described(body)}. Write "
            "scan_remat(lambda carry, x: (carry, y), init, xs)."
        )
    if not isinstance(policy, Policy):
        policy = policy_given(policy)
    check_budget(name, checkpoints, budget)
    if budget is None:
        check_checkpoints(checkpoints)
    rows, n = rows_of(name, xs, length)
    if unroll is not None and (isinstance(unroll, bool) or not isinstance(unroll, int) or unroll < 1):
        raise WrongValue(f"{name}: got unroll={unroll!r}; write how many steps a block has, 1 or more.")
    if torch.compiler.is_dynamo_compiling():
        how = bool(reverse), checkpoints, bool(offload), on_step, policy
        return call_scan(name, body, init, xs, n, *how, unroll=unroll)
    schedule = as_schedule("all" if checkpoints == "auto" else checkpoints)
    options = (bool(reverse), policy, bool(offload), None, on_step)
    spec = ScanSpec(name, n, structure(init), structure(xs), schedule, *options, unroll=unroll)
    if n == 0:
        return init, _no_ys(body, spec, init, rows)
    if checkpoints == "auto":
        schedule = auto(n, bytes_of("budget", budget), *_sizes(body, spec, init, rows))
    if policy == save_nothing and isinstance(schedule, All) and selecting():
        # The policy of the region around says of each step's values which are kept, as in JAX: the steps are
        # its own then, and it computes again what they lack.
        if not (offload or compile or on_step):
            policy = save_everything
    spec = replace(spec, schedule=schedule, policy=policy)
    if compile and _compilable(init):
        backend = compile if isinstance(compile, str) else "inductor"
        return _compiled(body, replace(spec, compile=backend), init, xs, rows)
    if policy != save_nothing:
        if isinstance(schedule, All):
            return _taped(body, spec, init, rows)
        if isinstance(schedule, Sqrt):
            spec = replace(spec, schedule=Segmented(schedule.stride(n)))
        if isinstance(spec.schedule, Segmented):
            body = _region(body, policy)
    return run_eager(body, spec, init, rows, body)


def structure(tree: Any) -> Structure:
    """The structure of what a scan is given."""
    with functions_as_they_are():  # no torch function of the user's
        return structure_of(tree)


def _compilable(init: Any) -> bool:
    """Whether steps can be compiled: under functorch, or where somebody watches, they run as they are."""
    leaves = flatten(init)[0]
    # A number in the carry that changes would be a constant of the graph.
    plain = all(is_tensor(t) and not t.is_complex() for t in leaves)
    return bool(leaves) and plain and not (in_transform() or watched())


def _compiled(body: Callable[..., Any], spec: ScanSpec, init: Any, xs: Any, rows: Rows) -> tuple[Any, Any]:
    carry = flatten(init)[0]
    try:
        return run_compiled(body, init, xs, Whole(spec, carry, rows, torch.is_grad_enabled()))
    except dynamo_errors():
        # What is wrong with the body, if anything, is said better where it runs.
        with torch.no_grad():
            Body(body, spec, trusted=True)([], carry, [x.select(0, 0) for x in rows])
        raise


def run_eager(
    body: Callable[..., Any],
    spec: ScanSpec,
    init: Any,
    rows: Rows,
    roots: Any,
    condition: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Run with the captured tensors as operands; one that the search missed is added and the scan starts
    again. `roots` are the functions whose captured tensors these are."""
    with users_aside():
        return _run_eager(body, spec, init, rows, roots, condition)


def _run_eager(
    body: Callable[..., Any], spec: ScanSpec, init: Any, rows: Rows, roots: Any, condition: Any
) -> tuple[Any, Any]:
    reach, carry = reached(roots), flatten(init)[0]
    # Where nothing can be differentiated, a step is evaluated once and reads what it captured as it is.
    live = torch.is_grad_enabled() or in_transform() or swapping() or dual_level_open()
    replaced = getattr(body, "replaced", ())
    found = captured(reach, unsaved=True) if live else []
    found = [t for t in found if id(t) not in replaced and known_around(t)]
    given = [t for t in (*found, *carry, *rows) if is_tensor(t)]
    random = RandomState(given, own=reach)
    for _ in range(MOST_TRIES):
        step = Body(body, spec, found, trusted=not live)
        bindings = Bindings(reach)
        step.in_scripts = None if bindings.scripts is None else bindings.in_scripts
        options: dict[str, Any] = {"around": bindings.restored, "offloaded": spec.offloaded}
        if condition is not None:
            options["proceed"] = functools.partial(_proceed, step, Called(condition, under_levels()))
        scan, operands = make(step, spec, found, carry, rows, **options)
        again = live and captured(operands)
        try:
            with unwritten(spec.name, captured=reach if again else ()):
                end, ys = run(scan, operands)
        except Missed as missed:
            if missed.around():
                raise
            if any(tensor is missed.tensor for tensor in found):
                break
            found = [*found, missed.tensor]
            random.restore()  # what the broken-off run drew is drawn again
            continue
        except Exception as error:
            roots, known = (roots, error), {*map(id, reach)}
            left = [t for t in reached(*roots) if smooth(t) and id(t) not in known]
            if again and left:
                broken_off(spec.name, roots, left, again)
            raise
        if again:
            _refuse_stored(body, spec, init, rows, roots, {id(value) for value in reach}, again)
        return unflatten(end, spec.carry.spec), step.stacked(ys) if condition is None else None
    raise RematError(changing(spec.name))


def _refuse_stored(
    body: Callable[..., Any], spec: ScanSpec, init: Any, rows: Rows, roots: Any, known: set[int], anchors: Any
) -> None:
    """Tensors that steps have stored, and not returned, refuse derivatives: the scan knows none."""
    new = [t for t in reached(roots) if is_tensor(t) and id(t) not in known]
    if not new:
        return
    # Tables that a first step caches depend on nothing. One more step tells: it stores anew what does depend.
    before = reached(roots)
    with torch.enable_grad(), hooks_allowed(), _tried(body, spec, init, rows, before):
        Body(body, spec, trusted=True)([], _marked(init), [row.select(0, 0) for row in rows])
        now = reached(roots)
        fresh = anew(now, {*map(id, before)})
        found = places_of(roots, map(id, fresh))
        lists = {id(holder) for holder, _, _ in found if isinstance(holder, (list, deque))}
        added = [value for holder, _, value in places_of(roots, map(id, new)) if id(holder) in lists]
    kept = {*map(id, now)}.difference(map(id, added))
    stored = [t for t in new if id(t) not in kept] if fresh else []
    if stored:
        refuse_derivatives(
            roots,
            stored,
            anchors,
            f"{spec.name}: its body stores a tensor (on a module, in a container or in a variable), and does "
            "not return it, so that its derivative is not known. Return it among the ys, or in the carry; or "
            "store its `.detach()`.",
        )


def _marked(init: Any) -> list[Any]:
    """A carry whose derivatives are followed. Under functorch it is tracked as it is, or else its part of the
    tape is no part of the derivative."""
    mark = not in_transform()
    return [t.detach().requires_grad_() if mark and smooth(t) else t for t in flatten(init)[0]]


def _proceed(step: Body, condition: Callable[[Any], Any], consts: Any, carry: list[Any]) -> Any:
    with step.swapped(consts, carry):
        return condition(unflatten(carry, step.spec.carry.spec))


def _no_ys(body: Callable[..., Any], spec: ScanSpec, init: Any, rows: Rows) -> Any:
    """The ys of a scan without steps: the body is evaluated on zeros to learn their shapes."""
    step = Body(body, spec, trusted=True)
    with torch.no_grad(), _tried(body, spec, init, rows, reached(body)):
        _, ys = step([], flatten(init)[0], [row.new_zeros(row.shape[1:]) for row in rows])
    return step.stacked([y.new_empty((0, *y.shape)) for y in ys])


def _sizes(body: Callable[..., Any], spec: ScanSpec, init: Any, rows: Rows) -> tuple[int, int]:
    """Bytes of a carry, and of what the backward of one step keeps, from one evaluation of the first step."""
    carry = flatten(init)[0]
    reach = reached(body)
    mine = [t for t in (*carry, *rows, *captured(reach)) if is_tensor(t)]
    given = {storage_key(unwrapped(t)) for t in mine}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        plain = unwrapped(tensor)
        key = storage_key(plain)
        if key not in given:
            kept[key] = plain.untyped_storage().nbytes()
        return tensor

    marked = _marked(init)
    given |= {storage_key(unwrapped(t)) for t in marked if is_tensor(t)}
    watching = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with torch.enable_grad(), hooks_allowed(), watching, _tried(body, spec, init, rows, reach):
        try:
            Body(body, spec, trusted=True)([], marked, [row.select(0, 0) for row in rows])
        except RuntimeError as error:
            if not is_hook_refusal(error):
                raise
            raise RematError(
                f"{spec.name}: checkpoints='auto' cannot measure a step that uses torch.func, which refuses "
                "saved-tensor hooks. Write a number of carries, or checkpoints='sqrt'."
            ) from error
    size = sum(unwrapped(t).nbytes for t in carry if is_tensor(t))
    return size, size + sum(kept.values())


@contextlib.contextmanager
def _tried(body: Any, spec: ScanSpec, init: Any, rows: Rows, reach: list[Any]) -> Iterator[None]:
    """Within, a step is evaluated for its shapes alone, and leaves no trace."""
    with isolating(body, init, rows), unwritten(spec.name, captured=reach):
        yield


def bytes_of(what: str, amount: Any) -> int:
    """An amount of bytes as a user writes it."""
    if isinstance(amount, str):
        with contextlib.suppress(ValueError):
            return parse_bytes(amount)
    elif isinstance(amount, int) and not isinstance(amount, bool):
        return amount
    raise WrongValue(f"{what}: got {amount!r}; write bytes as an int, or '64MiB', '2GB'.")


def _region(body: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """The body as a rematerialized region of its own."""
    if policy == save_everything:
        return body
    return with_policy(body, policy)


def _taped(body: Callable[..., Any], spec: ScanSpec, init: Any, rows: Rows) -> tuple[Any, Any]:
    """Every carry, and of every step what the policy keeps: a loop over regions, one graph."""
    step = Body(_region(body, spec.policy), spec, trusted=True)
    scan, _ = make(step, spec, [], flatten(init)[0], rows)
    carry, ys = flatten(init)[0], []
    for k in range(scan.length):
        at = scan.at(k)
        carry, y = with_step_note(scan, k, [], carry, [row.select(0, at) for row in rows])
        ys.append(y)
    stacked = [torch.stack(column) for column in zip(*ys[:: -1 if spec.reverse else 1], strict=True)]
    return unflatten(carry, spec.carry.spec), step.stacked(stacked)


runs_in_eager(scan_remat)
