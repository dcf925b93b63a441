"""Runs all rows of a sweep over the same data and measures each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from remat.cli.measure import Work, percentiles, seconds, trace_memory
from remat.cli.models import Params
from remat.cli.rows import NONE, Row
from remat.cli.steps import Step, Trainer, difference, tensors, tolerance, unmarked


@dataclass
class Result:
    """Figures of one row. Differences are to the row without remat; None: not measured, see `error`."""

    policy: str
    tolerance: float
    rival: bool = False
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    ops_recomputed: int | None = None
    flops_recomputed: int | None = None
    step_ms_p20: float | None = None
    step_ms_p50: float | None = None
    step_ms_p80: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    loss_difference: float | None = None
    gradient_difference: float | None = None
    error: str | None = None

    @property
    def wrong(self) -> bool:
        """A gradient differs by more than rounding explains."""
        return self.gradient_difference is not None and not self.gradient_difference <= self.tolerance

    @property
    def failed(self) -> bool:
        """A wrong gradient or an error of ours; a rival's is a finding, not a failure."""
        return not self.rival and (self.wrong or self.error is not None)


@dataclass
class Runner:
    """One row under way: its step, its parameters, what was measured so far."""

    row: Row
    step: Step
    trainer: Trainer
    result: Result
    work: Work = field(default_factory=Work)
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, row: Row, step: Step, params: Params) -> Runner:
        """A row with parameters of its own, before its first step."""
        largest = max(torch.finfo(t.dtype).eps for t in tensors(params))
        result = Result(row.name, tolerance(largest), row.rival)
        return cls(row, step, Trainer.start(params), result)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """An error becomes the row's result, so that the other rows go on; without a reference none can."""
        try:
            yield
        except Exception as error:
            if self.row is NONE:
                raise
            self.result.error = f"{type(error).__name__}: {error}"

    def inspect(self, params: Params, tokens: torch.Tensor, device: torch.device) -> Params:
        """Memory and work of a step; returns its gradients."""
        # The first step also pays for what is set up once: kernels, caches.
        self.step(params, tokens, unmarked)
        memory = trace_memory(lambda mark: self.step(params, tokens, mark), device)
        self.result.kept_bytes, self.result.peak_bytes = memory.kept, memory.peak
        with self.work:
            self.step(params, tokens, unmarked)
        return memory.result[1]

    def train(self, tokens: torch.Tensor, device: torch.device) -> None:
        """One timed step, optimizer aside, then the update."""
        params = self.trainer.params
        (loss, gradients), elapsed = seconds(lambda: self.step(params, tokens, unmarked), device)
        self.trainer.update(gradients)
        self.losses.append(float(loss.float().mean()))
        self.times.append(1e3 * elapsed)

    def summarize(self, reference: Runner) -> None:
        """Fill in what is known only when all steps have run."""
        result = self.result
        result.ops_recomputed, result.flops_recomputed = self.work.beyond(reference.work)
        result.step_ms_p20, result.step_ms_p50, result.step_ms_p80 = percentiles(self.times)
        result.loss_first, result.loss_last = self.losses[0], self.losses[-1]
        result.loss_difference = max(abs(a - b) for a, b in zip(self.losses, reference.losses, strict=True))


@dataclass
class Bench:
    """All rows on the same data; the first is the one without remat."""

    runners: list[Runner]
    data: Iterator[torch.Tensor]
    device: torch.device
    advance: Callable[[], None]

    def inspect(self, params: Params) -> None:
        """Memory, work and gradients at the initial parameters."""
        tokens = next(self.data)
        self._compare(lambda runner: runner.inspect(params, tokens, self.device))

    def train(self, steps: int) -> None:
        """Rows take turns step by step, another one first each time: drift of the machine meets all alike."""
        for turn in range(steps):
            tokens = next(self.data)
            self._each(lambda runner, tokens=tokens: runner.train(tokens, self.device), turn)

    def verify(self) -> None:
        """Gradients again, at the parameters that training without remat has reached; then the summary."""
        tokens, reference = next(self.data), self.runners[0]
        self._compare(lambda runner: runner.step(reference.trainer.params, tokens, unmarked)[1])
        for runner in self.runners:
            if runner.result.error is None:
                runner.summarize(reference)

    def _each(self, action: Callable[[Runner], None], first: int = 0) -> None:
        first %= len(self.runners)
        for runner in self.runners[first:] + self.runners[:first]:
            if runner.result.error is None:
                with runner.guarded():
                    action(runner)
            self.advance()

    def _compare(self, gradients: Callable[[Runner], Params]) -> None:
        expected: list[Params] = []

        def compare(runner: Runner) -> None:
            got = gradients(runner)
            expected.append(got)
            apart = difference(got, expected[0])
            runner.result.gradient_difference = max(apart, runner.result.gradient_difference or 0.0)
            del expected[1:]

        self._each(compare)
