"""A plan for every rank: a value that is made once, written to a file, and carried out by all."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from remat._core import format_bytes
from remat.plan.layout.layout import Layout
from remat.plan.layout.rank import BlockPolicy, agree, first_difference, place
from remat.transforms import RematError

_FORMAT = 1


@dataclass(frozen=True)
class Keeps:
    """What a block keeps.

    Attributes:
        program: hash of its ops.
        saved: positions of the ops that are saved.
        kept_bytes: of one microbatch, its input included.
        cost: seconds of what runs again.
    """

    program: str
    saved: tuple[int, ...]
    kept_bytes: int
    cost: float


@dataclass(frozen=True)
class StagePlan:
    """The ranks of one stage of the pipeline, which are all alike.

    Attributes:
        blocks: what each block keeps, by its qualified name.
        in_flight: microbatches that are kept at once.
        microbatch_bytes: kept for one, by blocks and what is around them.
        fixed: bytes whatever blocks keep, by what they are for.
        working_bytes: the most that lives over all these, in a forward or backward.
        seconds: of a microbatch's forward and backward, recomputation included.
        recompute_seconds: of that.
    """

    blocks: dict[str, Keeps]
    in_flight: int
    microbatch_bytes: int
    fixed: dict[str, int]
    working_bytes: int
    seconds: float
    recompute_seconds: float

    @property
    def kept_bytes(self) -> int:
        """Kept for all microbatches in flight."""
        return self.in_flight * self.microbatch_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes on a rank."""
        return sum(self.fixed.values()) + self.kept_bytes + self.working_bytes


@dataclass(frozen=True)
class MeshPlan:
    """A plan for every rank of a job: what `remat.fit(..., mesh=Layout(...))` returns.

    `remat.apply(model, plan=...)` carries it out, on every rank. No rank plans by itself.

    Attributes:
        model: name of the model's class.
        layout: how it is spread.
        device: whose speeds and links were used.
        memory: bytes of a device.
        stages: one for each stage of the pipeline.
        programs: the ops of each kind of block, by their hash.
        weights: shape over all ranks, shape of a rank of `tp` and `ep`, and dtype of each parameter.
        seconds: time the search took.

    Example:
        >>> import remat, torch
        >>> from remat.plan import Layout, MeshPlan
        >>> model = torch.nn.Sequential(*map(torch.nn.Sequential, [torch.nn.Linear(8, 8) for _ in range(2)]))
        >>> plan = remat.fit(model, torch.ones(4, 8), mesh=Layout(dp_shard=2, layers="*"), memory="1MiB")
        >>> list(plan.stages[0].blocks), MeshPlan.from_json(plan.to_json()) == plan
        (['0', '1'], True)
    """

    model: str
    layout: Layout
    device: str
    memory: int
    stages: tuple[StagePlan, ...]
    programs: dict[str, tuple[str, ...]] = field(repr=False)
    weights: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = field(repr=False)
    seconds: float = field(default=0.0, compare=False, repr=False)
    no_policy: ClassVar[str] = "write remat.apply(model, plan=plan), which makes regions of all blocks."

    @cached_property
    def hash(self) -> str:
        """A hash of all that ranks must agree on."""
        return hashlib.sha256(json.dumps(self._record(), sort_keys=True).encode()).hexdigest()

    def policies(self, model: torch.nn.Module, *, together: bool = True) -> dict[str, BlockPolicy]:
        """A policy for each block of `model`, the part of the model that this rank has.

        In a process group all ranks must call this: they compare their plans and what is wrong with them.

        Args:
            together: whether to compare with the other ranks.

        Raises:
            RematError: on every rank, if any has another plan, model or mesh; the message names the first
                difference and the rank.
        """
        wrong, names, peers = first_difference(self, model), place(self, model)[1], ()
        if together:
            peers = agree(self.hash, wrong, names)
        elif wrong is not None:
            raise RematError(wrong)
        return {name: replace(self.policy(name), peers=peers) for name in names}

    def policy(self, name: str) -> BlockPolicy:
        """The policy of one block.

        Raises:
            RematError: the plan has no such block.
        """
        for number, stage in enumerate(self.stages):
            if name in stage.blocks:
                keeps = stage.blocks[name]
                # The very last block may stay gathered: its backward comes at once.
                last = name == list(self.stages[-1].blocks)[-1]
                spread = tuple([pair for pair in self.layout.spread if pair[0] != "reshard" or not last])
                ops = self.programs[keeps.program]
                return BlockPolicy(name, number, ops, keeps.saved, keeps.kept_bytes, spread)
        known = ", ".join(list(self.stages[0].blocks)[:3])
        raise RematError(f"The plan for {self.model} has no block {name!r}; it has {known}, ...")

    # -- as a file -----------------------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        table = sorted({name for names in self.programs.values() for name in names})
        place = {name: k for k, name in enumerate(table)}
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "seconds"}
        record |= {
            "remat_mesh_plan": _FORMAT,
            "layout": self.layout.to_dict(),
            "stages": [asdict(stage) for stage in self.stages],
            "ops": table,
            "programs": {key: [place[name] for name in names] for key, names in self.programs.items()},
        }
        return record

    def to_json(self) -> str:
        """The plan as JSON text, by stage and by name of module."""
        return json.dumps(self._record() | {"hash": self.hash})

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> MeshPlan:
        """The plan in a file.

        Raises:
            RematError: the file is not there, or is not a plan.
        """
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RematError(f"The plan {str(path)!r} cannot be read: {error}.") from error
        return cls.from_json(text)

    @classmethod
    def from_json(cls, text: str) -> MeshPlan:
        """The plan that `to_json` wrote.

        Raises:
            RematError: where the text is no such plan, or was changed by hand.
        """
        try:
            record = json.loads(text)
            if "op_names" in record:
                raise ValueError("it is one of Plan.to_json, for one region: policy=Plan.from_json(text)")
            if record.pop("remat_mesh_plan") != _FORMAT:
                raise ValueError("another version wrote it")
            table, told = record.pop("ops"), record.pop("hash")
            record["programs"] = {
                k: tuple(table[n] for n in names) for k, names in record["programs"].items()
            }
            record["weights"] = {k: (tuple(a), tuple(b), c) for k, (a, b, c) in record["weights"].items()}
            record["stages"] = tuple(_stage(stage) for stage in record["stages"])
            plan = cls(**record | {"layout": Layout.from_dict(record["layout"])})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise RematError(
                f"This text is not a plan written by MeshPlan.to_json: {error!r}. Plan anew, as "
                "remat.fit(model, *args, mesh=layout)."
            ) from error
        if plan.hash != told:
            raise RematError(
                "This plan was changed after it was written: its hash is another one. Plan anew."
            )
        return plan

    def __str__(self) -> str:
        layout = self.layout
        names = ("dp_replicate", "dp_shard", "tp", "pp", "ep")
        mesh = " x ".join(f"{n} {getattr(layout, n)}" for n in names if getattr(layout, n) > 1)
        many = f"{layout.ranks} ranks ({mesh or 'one device'})"
        head = f"Plan for {self.model} on {many}, {format_bytes(self.memory)} each"
        return "\n".join([head, *(_told(number, stage) for number, stage in enumerate(self.stages))])


def _stage(record: dict[str, Any]) -> StagePlan:
    blocks: Any = {
        name: Keeps(**keeps | {"saved": tuple(keeps["saved"])}) for name, keeps in record["blocks"].items()
    }
    return StagePlan(**record | {"blocks": blocks})


def _told(number: int, stage: StagePlan) -> str:
    names = list(stage.blocks)
    flying = f"{stage.in_flight} microbatch{'es' if stage.in_flight > 1 else ''}"
    rows = {f"kept for {flying}": stage.kept_bytes, "at work": stage.working_bytes, **stage.fixed}
    lines = [
        f"stage {number}: {len(names)} blocks, {names[0]} to {names[-1]}",
        f"  {format_bytes(stage.peak_bytes):>10}  at the peak; a microbatch takes {stage.seconds:.3g} s, "
        f"{stage.recompute_seconds / stage.seconds:.1%} of that recomputation",
        *(f"  {format_bytes(size):>10}  {name}" for name, size in rows.items()),
    ]
    return "\n".join(lines)
