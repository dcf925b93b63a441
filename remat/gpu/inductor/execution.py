"""A wrapper's own `call`, executed on fake tensors: what it launches, and the bytes alive meanwhile."""

from __future__ import annotations

import ast
import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.gpu.inductor.machine import DEVICE, Chip, pretended
from remat.transforms.compat import DispatchMode, example_of, storage_key

aten = torch.ops.aten
# Ops that launch nothing.
_NO_KERNEL = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.alias.default,
}

_GENERATOR = torch.zeros(16, dtype=torch.uint8)


@dataclass(frozen=True)
class Launch:
    """One kernel that a wrapper starts.

    Attributes:
        name: of the Triton or C++ kernel, or of the op.
        op: the op, None for a kernel that Inductor wrote.
        args, kwargs, outputs: the op's, tensors without data among them; of a kernel its arguments.
        read, written: bytes.
        live: bytes alive while it runs, above what the caller holds.
        text: of the kernel; empty for an op.
    """

    name: str
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    read: int
    written: int
    live: int
    text: str = ""


class Execution:
    """Wrappers of one step, run one after another: what the first returns lives on in the second.

    Args:
        chip: what they were lowered for; None for the CPU.
        kernels: what ops run that launch kernels of their own and call other wrappers: the ops of scans.
        inside: bytes that an op's kernel takes while it runs, beside its operands and results: of the op, its
            operands and what it made. None: none.

    Attributes:
        launches: of the wrapper that ran last, and of those that it called.
        called: how often it called which other wrapper, by its source.
        live, peak: bytes alive now, and the most that were since the last `run` began, above what was handed
            in as the caller's.
    """

    def __init__(
        self,
        chip: Chip | None,
        kernels: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
        inside: Callable[[Any, Sequence[Any], Sequence[Any]], int] | None = None,
    ) -> None:
        self.chip, self.kernels, self.inside = chip, kernels, inside
        self.device = DEVICE if chip else torch.device("cpu")
        self.launches: list[Launch] = []
        self.called: Counter[str] = Counter()
        self.live = self.peak = 0
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._seen = _Watch(self)
        self._calls: dict[str, Callable[[list[Any]], Any]] = {}  # wrappers that the running one called
        self._callers: dict[int, torch.Tensor] = {}  # storage -> the caller's tensor, which lives on
        self._count: dict[int, int] = {}  # storage -> tensors of it that are alive
        self._sizes: dict[int, int] = {}

    def given(self, like: Any) -> Any:
        """A tensor of the caller's: its memory does not count."""
        if not isinstance(like, torch.Tensor):
            return like
        # The length of a random state is a symbol to torch.
        size, stride = ([example_of(n) for n in numbers] for numbers in (like.shape, like.stride()))
        with self._mode:
            made = torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
        self._callers[storage_key(made)] = made
        return made

    def own_bytes(self, values: Iterable[Any]) -> int:
        """Bytes of these tensors that are not the caller's, each memory once."""
        keys = {storage_key(t) for t in values if isinstance(t, torch.Tensor)}
        return sum(self._sizes.get(key, 0) for key in keys)

    def run(self, source: str, args: list[Any]) -> list[Any]:
        """What `call(args)` of a wrapper returns. `args` is emptied, as compiled code does."""
        self.launches, self.called, self.peak = [], Counter(), self.live
        self._seen, self._calls = _Watch(self), {}
        with self._at_work():
            call = self._loaded(source)
            with self._mode, self._seen, torch.no_grad():
                return list(call(args))

    def call(self, source: str, args: list[Any]) -> list[Any]:
        """What `call(args)` of a wrapper returns that the running one calls."""
        self.called[source] += 1
        if source not in self._calls:
            self._calls[source] = self._loaded(source)
        return list(self._calls[source](args))

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        from torch._inductor import async_compile

        with contextlib.ExitStack() as stack:
            stack.enter_context(pretended(self.chip) if self.chip else contextlib.nullcontext())
            stack.enter_context(mock.patch.object(async_compile, "AsyncCompile", _Kernels))
            yield

    def _loaded(self, source: str) -> Callable[[list[Any]], Any]:
        names: dict[str, Any] = {"__name__": "wrapper", "__file__": "wrapper"}
        exec(compile(source, "<wrapper>", "exec"), names)
        for value in list(names.values()):
            if isinstance(value, _Kernel):
                value.seen = self._seen
        for name, device in (("cuda", DEVICE), ("cpu", "cpu"), ("cpu_pinned", "cpu")):
            names[f"empty_strided_{name}"] = partial(_allocate, device=device)
        names |= dict.fromkeys(("assert_size_stride", "assert_alignment"), lambda *_: None)
        names |= {"reinterpret_tensor": _reinterpret, "alloc_from_pool": _refuse_pool}
        return names["call"]

    def note(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor that is there now, until it and all that share it are gone."""
        key = storage_key(tensor)
        if key in self._callers or tensor.device.type != self.device.type:
            return
        if key not in self._count:
            self._count[key], self._sizes[key] = 0, tensor.untyped_storage().nbytes()
            self.live += self._sizes[key]
            self.peak = max(self.peak, self.live)
        self._count[key] += 1
        weakref.finalize(tensor, self._gone, key)

    def note_inside(self, size: int) -> None:
        """Count memory that a kernel takes while it runs, and that nobody sees."""
        self.peak = max(self.peak, self.live + size)

    def _gone(self, key: int) -> None:
        self._count[key] -= 1
        if not self._count[key]:
            del self._count[key]
            self.live -= self._sizes.pop(key)


class _Watch(DispatchMode):
    """Counts what ops make, and notes those that launch a kernel."""

    def __init__(self, execution: Execution) -> None:
        super().__init__()
        self.execution = execution

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kernel = self.execution.kernels.get(func)
        if kernel is not None:
            # A comparison of generators reads numbers.
            with self, mock.patch.object(torch.cuda, "get_rng_state", lambda _: _GENERATOR):
                return kernel(*args, **kwargs)
        # Results of such an op are there already.
        out = kwargs["out"] if "out" in kwargs else func(*args, **kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        for tensor in made:
            if not any(tensor is other for other in given):
                self.execution.note(tensor)
        if not isinstance(func, OpOverload):
            # Torch's checkpoint runs what could draw with a random state kept or restored.
            at = next((i for i, arg in enumerate(args) if isinstance(arg, OpOverload)), None)
            if at is None:
                return out
            func, args = args[at], args[at + 1 :]
        if self.execution.inside is not None:
            self.execution.note_inside(self.execution.inside(func, args, made))
        # (An op without results waits for something.)
        if (
            made
            and func not in _NO_KERNEL
            and not func.is_view
            and func.namespace not in ("prim", "inductor")
        ):
            read = sum(t.nbytes for t in given if not any(t is other for other in made))
            outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
            self.add(Launch(str(func), func, args, kwargs, outs, read, sum(t.nbytes for t in made), 0))
        return out

    def add(self, launch: Launch) -> None:
        self.execution.launches.append(
            Launch(**{**launch.__dict__, **_plain(launch), "live": self.execution.live})
        )


def _plain(launch: Launch) -> dict[str, Any]:
    """The operands with stand-ins for tensors, which would live on otherwise."""
    hollow: dict[int, Any] = {}

    def without_data(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return hollow.setdefault(id(value), Hollow(tuple(value.shape), value.dtype, value.stride()))

    parts = (launch.args, launch.kwargs, launch.outputs)
    args, kwargs, outputs = pytree.tree_map(without_data, parts)
    return {"args": tuple(args), "kwargs": kwargs, "outputs": tuple(outputs)}


@dataclass(frozen=True)
class Hollow:
    """A tensor's shape, type and strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]


class _Kernel:
    """A kernel that Inductor wrote; it does nothing but say that it was launched."""

    seen: _Watch | None = None

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        # By their names: `out_ptr0` is written, `in_out_ptr0` both.
        signature = re.search(r"'signature': (\{.*?\})", text)
        names = ast.literal_eval(signature[1]) if signature else {}
        written = re.search(r"'mutated_arg_names': (\[.*?\])", text)
        self.names = [key for key, kind in names.items() if kind != "constexpr"]
        self.mutated = set(ast.literal_eval(written[1])) if written else set()
        total = re.search(r"'kernel_num_gb': ([0-9.e-]+)", text)
        self.total = int(float(total[1]) * 1e9) if total else None

    def run(self, *args: Any, **_: Any) -> None:
        self(*args)

    def __call__(self, *args: Any, **_: Any) -> None:
        assert self.seen is not None
        named = zip(self.names or [""] * len(args), args, strict=False)
        tensors = [(name, t) for name, t in named if isinstance(t, torch.Tensor)]
        writes = [t for name, t in tensors if "out" in name.partition("_ptr")[0] or name in self.mutated]
        reads = [t for name, t in tensors if not name.startswith("out_ptr")]
        read, written = sum(t.nbytes for t in reads), sum(t.nbytes for t in writes)
        if self.total is not None:
            # Inductor's own count: of a slice it is the slice, not the tensor that it lies in.
            written = min(written, self.total)
            read = self.total - written
        self.seen.add(Launch(self.name, None, args, {}, tuple(writes), read, written, 0, self.text))


class _Kernels:
    """In place of what compiles kernels in the background."""

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        return lambda name, text, *_, **__: _Kernel(name, text)

    def cpp_pybinding(self, types: Any, text: str, **_: Any) -> _Kernel:
        found = re.search(r"void (\w+)\(", text)
        return _Kernel(found[1] if found else "cpp", text)

    def wait(self, names: Any) -> None:
        return None


def _allocate(size: Any, stride: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _refuse_pool(*_: Any) -> torch.Tensor:
    raise NotImplementedError("Inductor's memory_planning puts buffers into pools: turn it off.")


def saved(outputs: Sequence[str | None], returned: Sequence[Any], wanted: Sequence[str]) -> dict[str, Any]:
    """What a forward hands to its backward: by the names that the backward has for it."""
    by_name = dict(zip(outputs, returned, strict=True))
    return {name: by_name[name] for name in wanted if name in by_name}
