"""A panel: one model in one mode, every peer checked, then its memory, FLOPs and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from benchmarks.common import jax_peer
from benchmarks.common.measures import (
    LEAST_ROUNDS,
    NEVER,
    Clock,
    Deadline,
    Run,
    Turn,
    clock_of,
    counted,
    interleaved,
    kernel_milliseconds,
    recover,
    told,
)
from benchmarks.common.models import Problem
from benchmarks.common.peers import Peer, is_planned, peer
from benchmarks.common.steps import Step, checking, eager, make_step, own_code
from benchmarks.suite.cases import NO_TIME, Case, Measured
from benchmarks.suite.predicted import Predicted, probed_anew
from benchmarks.suite.suites import PAIRS
from remat.cli.measure import Work, percentiles, seconds as timed, trace_memory
from remat.cli.steps import difference, tensors, tolerance, unmarked
from remat.plan import Choice

# A plan that seems to be beaten by so much takes so many times the rounds more, with its rival alone.
DOUBT, FURTHER = 1.01, 3


class WrongGradient(Exception):
    """A peer's gradients differ from those without remat by more than rounding explains."""


@dataclass
class Panel:
    """The case's numbers, and the gradients and FLOPs that peers are compared with."""

    case: Case
    problem: Problem
    expected: Any
    allowed: float
    flops: int | None = None
    # What `allowed` may be raised to, where compiled kernels round elsewhere than eager ones.
    most: float = math.inf
    deadline: Deadline = NEVER
    # Beside other processes: see there.
    shared: Turn | None = None
    # What was found of each peer, by metric.
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    # What the regions do of those whose step is foretold.
    promises: dict[str, Sequence[Choice]] = field(default_factory=dict)
    # Seconds of one step of every peer that is to be timed.
    turn: float = 0.0

    @classmethod
    def of(cls, case: Case, deadline: Deadline = NEVER, shared: Turn | None = None) -> Panel:
        problem = problem_of(case)
        step = make_step(case.mode, *problem.bind(peer("none").around), eager)
        eps = max(torch.finfo(t.dtype).eps for t in tensors(problem.params))
        expected = step(problem.params, problem.batch, checking)
        # Where a token goes can turn on the last bit of a score, and then gradients are others.
        most = 1.0 if case.model == "moe" else eps**0.5
        return cls(case, problem, expected, tolerance(eps), most=most, deadline=deadline, shared=shared)

    def run(self) -> Iterator[Measured]:
        """All rows of the case; a peer that fails, or that there is no time for, is a row that says so."""
        runs: dict[str, Run] = {}
        slowest = 0.0
        # Beside others, rounds have a time of their own.
        rounds = 0 if self.shared else min(self.case.rounds, LEAST_ROUNDS)
        rows = {
            name: replace(Measured.of(self.case), peer=name, family=peer(name).family)
            for name in self.case.peers
        }
        for name, row in rows.items():
            if not self.deadline.allows_another(slowest, rounds * self.turn):
                yield row.failed(NO_TIME)
                continue
            start = time.monotonic()
            try:
                run, found = self.inspect(peer(name), row)
                yield from found
                self.found[name] = {one.metric: one.value or 0.0 for one in found}
                runs[name] = run
            except Exception as error:
                yield row.failed(told(error))
                recover(error)
            if self.shared is not None and self.case.device == "cuda":
                torch.cuda.empty_cache()  # what is held for later is memory that others may need
            slowest = max(slowest, time.monotonic() - start)
        self.expected = None
        if runs and self.case.rounds:
            self.be_alone()
            times, failed = interleaved(runs, self.case.rounds, self.clock(), self.deadline)
            yield from (
                rows[name].with_spread("step", self.case.unit, percentiles(taken))
                for name, taken in times.items()
            )
            yield from self.ratios(rows, runs, times)
            yield from self.foretold(rows)
            yield from self.kernels(rows, {name: runs[name] for name in times})
            yield from (rows[name].failed(error) for name, error in failed.items())

    def be_alone(self) -> None:
        """Wait until no other process uses the machine."""
        if self.shared is None:
            return
        self.shared.alone()
        self.deadline = self.shared.until

    def kernels(self, rows: dict[str, Measured], runs: dict[str, Run]) -> Iterator[Measured]:
        """How long a GPU computes in a compiled step; a short step can wait for launches most of the time."""
        if self.case.device != "cuda" or not self.case.compiled:
            return
        for name, run in runs.items():
            if rows[name].family != "jax":
                taken = min(kernel_milliseconds(run) for _ in range(2))
                yield rows[name].with_value("kernels", "ms", taken)

    def ratios(
        self, rows: dict[str, Measured], runs: dict[str, Run], times: dict[str, list[float]]
    ) -> Iterator[Measured]:
        """Planned steps over those of ready policies, and ours over torch's with the same verdicts.

        Of the same round: drift hits both alike.
        """
        rivals = [name for name in times if rows[name].family in ("remat", "none") and not is_planned(name)]
        for name in filter(is_planned, times):
            for rival in rivals:
                taken = over(times[name], times[rival])
                if percentiles(taken)[1] > DOUBT and self.keeps_no_more(rival, name):
                    pair = {one: runs[one] for one in (name, rival)}
                    again, _ = interleaved(pair, FURTHER * len(taken), self.clock(), self.deadline)
                    fresh = over(again.get(name, []), again.get(rival, []))
                    # By the first rounds this pair was chosen, so by chance they tell against the plan.
                    taken = fresh if len(fresh) >= len(taken) else taken + fresh
                yield rows[name].with_spread(f"step over {rival}", "ratio", percentiles(taken))
        for name, rival in PAIRS.items():
            if name in times and rival in times:
                taken = over(times[name], times[rival])
                yield rows[name].with_spread(f"step over {rival}", "ratio", percentiles(taken))

    def keeps_no_more(self, rival: str, name: str) -> bool:
        """Whether a rival could beat a planned peer."""
        bounds = ("peak",) if name.startswith("fit ") else ("kept", "peak")
        mine, theirs = self.found[name], self.found[rival]
        return any(theirs.get(bound, math.inf) <= mine.get(bound, 0.0) for bound in bounds)

    @cached_property
    def predicted(self) -> Predicted:
        return Predicted(self.problem)

    def promised(self, one: Peer, row: Measured) -> tuple[Peer, list[Measured]]:
        """A planned peer with its regions, and what its plan promises."""
        kind, share = one.name.split(maxsplit=1)
        if kind == "fit":
            chosen = self.predicted.fit(share)
            one = replace(one, around=self.predicted.around(chosen))
            choices, peak = chosen.choices, [row.with_value("predicted peak", "bytes", chosen.peak)]
        else:
            choices, peak = self.predicted.budget(float(share)), []
        self.promises[one.name] = choices
        kept = row.with_value("predicted kept", "bytes", self.predicted.kept(choices))
        return one, [kept, *peak]

    def foretold(self, rows: dict[str, Measured]) -> Iterator[Measured]:
        """What planned steps and that without remat should have taken.

        By two probes, before the rounds and after them: a machine that is shared is not always as fast.
        """
        before = {name: self.predicted.seconds(choices) for name, choices in self.promises.items()}
        with probed_anew():
            for name, choices in self.promises.items():
                seconds = (before[name] + self.predicted.seconds(choices)) / 2
                yield rows[name].with_value("predicted step", "ms", 1e3 * seconds)

    def clock(self) -> Clock:
        return clock_of(self.case.device, self.case.clock)

    def inspect(self, one: Peer, row: Measured) -> tuple[Run, list[Measured]]:
        if one.only and one.only != self.case.engine:
            raise ValueError(f"{one.name} exists {one.only} only")
        if one.family == "jax":
            return self.inspect_jax(one, row)
        told = []
        if self.case.mode == "backward" and not self.case.compiled:
            if one.name.startswith("fit ") or (self.case.device == "cpu" and is_planned(one.name)):
                one, told = self.promised(one, row)
            elif one.family == "none" and any(map(is_planned, self.case.peers)):
                self.promises[one.name] = ()
        step, rows = self.compiled(one, row) if self.case.compiled else self.eager(one, row)
        rows += told
        memory, seconds = timed(lambda: trace_memory(lambda mark: self.call(step, mark), self.case.device))
        self.turn += seconds
        rows += [row.with_value("peak", "bytes", memory.peak)]
        if memory.kept:
            rows += [row.with_value("kept", "bytes", memory.kept)]
        return lambda: self.call(step, unmarked), rows

    def call(self, step: Step, mark: Any) -> Any:
        return step(self.problem.params, self.problem.batch, mark)

    def eager(self, one: Peer, row: Measured) -> tuple[Step, list[Measured]]:
        step = make_step(self.case.mode, *self.problem.bind(one.around), eager)
        rows = self.checked(step, row)
        with Work() as work:
            self.call(step, unmarked)
        return step, rows + self.counted(row, work.flops)

    def compiled(self, one: Peer, row: Measured) -> tuple[Step, list[Measured]]:
        step = compiled_step(self.case, self.problem, one)
        with one.compiling(), counted() as counter:
            rows = self.checked(step, row)
        if self.case.mode == "scan":
            # A scan's steps are compiled as graphs of their own, once for all of them.
            return step, rows
        return step, rows + self.counted(row, counter.flops)

    def checked(self, step: Step, row: Measured) -> list[Measured]:
        return self.compared(self.call(step, checking), row)

    def compared(self, got: Any, row: Measured) -> list[Measured]:
        apart = difference(got, self.expected)
        if row.family == "none":
            # Compiled kernels round elsewhere than eager ones: that much is no fault of a peer, but more than
            # half of all digits is a wrong term.
            self.allowed = max(self.allowed, min(2 * apart, self.most))
        if not apart <= self.allowed:
            raise WrongGradient(f"off by {apart:.1e}, where {self.allowed:.1e} is rounding")
        return [row.with_value("gradient difference", "relative", apart)]

    def counted(self, row: Measured, flops: int) -> list[Measured]:
        if row.family == "none":
            self.flops = flops
        again = [] if self.flops is None else [row.with_value("recomputed", "FLOP", flops - self.flops)]
        return [row.with_value("flops", "FLOP", flops), *again]

    def inspect_jax(self, one: Peer, row: Measured) -> tuple[Run, list[Measured]]:
        if not jax_peer.available():
            raise ModuleNotFoundError("JAX is not installed: pip install 'remat[jax]'")
        if not self.case.compiled:
            raise ValueError("JAX is measured under jit only")
        if self.case.device == "cuda":
            # What torch's allocator holds for later is memory that JAX's could not have.
            torch.cuda.empty_cache()
        run = jax_peer.JaxStep(self.case.built(), self.problem, self.case.mode, one.name.removeprefix("jax "))
        got = run.gradients()
        # It comes by way of the host.
        where = torch.device(self.problem.batch.device)
        rows = [] if got is None else self.compared(pytree.tree_map(lambda t: t.to(where), got), row)
        return run, [*rows, row.with_value("peak", "bytes", run.peak)]


def over(mine: list[float], theirs: list[float]) -> list[float]:
    return [one / other for one, other in zip(mine, theirs, strict=False)]


def problem_of(case: Case) -> Problem:
    dtype = getattr(torch, case.dtype)
    return case.built().problem(torch.device(case.device), dtype, case.seed, stacked=case.mode == "scan")


def compiled_step(case: Case, problem: Problem, one: Peer) -> Step:
    """The peer's step through `torch.compile`; our scans compile their own steps."""
    around = one.around
    if case.mode == "blocks":
        wrap = around.wrap
        around = replace(around, wrap=lambda fn: compiled(wrap(fn)))
        return make_step(case.mode, *problem.bind(around), eager)
    if case.mode == "scan" and around.scan is not None:
        around = replace(around, scan=around.scan | {"compile": True})
        return make_step(case.mode, *problem.bind(around), eager)
    return make_step(case.mode, *problem.bind(around), compiled)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(own_code(fn), fullgraph=True, dynamic=False)
