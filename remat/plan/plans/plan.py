"""A plan as a value: what a region keeps, op by op, with its cost and the proof of how good it is."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from remat._core import Decision, OpInfo, format_bytes
from remat.plan.calls import graph_of
from remat.plan.graph import Graph
from remat.plan.plans.followed import carried_out
from remat.plan.solve import Problem, Proven, Solved
from remat.policies import Policy
from remat.transforms import Key, RematError
from remat.transforms.compat import in_transform


@dataclass(frozen=True)
class Kept:
    """One thing that a plan keeps.

    Attributes:
        position: the op in the region's forward, or -1 for an input of the region.
        op: its name, or "input".
        shape, dtype: of the op's first result.
        bytes: of all its results, whole storages.
        location: the user's "file:line".
    """

    position: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    location: str = field(default="", compare=False)


@dataclass(frozen=True)
class Plan(Policy, Proven):
    """Which ops of a region's forward are saved; every other op runs again where the backward needs it.

    A plan is a policy: `remat(fn, policy=plan)` carries it out, and raises where `fn` turns out to be another
    function than the one planned for.

    Attributes:
        region: name of the function.
        ops: names of the forward's ops in order (`detach` does not count).
        saved: positions in `ops` that are saved.
        kept: everything kept, the region's inputs included.
        budget: bytes allowed.
        kept_bytes: bytes kept.
        default_bytes: bytes that would be kept without a plan; regions inside stay as they are.
        recomputed_flops: FLOPs run again in the backward.
        step_flops: FLOPs of forward and backward without remat.
        cost: modelled price of the recomputation, in `unit` ("FLOP" or "s").
        lower_bound: no plan within the budget has a lower `cost`.
        solver: what found it.
        seconds: time the search took (not part of the comparison of plans).
        peak_bytes: the most that is live at once in the region's forward and backward, simulated.
        sent: those of `saved` that are kept on the host; `kept_bytes` are those on the device.
        sent_bytes: bytes of those.
        forgone: by how much a cheaper plan was found. It is a ready policy's instead (`solver` names it), as
            prices are not accurate to so little.

    Example:
        >>> import torch
        >>> from remat import checkpoint_policy, remat
        >>> fn, x = lambda x: (x @ x).tanh() @ x, torch.ones(8, 8, requires_grad=True)
        >>> plan = checkpoint_policy(budget=0.5, cost="flops").plan(fn, x)
        >>> remat(fn, policy=plan)(x).sum().backward()
    """

    region: str
    ops: tuple[str, ...] = field(repr=False)
    saved: tuple[int, ...]
    kept: tuple[Kept, ...] = field(repr=False)
    budget: int
    kept_bytes: int
    default_bytes: int
    recomputed_flops: float
    step_flops: float
    cost: float
    unit: str
    lower_bound: float
    solver: str
    seconds: float = field(default=0.0, compare=False, repr=False)
    peak_bytes: int = field(default=0, compare=False)
    sent: tuple[int, ...] = ()
    sent_bytes: int = 0
    forgone: float = field(default=0.0, compare=False)

    @classmethod
    def of(
        cls,
        graph: Graph,
        problem: Problem,
        solved: Solved,
        *,
        region: str,
        budget: float,
        unit: str,
        peak: int = 0,
    ) -> Plan:
        """The plan that a solution of `graph.problem(...)` stands for."""
        count, solution = len(graph.ops), solved.solution
        kept = sorted(v for v in solution.saved if problem.size[v] > 0)
        flops = sum(graph.flops[op] for op in solution.replayed if op < count)
        return cls(
            region=region,
            ops=graph.names,
            saved=tuple(v for v in sorted(solution.saved) if v < count),
            kept=tuple(_describe(graph, v, int(problem.size[v])) for v in kept),
            budget=int(budget),
            kept_bytes=solution.bytes,
            default_bytes=graph.kept_by_default,
            recomputed_flops=flops,
            step_flops=graph.step_flops,
            cost=solution.cost,
            unit=unit,
            lower_bound=solved.lower_bound,
            solver=solved.solver,
            seconds=solved.seconds,
            peak_bytes=peak,
            forgone=solved.forgone,
        )

    def __call__(self, info: OpInfo) -> Decision:
        """The decision for the op at `info.index`.

        Raises:
            RematError: where that op is not the one planned for.
        """
        planned = self.ops[info.index] if info.index < len(self.ops) else None
        if planned != str(info.op):
            raise RematError(self.difference(info.index, planned, str(info.op)))
        if info.index in self.sent:
            return Decision.OFFLOAD
        return Decision.SAVE if info.index in self.chosen else Decision.RECOMPUTE

    @cached_property
    def key(self) -> Hashable:
        """The verdicts: which ops there are, and which of them are saved."""
        return Key(type(self), self.ops, self.saved, self.sent)

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def chosen(self) -> frozenset[int]:
        """`saved` as a set."""
        return frozenset(self.saved)

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of what is kept, by the op's position."""
        return {kept.position: kept.bytes for kept in self.kept}

    def check(self, names: Sequence[str]) -> None:
        """Raise where a function's ops are not those planned for.

        Raises:
            RematError: names the first difference.
        """
        for position in range(max(len(names), len(self.ops))):
            planned = self.ops[position] if position < len(self.ops) else None
            met = names[position] if position < len(names) else None
            if planned != met:
                raise RematError(self.difference(position, planned, met))

    def difference(self, position: int, planned: str | None, met: str | None) -> str:
        """The message for an op that is not the one planned for."""
        return (
            f"The plan for {self.region} does not fit this function: op {position} is "
            f"{met or 'missing (it ends)'}, planned was {planned or f'the end, after {len(self.ops)} ops'}. "
            "A plan holds for one function at one configuration (layers, training mode, autocast, dtype): "
            "plan this one anew, or use checkpoint_policy(budget=...), which does so by itself."
        )

    def bind(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        """The plan for this call, after a look (once per function and metadata) at the function's ops."""
        names = graph_of(fn, args, kwargs).names
        if names != self.ops:
            self.check(names)
        return self.followed()

    def followed(self) -> Policy:
        """The policy that carries it out where this call is, the same for every call."""
        inside = in_transform()
        if inside not in self._followed:
            self._followed[inside] = carried_out([self])
        return self._followed[inside]

    @cached_property
    def _followed(self) -> dict[bool, Policy]:
        return {}

    def to_json(self) -> str:
        """The plan as JSON text; without the user's file names."""
        record = asdict(self)
        table = sorted(set(self.ops))
        record |= {"op_names": table, "ops": [table.index(name) for name in self.ops]}
        for entry in record["kept"]:
            del entry["location"]
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            RematError: where the text is no plan.
        """
        try:
            record = json.loads(text)
            table = record.pop("op_names")
            record["ops"] = tuple(table[k] for k in record["ops"])
            record["saved"] = tuple(record["saved"])
            record["sent"] = tuple(record.get("sent", ()))
            record["kept"] = tuple(
                Kept(**{**entry, "shape": tuple(entry["shape"])}) for entry in record["kept"]
            )
            return cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RematError(
                f"This text is not a plan written by Plan.to_json, or not by this version: {error!r}. Plan "
                "anew, as checkpoint_policy(budget=0.5).plan(fn, *args)."
            ) from error

    def diff(self, other: Plan) -> str:
        """What changes from this plan to `other`: a unified diff of what they keep, empty if nothing."""
        lines = difflib.unified_diff(
            self._lines(), other._lines(), "this plan", "the other", lineterm="", n=0
        )
        return "\n".join(lines)

    def _lines(self) -> list[str]:
        what = [f"{k.position:>5} {k.op} {list(k.shape)} {k.dtype} {k.bytes:,} bytes" for k in self.kept]
        return [*what, f"keeps {self.kept_bytes:,} bytes, recomputes {self.recomputed_flops:.4g} FLOPs"]

    def __str__(self) -> str:
        share = self.kept_bytes / self.default_bytes if self.default_bytes else 0.0
        again = self.recomputed_flops / self.step_flops if self.step_flops else 0.0
        head = (
            f"Plan for {self.region}: keeps {format_bytes(self.kept_bytes)} of "
            f"{format_bytes(self.default_bytes)} ({share:.1%}; budget {format_bytes(self.budget)})\n"
            f"  recomputes {self.recomputed_flops:.4g} FLOPs ({again:.2%} of forward and backward); "
            f"cost {self.cost:.4g} {self.unit}, proven lower bound {self.lower_bound:.4g} "
            f"(gap {self.gap:.2%}, {self.solver})\n"
        )
        if self.forgone:
            head += (
                f"  as {self.solver}: another plan saves {self.forgone:.2g} {self.unit} more, which is less "
                "than prices are accurate to\n"
            )
        if self.sent:
            head += f"  {format_bytes(self.sent_bytes)} of it on the host\n"
        rows = Counter((k.op, k.shape, k.dtype, k.bytes, k.location) for k in self.kept)
        body = [
            f"  {f'{n} x ' if n > 1 else ''}{format_bytes(size):>10}  "
            + f"{dtype}{list(shape)} of {op} {where}".rstrip()
            for (op, shape, dtype, size, where), n in rows.items()
        ]
        return head + "\n".join(body)


def _describe(graph: Graph, place: int, size: int) -> Kept:
    made = place < len(graph.ops)
    number = graph.ops[place].outputs[0] if made else graph.inputs[place - len(graph.ops)]
    value = graph.joint.values[number]
    return Kept(
        position=place if made else -1,
        op=graph.names[place] if made else "input",
        shape=value.shape,
        dtype=str(value.dtype).removeprefix("torch."),
        bytes=size,
        location=graph.ops[place].location if made else "",
    )
