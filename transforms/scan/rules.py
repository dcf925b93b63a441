"""The rules of a scan: the scan of a vmapped step; derivatives of a scan written as scans, its tangents
and its pull-back as a differentiable function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.transforms.compat import dual_level_known_if_any, restore_vmap
from remat.transforms.ops import with_memory
from remat.transforms.pytree import merge, smooth as pytree_smooth
from remat.transforms.scan.backward import check_seen
from remat.transforms.scan.spec import (
    Leaves,
    Primals,
    Scan,
    ScanSpec,
    Tensors,
    as_in_forward,
    make,
)
from remat.transforms.scan.vjp import pull
from remat.transforms.state import RandomState, fingerprints_of


def expand(tensor: torch.Tensor, dim: int | None, size: int, to: int = 0) -> torch.Tensor:
    """A batch of a tensor at dimension `to`: its own at `dim`, or `size` copies where that is None."""
    if dim is not None:
        return tensor.movedim(dim, to)
    shape = list(tensor.shape)
    shape.insert(to, size)
    return with_memory(tensor.unsqueeze(to).expand(shape))


def unbatched(scan: Scan, info: Any, dims: Sequence[int | None]) -> Primals | None:
    """The values of a scan over dual numbers, if only its tangents have a batch dimension (as in jacfwd)."""
    values = scan.values
    if values is None or scan.opaque is not None or info.randomness == "different":
        return None
    starts = (0, values.consts), (scan.sizes[0], values.carry), (sum(scan.sizes[:2]), values.xs)
    return None if any(d is not None for low, count in starts for d in dims[low : low + count]) else values


def batch(
    scan: Scan,
    info: Any,
    dims: Sequence[int | None],
    flat: Tensors,
    every: Sequence[bool],
    values: Primals | None = None,
) -> tuple[Scan, list[torch.Tensor]]:
    """The scan of the vmapped step, and its operands; `every` marks those that must be batched.

    The carry is always batched, but for `values`: whether a step batches it is known only after the step.
    """
    a, b, _ = scan.sizes
    kept = values.carry if values else 0
    moved: list[torch.Tensor] = []
    inner: list[int | None] = []
    for i, (tensor, dim) in enumerate(zip(flat, dims, strict=True)):
        to = 1 if i >= a + b else 0
        if dim is None and not every[i] and not a + kept <= i < a + b:
            moved.append(tensor)
            inner.append(None)
        else:
            moved.append(expand(tensor, dim, info.batch_size, to))
            inner.append(0)
    const_dims, x_dims = inner[:a], inner[a + b :]

    def step(consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        static: Leaves = []

        def one(consts: Tensors, tensors: Tensors, x: Tensors) -> tuple[Any, Any]:
            before = scan.whole(tensors, carry)
            full, ys = scan.step(consts, before, x)
            more = scan.proceed(consts, before) if scan.proceed is not None else None
            if isinstance(more, torch.Tensor):  # an example that is done keeps its carry
                full = [
                    torch.where(more, b, a) if i in scan.tensors else b
                    for i, (a, b) in enumerate(zip(before, full, strict=True))
                ]
            static[:] = [None if i in scan.tensors else leaf for i, leaf in enumerate(full)]
            return [full[i] for i in scan.tensors], ys

        def placed(tensors: Tensors, dims: Sequence[int | None], plain: int) -> list[torch.Tensor]:
            assert not any(d is not None for d in dims[:plain])
            pairs = enumerate(zip(tensors, dims, strict=True))
            return [t if i < plain else expand(t, d, info.batch_size) for i, (t, d) in pairs]

        over = (list(const_dims), inner[a : a + b], list(x_dims))
        of = restore_vmap(one, over, info.batch_size, info.randomness)
        (new, ys), dims = of(list(consts), [carry[i] for i in scan.tensors], list(x))
        dims = dims if new or ys else ([], [])  # torch has none for no results
        ys = placed(ys, dims[1], values.ys if values else 0)
        return scan.whole(placed(new, dims[0], kept), static), ys

    proceed = None if scan.proceed is None else _batch_condition(scan, const_dims)
    return replace(scan, step=step, proceed=proceed, blocks=None), moved


def _batch_condition(scan: Scan, const_dims: list[int | None]) -> Callable[[Tensors, Leaves], Any]:
    """Go on while any example does."""

    def proceed(consts: Tensors, carry: Leaves) -> Any:
        def one(consts: Tensors, tensors: Tensors) -> torch.Tensor:
            assert scan.proceed is not None
            more = scan.proceed(consts, scan.whole(tensors, carry))
            return more if isinstance(more, torch.Tensor) else torch.tensor(more, device="cpu")

        over = (list(const_dims), [0] * len(scan.tensors))
        return torch.vmap(one, in_dims=over)(list(consts), [carry[i] for i in scan.tensors]).any()

    return proceed


def kept_batched(
    scan: Scan, kept: Tensors, size: int, values: Primals | None
) -> tuple[list[torch.Tensor], list[int | None]]:
    """What a batched forward keeps, as results of the rule, and where the batch dimension of each is."""
    if values is not None:
        first = scan.tensors[: values.carry]
        plain = {~at for state in scan.record.states.values() for i in first if (at := state.carry[i]) < 0}
        return [*kept], [None if i in plain else 0 for i in range(len(kept))]
    carries = len(scan.tensors) if scan.taped else len(kept)
    # What a selector keeps of a batched step has its batch dimension anywhere or nowhere: one that says
    # nothing is put before it, so that a pull-back can tell whether its forward was batched.
    others = [t.unsqueeze(0).expand(size, *t.shape) for t in kept[carries:]]
    return [*kept[:carries], *others], [*[_carries_dim(scan)] * carries, *[0] * len(others)]


def kept_for_batch(scan: Scan, kept: Tensors, dims: Sequence[int | None], size: int) -> list[torch.Tensor]:
    """What the forward kept, as the batched pull-back takes it: carries alone if that was not batched."""
    carries, to = len(scan.tensors) if scan.taped else len(kept), _carries_dim(scan)
    pairs = list(zip(kept, dims, strict=True))
    found = [expand(t, d, size, to) for t, d in pairs[:carries]]
    if any(d is None for _, d in pairs[carries:]):
        return found
    return found + [t.select(d, 0) for t, d in pairs[carries:] if d is not None]


def _carries_dim(scan: Scan) -> int:
    """Where kept carries have their batch dimension: an opaque scan's are stacks, of blocks if taped."""
    return 0 if scan.opaque is None else 2 if scan.taped else 1


Cotangents = Sequence[torch.Tensor | None]

# `function.run`, which itself needs this file.
Run = Callable[..., Any]


def tangents_of(run: Run, scan: Scan, flat: Tensors, tangents: Cotangents) -> list[torch.Tensor | None]:
    """Tangents of the carry's tensors and the ys: one scan over (value, tangent) pairs."""
    consts, carry, xs = scan.split(flat)
    a, b, _ = scan.sizes
    # (In eager a look would be one more evaluation of the user's function: all may have one.)
    given = [t is not None for t in tangents]
    moving = [True] * b if scan.opaque is None else scan.opaque.moving(scan, flat, given)
    full = _full(flat, tangents, {a + i for i, moves in enumerate(moving) if moves})
    step = _DualStep(scan, [t is not None for t in full])
    dual, operands = make(
        step,
        _spec(scan),
        [*consts, *(t for t in full[:a] if t is not None)],
        [*carry, *(t for t in full[a : a + b] if t is not None)],
        [*xs, *(t for t in full[a + b :] if t is not None)],
        around=scan.around,
        opaque=scan.opaque,
        values=step.values,
    )
    with as_in_forward(scan, seeded=True):
        end, ys = run(dual, operands)
    if scan.length in scan.record.seen:
        check_seen(scan, {scan.length: fingerprints_of(end[: len(carry)])})
    # (A Function's result without a tangent is an assertion of torch's.)
    carries = {i: torch.zeros_like(end[i]) for i in scan.tensors if pytree_smooth(end[i])}
    carries |= dict(zip(step.at, end[len(carry) :], strict=True))
    dys = iter(ys[len(step.smooth) :])
    return [*(carries.get(i) for i in scan.tensors), *(next(dys) if f else None for f in step.smooth)]


class _DualStep:
    """A step over (value, tangent) pairs: of each kind of operand all values, then the tangents there are.

    Args:
        moving: which of the scan's operands have a tangent.

    Attributes:
        at: places in the carry of the leaves that have one.
        values: how many operands and results are values.
        smooth: which ys have a derivative, known after the first step.
    """

    def __init__(self, scan: Scan, moving: Sequence[bool]) -> None:
        a, b, c = scan.sizes
        self.scan, self.values, self.smooth = scan, Primals(a, b, c), list[bool]()
        self.consts, self.xs = moving[:a], moving[a + b :]
        self.at = list(itertools.compress(scan.tensors, moving[a : a + b]))

    def __call__(self, consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        at, places = self.at, self.scan.tensors
        (a, _, c), count = self.scan.sizes, len(self.scan.carry)
        values = consts[:a], carry[:count], x[:c]
        moved = (
            list(map(with_memory, itertools.compress(values[0], self.consts))),
            [with_memory(carry[i]) for i in at],
            list(map(with_memory, itertools.compress(values[2], self.xs))),
        )
        fixed: Leaves = []

        def floats(moved: tuple[Tensors, Tensors, Tensors]) -> tuple[Any, Any]:
            new, ys = self.scan.step(
                _put(values[0], self.consts, moved[0]),
                merge(values[1], at, moved[1]),
                _put(values[2], self.xs, moved[2]),
            )
            self.smooth, self.values.ys = list(map(pytree_smooth, ys)), len(ys)
            fixed[:] = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in new]
            # Tensors must leave the level as results: those without derivative go as auxiliary ones.
            others = [new[i] for i in places if i not in at], [y for y in ys if not pytree_smooth(y)]
            smooth = [new[i] for i in at], list(filter(pytree_smooth, ys))
            return (*smooth, [] if any(smooth) else [torch.zeros(())]), others  # torch.func wants a result

        tangents = list(consts[a:]), list(carry[count:]), list(x[c:])
        with dual_level_known_if_any():
            results: Any = torch.func.jvp(floats, (moved,), (tangents,), has_aux=True)
        (new, ys, _), (dnew, dys, _), (others, other_ys) = results
        out = merge(fixed, [*at, *(i for i in places if i not in at)], [*new, *others])
        smooth, rest = iter(ys), iter(other_ys)
        return [*out, *dnew], [*(next(smooth) if f else next(rest) for f in self.smooth), *dys]


def _put(values: Sequence[Any], marks: Sequence[bool], others: Tensors) -> list[Any]:
    """Values, those that are marked replaced by `others` in turn."""
    return merge(values, [i for i, mark in enumerate(marks) if mark], others)


def _full(flat: Tensors, tangents: Cotangents, moving: set[int]) -> list[torch.Tensor | None]:
    """Tangents of the operands, those at `moving` without None, as they may become other than zero.

    What has none of the others is no dual number: writes into it need not fit the memory of a zero.
    """
    return [
        (torch.zeros_like(t) if d is None and i in moving else d) if pytree_smooth(t) else None
        for i, (t, d) in enumerate(zip(flat, tangents, strict=True))
    ]


def pull_back_of(
    run: Run, scan: Scan, needs: Sequence[bool], flat: Tensors, cts: Cotangents
) -> tuple[torch.Tensor, ...]:
    """Gradients of the needed operands as a function of operands and cotangents that autograd can
    differentiate.

    All n states are listed (n carries, no tape): what the second order costs.
    """
    consts, carry, xs = scan.split(flat)
    a, b, _ = scan.sizes
    states, statics, randoms = _states_of(run, scan, consts, carry, xs)
    numbers = [0] if scan.opaque is None else []
    float_at = [i for i, j in enumerate(scan.tensors) if pytree_smooth(carry[j])]
    count = len(scan.tensors)
    start = [scan.or_zero(cts[i], carry[scan.tensors[i]]) for i in float_at]
    const_at = [i for i in range(a) if needs[i]]
    x_at = [i for i in range(len(xs)) if needs[a + b + i]]
    ct_at = [i for i, ct in enumerate(cts[count:]) if ct is not None]

    def back(consts: Tensors, carry2: Leaves, x2: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        ks, rest = carry2[: len(numbers)], carry2[len(numbers) :]
        given, totals = rest[: len(start)], rest[len(start) :]
        state, x, ys = x2[:count], x2[count : count + len(xs)], x2[count + len(xs) :]
        full = scan.whole(state, statics[ks[0]] if ks else None)
        if ks and ks[0] in randoms:
            randoms[ks[0]].restore()
        carry_cts = merge([None] * count, float_at, given)
        y_cts = merge([None] * (len(cts) - count), ct_at, ys)

        def one(consts: Tensors, carry: Leaves, rows: list[Any]) -> tuple[Leaves, list[Any]]:
            new, out = scan.step(consts, carry, rows[0])
            return new, [out]

        wanted = list(needs[:a]), list(needs[a + b :])
        grads = pull(one, consts, full, [list(x)], carry_cts, [y_cts], wanted, scan.over)
        by_const, by_carry, by_x = grads
        new = [scan.or_zero(by_carry[i], state[i]) for i in float_at]
        sums = [t if by_const[i] is None else t + by_const[i] for i, t in zip(const_at, totals, strict=True)]
        return [*(k - 1 for k in ks), *new, *sums], [scan.or_zero(by_x[0][i], x[i]) for i in x_at]

    end, x_grads = run(
        *make(
            back,
            replace(_spec(scan), reverse=not scan.reverse),
            consts,
            [*(scan.length - 1 for _ in numbers), *start, *(scan.zeros(consts[i]) for i in const_at)],
            [*states, *xs, *(cts[count + i] for i in ct_at)],  # type: ignore[list-item]
            around=scan.around,
            opaque=scan.opaque,
        )
    )
    grads = end[len(numbers) :]
    by_carry = dict(zip(float_at, grads[: len(start)], strict=True))
    const_grads = grads[len(start) :]
    return (*const_grads, *(by_carry[i] for i in range(b) if needs[a + i]), *x_grads)


def _states_of(
    run: Run, scan: Scan, consts: Tensors, carry: Leaves, xs: Tensors
) -> tuple[list[torch.Tensor], dict[int, Leaves], dict[int, RandomState]]:
    """The tensors of all carries, stacked; by step the rest of each carry, and the generators before it."""
    statics: dict[int, Leaves] = {}
    randoms: dict[int, RandomState] = {}
    # What changes from step to step beside tensors is found by the step's number. In a traced graph nothing
    # does, and a number that changes would be a constant of it.
    numbers = [0] if scan.opaque is None else []

    def emit(consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        if not numbers:
            new, _ = scan.step(consts, carry, x)
            return new, list(carry)
        *carry, k = carry
        statics[k] = [None if i in scan.tensors else leaf for i, leaf in enumerate(carry)]
        if scan.record.random and scan.record.start is not None:
            randoms[k] = scan.record.start.again()
        new, _ = scan.step(consts, carry, x)
        return [*new, k + 1], [carry[i] for i in scan.tensors]

    start = [*carry, *numbers]
    end, states = run(*make(emit, _spec(scan), consts, start, xs, around=scan.around, opaque=scan.opaque))
    if scan.length in scan.record.seen:
        check_seen(scan, {scan.length: fingerprints_of(end)})
    return states, statics, randoms


def _spec(scan: Scan) -> ScanSpec:
    """What a scan over as many steps is that serves a derivative: nobody is told of its evaluations."""
    return replace(scan.spec, length=scan.length, on_step=None)
