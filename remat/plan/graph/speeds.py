"""Speeds of the machine at hand: those of the nearest processor that was probed (`processors`), until it is
measured itself (`python -m remat env --measure`), which takes some seconds and is remembered on disk.

A speed is a curve: work -> work per second, as small ops attain less than large ones. Work is FLOPs of
matmuls, convolutions and attention, and bytes read and written of the others.

| kind | stands for |
|---|---|
| `matmul`, `convolution`, `attention`, `attention backward` | ops with FLOPs |
| `linalg` | factorizations, solves, FFTs: by a QR |
| `narrow attention` and so on | the same of heads narrower than `NARROW`: softmax takes a larger part |
| `copy` | sums, products, copies: ops as fast as memory |
| `clone` | a copy into another order of dimensions |
| `math` | exponentials and the like: `gelu`, `silu`, `exp`, softmax |
| `tanh` | what takes several times as long: `tanh`, `softplus`, powers, `gelu` by tanh |
| `norm` | layer norm and other ops that read their input twice |
| `random` | draws |

A probe has several sets of operands, and drops no result before the last: in a step, too, operands are not
in the processor's nearest cache. Two more figures are of a small block, whose tiny ops lie between large
ones: what an op takes in a step beside its kernel, and what a region adds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch

from remat._region import with_policy
from remat.plan.graph.disk import read_table, table_path, write_table
from remat.plan.graph.processors import nearest
from remat.plan.graph.stopwatch import alone, best_seconds, in_turns, one_thread
from remat.policies import save_nothing
from remat.transforms import RematError

# (work, work per second), the smallest work first.
Curve: TypeAlias = "tuple[tuple[float, float], ...]"

HEAVY = ("matmul", "convolution", "attention", "attention backward")
NARROW = 48
NARROWED = tuple(f"narrow {kind}" for kind in HEAVY if "attention" in kind)
LIGHT = ("copy", "clone", "math", "tanh", "norm", "random")
# No probe is begun that would take longer, by the speed of the one before.
_LONG = 0.05
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Operands of a probe: so many bytes, in so many sets at most.
_APART, _SETS = 2**24, 16
# Large ops of the small block, and tiny ones behind each.
_BLOCK, SEVERAL = 8, 22


class Probe(NamedTuple):
    """What is timed: work, bytes read and written, and what makes a call with operands of its own."""

    work: float
    bytes: float
    make: Callable[[], Callable[[], Any]]


# Whether what is not known is probed.
_measuring: ContextVar[bool] = ContextVar("remat_measuring", default=False)


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Within, a speed of this machine that is not known is probed when it is first asked for."""
    token = _measuring.set(True)
    try:
        yield
    finally:
        _measuring.reset(token)


class Speeds:
    """What one device attains."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.path = table_path("rates", device)
        self.table: dict[str, Any] = read_table(self.path)

    def call(self) -> float:
        """Seconds of an op on next to nothing, called again and again."""
        return float(self._found("call", self._time_call))

    def op(self) -> float:
        """Seconds of an op of an eager step beside its kernel: a call, autograd, and cold caches."""
        return max(self._in_a_step()[0], self.call())

    def region(self, ops: int) -> float:
        """Seconds that a region of eager code adds beside what runs again: `ops` counts no views."""
        _, once, each = self._in_a_step()
        return max(once, 0.0) + ops * max(each, 0.0)

    def _in_a_step(self) -> tuple[float, float, float]:
        """Seconds of an op, and those of a region: once, and for each of its ops."""
        return tuple(self._found("in a step", lambda: time_blocks(self.device)))

    def curve(self, kind: str, dtype: torch.dtype) -> Curve:
        """Speeds by work; a dtype that is not probed has those of float32."""
        if dtype not in _DTYPES:
            dtype = torch.float32
        name = f"{kind} {str(dtype).removeprefix('torch.')}"
        return tuple((w, rate) for w, rate in self._found(name, lambda: self._time_curve(kind, dtype)))

    def seconds(self, kind: str, dtype: torch.dtype, work: float) -> float:
        """What so much work takes, the call itself aside."""
        return work / rate_at(self.curve(kind, dtype), work) if work > 0 else 0.0

    @property
    def known(self) -> bool:
        """Whether there are any: no card has been probed that this one could be like."""
        return bool(self.table) or self.device.startswith("cpu") or _measuring.get()

    def measure(self) -> None:
        """Probe all there is, anew."""
        self.table = {}
        self.path.unlink(missing_ok=True)
        with measuring():
            self.op()
            for kind, dtype in itertools.product((*HEAVY, *NARROWED, "linalg", *LIGHT), _DTYPES):
                self.curve(kind, dtype)

    def attained(self, dtype: torch.dtype) -> dict[str, float]:
        """The speed of each kind at the largest work that was probed, for people."""
        return {kind: self.curve(kind, dtype)[-1][1] for kind in (*HEAVY, *LIGHT)}

    def _found(self, name: str, probe: Callable[[], Any]) -> Any:
        if name not in self.table and self.device.startswith("cpu") and not _measuring.get():
            return nearest(torch.get_num_threads())[name]
        if name not in self.table:
            with alone(self.device):
                made = probe()
            # Another process may have probed meanwhile: all are to price alike, so the first one counts.
            self.table = {name: made} | self.table | read_table(self.path)
            write_table(self.path, self.table)
        return self.table[name]

    def _time_call(self) -> float:
        tiny = torch.zeros(8, device=self.device)
        return best_seconds(lambda: torch.add(tiny, tiny), self.device)

    def _time_curve(self, kind: str, dtype: torch.dtype) -> list[list[float]]:
        call, curve = self.call(), []
        for work, size, make in probes(kind, dtype, self.device):
            if curve and work / curve[-1][1] > _LONG:
                break
            try:
                taken = seconds_apart(make, size, self.device)
            except RuntimeError as error:
                # No kernel for this dtype: it is priced as float32 is.
                if dtype is torch.float32 and not curve:
                    raise RematError(
                        f"a planner's prices are timed on {self.device!r}, and {kind} of float32 cannot run "
                        f'there: {error}. Write cost="flops", or device= of a card with published rates.'
                    ) from error
                break
            curve.append([work, work / max(taken - call, 0.5 * taken)])
        if not curve:
            return [list(point) for point in self.curve(kind, torch.float32)]
        return curve


def time_blocks(device: str) -> list[float]:
    """Seconds of a tiny op between large ones; those that a region adds, once and for each op.

    The same blocks take turns: what slows the machine for a while slows all of them.
    """
    wide = torch.ones(256, 256, device=device, requires_grad=True)
    given = [torch.ones(shape, device=device, requires_grad=True) for shape in ((4, 8), (8,), (8, 8))]

    def block(
        count: int, between: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, *weights: Any
    ) -> Any:
        for _ in range(count):
            x, y = x.relu(), between(y, *weights)
        return x, y

    def step(fn: Callable[..., Any]) -> None:
        with torch.enable_grad():
            results = [t for t in fn(wide, *given) if t.grad_fn is not None]
            ones = [t.detach() for t in results]
            torch.autograd.grad(results, [wide, *given], ones, allow_unused=True)

    runs: list[Callable[[], Any]] = []
    for count in (_BLOCK, 1):
        fn = functools.partial(block, count, _twice)
        runs += [functools.partial(step, fn), functools.partial(step, with_policy(fn, save_nothing))]
        runs += [functools.partial(fn, wide, *given)]
    for between in (lambda y, *_: y, several):
        runs += [functools.partial(step, functools.partial(block, _BLOCK, between))]
    # Of Python and tiny ops, which one thread runs: by its clock other jobs do not count.
    with one_thread():
        plain, region, again, short, shorter, anew, bare, filled = in_turns(runs, device)
    most, least = region - plain - again, shorter - short - anew
    each = (most - least) / ((_BLOCK - 1) * 3)
    return [(filled - bare) / (_BLOCK * SEVERAL), least - 3 * each, each]


def _twice(y: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return y.tanh().tanh()


def several(y: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Ops of several kinds on next to nothing: `SEVERAL` in forward and backward."""
    h = torch.nn.functional.layer_norm(y, (8,), norm, norm) @ weight
    return y + torch.nn.functional.gelu(h.view(2, 2, 8).transpose(0, 1)).reshape(4, 8) * 0.5


def seconds_apart(make: Callable[[], Callable[[], Any]], size: float, device: str) -> float:
    """Seconds of a call whose operands, of `size` bytes, are others than those of the calls before."""
    runs = [make() for _ in range(min(_SETS, 1 + int(_APART / size)))]
    return best_seconds(lambda: [run() for run in runs], device) / len(runs)


@functools.lru_cache(maxsize=16)
def _speeds(device: str, threads: int, folder: str | None) -> Speeds:
    return Speeds(device)


def speeds_of(device: str) -> Speeds:
    """The speeds of "cpu" or of a CUDA device of this machine, with so many threads as there are now."""
    return _speeds(device, torch.get_num_threads(), os.environ.get("REMAT_CACHE"))


def rate_at(curve: Curve, work: float) -> float:
    """The speed at so much work: between two points as a power of the work, beyond them as at the last."""
    if work <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in zip(curve, curve[1:], strict=False):
        if work <= high:
            share = math.log(work / low) / math.log(high / low)
            return slow * (fast / slow) ** share
    return curve[-1][1]


def probes(kind: str, dtype: torch.dtype, device: str) -> Iterator[Probe]:
    """What is timed of a kind, the smallest work first."""
    large = device.startswith("cuda")
    ones = functools.partial(torch.ones, dtype=dtype, device=device)
    if kind not in LIGHT:
        yield from _heavy(kind, large, ones, dtype.itemsize)
        return
    for count in (2**14, 2**18, 2**22) if not large else (2**18, 2**22, 2**26):
        size = (3 if kind == "copy" else 2) * count * dtype.itemsize
        yield Probe(size, size, functools.partial(_light, kind, count, ones))


def _light(kind: str, count: int, ones: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
    x, y, w = ones(count // 256, 256), ones(count // 256, 256), ones(256)
    turned = y.view(-1, 16, 64).transpose(0, 1)
    return {
        # Two operands: the second read of one and the same comes from the nearest cache.
        "copy": lambda: x + y,
        "clone": lambda: turned.clone(memory_format=torch.contiguous_format),
        "math": lambda: torch.nn.functional.gelu(x),
        "tanh": lambda: x.tanh(),
        "norm": lambda: torch.nn.functional.layer_norm(x, (256,), w, w),
        "random": lambda: torch.rand_like(x),
    }[kind]


def _heavy(kind: str, large: bool, ones: Callable[..., torch.Tensor], item: int) -> Iterator[Probe]:
    from torch.nn import functional as F

    if kind == "matmul":
        for n in (64, 256, 768) if not large else (512, 2048, 8192):
            yield Probe(
                2.0 * n**3, 3 * n * n * item, lambda n=n: functools.partial(torch.mm, ones(n, n), ones(n, n))
            )
    elif kind == "linalg":
        for n in (64, 256) if not large else (256, 1024):
            # (LAPACK and MAGMA know no bfloat16.)
            yield Probe(
                8 / 3 * n**3, 3 * n * n * item, lambda n=n: functools.partial(torch.linalg.qr, ones(n, n))
            )
    elif kind == "convolution":
        for n in (8, 32) if not large else (32, 128):

            def convolve(n: int = n) -> Callable[[], torch.Tensor]:
                return functools.partial(F.conv2d, ones(4, 64, n, n), ones(64, 64, 3, 3), padding=1)

            yield Probe(2.0 * 4 * n**2 * 64 * 64 * 9, 2 * 4 * 64 * n * n * item, convolve)
    else:
        back = kind.endswith("backward")
        dim = 32 if kind.startswith("narrow") else 64
        for rows in (64, 256, 1024) if not large else (512, 2048, 8192):
            flops = (10.0 if back else 4.0) * 8 * rows**2 * dim

            def attend(rows: int = rows) -> Callable[[], Any]:
                given = [ones(1, 8, rows, dim).requires_grad_(back) for _ in "qkv"]
                with torch.set_grad_enabled(back):
                    run = functools.partial(F.scaled_dot_product_attention, *given)
                    if not back:
                        return run
                    out = run()
                gradient = torch.ones_like(out)
                return lambda: torch.autograd.grad(out, given, gradient, retain_graph=True)

            yield Probe(flops, (8 if back else 4) * 8 * rows * dim * item, attend)
