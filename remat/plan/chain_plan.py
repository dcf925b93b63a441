"""A plan for functions called one after another: which regions they form, nested ones too.

`plan_regions` meets regions one by one. It cannot tell that a result is only the next region's argument, nor
put a region around several calls of the user's. So here the functions are given, and the plan makes the
calls. Inside a region that is recomputed as a whole a stage keeps nothing or what autograd keeps: what an
inner policy saves would be saved in the first forward.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from remat._core import Decision, OpInfo, format_bytes, name_of
from remat._region import with_policy
from remat.plan.budget import check_peak
from remat.plan.calls import looked
from remat.plan.chain import Chain, Measure, Part, best_parts
from remat.plan.graph import CostModel, Graph, cost_model
from remat.plan.joint import on_fakes, record
from remat.plan.plans import Following, Plan
from remat.plan.solve import Problem, Solved, complete
from remat.policies import Numbered, Policy, save_nothing
from remat.transforms import RematError
from remat.transforms.compat import is_tracing

Stages = Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class ChainPlan:
    """A chain of functions with the regions that keep it within a peak; calling it carries the plan out.

    Attributes:
        fn: the chain with its regions.
        parts: the regions, by the stages that they hold; those of a region that is recomputed as a whole are
            inside it.
        plans: the plans of the regions that keep more than their input, by the first stage of each.
        peak_bytes: the most live at once in forward and backward, simulated.
        kept_bytes, default_bytes: bytes between forward and backward, with the plan and without remat.
        recomputed_flops: FLOPs run again.
        cost, unit: modelled price of that.
        seconds: time that planning took.

    Example:
        >>> import remat, torch
        >>> planned = remat.fit([torch.sin, torch.exp], torch.ones(64, requires_grad=True), peak="2KiB")
        >>> planned(torch.zeros(64)).shape, planned.peak_bytes <= 2048
        (torch.Size([64]), True)
    """

    fn: Callable[..., Any] = field(repr=False, compare=False)
    names: tuple[str, ...]
    parts: tuple[Part, ...]
    plans: dict[int, Plan] = field(repr=False)
    peak_bytes: int
    kept_bytes: int
    default_bytes: int
    recomputed_flops: float
    cost: float
    unit: str
    seconds: float = field(default=0.0, compare=False, repr=False)
    no_policy: ClassVar[str] = "call it in the place of its functions, planned(x)."

    def __call__(self, x: Any, *args: Any) -> Any:
        """The chain's result for `x`."""
        return self.fn(x, *args)

    def __str__(self) -> str:
        head = (
            f"{len(self.names)} stages keep {format_bytes(self.kept_bytes)} of "
            f"{format_bytes(self.default_bytes)}, peak at {format_bytes(self.peak_bytes)} (simulated), "
            f"recompute {self.recomputed_flops:.4g} FLOPs; cost {self.cost:.4g} {self.unit}"
        )
        return "\n".join([head, *self._lines(self.parts, 1)])

    def _lines(self, parts: tuple[Part, ...], depth: int) -> Iterator[str]:
        for part in parts:
            names = ", ".join(dict.fromkeys(self.names[part.start : part.stop]))
            stages = f"{'  ' * depth}{part.start}-{part.stop - 1} ({names})"
            if part.parts:
                yield f"{stages}: recomputed as a whole from its input, then"
                yield from self._lines(part.parts, depth + 1)
            elif part.choice < 0:
                yield f"{stages}: as without remat"
            else:
                plan = self.plans[part.start]
                yield f"{stages}: keeps {format_bytes(plan.kept_bytes)}, {plan.recomputed_flops:.4g} FLOPs"


def plan_stages(
    stages: Stages,
    x: Any,
    *args: Any,
    peak: int | str | None,
    cost: str | CostModel = "roofline",
    device: Any = None,
    compiled: bool = False,
    accumulating: bool = False,
) -> ChainPlan:
    """Plan regions for `x = stage(x, *args)` over all stages, within a peak of live bytes.

    Stages become regions of their own, in pairs, or in longer runs. A longer run is recomputed as a whole and
    holds such regions in turn, so its inner stages run more than twice. That reaches lower peaks than any
    plan that recomputes every op at most once. Plans are for shapes alone; nothing is computed.

    Args:
        stages: functions of (x, *args), or modules, such as the halves of a model's blocks. The finer they
            are, the lower the peaks that can be reached.
        x: the first stage's input, any pytree.
        args: what every stage gets besides.
        peak: the most bytes that may be live at once in forward and backward, such as "20GiB". Parameters'
            gradients and `x` count. Parameters, `args`, the chain's result and its gradient do not.
        cost, device: as for `BudgetPolicy`.
        compiled: plan for a backward under `torch.compile`, where what runs again does so right before its
            first reader. In eager a region runs again as a whole when its backward begins.
        accumulating: parameters have their `.grad` before the step. New gradients are added to it and freed.

    Returns:
        A function of (x, *args) that carries the plan out.

    Raises:
        RematError: no stages, a stage that cannot be traced without data, or a peak out of reach (the message
            gives the lowest).

    Example:
        >>> import remat, torch
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
        >>> x = torch.ones(256, 64)
        >>> planned = remat.fit(layers, x, peak="400KiB")
        >>> planned(x).sum().backward()
        >>> planned.peak_bytes <= 400 * 2**10
        True
    """
    start = time.perf_counter()
    if not stages:
        raise RematError("remat.fit got no stages: write remat.fit([block1, block2], x, peak='20GiB').")
    if peak is None:
        raise RematError("remat.fit of a list of stages takes peak=...: write peak='20GiB'.")
    limit, model = check_peak(peak), cost_model(cost, device, compiled=compiled)
    graphs = looked(lambda _: trace(stages, x, args), stages, x, args)
    if not any(graph.joint.gradients for graph in graphs[0]):
        graphs[0][0].check_differentiated("this chain")
    task = Task(list(stages), graphs, model, compiled, accumulating)
    parts = best_parts(task.chain, limit)
    if parts is None:
        # The search rounds bytes: what it is told to write must be what it finds.
        tried = (int(task.chain.lowest() * share) for share in (1.0, 1.001, 1.01))
        lowest = next((low for low in tried if best_parts(task.chain, low)), task.chain.lowest())
        raise RematError(
            f"A peak of {limit:,} bytes cannot be met by this chain: the lowest that was found is {lowest:,} "
            f"bytes. Write peak={lowest} or more, or make the stages finer (attention and MLP apart) or the "
            "batch smaller."
        )
    return task.plan(parts, time.perf_counter() - start)


class Task:
    """The stages of a chain, traced and measured, equal ones once."""

    def __init__(
        self,
        stages: list[Callable[..., Any]],
        graphs: tuple[list[Graph], list[Graph]],
        model: CostModel,
        compiled: bool = False,
        accumulating: bool = False,
    ) -> None:
        self.stages, self.model = stages, model
        self.options = {"compiled": compiled, "accumulating": accumulating}
        self.graphs, self.pairs = graphs
        self.measured: dict[Any, Any] = {}
        count = len(stages)
        alone = [self._once(Measure.stage, g, k == count - 1) for k, g in enumerate(self.graphs)]
        pairs = enumerate(self.pairs)
        joined = {(k, k + 2): self._once(Measure.choices, g, k == count - 2) for k, g in pairs}
        self.chain = Chain(alone, joined)

    def _once(self, of: Callable[[Measure], Any], graph: Graph, last: bool) -> Any:
        key = of, last, graph.signature
        if key not in self.measured:
            lent = range(len(graph.joint.results)) if last else ()
            self.measured[key] = of(Measure(graph, self.model, lent=lent, **self.options))
        return self.measured[key]

    def plan(self, parts: tuple[Part, ...], seconds: float) -> ChainPlan:
        """The plan that `parts` stand for."""
        chain = self.chain
        plans = {p.start: self._plan(p) for p in parts if not p.parts}
        return ChainPlan(
            fn=_sequence([self._carried_out(part, plans) for part in parts]),
            names=tuple(map(name_of, self.stages)),
            parts=parts,
            plans=plans,
            peak_bytes=chain.peak(parts),
            kept_bytes=sum(map(chain.kept, parts)),
            default_bytes=sum(graph.kept_by_default for graph in self.graphs),
            recomputed_flops=chain.flops(parts),
            cost=chain.cost(parts),
            unit=self.model.unit,
            seconds=seconds,
        )

    def _plan(self, part: Part) -> Plan:
        graph = self.graphs[part.start] if part.stop == part.start + 1 else self.pairs[part.start]
        problem: Problem = graph.problem(self.model)
        solution = complete(problem, self.chain.choice(part).saved)
        assert solution is not None
        solved = Solved(solution, 0.0, "chain", 0.0)
        region = ", ".join(map(name_of, self.stages[part.start : part.stop]))
        return Plan.of(graph, problem, solved, region=region, budget=solution.bytes, unit=self.model.unit)

    def _carried_out(self, part: Part, plans: dict[int, Plan]) -> Callable[..., Any]:
        """The stages of a part in the regions that it says."""
        if part.parts:
            return with_policy(_sequence([self._carried_out(one, {}) for one in part.parts]), save_nothing)
        run = _sequence(self.stages[part.start : part.stop])
        return run if part.choice < 0 else with_policy(run, _GivenPlan(plans[part.start]))


@dataclass(frozen=True)
class _GivenPlan(Numbered):
    """A plan for a region that may be called in another way than it was planned in.

    Traced, a function may run a few other ops (a dropout that drops nothing is a copy there).
    """

    plan: Plan

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        return Following((self.plan,)) if is_tracing() else self.plan.followed()

    def __call__(self, info: OpInfo) -> Decision:
        return self.plan(info)


def _sequence(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The functions one after another."""
    if len(functions) == 1:
        return functions[0]
    functions = tuple(functions)

    def run(x: Any, *args: Any) -> Any:
        for function in functions:
            x = function(x, *args)
        return x

    # What the engine learns of a function it remembers by its code.
    label = "_".join(dict.fromkeys(map(name_of, functions)))
    run.__name__ = run.__qualname__ = label
    run.__code__ = run.__code__.replace(co_name=label)
    return run


def trace(stages: Stages, x: Any, args: tuple[Any, ...]) -> tuple[list[Graph], list[Graph]]:
    """The joint graphs of the stages and of pairs of neighbours."""
    inputs: list[Any] = []

    def through(x: Any, *args: Any) -> tuple[Any, ...]:
        for stage in stages:
            inputs.append(x)
            x = stage(x, *args) if len(inputs) < len(stages) else x
        return args

    args = on_fakes(through, (x, *args))

    def graph(first: int, count: int) -> Graph:
        run = _sequence(stages[first : first + count])
        # What all stages share is held by the caller, as what a function captures is.
        return Graph(record(functools.partial(_with, run, args), (inputs[first],)))

    alone = [graph(k, 1) for k in range(len(stages))]
    pairs: list[Graph] = []
    seen: dict[Any, Graph] = {}
    for k, kind in enumerate(itertools.pairwise(one.signature for one in alone)):
        if kind not in seen:
            seen[kind] = graph(k, 2)
        pairs.append(seen[kind])
    return alone, pairs


def _with(run: Callable[..., Any], args: tuple[Any, ...], x: Any) -> Any:
    return run(x, *args)
