"""What tests share: how the table is run, derivatives in few words, ops and bytes counted."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from _pytest.mark.structures import ParameterSet
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from remat.plan.calls import cache as plan_cache, trusted
from remat.transforms.offload import transfer
from remat.transforms.region import cache, forget_all
from tests.composition.table import POLICIES as POLICIES, rand as rand

# For what torch itself does otherwise in some versions.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
FEW = ("nothing", "matmuls", "rule")


def allocations(fn: Callable[..., Any], *args: Any) -> tuple[list[int], Any]:
    """The bytes that the CPU allocator gave out (freed: negative) in a call, in order; and the result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        out = fn(*args)
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events: list[Any] = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())], out


@contextlib.contextmanager
def nan_where_nobody_wrote(backend: str | None = None) -> Iterator[None]:
    """Torch fills what it allocates within, so that a number that nobody computed is seen.

    Not for Inductor, which makes other code then.
    """
    if backend == "inductor":
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def forget() -> None:
    """Forget what first calls taught: the next call of every region is a first one."""
    for known in list(cache._caches.values()):
        known.differentiates = known.unframed = False
    forget_all()
    # A graph that an earlier test left alive would have its values fetched ahead in the next one's backward.
    transfer._order.last = None
    # Calls that look alike share what was planned, and what was warned of.
    for calls in list(plan_cache._SEEN.values()):
        calls.paths, calls.kinds = None, []
    trusted._trusts.clear()
    plan_cache._warned.clear()


def unseen(like: Tensor, value: float = 0.0) -> Tensor:
    """A number that no op wrote: where a recomputation needs it, the region's function runs again.

    It lies in memory of over a megabyte, of which a region holds no copy."""
    memory = torch.empty(like.numel() + (1 << 20), dtype=like.dtype)
    filled = memory[: like.numel()].view(like.shape)
    filled.numpy().fill(value)
    return filled


def sparse(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Parameters of which every third, and the first, is in the quick suite: the others are slow."""
    params = [v if isinstance(v, ParameterSet) else pytest.param(v) for v in values]
    return [
        p if i % every == 0 else pytest.param(*p.values, id=p.id, marks=[*p.marks, pytest.mark.slow])
        for i, p in enumerate(params)
    ]


def _called(value: Any) -> str:
    """For the name of a test, in which a number of an object would be another one in each process."""
    plain = isinstance(value, int | float | tuple | None)
    return str(value) if plain else getattr(value, "__name__", type(value).__name__)


def crossed(*axes: Iterable[Any], every: int = 3) -> list[ParameterSet]:
    """One in `every` of the combinations of the values, each value among them."""
    values = [list(axis) for axis in axes]
    rows = [row for row in itertools.product(*[range(len(axis)) for axis in values]) if sum(row) % every == 0]
    for at, axis in enumerate(values):
        for missing in sorted({*range(len(axis))} - {row[at] for row in rows}):
            rows.append(tuple(missing if k == at else missing % len(other) for k, other in enumerate(values)))
    found = [[axis[i] for axis, i in zip(values, row, strict=True)] for row in rows]
    return [
        pytest.param(*row, id="-".join(v if isinstance(v, str) else _called(v) for v in row)) for row in found
    ]


def same(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
    )


def scalar(outputs: Any) -> Tensor:
    """A real loss that reads every inexact output with its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(pytree.tree_leaves(outputs)):
        if isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex()):
            squared = (out * out.conj()).real if out.is_complex() else out * out
            total = total + (i + 1) * squared.double().sum() + (i + 2) * out.real.double().sum()
    return total


def gradients(outputs: Any, leaves: list[Tensor], **options: Any) -> tuple[Tensor | None, ...]:
    """Derivatives of `scalar(outputs)` for those of `leaves` that require grad, by plain autograd."""
    options.setdefault("allow_unused", True)
    return torch.autograd.grad(scalar(outputs), [x for x in leaves if x.requires_grad], **options)


def leaves_of(args: tuple[Tensor, ...]) -> list[Tensor]:
    """Fresh leaves that require grad where that is possible."""
    return [a.detach().clone().requires_grad_(a.is_floating_point() or a.is_complex()) for a in args]


def inexact(args: Any) -> tuple[int, ...]:
    """Positions of the arguments that have derivatives."""
    return tuple(i for i, a in enumerate(args) if a.is_floating_point() or a.is_complex())


def vjp(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, Callable[..., Any]]:
    """torch.func.vjp, whose annotation says that it may return three values."""
    return torch.func.vjp(fn, *args)  # type: ignore[return-value]


def jvp(fn: Callable[..., Any], primals: Any, directions: Any) -> tuple[Any, Any]:
    """torch.func.jvp, likewise."""
    return torch.func.jvp(fn, primals, directions)  # type: ignore[return-value]


def batched(args: tuple[Tensor, ...], size: int = 2) -> tuple[Tensor, ...]:
    """Every argument stacked `size` times, the copies different where the dtype allows."""
    return tuple(
        torch.stack(
            [a * (1 + 0.25 * i) if a.is_floating_point() or a.is_complex() else a for i in range(size)]
        )
        for a in args
    )


def custom(result: Callable[..., Any], gradient: Callable[..., Any]) -> Callable[..., Any]:
    """An autograd Function that saves its operands; its gradient is of a cotangent and of these."""

    def forward(ctx: Any, *operands: Tensor) -> Any:
        ctx.save_for_backward(*operands)
        return result(*operands)

    made: Any = type("Custom", (torch.autograd.Function,), {})
    made.forward = staticmethod(forward)
    made.backward = staticmethod(lambda ctx, *cotangents: gradient(*cotangents, *ctx.saved_tensors))
    return made.apply


class Watched(TorchDispatchMode):
    """Tells `look` of each op that has run below autograd: the op, what it was given, what it returned."""

    def __init__(self, look: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.look(func, args, kwargs or {}, out)
        return out


class OpCounter(Watched):
    """Counts the ops that run below autograd."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        super().__init__(lambda op, *_: self.counts.update([op._schema.name.split("::")[1]]))

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    @property
    def dots(self) -> int:
        return sum(self.counts[name] for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot"))


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made since it was entered that are still alive: no cycle may hold one."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made = [(ref, size) for ref, size in self.made if not ref.expired()]
        known = {ref.cdata for ref, _ in self.made}
        for given in pytree.tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                given = given.untyped_storage()
            if isinstance(given, torch.UntypedStorage):  # an operand of `set_`
                known.add(given._cdata)
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known:
                self.made.append((StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()))
        self.peak = max(self.peak, self.bytes)
        return out

    @property
    def bytes(self) -> int:
        return sum(size for ref, size in self.made if not ref.expired())


def seed_only_what_is_there() -> None:
    """Without a GPU `torch.manual_seed` writes down a stack trace for each kind of GPU (1.5 ms)."""
    kinds: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for kind in kinds:
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


def loop(body: Callable[..., Any], carry: Any, xs: Tensor, reverse: bool = False) -> Any:
    """What `scan_remat` computes, step by step."""
    ys = []
    for x in xs.flip(0) if reverse else xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, torch.stack(ys[::-1] if reverse else ys)
