"""Calls that a joint graph leaves out: what goes in and what comes out of them is there, their ops are not.

A planner that knows the regions of a model by themselves records the model around them: so the layers of a
deep model are traced once, and not once more as parts of the whole.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat.plan.joint.ops import Joint, Strides, dense
from remat.plan.joint.packing import Packing
from remat.plan.joint.stand_ins import on_fakes
from remat.transforms import (
    ON_HEAP,
    RematError,
    attributes,
    blank,
    container_of,
    flatten,
    is_a,
    is_tensor,
    slots,
    tree_leaves,
    unflatten,
    wraps,
)
from remat.transforms.compat import at_hand, outside_all_modes, storage_held, storage_key

# The recorder of the graph that is being made, for those who leave calls out of it.
around: ContextVar[Any] = ContextVar("remat_around", default=None)


@dataclass(frozen=True)
class _Fresh:
    """Stands for a tensor that the call has made, by its number."""

    at: int


@dataclass(frozen=True)
class Parts:
    """What a call returns, without the tensors.

    Attributes:
        spec: of the results as a tree.
        leaves: for each the number of the tensor among the arguments that it is, what stands for one that was
            made, an object that holds such, or the thing itself in a tuple.
        kind: the class of the object whose attributes these are, or the function that closes over these; None
            for the results themselves.
    """

    spec: Any
    leaves: tuple[Any, ...]
    kind: Any = None

    @property
    def general(self) -> bool:
        """Whether calls of other modules return the same: a function closes over its own."""
        inside = (leaf for leaf in self.leaves if isinstance(leaf, Parts))
        return not _closes(self.kind) and all(one.general for one in inside)

    def filled(self, given: list[torch.Tensor], made: Sequence[torch.Tensor]) -> Any:
        """The same with these tensors."""

        def leaf(one: Any) -> Any:
            if isinstance(one, Parts):
                return one.filled(given, made)
            if isinstance(one, _Fresh):
                return made[one.at]
            return given[one] if isinstance(one, int) else one[0]

        tree = unflatten(map(leaf, self.leaves), self.spec)
        if self.kind is None:
            return tree
        if _closes(self.kind):
            return _closed(self.kind, tree)
        made_object = blank(self.kind)
        if (own := attributes(made_object)) is not None:
            dict.update(own, tree)
        return made_object


def parts_of(out: Any, args: Any, kwargs: Any) -> tuple[Parts, list[torch.Tensor]]:
    """The results of a call taken apart, and the tensors that it has made, those in objects as well."""
    given = {id(t): k for k, t in enumerate(tensors_given(args, kwargs))}
    there = {id(leaf) for leaf in tree_leaves((args, kwargs)) if not is_tensor(leaf)}
    fresh: dict[int, tuple[int, torch.Tensor]] = {}

    def apart(tree: Any, kind: Any) -> Parts:
        leaves, spec = flatten(tree)
        return Parts(spec, tuple(map(noted, leaves)), kind)

    def noted(leaf: Any) -> Any:
        if is_tensor(leaf):
            if id(leaf) in given:
                return given[id(leaf)]
            return _Fresh(fresh.setdefault(id(leaf), (len(fresh), leaf))[0])
        closes = isinstance(leaf, (types.FunctionType, functools.partial))
        if id(leaf) in there or not (closes or is_record(leaf)):
            return (leaf,)
        there.add(id(leaf))
        before = len(fresh)
        found = apart(*_opened(leaf)) if closes else apart(dict(attributes(leaf) or {}), type(leaf))
        there.discard(id(leaf))
        return found if len(fresh) > before else (leaf,)

    parts, made = apart(out, None), [tensor for _, tensor in fresh.values()]
    # These functions know each other: a cycle that would hold the tensors.
    fresh.clear()
    return parts, made


def _closes(kind: Any) -> bool:
    """Whether parts are those of a function."""
    return isinstance(kind, types.FunctionType) or kind is functools.partial


def _opened(fn: Any) -> tuple[Any, Any]:
    """What a function closes over, and the function without it."""
    if isinstance(fn, functools.partial):
        return (fn.func, fn.args, fn.keywords), functools.partial
    cells = fn.__closure__ or ()
    # (An empty cell has nothing in it, and not None.)
    full = [(at, cell.cell_contents) for at, cell in enumerate(cells) if cell != types.CellType()]
    return dict(full), _with_cells(fn, tuple([types.CellType() for _ in cells]))


def _closed(kind: Any, inside: Any) -> Any:
    """The function of this kind that closes over these."""
    if kind is functools.partial:
        fn, args, keywords = inside
        return functools.partial(fn, *args, **keywords)
    count = len(kind.__closure__ or ())
    return _with_cells(
        kind, tuple([types.CellType(inside[k]) if k in inside else types.CellType() for k in range(count)])
    )


def _with_cells(fn: types.FunctionType, cells: tuple[types.CellType, ...]) -> types.FunctionType:
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__dict__.update(fn.__dict__)
    return made


def is_record(value: Any) -> bool:
    """Whether an object is nothing but its attributes, such as an instance of a dataclass."""
    if is_a(value, (type, torch.nn.Module)) or container_of(value) is not None or slots(value):
        return False
    return bool(type(value).__flags__ & ON_HEAP) and attributes(value) is not None


@dataclass(frozen=True)
class Shell:
    """What a call returns, without data.

    Attributes:
        parts: the results.
        fresh: the metadata of the tensors that it makes, then that of others which outlive it.
    """

    parts: Parts
    fresh: tuple[_Meta, ...]

    def within(self, joint: Joint, operands: int) -> Shell:
        """The same with where its results lie, and with what it leaves behind, such as attributes of modules.

        A view of one of the `operands` lies in its memory. One of what the call captures, such as a
        parameter, takes none.
        """
        fresh = list(self.fresh)
        for place, v in enumerate(joint.made):
            s = joint.values[v].storage
            if joint.owner[s] < 0 and fresh[place].whole > 0:
                first = joint.family[s][0]
                inside = first < operands
                fresh[place] = replace(fresh[place], given=first if inside else -1, whole=0, stays=False)
        found: list[_Meta] = []
        for s in joint.stored:
            value, size = joint.values[joint.family[s][0]], joint.storages[s]
            places = len(self.fresh) + len(found)
            found.append(_Meta((size,), (1,), torch.uint8, value.device, False, size, places, stays=True))
        return replace(self, fresh=(*fresh, *found))


@dataclass(frozen=True)
class _Meta:
    """The metadata of a result, and whether it has a gradient.

    Attributes:
        whole: bytes of its storage.
        shares: the number of the first result in the same storage.
        given: the number of the argument in whose storage it lies, -1 if it lies in none.
        stays: whether somebody holds it beside the caller, such as a module as its attribute.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool
    whole: int
    shares: int
    given: int = -1
    stays: bool = False


def shell_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shell:
    """What `fn(*args, **kwargs)` returns, by a run on fake tensors that no mode around sees."""
    saving = Packing()  # what it saves is nothing to those who record around
    with outside_all_modes(), saving.packing():
        parts, fresh = parts_of(on_fakes(fn, args, kwargs), args, kwargs)
    saving.hook_late(fresh)
    metas = _metas(fresh)
    # Those that somebody else holds are there without these.
    held = [storage_held(t) if t.layout is torch.strided else None for t in fresh]
    fresh.clear()
    # (A node that takes no hooks may hold its own result.)
    stay = [not saving.late and h is not None and h.expired() is False for h in held]
    return Shell(parts, tuple([replace(m, stays=stays) for m, stays in zip(metas, stay, strict=True)]))


def _metas(fresh: Sequence[torch.Tensor]) -> list[_Meta]:
    first: dict[Any, int] = {}
    found: list[_Meta] = []
    for k, t in enumerate(fresh):
        strided = t.layout is torch.strided and not wraps(t)
        shares = first.setdefault(storage_key(t) if strided else -id(t), k)
        whole = at_hand(t.untyped_storage().nbytes()) if strided else -1
        made = tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad
        found.append(_Meta(*made, whole=whole, shares=shares))
    return found


def left_out(
    shell: Shell,
    lies: Callable[[Strides], dict[int, tuple[int, ...]]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The results of a call that is left out of the graph around.

    `lies`: the strides of the arguments' gradients, by number, from those of the results' gradients.
    """
    given = tensors_given(args, kwargs)
    hole = Opened(around.get(), given)
    # Parameters inside give the results a gradient, too.
    anchor = torch.empty(0, requires_grad=any(meta.grad for meta in shell.fresh))
    hole.begin(anchor)
    operands = {k: t for k, t in enumerate(given) if t.requires_grad}
    at = lies, tuple(operands)
    made = _Left.apply(hole, shell.fresh, at, anchor, *operands.values()) if shell.fresh else ()
    made = [_Alone.apply(hole.watched(k), t) if t.requires_grad else t for k, t in enumerate(made)]
    hole.give(made, [t for t, meta in zip(made, shell.fresh, strict=True) if meta.stays])
    return shell.parts.filled(given, made)


def tensors_given(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among arguments, each once."""
    return list({id(t): t for t in tree_leaves((args, kwargs)) if is_tensor(t)}.values())


def is_held(tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
    """Whether somebody else holds a tensor among arguments: a parameter, or a leaf in a container."""
    if isinstance(tensor, torch.nn.Parameter) or not (tensor.requires_grad and tensor.is_leaf):
        return isinstance(tensor, torch.nn.Parameter)
    return not any(tensor is one for one in (*args, *kwargs.values()))


class Opened:
    """A hole while the graph around is recorded; `recorder` is None where there is none."""

    def __init__(self, recorder: Any, given: list[torch.Tensor]) -> None:
        self.recorder, self.given, self.at = recorder, given, -1

    def begin(self, anchor: torch.Tensor) -> None:
        if self.recorder is not None:
            self.at = len(self.recorder.holes)
            operands = tuple([self.recorder.number(t) for t in self.given])
            # Whoever holds them until the backward counts as one who does.
            self.given = []
            self.recorder.holes.append([len(self.recorder.ops), -1, operands, (), (), (), ()])
            if anchor.requires_grad:
                # The backward is to come here, whatever else has a gradient.
                self.recorder.captured[id(anchor)] = anchor

    def watched(self, place: int) -> Any:
        """What is there as long as nodes are that lead to a result."""
        token = set[int]()
        if self.recorder is not None:
            self.recorder.leading.append((weakref.ref(token), self.at, place))
        return token

    def give(self, made: Sequence[torch.Tensor], staying: Sequence[torch.Tensor]) -> None:
        """The results are there; others than the caller hold some of them."""
        if self.recorder is not None:
            self.recorder.staying += staying
            self.recorder.holes[self.at][4] = tuple([self.recorder.number(t) for t in made])

    def made_of(self, meta: _Meta, made: list[torch.Tensor]) -> torch.Tensor:
        """A result, in the memory that it shares with another one, or with an argument."""
        with self._memory(meta, made):
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)

    def _memory(self, meta: _Meta, made: list[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        if (recorder := self.recorder) is None:
            return contextlib.nullcontext()
        number = None
        if meta.given >= 0:
            number = recorder.holes[self.at][2][meta.given]
        elif meta.shares < len(made):
            number = recorder.number(made[meta.shares])
        return recorder.in_storage(number, meta.whole)

    def come_back(self, cotangents: tuple[Any, ...]) -> None:
        if self.recorder is not None:
            if self.recorder.in_forward:
                # What stands for its gradients has no derivatives, and its graph is of one backward.
                raise RematError(
                    "This step calls a backward in its forward (autograd.grad: forces, penalties, steps "
                    "inside) that goes through its blocks. Plans of whole steps are of one backward. Choose "
                    "what blocks keep: remat.apply(model, policy=save_nothing), or "
                    "policy=checkpoint_policy(budget=0.5)."
                )
            hole = self.recorder.holes[self.at]
            hole[3] = tuple([self.recorder.number(t) for t in cotangents if t is not None])
            hole[5] = tuple([at for at, t in enumerate(cotangents) if t is not None])
            hole[1] = len(self.recorder.ops)


class _Alone(torch.autograd.Function):
    """A node of its own for each result, that tells whether anything leads there."""

    @staticmethod
    def forward(ctx: Any, token: Any, result: torch.Tensor) -> torch.Tensor:
        ctx.token = token
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, *cotangents


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hole: Opened,
        fresh: Sequence[_Meta],
        lies: Any,
        anchor: torch.Tensor,
        *operands: torch.Tensor,
    ) -> Any:
        made: list[torch.Tensor] = []
        for meta in fresh:
            made.append(hole.made_of(meta, made))
        ctx.mark_non_differentiable(*[t for t, m in zip(made, fresh, strict=True) if not m.grad])
        ctx.set_materialize_grads(False)
        ctx.hole, ctx.lies = hole, lies
        ctx.like = [(t.shape, dense(t.shape, t.stride()), t.dtype, t.device) for t in operands]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ctx.hole.come_back(cotangents)
        of, places = ctx.lies
        lie = of(tuple([t.stride() for t in cotangents if t is not None]))
        found = [
            torch.empty_strided(shape, lie.get(at, stride), dtype=dtype, device=device) if wanted else None
            for at, (shape, stride, dtype, device), wanted in zip(
                places, ctx.like, ctx.needs_input_grad[4:], strict=True
            )
        ]
        return (None, None, None, None, *found)
