"""A rank with a plan: whether it fits what is there, whether all ranks have the same, and its policies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from remat._core import Decision, OpInfo
from remat._ranks import wrong_anywhere
from remat._torch import data_parallel, reduced_in
from remat.plan.calls import graph_of
from remat.plan.layout.trace import block_names
from remat.plan.plans import WAIT, Plan, carried_out
from remat.policies import Policy
from remat.transforms import RematError, local_tensors, ranks_met
from remat.transforms.compat import is_tracing

if TYPE_CHECKING:
    from remat.plan.layout.mesh_plan import MeshPlan


def canonical(name: str) -> str:
    """The name of an op, whatever kernel of attention a device has for it."""
    attention = name.startswith("aten._scaled_dot_product") and "backward" not in name
    return "aten.scaled_dot_product_attention" if attention else name


def _of_the_program(names: Iterable[str]) -> tuple[str, ...]:
    """Without the waits for collectives: on fakes each waits at once, on ranks where its result is read."""
    return tuple([name for name in names if name != WAIT])


def digest(names: Iterable[str]) -> str:
    """A hash of the op sequence of a block."""
    return hashlib.sha256("\n".join(map(canonical, names)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BlockPolicy(Policy):
    """What one block keeps, by the positions of its ops.

    Attributes:
        name: of the block.
        stage: of the pipeline.
        ops: canonical names of its ops.
        saved: positions of those that are saved.
        kept_bytes: as planned.
        spread: as `Layout.spread` says.
    """

    name: str
    stage: int
    ops: tuple[str, ...]
    saved: tuple[int, ...]
    kept_bytes: int
    spread: tuple[tuple[str, Any], ...] = field(compare=False, repr=False)
    # The ranks that have the same blocks. After the first call, in which they tell each other what is wrong:
    # what is wrong with the mesh.
    peers: tuple[int, ...] = field(default=(), compare=False, repr=False)
    told: list[str | None] = field(default_factory=list, compare=False, repr=False)

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        """The plan for this call, after a look (once for all calls alike) at the block's ops and its mesh.

        Raises:
            RematError: they are not those planned for; names the first difference and the rank. In the first
                call on every rank that has the block.
        """
        try:
            names = _of_the_program(graph_of(fn, args, kwargs).names)
            wrong = self._difference(tuple(map(canonical, names)))
        except RematError as error:
            if len(self.peers) < 2:
                raise
            names, wrong = (), f"On {_who()}: {error}"
        if not self.told:
            self.told.append(self._other_mesh())
            wrong = wrong_anywhere(self.peers, f"block {self.name}", wrong or self.told[0])
        if (wrong := wrong or self.told[0]) is not None:
            raise RematError(wrong)
        return carried_out([self._plan(names)])

    def _difference(self, met: tuple[str, ...]) -> str | None:
        """What is run that was not planned for."""
        ops = _of_the_program(self.ops)
        if met == ops:
            return None
        pairs = enumerate(zip(met, ops, strict=False))
        at = next((k for k, (a, b) in pairs if a != b), min(len(met), len(ops)))
        here, planned = (names[at] if at < len(names) else "the end" for names in (met, ops))
        return (
            f"The plan does not fit {_who()}: op {at} of block {self.name} (stage {self.stage}) is "
            f"{here}, planned was {planned}. A plan holds for one model at one configuration (training "
            "mode, autocast, dtype, parallelize=): plan anew with what this rank runs."
        )

    def _other_mesh(self) -> str | None:
        """What differs from the layout in how FSDP or DistributedDataParallel spreads the block."""
        found = data_parallel()
        if not found and ranks_met() and not is_tracing():
            found = {"dp_shard": 1}  # no wrapper: all of the parameters are here
        own = gathered = found.get("dtype")
        for what, planned in self.spread:
            if what == "param_dtype":
                planned = gathered = planned or own
            elif what == "reduce_dtype":
                planned = reduced_in(planned, gathered, own)
            if planned is not None and found.get(what, planned) != planned:
                return (
                    f"The plan does not fit {_who()}: block {self.name} (stage {self.stage}) is trained with "
                    f"{what}={found[what]}, planned was {what}={planned}. Wrap the model as the layout of "
                    "the plan says, or plan anew for this mesh."
                )
        return None

    def _plan(self, names: tuple[str, ...]) -> Plan:
        return Plan(
            region=self.name,
            ops=names,
            saved=tuple([len(_of_the_program(self.ops[:at])) for at in self.saved]),
            kept=(),
            budget=self.kept_bytes,
            kept_bytes=self.kept_bytes,
            default_bytes=0,
            recomputed_flops=0.0,
            step_flops=0.0,
            cost=0.0,
            unit="s",
            lower_bound=0.0,
            solver="layout",
        )

    def __call__(self, info: OpInfo) -> Decision:
        raise RematError(
            f"The plan of block {self.name} decides for the block as a whole: pass it to remat as a policy."
        )


def _who() -> str:
    return f"rank {dist.get_rank()}" if ranks_met() else "this process"


def place(plan: MeshPlan, model: torch.nn.Module) -> tuple[str | None, list[str]]:
    """What is wrong with the blocks that a rank has, and the planned ones among them."""
    here = block_names(model, plan.layout.layers)
    stages = {name: number for number, stage in enumerate(plan.stages) for name in stage.blocks}
    known = [name for name in here if name in stages]
    if unknown := [name for name in here if name not in stages]:
        return f"it has the block {unknown[0]}, which was not planned ({len(stages)} blocks were)", known
    mine = {stages[name] for name in known}
    whole = len(known) == len(stages)
    if len(mine) > 1 and not whole:
        first, other = known[0], next(name for name in known if stages[name] != stages[known[0]])
        return (
            f"it has {first} of stage {stages[first]} and {other} of stage {stages[other]}; split the model "
            "as the plan's stages say"
        ), known
    missing = [n for n, number in stages.items() if number in mine and n not in known]
    return (f"it lacks the block {missing[0]} of stage {stages[missing[0]]}" if missing else None), known


def first_difference(plan: MeshPlan, model: torch.nn.Module) -> str | None:
    """What a rank has that was not planned for; None where all is as planned."""
    planned, told = plan.layout.ranks, os.environ.get("WORLD_SIZE", "")
    if ranks_met() and (ranks := dist.get_world_size()) != planned:
        return f"there are {ranks} ranks, planned were {planned}"
    if not ranks_met() and told.isdigit() and int(told) != planned:
        return f"there are {told} ranks (WORLD_SIZE), planned were {planned}"
    wrong, known = place(plan, model)
    if wrong is not None:
        return wrong
    inside = tuple([f"{name}." for name in known])
    found = dict(model.named_parameters(remove_duplicate=False))
    for name, (shape, part, dtype) in plan.weights.items():
        if not name.startswith(inside):
            continue
        if name not in found:
            return f"it lacks the parameter {name}"
        tensor = found.pop(name)
        sharded = getattr(tensor, "device_mesh", None) is not None
        for what, met, planned in (
            ("the shape", tuple(tensor.shape), shape),
            ("on a rank the shape", tuple(next(local_tensors([tensor])).shape) if sharded else part, part),
            ("the dtype", str(tensor.dtype).removeprefix("torch."), dtype),
        ):
            if met != planned:
                return f"{name} has {what} {_shown(met)}, planned was {_shown(planned)}"
    more = next((name for name in found if name.startswith(inside)), None)
    return None if more is None else f"it has the parameter {more}, which was not planned"


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def agree(key: str, wrong: str | None, blocks: Sequence[str] = ()) -> tuple[int, ...]:
    """Raise on every rank where any has another plan, or something wrong; the ranks that have these blocks.

    Raises:
        RematError: names the first such rank, and what is wrong there.
    """
    if not ranks_met():
        if wrong is not None:
            raise RematError(_refusal("this process", wrong))
        return ()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (key, wrong, tuple(blocks)))
    for rank, (other, fault, _) in enumerate(told):
        if fault is not None:
            raise RematError(_refusal(f"rank {rank}", fault))
        if other != told[0][0]:
            raise RematError(
                f"Rank {rank} has another plan than rank 0 ({other[:12]}, {told[0][0][:12]}): let all ranks "
                "load one file."
            )
    return tuple([rank for rank, (_, _, there) in enumerate(told) if there == tuple(blocks)])


def _refusal(who: str, wrong: str) -> str:
    wrong = wrong.removesuffix(".")
    return f"The plan does not fit {who}: {wrong}. Plan anew for this model and mesh, or load their plan."
