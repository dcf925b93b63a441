"""`python -m remat sweep`: train a transformer under each policy; what it saves, what it costs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from remat.cli.bench import Bench, Result, Runner
from remat.cli.checked import device_of, writable_folder
from remat.cli.errors import UsageError
from remat.cli.models import batches
from remat.cli.options import DTYPES, ModelOptions
from remat.cli.rows import Row, rows
from remat.cli.steps import Mode, make_step
from remat.gpu import CARDS, GpuReport, compile_for
from remat.gpu.inductor import fakes


@dataclass(kw_only=True)
class Sweep(ModelOptions):
    """Train a transformer on the bytes of Python's standard library under each policy and compare them.

    Exits with 1 when the gradients of a policy differ from those without remat by more than rounding
    explains, or when a policy raises. Torch's own two rows may do either, and that is shown.
    """

    model: str = "gpt"
    """gpt, llama, or hf:NAME: a Hugging Face config type (gpt2, llama, qwen2, ...) with random weights."""
    mode: Mode = "backward"
    """loss.backward(), remat.transforms.value_and_grad, or vmap of it: one gradient per sample."""
    policy: tuple[str, ...] = ()
    """Rows: none, torch_checkpoint, torch_sac; policies as in Python ('save_matmuls | save_attention');
    budget=0.4, peak=2GiB, plan=FILE, names=q,k; or MODULE:RULE, a policy or rule of your own."""
    device: str = "cpu"
    """Where to run: cpu, cuda, cuda:1, mps. Or a100, h100, h200, b200: compiled for that card, not run."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Type of parameters and activations."""
    steps: int = 5
    """Timed training steps of each row."""
    out: Path = Path("out")
    """Folder for sweep.csv and sweep.svg."""
    json: bool = False
    """Print one JSON object instead of the table."""

    def __call__(self) -> int:
        from remat.cli.commands import report

        writable_folder("--out", self.out)
        if self.device in CARDS:
            return self.compiled()
        with warnings.catch_warnings():
            # vmap says so when it runs a kernel sample by sample; a sweep compares rows that all do.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            results = self.run(report.progress(quiet=self.json))
        report.write(self, results)
        return int(any(result.failed for result in results))

    def compiled(self) -> int:
        """Every row compiled for a card that need not be there."""
        from remat.cli.cards import show
        from remat.cli.commands import report

        if self.mode != "backward":
            raise UsageError(f"--mode {self.mode} --device {self.device}: a card compiles --mode backward.")
        with fakes():
            model = self.build(self.model, DTYPES[self.dtype], torch.device("cpu"))
            tokens = next(batches(self.batch, self.seq, self.seed))
        params = model.leaves(model.params)

        def compiled(row: Row) -> GpuReport:
            step = lambda params, tokens: model.loss(params, tokens, row.wrap)  # noqa: E731
            return compile_for(self.device, step, params, tokens, machine_code=False)

        each = [(row.name, partial(compiled, row)) for row in rows(self.policy)]
        title = report.title(report.described(self))
        return show(title, self.device, each, self.json, self.out / "sweep.svg")

    def run(self, advance: Callable[[float], None] = lambda share: None) -> list[Result]:
        """Measures every row; `advance` is told the share of the work that was done."""
        if self.steps < 1:
            raise UsageError(f"--steps {self.steps} must be positive. Write --steps 5.")
        device = device_of(self.device)
        model = self.build(self.model, DTYPES[self.dtype], device)
        data = (tokens.to(device) for tokens in batches(self.batch, self.seq, self.seed))
        steps = {row: make_step(self.mode, model, row.wrap) for row in rows(self.policy)}
        runners = [Runner.start(row, step, model.params) for row, step in steps.items()]
        share = 1 / (len(runners) * (self.steps + 2))
        bench = Bench(runners, data, device, lambda: advance(share))
        bench.inspect(model.params)
        bench.train(self.steps)
        bench.verify()
        return [runner.result for runner in runners]
