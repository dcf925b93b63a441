"""How a model is spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from remat._core import OPTIMIZERS
from remat.transforms import RematError

SCHEDULES = ("1f1b", "gpipe", "zerobubble")
_COUNTS = ("dp_replicate", "dp_shard", "tp", "pp", "ep", "microbatches")


@dataclass(frozen=True)
class Layout:
    """How a model is spread over devices: what `remat.fit(..., mesh=...)` plans for.

    There are `dp_replicate * dp_shard * tp * pp` ranks.

    Attributes:
        dp_replicate: copies of the model that are trained side by side (DDP, or HSDP's outer dimension).
        dp_shard: ranks that FSDP2 shards parameters, gradients and optimizer state over. Each block is a
            unit, and what lies outside of blocks is one more, which stays gathered.
        tp: ranks of tensor parallelism.
        pp: stages of the pipeline.
        ep: ranks that experts are spread over, taken from `dp_shard`, as torchtitan does.
        schedule: of the pipeline: "1f1b", "gpipe" or "zerobubble".
        microbatches: that a rank runs in one step of the pipeline.
        reshard: whether FSDP2 frees a block's parameters after its forward.
        optimizer: "adamw", "adam", "lion", "momentum", "muon", "sgd", or how many numbers of its dtype are
            held for each parameter.
        param_dtype, reduce_dtype: those of FSDP2's mixed precision; None means the parameter's own. Until
            torch 2.15 gradients are then reduced in `param_dtype`, as FSDP2 does.
        parallelize: how tensor and expert parallelism spread the model. A plan as `parallelize_module` takes
            it, or a function of the model and the device mesh that does it in place. The mesh has those of
            the dimensions "ep" and "tp" that are above 1. None means the plan that a Hugging Face model
            brings along.
        layers: patterns for the names of the blocks that become regions, as `remat.apply` reads them.
            Where that has made regions already, those are the blocks.
        split: blocks for each stage of the pipeline; None means that the plan chooses.

    Raises:
        RematError: a value that means nothing; the message says what to write.

    Example:
        >>> from remat.plan import Layout
        >>> Layout(dp_shard=16, tp=8, pp=4, microbatches=16).ranks
        512
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    reshard: bool = True
    optimizer: str | int = "adamw"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    parallelize: Mapping[str, Any] | Callable[[torch.nn.Module, Any], Any] | None = field(
        default=None, repr=False, compare=False
    )
    layers: str | Sequence[str] = "*.layers.*"
    split: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise RematError(f"Layout({name}={count!r}): {name} is 1 or more.")
        if self.schedule not in SCHEDULES:
            raise RematError(f"Layout(schedule={self.schedule!r}): write one of {', '.join(SCHEDULES)}.")
        known = isinstance(self.optimizer, str) and self.optimizer in OPTIMIZERS
        if not known and (isinstance(self.optimizer, (bool, str)) or self.optimizer < 0):
            names = ", ".join(OPTIMIZERS)
            raise RematError(
                f"Layout(optimizer={self.optimizer!r}): write one of {names}, or how many numbers it holds "
                "for each parameter."
            )
        if self.dp_shard % self.ep:
            raise RematError(
                f"Layout(ep={self.ep}, dp_shard={self.dp_shard}): experts are spread over ranks of dp_shard, "
                "so ep must divide it."
            )
        self._check_layers()
        if self.pp == 1 and self.microbatches > 1:
            raise RematError(
                f"Layout(microbatches={self.microbatches}) without a pipeline: gradients of microbatches "
                "that run one after another need no plan of their own. Leave it out, or write pp=..."
            )
        if self.split is not None and (len(self.split) != self.pp or min(self.split) < 1):
            raise RematError(
                f"Layout(split={self.split!r}, pp={self.pp}): write the number of blocks, 1 or more, "
                "for each stage."
            )

    def _check_layers(self) -> None:
        """A layout is written to files, so its layers are patterns; an iterator of them is read once."""
        given: Any = self.layers
        parts = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
        if not parts or not all(isinstance(part, str) for part in parts):
            raise RematError(
                f"Layout(layers={given!r}): write a pattern for qualified names, or several, such as "
                'layers="layers.*". For classes or modules call remat.apply(model, layers=...) first: '
                "regions that are there already are the blocks."
            )
        if not isinstance(given, (str, tuple, list)):
            object.__setattr__(self, "layers", tuple(parts))

    @property
    def ranks(self) -> int:
        """All devices."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp

    @property
    def spread(self) -> tuple[tuple[str, Any], ...]:
        """What a rank can see of it in FSDP's wrappers, None where that does not count."""
        # A pipeline's backward leaves parameters gathered in any case.
        reshard = self.reshard if self.pp == 1 and self.dp_shard > 1 else None
        found = {"dp_shard": self.dp_shard, "dp_replicate": self.dp_replicate, "reshard": reshard}
        return *found.items(), ("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)

    @property
    def states(self) -> int:
        """Numbers that the optimizer holds for each parameter."""
        return OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer

    def in_flight(self, stage: int) -> int:
        """Microbatches whose forward has run on a stage and whose backward has not, at most."""
        if self.schedule == "gpipe":
            return self.microbatches
        return min(self.microbatches, self.pp - stage)

    def waiting(self, stage: int) -> int:
        """Microbatches whose gradients of parameters wait under ZeroBubble, at most."""
        return min(self.microbatches, stage + 1) if self.schedule == "zerobubble" else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without `parallelize`: what a plan remembers."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "parallelize"}
        for name in ("param_dtype", "reduce_dtype"):
            record[name] = None if record[name] is None else str(record[name]).removeprefix("torch.")
        for name in ("layers", "split"):
            value = record[name]
            record[name] = value if value is None or isinstance(value, str) else list(value)
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Layout:
        """The layout that `to_dict` gave."""
        made = dict(record)
        for name in ("param_dtype", "reduce_dtype"):
            made[name] = None if made[name] is None else getattr(torch, made[name])
        for name in ("layers", "split"):
            value = made[name]
            made[name] = value if value is None or isinstance(value, str) else tuple(value)
        return cls(**made)
