"""Measures that all kinds of cases share: FLOPs of graphs, interleaved times, calls, errors as text."""

from __future__ import annotations

import contextlib
import cProfile
import fcntl
import gc
import math
import os
import pstats
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from remat._core import known_flops
from remat.cli.measure import seconds
from remat.transforms.compat import unwind_levels
from remat.transforms.compat.autograd import allow_hooks

ROOT = Path(__file__).parents[2]
Run = Callable[[], Any]
Spread = tuple[float, float, float]
# Milliseconds of one run.
Clock = Callable[[Run], float]
# Rounds that time is kept for where it is short.
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Deadline:
    """When a case is stopped. What would not be done by then is left out, and its row says so.

    Attributes:
        at: on the clock of `time.time`, which all processes of a machine share.
        seconds: from the start of the case until then.
    """

    at: float = math.inf
    seconds: float = math.inf

    @classmethod
    def until(cls, at: float) -> Deadline:
        return cls(at, at - time.time())

    def left(self) -> float:
        return self.at - time.time()

    def allows(self, seconds: float) -> bool:
        """Whether that much is left, and a tenth of the whole for what nobody foresees."""
        return math.isinf(self.seconds) or self.left() >= seconds + 0.1 * self.seconds

    def allows_another(self, slowest: float, rounds: float = 0.0) -> bool:
        """Whether a peer can be begun, beside the seconds of rounds, where the slowest so far took that long.

        The next one may take half as long again: no remat, which compiles fastest, comes first.
        """
        return self.allows(1.5 * slowest + rounds)


NEVER = Deadline()


class Turn:
    """Processes that share a machine: all of them prepare at once, and one at a time is timed.

    They lock a file: together while they prepare, alone while one is timed. So the first is timed when none
    prepares any more.

    Attributes:
        until: when what is timed has to end.
    """

    def __init__(self, file: Path, until: Deadline = NEVER) -> None:
        self.until = until
        self._file = file.open("w")

    def together(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def alone(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)


class GraphFlops(CustomGraphPass):
    """Counts the FLOPs of all graphs that Inductor is given, before it chooses its kernels."""

    def __init__(self) -> None:
        self.flops = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.flops += sum(map(flops_of, graph.nodes))

    def uuid(self) -> Any:
        """None: nothing that was compiled before serves here, or its graphs would not be seen."""
        return None


def flops_of(node: torch.fx.Node) -> int:
    if node.op != "call_function":
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    op, args = unwrapped(node.target, args)
    if not isinstance(op, torch._ops.OpOverload):
        return 0
    out = node.meta.get("val")
    outputs = out if isinstance(out, (tuple, list)) else (out,)
    known = known_flops(op, args, kwargs, outputs, lambda leaf: isinstance(leaf, torch.Tensor))
    return known or 0


def unwrapped(target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node runs, and its operands, also where it runs it with a random state kept or restored.

    Torch's checkpoint does that to attention, which could drop out (2.13).
    """
    if "rng_state" not in getattr(target, "__name__", ""):
        return target, args
    position = next(i for i, arg in enumerate(args) if isinstance(arg, torch._ops.OpOverload))
    return args[position], args[position + 1 :]


@contextlib.contextmanager
def counted() -> Iterator[GraphFlops]:
    """Counts in what is compiled within."""
    from torch._inductor import config

    counter = GraphFlops()
    with config.patch(post_grad_custom_pre_pass=counter):
        yield counter


def interleaved(
    runs: Mapping[str, Run], rounds: int, clock: Clock, deadline: Deadline = NEVER
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds of each run, round by round, and what the others raised.

    All take turns, another one first each time: drift of the machine meets all alike. Not
    `torch.utils.benchmark.Timer`: it warms up before every single measurement, which would be most of the
    time of an interleaved round.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    took = 0.0
    for turn in range(rounds):
        # The first round is there in any case: a peer that came so far should have a time.
        if turn and not deadline.allows(took):
            break
        start = time.perf_counter()
        gc.collect()
        names = list(taken)
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            try:
                taken[name].append(clock(runs[name]))
            except Exception as error:
                # Memory may run out here for the first time: the other runs hold theirs.
                failed[name] = told(error)
                del taken[name]
                recover(error)
        took = time.perf_counter() - start
    return taken, failed


def python_calls(run: Run) -> Counter[str]:
    """How many calls of functions a run makes, by the file that they are in."""
    with cProfile.Profile() as profile:
        run()
    found: Counter[str] = Counter()
    for (path, _, _), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        found[path] += count
    return found


def clock_of(device: str, kind: str) -> Clock:
    """What takes the milliseconds of a run on the device: `kind` is that of `Case.clock`."""
    return on_gpu if device == "cuda" else in_process if kind == "process" else on_cpu


def on_cpu(run: Run) -> float:
    return 1e3 * seconds(run)[1]


def in_process(run: Run) -> float:
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


def on_gpu(run: Run) -> float:
    """By CUDA events; a run that says so (JAX, which has streams of its own) by the clock on the wall."""
    if getattr(run, "wall_clock", False):
        return 1e3 * seconds(run, "cuda")[1]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def kernel_milliseconds(run: Run) -> float:
    """Milliseconds in which a GPU computes or copies during a run: where launches take longer, the rest of
    the time it waits for the next."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    events: Any = profile.events()
    on_card = [event for event in events if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_card)
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e3


def recover(error: BaseException | None = None) -> None:
    """Undo what torch leaves behind when its own checkpoint fails to compile under torch.func.

    The frames that `error`, and what it was raised from, still hold are let go of, with their tensors.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    unwind_levels()
    allow_hooks()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def told(error: BaseException) -> str:
    """One line of what was raised: memory that ran out by that name, otherwise the line that says most."""
    if isinstance(error, torch.OutOfMemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hooks = next((line for line in lines if "don't yet support" in line), None)
    line = hooks or (lines[0] if lines else "")
    # Addresses differ from run to run, folders from machine to machine, and a row should not.
    text = f"{type(error).__name__}: {line}".replace(f"{ROOT}{os.sep}", "")
    return re.sub(r"(?<=0x)[0-9a-f]+|/\S*/site-packages/", "", text)[:200]
