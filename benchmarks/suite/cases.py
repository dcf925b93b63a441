"""What is measured and what comes of it: a case is run in one process, and gives rows of a long CSV."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from benchmarks.common.models import Model, named

# In place of a value: of a peer or a whole case that was left out because the time was up.
NO_TIME = "not run: the time was up"


@dataclass(frozen=True)
class Case:
    """One process's worth of measurements: one model in one mode, all peers taking turns.

    Attributes:
        kind: "panel" (memory, FLOPs, time), "compile" (seconds cold and warm), "fit" (largest `vary`
            whose step peaks within `limit`), "plan" (seconds of planners), or "records" (the benchmark
            called `model`).
        model: a name of `benchmarks.common.models.SIZES`.
        peers: names for `benchmarks.common.peers.peer`; in a panel the first is the one whose
            gradients are right.
        mode: of `benchmarks.common.steps`.
        compiled: through `torch.compile`.
        device: "cpu" or "cuda".
        dtype: of parameters and activations.
        sizes: what differs from the model's size for the device.
        rounds: timed turns of every peer; 0 leaves time out.
        vary: "batch" or "seq", with `step` as its unit.
        limit: bytes.
        seed: of weights and batch.
        threads: of the CPU; 0 leaves them as they are.
        clock: "wall", or "process" for the process's CPU time: what others take of the machine does not count
            then. For one thread on a CPU.
        alone: not beside other cases while it prepares: its memory is most of the machine, or it has next to
            nothing to prepare.
        seconds: how long it may be expected to take, for the time left and the time limit.
    """

    kind: str
    model: str
    peers: tuple[str, ...] = ()
    mode: str = "backward"
    compiled: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    sizes: tuple[tuple[str, int], ...] = ()
    rounds: int = 0
    vary: str = ""
    step: int = 1
    limit: int = 0
    seed: int = 0
    threads: int = 0
    clock: str = "wall"
    alone: bool = False
    seconds: float = 10.0

    @property
    def engine(self) -> str:
        return "compiled" if self.compiled else "eager"

    @property
    def unit(self) -> str:
        """Of times that are measured in rounds."""
        return "ms" if self.clock == "wall" else "ms of CPU time"

    @property
    def name(self) -> str:
        """Tells it from the other cases of a suite, to people and to a run that goes on where one ended."""
        sizes = " ".join(f"{key}={value}" for key, value in self.sizes)
        limit = f"{self.vary} within {self.limit >> 20} MiB" if self.vary else ""
        parts = (self.kind, self.model, sizes, self.mode, self.engine, limit, self.device, self.dtype)
        return " ".join(filter(None, parts))

    def built(self) -> Model:
        return named(self.model, self.device, **dict(self.sizes))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        values = json.loads(text)
        sizes = tuple((key, value) for key, value in values.pop("sizes"))
        return cls(**values | {"sizes": sizes, "peers": tuple(values["peers"])})


@dataclass(frozen=True)
class Measured:
    """One value of one peer. `error` holds what was raised instead, and the numbers are then None."""

    case: str
    kind: str
    model: str
    depth: int | None
    batch: int | None
    seq: int | None
    mode: str
    engine: str
    device: str
    dtype: str
    seed: int
    peer: str = ""
    family: str = ""
    metric: str = ""
    unit: str = ""
    value: float | None = None
    p20: float | None = None
    p50: float | None = None
    p80: float | None = None
    error: str = ""

    @classmethod
    def of(cls, case: Case) -> Measured:
        """A row of `case` without a value yet."""
        sizes: dict[str, Any] = dict.fromkeys(("depth", "batch", "seq"))
        if case.kind != "records":
            built = case.built()
            sizes = {key: getattr(built, key) for key in sizes}
        shared = ("kind", "model", "mode", "engine", "device", "dtype", "seed")
        return cls(case=case.name, **sizes, **{key: getattr(case, key) for key in shared})

    def with_value(self, metric: str, unit: str, value: float) -> Measured:
        return replace(self, metric=metric, unit=unit, value=value)

    def with_spread(self, metric: str, unit: str, spread: tuple[float, float, float]) -> Measured:
        low, middle, high = spread
        return replace(self, metric=metric, unit=unit, value=middle, p20=low, p50=middle, p80=high)

    def failed(self, error: str) -> Measured:
        return replace(self, metric="error", error=error)


def read(row: dict[str, str]) -> Measured:
    """A line of the CSV, its columns on machine and versions aside."""
    made = {field.name: converted(field.name, row[field.name]) for field in fields(Measured)}
    return Measured(**made)


def converted(name: str, text: str) -> Any:
    if name in ("depth", "batch", "seq", "seed"):
        return int(text) if text else None
    if name in ("value", "p20", "p50", "p80"):
        return float(text) if text else None
    return text
