"""What a function keeps between its forward and its backward."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat._core import check_callable, format_bytes, format_shape
from remat._inspect.looking import looked_at
from remat.transforms import (
    flatten,
    is_tensor,
    local_tensors,
    merge,
    on_wrappers,
    placements_of,
    smooth,
    unflatten,
    user_place,
    wraps,
)
from remat.transforms.closure import by_storage
from remat.transforms.compat import (
    DispatchMode,
    in_transform,
    is_strided,
    listed,
    next_node,
    saved_slots,
    storage_key,
    unwrapped,
)
from remat.transforms.compiled import give_name
from remat.transforms.tape import Kept, listen, nodes_behind

_KEPT = {"policy": ", saved by policy", "decision": ", a decision", "context": ", on a Function's context"}


@dataclass(frozen=True)
class Residual:
    """One block of memory that waits for the backward. Sizes are bytes.

    Attributes:
        shape: sizes of the tensor; of several views of one block, of the first.
        dtype: its element type.
        device: where it is.
        bytes: of the whole block, also where the tensor is a view of a part.
        why: "argument", "captured" (from outside, such as a weight), "policy" (a policy saved it),
            "decision", "random" (generator state), "context" or "output". A decision is an index or a mask
            that must not flip, see `keep_decisions` of `remat`. A context is a Function's: no hook is shown
            its attributes (`ctx.slope = ...`), so no checkpoint lets go of them. An output is a result that
            autograd or a region keeps.
        op: the op that made it, None for arguments and captured tensors.
        name: its `checkpoint_name`, or None.
        location: `file:line (function)` of the user's code that made it, or None.
        path: where it is found among the arguments, such as `params['layers'][0]['w']`, or None.
        host: whether a policy sent it to host memory.
        placements: of the `DTensor` whose local part it is, such as "(Shard(dim=0),)", else None.
            Shape and bytes are those of the part.

    Example:
        >>> import torch
        >>> from remat import saved_residuals
        >>> argument, made = saved_residuals(lambda x: x.sin().exp(), torch.ones(3))
        >>> made.shape, made.bytes, made.why, made.op
        ((3,), 12, 'output', <OpOverload(op='aten.exp', overload='default')>)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bytes: int
    why: str
    op: Any = None
    name: str | None = None
    location: str | None = None
    path: str | None = None
    host: bool = False
    placements: str | None = None

    def __str__(self) -> str:
        where = "" if self.device.type == "cpu" else f" on {self.device}"
        lies = "" if self.placements is None else f" of {self.placements}"
        return (
            f"{format_shape(self.dtype, self.shape)}{lies} {format_bytes(self.bytes)}{where} {self._source()}"
        )

    def _source(self) -> str:
        if self.op is None:
            origin = f"from the {self.why} {self.path}" if self.path else f"from a {self.why} tensor"
            origin = "random generator state" if self.why == "random" else origin
            return origin if self.name is None else f"named {self.name!r}, {origin}"
        made = f"output of {getattr(self.op, 'overloadpacket', self.op)}"
        made = made if self.name is None else f"named {self.name!r}, {made}"
        file, _, rest = (self.location or "an unknown line").rpartition(os.sep)
        kept = ", offloaded by policy" if self.host else _KEPT.get(self.why, "")
        return f"{made} from {rest}{kept}"


class Residuals(list[Residual]):
    """The residuals of one call, with their totals. No memory is counted twice.

    Reports use three words. *Kept* is what the function made and autograd keeps for the backward:
    activations. *Held* are arguments and captured tensors (weights) that the backward reads: the caller has
    them anyway. *Offloaded* is what policies sent to host memory.
    """

    @property
    def bytes(self) -> int:
        """Bytes of all residuals."""
        return sum(r.bytes for r in self)

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations that stay on their device."""
        return self.bytes - self.held_bytes - self.host_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of arguments and captured tensors."""
        return sum(r.bytes for r in self if r.why in ("argument", "captured") and not r.host)

    @property
    def host_bytes(self) -> int:
        """Bytes that policies sent to host memory."""
        return sum(r.bytes for r in self if r.host)

    def totals(self) -> str:
        """The totals in words."""
        words = f"{format_bytes(self.kept_bytes)} kept, {format_bytes(self.held_bytes)} held"
        return words + (f", {format_bytes(self.host_bytes)} offloaded" if self.host_bytes else "")

    def __str__(self) -> str:
        return "\n".join([*map(str, self), f"{self.totals()}, in {len(self)} tensors"])


def saved_residuals(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Residuals:
    """What would be kept if `fn(*args, **kwargs)` were differentiated.

    Runs the forward once under plain autograd, and isolates what `explain` isolates. If nothing that requires
    grad takes part, every floating point and complex argument is differentiated, as by `torch.func.grad` over
    all of them.

    Args:
        fn: any function, with or without regions and `torch.func` transforms inside.
        args, kwargs: its arguments.

    Returns:
        A list with one `Residual` for every block of memory; its `bytes` is the total.

    Example:
        >>> import torch
        >>> from remat import saved_residuals
        >>> [(r.why, r.path, r.bytes) for r in saved_residuals(lambda x: x.sin().exp(), torch.ones(3))]
        [('argument', 'x', 12), ('output', None, 12)]
    """
    check_callable("saved_residuals", (fn,))
    found = _observed(fn, args, kwargs)
    return found if found is not None else _differentiated(fn, args, kwargs) or Residuals()


def print_saved_residuals(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Print what `saved_residuals` finds, a line each, and the total.

    Example:
        >>> import torch
        >>> from remat.jax_names import print_saved_residuals
        >>> print_saved_residuals(lambda x: x.sin(), torch.ones(3))
        f32[3] 12 B from the argument x
        0 B kept, 12 B held, in 1 tensors
    """
    print(saved_residuals(fn, *args, **kwargs))


def _differentiated(fn: Callable[..., Any], args: Any, kwargs: Any) -> Residuals | None:
    """The residuals of one run in which every inexact argument requires grad."""
    leaves, spec = flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if smooth(x)]
    found: list[Residuals | None] = [None]

    def look(*inexact: Tensor) -> Tensor:
        new_args, new_kwargs = unflatten(merge(leaves, at, list(inexact)), spec)
        found[0] = _observed(fn, new_args, new_kwargs)
        return torch.zeros(())

    if not at:
        return None
    if in_transform():
        # requires_grad_ is refused there; a level of torch.func does the same.
        torch.func.vjp(look, *[leaves[i] for i in at])
    else:
        look(*[leaves[i].detach().requires_grad_() for i in at])
    return found[0]


def _observed(
    fn: Callable[..., Any], args: Any, kwargs: Any, packed: _Packed | None = None
) -> Residuals | None:
    """The residuals of one run, which is isolated, or None when autograd recorded nothing."""
    with looked_at(fn, args, kwargs):
        found, readable = _run(fn, args, kwargs, packed)
    if not readable:
        with contextlib.suppress(RuntimeError):
            return _observed(fn, args, kwargs, _Packed())
    return found


def _run(
    fn: Callable[..., Any], args: Any, kwargs: Any, packed: _Packed | None
) -> tuple[Residuals | None, bool]:
    """What one run keeps, and whether all nodes of the graph showed what they save."""
    first = next_node()  # older nodes belong to what `fn` was given
    makers = _Makers()
    with torch.enable_grad(), listen() as heard, makers, packed or contextlib.nullcontext():
        out = fn(*args, **kwargs)
    roots = [t.grad_fn for t in flatten(out)[0] if is_tensor(t) and t.grad_fn is not None]
    if not any(node._sequence_nr() >= first for node in roots):
        return None, True
    table, readable = _Table(makers, by_storage(fn, args, kwargs)), True
    # Regions report what they keep; what is kept outside of them stands in autograd's graph. Policies go
    # first: a value that one saved is theirs, even if an op outside reads it too.
    for kept in sorted(heard, key=lambda k: k.why not in _KEPT):
        table.add(kept.tensor, kept)
    try:
        for tensor in packed.alive() if packed else _saved_by(nodes_behind(roots, first)):
            table.add(tensor)
    except _Unreadable:
        readable = False
    if not in_transform():
        heard.clear()
        roots, tensor, kept, packed = [], None, None, None
        aside = {storage_key(t) for t in flatten(out)[0] if is_strided(t)}
        lives = makers.alive(aside | table.found.keys())
        if lives:
            # What a cycle holds goes some time, and no graph's end may be taken for the reason.
            gc.collect()
            lives = makers.alive(aside | table.found.keys())
        del out
        for key in lives:
            if makers.gone(key):
                table.add_hidden(key)
    return table.residuals(), readable


class _Packed(torch.autograd.graph.saved_tensors_hooks):
    """Watches what autograd packs, for graphs with nodes that cannot be read. torch.func refuses it."""

    def __init__(self) -> None:
        self.tokens: list[weakref.ref[_Token]] = []
        super().__init__(self.pack, lambda token: token.tensor)

    def pack(self, tensor: Tensor) -> _Token:
        token = _Token(tensor)
        self.tokens.append(weakref.ref(token))
        return token

    def alive(self) -> Iterator[Tensor]:
        """The tensors whose node, or region, is still there."""
        yield from [token.tensor for ref in self.tokens if (token := ref()) is not None]


class _Token:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Makers(DispatchMode):
    """Remembers which op and which line made each block of memory."""

    def __init__(self) -> None:
        super().__init__()
        # The weak references keep an address, by which blocks of memory are told apart, from being reused.
        self.made: dict[int, tuple[int, Any, str | None, StorageWeakRef]] = {}
        self.metas: dict[int, tuple[tuple[int, ...], torch.dtype, torch.device, int]] = {}
        self.named: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and on_wrappers(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        read = {storage_key(t) for t in flatten((args, kwargs))[0] if is_strided(t)}
        line = user_place()
        for tensor in flatten(out)[0]:
            if is_strided(tensor) and (key := storage_key(tensor)) not in read:
                storage = tensor.untyped_storage()
                self.made[key] = len(self.made), func, line, StorageWeakRef(storage)
                self.metas[key] = tuple(tensor.shape), tensor.dtype, tensor.device, storage.nbytes()
            elif name := _name_being_given():
                self.named[storage_key(tensor)] = name
        return out

    def alive(self, but: set[int]) -> list[int]:
        """The blocks of memory that were made and are still there, `but` those."""
        return [key for key in self.made if key not in but and not self.gone(key) and self.metas[key][3]]

    def gone(self, key: int) -> bool:
        return self.made[key][3].expired()


def _name_being_given() -> str | None:
    # checkpoint_name tells the regions that are being recorded. Outside of regions it is found on the stack.
    frame = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return None
        if frame.f_code is give_name.__code__:
            return frame.f_locals["name"]
        frame = frame.f_back
    return None


class _Table:
    """Residuals by block of memory, in the order of arguments, captured tensors, and ops."""

    def __init__(self, makers: _Makers, paths: dict[int, tuple[str, str, int]]) -> None:
        self.makers, self.paths = makers, paths
        self.found: dict[int, tuple[tuple[int, int], Residual]] = {}

    def add(self, tensor: Tensor, kept: Kept | None = None, lies: str | None = None) -> None:
        if wraps(tensor):
            for part in local_tensors([tensor]):
                self.add(part, kept, placements_of(tensor))
            return
        tensor = unwrapped(tensor)
        lies = lies if kept is None else kept.placements or lies
        key = storage_key(tensor) if is_strided(tensor) else id(tensor)
        size = tensor.untyped_storage().nbytes() if is_strided(tensor) else _sparse_bytes(tensor)
        # A region puts tensors without memory in the place of operands that its backward does not read.
        if key in self.found or (size == 0 and tensor.numel()):
            return
        why, path, place = self.paths.get(key, ("captured", None, len(self.paths)))
        order, op, line, _ = self.makers.made.get(key, (-1, None, None, None))
        name = self.makers.named.get(key)
        if kept is not None:
            name = kept.name or name
            op = kept.op or op
        if op is not None and why == "captured":
            why = "output"
        if kept is not None and kept.why in (*_KEPT, "random"):
            why = kept.why
        away = kept is not None and bool(kept.away)
        shape = tuple(tensor.shape)
        residual = Residual(shape, tensor.dtype, tensor.device, size, why, op, name, line, path, away, lies)
        rank = {"argument": 0, "captured": 1, "random": 2}.get(why, 3)
        self.found[key] = (rank, order if rank == 3 else place), residual

    def add_hidden(self, key: int) -> None:
        """What lived as long as the graph, and no node or hook showed."""
        order, op, line, _ = self.makers.made[key]
        shape, dtype, device, size = self.makers.metas[key]
        name = self.makers.named.get(key)
        self.found[key] = (3, order), Residual(shape, dtype, device, size, "context", op, name, line)

    def residuals(self) -> Residuals:
        return Residuals(residual for _, residual in sorted(self.found.values(), key=lambda pair: pair[0]))


def _sparse_bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.numel() * tensor.element_size()


# -- autograd's graph ---------------------------------------------------------------------------------


class _Unreadable(Exception):
    """A node of the graph does not show what it saves."""


def _saved_by(nodes: Iterable[Any]) -> Iterator[Tensor]:
    found: list[Tensor] = []
    for node in nodes:
        # An in-place op on a view hides its node inside this one.
        if node.name().endswith("CopySlices"):
            raise _Unreadable
        for attribute in saved_slots(type(node)):
            for slot in listed(getattr(node, attribute)):
                _look_into(slot, found)
        yield from found
        found.clear()


def _look_into(slot: Any, found: list[Tensor]) -> None:
    """Append the tensor in a slot of a node, unless a region's hooks stand there."""

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    try:
        slot.register_hooks(note, lambda tensor: tensor)
    except (RuntimeError, AttributeError):
        # Hooks are there already, or the slot is empty.
        return
