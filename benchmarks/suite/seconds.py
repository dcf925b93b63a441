"""Seconds that are spent before a step runs: compilation, cold and warm, and planning."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.common.measures import NEVER, Deadline, recover, told
from benchmarks.common.models import Problem
from benchmarks.common.peers import Peer, peer
from benchmarks.suite.cases import NO_TIME, Case, Measured
from benchmarks.suite.panel import compiled_step, problem_of
from remat import fit
from remat.cli.steps import unmarked
from remat.plan.compared import torch_plan
from remat.plan.joint import record


def each(
    case: Case, measure: Callable[[Peer, Measured], Iterator[Measured]], deadline: Deadline
) -> Iterator[Measured]:
    slowest = 0.0
    for name in case.peers:
        one = peer(name)
        row = replace(Measured.of(case), peer=name, family=one.family)
        if not deadline.allows_another(slowest):
            yield row.failed(NO_TIME)
            continue
        start = time.monotonic()
        try:
            yield from measure(one, row)
        except Exception as error:
            yield row.failed(told(error))
            recover(error)
        slowest = max(slowest, time.monotonic() - start)


def compile_seconds(case: Case, deadline: Deadline = NEVER) -> Iterator[Measured]:
    """Seconds of the first step with Inductor's caches empty, and again with them filled."""
    from torch._inductor.utils import fresh_cache

    problem = problem_of(case)
    # The compiler's own set-up (imports, worker processes) is nobody's compile time.
    torch.compile(lambda x: (x * 2).sum())(torch.ones(4, device=case.device, requires_grad=True)).backward()

    def measure(one: Peer, row: Measured) -> Iterator[Measured]:
        with fresh_cache():
            for metric in ("compile cold", "compile warm"):
                torch._dynamo.reset()
                yield row.with_value(metric, "s", first_step(case, problem, one))

    yield from each(case, measure, deadline)


def first_step(case: Case, problem: Problem, one: Peer) -> float:
    step = compiled_step(case, problem, one)
    start = time.perf_counter()
    with one.compiling():
        step(problem.params, problem.batch, unmarked)
    if case.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def plan_seconds(case: Case, deadline: Deadline = NEVER) -> Iterator[Measured]:
    """Seconds of choosing what to keep in the whole model: ours with its tracing, torch's solver alone."""
    problem = problem_of(case)

    def measure(one: Peer, row: Measured) -> Iterator[Measured]:
        loss, leaves = problem.bind(one.around)
        own, share = leaves(problem.params), float(one.name.split()[-1])
        if one.family == "torch":
            solver = one.name.split()[2]
            joint = record(lambda x: loss(own, x), (problem.batch,))
            seconds = torch_plan(joint, share, solver).seconds
        else:
            start = time.perf_counter()
            fit(loss, own, problem.batch, budget=share)
            seconds = time.perf_counter() - start
        yield row.with_value("plan", "s", seconds)

    yield from each(case, measure, deadline)
