"""An optimization barrier: the identity on a value, ordered after other values.

A recomputation that is written out in a graph repeats the forward op by op. Compilers undo that:
common-subexpression elimination merges the two, and schedulers fuse or interleave them. A recomputation
that starts from `fence(x, cotangents)` has other inputs than the forward, and cannot start before the
backward has reached it. (JAX puts its `optimization_barrier` in the same place, `jax._src.ad_checkpoint`.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.transforms.compat import (
    as_it_is,
    graph_memory,
    graph_storage,
    in_transform,
    must_save,
    traced,
    unwrapped,
)
from remat.transforms.context import recordings
from remat.transforms.offload import Elsewhere, copied_to_host, lane, to_device
from remat.transforms.ops import Traits, grouped, tensors_in
from remat.transforms.sharded import Wrapper, local_tensors, wraps

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("fence(Tensor value, Tensor[] after) -> Tensor")
_library.define("snapshot(Tensor value) -> Tensor")
_library.define("once(Tensor value) -> Tensor")


def as_fenced(value: torch.Tensor, after: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """A copy of a value that is computed `after` others; it lies in memory as the value does."""
    copy = value.clone()
    if copy.stride() == value.stride():
        return copy
    # Expanded, or with gaps: the strides that were promised are those of a copy of the memory it spans.
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    span = value.as_strided((last + 1,), (1,)) if value.numel() else value.flatten()
    return span.clone().as_strided(value.shape, value.stride())


def fence_fake(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    """What stands for `as_fenced` while a graph is traced."""
    # By its schema the op makes a new tensor, so functionalization tells the two apart; by its memory it is
    # the same, so that no later pass writes into what it takes for a buffer of its own.
    return value.view_as(value)


_library.impl("fence", as_fenced, "CompositeExplicitAutograd")
torch.library.register_fake("remat::fence", fence_fake, lib=_library)
_library.impl("snapshot", as_fenced, "CompositeExplicitAutograd")
torch.library.register_fake("remat::snapshot", as_fenced, lib=_library)
_library.impl("once", as_fenced, "CompositeExplicitAutograd")
torch.library.register_fake("remat::once", lambda value: fence_fake(value, ()), lib=_library)
# A backend that executes its graph as it is runs one backward for all cotangents of `is_grads_batched`. The
# order holds whatever is batched.
_library.impl("fence", lambda value, after: value.clone(), "Batched")
FENCE = torch.ops.remat.fence.default
# A value that is computed once in a graph (`lowering.GraphConstants`).
ONCE = torch.ops.remat.once.default


def snapshot(value: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that is about to be written to. Of a plain one compilers find that it does nothing,
    and hand what is in the memory later to the backward."""
    copy = on_local(torch.ops.remat.snapshot.default, value)
    must_save(copy)
    return copy


def fence(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    """`value`, as a compiler must compute with it: after `after`, and never for what it was before.

    The identity for derivatives of every order and kind, which go to `value` alone.

    Args:
        value: a tensor of any shape and dtype.
        after: tensors that have to be there first; with none of them the result is `value` itself.
    """
    if after and (torch.is_grad_enabled() or in_transform()):
        return _Fence.apply(value, *after)
    return fence_below(value, after)


def fence_below(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    """`fence` in a dispatch mode, where autograd and functorch have been: it leaves no node of its own."""
    return fenced(value, after) if after else value


def fenced(value: torch.Tensor, after: Sequence[torch.Tensor], op: Any = FENCE) -> torch.Tensor:
    """What a fence of one of the kinds makes of a value; the order is that of this process's tensors."""
    local = local_tensors(after) if any(map(_sharded, after)) else after
    return on_local(op, value, list(local))


def _sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__") and wraps(tensor)


def on_local(op: Callable[..., torch.Tensor], value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What `op` makes of a value. A `DTensor` knows no sharding of these ops: they run on what it wraps."""
    if not _sharded(value):
        return op(value, *rest)
    wrapper = Wrapper(value, lambda local: op(local, *rest))
    return wrapper.around(wrapper.parts)


class _Fence(torch.autograd.Function):
    """The rules: torch's custom ops have none for torch.func."""

    generate_vmap_rule = False

    @staticmethod
    def forward(value: torch.Tensor, *after: torch.Tensor) -> torch.Tensor:
        return fenced(value, after)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.count = len(inputs) - 1
        if not output.is_floating_point() and not output.is_complex():
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return cotangent, *[None] * ctx.count

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return None if tangent is None else tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, dims: Any, value: torch.Tensor, *after: torch.Tensor) -> Any:
        # The order holds whatever the batch dimensions of `after` are.
        return fence(value, after), dims[0]


# -- where it stands ----------------------------------------------------------------------------------
# A fence costs a node of every graph that a compiler makes of a region, and most operands are weights, which
# ops only join with something that is behind a fence already.
_aten = torch.ops.aten

# Ops that are linear in all but one operand, at this position. What decompositions make of them computes
# nothing from the others alone, nor do their derivatives, which join them with a cotangent.
_LINEAR_BESIDE = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten.convolution.default: 0,
    _aten.native_layer_norm.default: 0,
    _aten.native_group_norm.default: 0,
    _aten.add.Tensor: 0,
    _aten.sub.Tensor: 0,
    _aten.mul.Tensor: 0,
}


class Origins:
    """Follows a region's ops in a trace, and what they compute from.

    A fence stands only where something is computed from an operand alone, so weights have none: with one on
    every operand the peak of two blocks of GPT-2 medium's kind was 24.2 MB in place of 21.0 (Inductor, CPU).

    Args:
        operands: the region's, each by its position.
    """

    def __init__(self, operands: Sequence[torch.Tensor]) -> None:
        self.count = len(operands)
        self.given = grouped(map(graph_storage, operands))  # storage -> positions
        self.fenced: set[int] = set()
        # Storages of results that cannot be computed without a fenced operand.
        self.behind: set[int] = set()
        # What is known by its address: a freed one comes again, for other memory.
        self.held: list[torch.UntypedStorage] = []

    def bare(self, position: int) -> bool:
        """Whether nothing is computed from this operand but together with a fenced one."""
        return position < self.count and position not in self.fenced

    def follow(self, func: Any, facts: Traits, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of an op that ran."""
        read = [graph_storage(t) for t in tensors_in((*args, *kwargs.values()))]
        if facts.view and read and read[0] in self.given:
            return
        starts = read
        at = _LINEAR_BESIDE.get(func)
        if at is not None and isinstance(args[at], torch.Tensor):
            main = graph_storage(args[at])
            if main in self.given or main in self.behind:
                starts = [main]
        self.fenced.update(i for s in starts for i in self.given.get(s, ()))
        if any(map(self._behind, read)):
            made = [graph_memory(t) for t in tensors_in(out)]
            self.behind.update(memory._cdata for memory in made)
            self.held += made

    def renamed(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Take note that values have got other memories, as results of regions inside do."""
        for was, tensor in zip(old, new, strict=True):
            if self._behind(graph_storage(was)):
                self.behind.add(graph_storage(tensor))
                self.held.append(graph_memory(tensor))

    def _behind(self, storage: int) -> bool:
        return storage in self.behind or any(i in self.fenced for i in self.given.get(storage, ()))


# -- names -----------------------------------------------------------------------------------------------
# Naming a value, so that a compiler's graph keeps the name.


# Composite: below autograd and functorch only the alias is left, which has all their rules.
_library.define("checkpoint_name(Tensor(a) value, str name) -> Tensor(a)")
# Signposts in Dynamo's graphs: what a region hands out because `capture` wants it, and what `capture_grads`
# differentiates by.
_library.define("captured(Tensor(a) value, str name) -> Tensor(a)")
_library.define("variable(Tensor(a) value) -> Tensor(a)")


def give_name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`named` outside of Dynamo."""
    # An op of its own: the value that is named may be one of several results of the op that made it.
    alias = tensor.view_as(tensor)
    for mode in recordings():
        for part in local_tensors([unwrapped(alias)]):
            mode.name(part, name)
    return alias


def _alias(tensor: torch.Tensor, *_: str) -> torch.Tensor:
    return tensor.view_as(tensor)


for _op, _kernel in (("checkpoint_name", give_name), ("captured", _alias), ("variable", _alias)):
    _library.impl(_op, _kernel, "CompositeImplicitAutograd")
    # torch.vmap does not take the composite for a rule of its own.
    _library.impl(_op, _kernel, "FuncTorchBatchedDecomposition")
NAMED = torch.ops.remat.checkpoint_name.default
CAPTURED = torch.ops.remat.captured.default
VARIABLE = torch.ops.remat.variable.default


def named(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An alias of `tensor` that every recording in progress knows by `name`."""
    if torch.compiler.is_dynamo_compiling():
        # Nothing is recorded yet: the op stands in the graph until it is traced.
        return NAMED(tensor, name)
    return give_name(tensor, name)


# -- kept values on the host ------------------------------------------------------------------------------


# A CUDA graph holds no host memory, and its replay asks nobody whether a copy has arrived. (Inductor is told
# to capture no part of such a graph.)
for _schema in (
    "send(Tensor value) -> Tensor",
    "sent(Tensor value, Tensor[] hosts) -> Tensor",
    "fetch(Tensor host, Device device, Tensor[] after) -> Tensor",
    "arrived(Tensor value, Tensor[] after) -> Tensor",
    "arrived.wait(Tensor value) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))

# By the address of what was fetched: the mark that says when it is there.
_marks: dict[int, Any] = {}


def _send(value: torch.Tensor) -> torch.Tensor:
    return copied_to_host(value)


def _fetch(host: torch.Tensor, device: torch.device, after: Sequence[torch.Tensor]) -> torch.Tensor:
    copy = to_device(host, device)
    if copy.mark is not None:
        _marks[copy.tensor.data_ptr()] = copy.mark
    return copy.tensor


def _wait(value: torch.Tensor) -> None:
    # What was fetched is computed with from now on: Inductor's code calls this.
    mark = _marks.pop(value.data_ptr(), None) if _marks else None
    if mark is not None:
        lane(value).arrived(value, mark)


def _arrived(value: torch.Tensor, after: Sequence[torch.Tensor]) -> torch.Tensor:
    _wait(value)
    return as_fenced(value, after)


def _send_fake(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, device="meta" if value.is_meta else "cpu")


for _name, _kernel, _fake in (
    ("send", _send, _send_fake),
    ("sent", as_fenced, fence_fake),
    ("fetch", _fetch, lambda host, device, after: torch.empty_like(host, device=device)),
    ("arrived", _arrived, fence_fake),
    ("arrived.wait", _wait, lambda value: None),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"remat::{_name}", _fake, lib=_library)

# What they wait for may be batched, as with a fence.
_library.impl("fetch", lambda host, device, after: _fetch(host, device, ()), "Batched")
_library.impl("arrived", lambda value, after: _arrived(value, ()), "Batched")
FETCH = torch.ops.remat.fetch.default
_SEND, ARRIVED = torch.ops.remat.send.default, torch.ops.remat.arrived.default


def behind(value: torch.Tensor, first: Sequence[torch.Tensor]) -> torch.Tensor:
    """`value`, behind a fence that stands after `first`: what is sent, or copies of what is written to.
    Otherwise those might be made as the forward ends, or in the backward. What comes behind may be a result
    of the graph: it is no copy."""
    return fenced(value, first, torch.ops.remat.sent.default)


class Sent(Elsewhere):
    """A kept value that the graph copies to the host.

    A graph has one order. So the fetch of a region is put before the recomputation of the region that is
    recomputed before it: as in eager, copies run beside what is computed (`offload.transfer`), one region
    ahead.
    """

    __slots__ = ("before", "device", "fetched", "host", "tensor")

    def __init__(self, tensor: torch.Tensor, waits: bool = False) -> None:
        """`waits`: it is sent when the next one that waits is made, so the last of a graph never is."""
        self.device, self.tensor, self.host = tensor.device, as_it_is(tensor), None
        self.fetched: torch.Tensor | None = None
        self.before: Sent | None = None
        if waits and (at := traced(tensor)) is not None:
            self.before = _waiting.get(at[0])
            _waiting[at[0]] = self
        for one in (self.before,) if waits else (self,):
            if one is not None:
                one.host = on_local(_SEND, one.tensor)

    def hosts(self) -> list[torch.Tensor]:
        """What was sent when this value was made: itself, or the one that had waited."""
        first = self.before if self.before is not None else self
        return [] if first.host is None else [first.host]

    def fetch(self, after: Sequence[torch.Tensor]) -> None:
        """Begin to copy it back, once `after` are there."""
        if self.host is not None:
            self.fetched = on_local(FETCH, self.host, self.device, list(local_tensors(after)))

    def fenced(self, after: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value on its device, behind a fence."""
        if self.fetched is None:
            return fence_below(self.tensor, after)
        return fenced(self.fetched, after, ARRIVED)


# The value of a graph under way that waits.
_waiting: weakref.WeakKeyDictionary[Any, Sent] = weakref.WeakKeyDictionary()
