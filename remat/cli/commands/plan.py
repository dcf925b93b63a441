"""`python -m remat plan MODULE:FN --budget ...`."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from remat._core import collecting_rarely, format_bytes
from remat._fit import fit
from remat.cli.checked import writable
from remat.cli.errors import UsageError
from remat.cli.models import check_published, published
from remat.cli.options import DTYPES, Target
from remat.cli.rows import amount
from remat.cli.target import load
from remat.plan import BudgetPolicy, pareto


@dataclass
class Plan:
    """Plan what a function keeps for its backward. Without --budget: the whole frontier.

    Nothing is computed: any size can be planned on any machine. For hf:CONFIG the step of a whole model is
    planned to stay within --peak.
    """

    target: Target
    """A function or module of tensors, a function of no arguments that returns (fn, *args), or hf:CONFIG: a
    published model (llama-3-8b, ...), a config.json, or a type of config."""
    input: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A tensor argument, as 4x128x256; once for each."""
    dtype: str = ""
    """Of the inputs, float32; of a model, bfloat16."""
    budget: str = ""
    """0.4 (a share), 2GiB or 1000000 (bytes), or "free"."""
    cost: Literal["flops", "roofline", "measured"] = "roofline"
    """What recomputation is counted in."""
    device: str = ""
    """What the cost model is of, such as h100 or cpu; left out, this machine's accelerator."""
    peak: str = ""
    """Of a model: the most bytes live in a step, such as 80GB: weights, optimizer and gradients included."""
    params: Literal["meta"] = "meta"
    """Of a model: weights have no data."""
    seq: int = 2048
    """Of a model: tokens in a sequence."""
    batch: int = 1
    """Of a model: sequences, or images, in a batch."""
    optimizer: str = ""
    """Of a model: adamw, sgd or momentum, whose state is held."""
    shards: int = 1
    """Of a model: devices over which weights, gradients and state are sharded (FSDP)."""
    points: int = 10
    """Budgets on the frontier."""
    json: bool = False
    """Print one JSON object: the plan, or the frontier."""
    out: Path | None = None
    """Write the plan there, as JSON that remat.plan.Plan.from_json reads."""
    csv: Path | None = None
    """Write the frontier there."""

    def __call__(self) -> int:
        for option, path in (("--out", self.out), ("--csv", self.csv)):
            writable(option, path)
        if self.out and not self.budget:
            raise UsageError(
                f"--out {self.out} is for one plan: write --budget too, or --csv for the frontier."
            )
        if self.target.startswith("hf:"):
            self._published()
            return 0
        if self.peak:
            raise UsageError(f"--peak {self.peak} is for hf:CONFIG; of a function write --budget.")
        fn, args = load(self.target, self.input, self.dtype or "float32")
        if self.budget:
            self._one(fn, args)
        if self.csv or not self.budget:
            self._frontier(fn, args)
        return 0

    def _published(self) -> None:
        """Print what the blocks of a model do for its step to stay within a peak, and what planning took."""
        given = {"--input": self.input, "--budget": self.budget, "--out": self.out, "--csv": self.csv}
        if wrong := [option for option, value in given.items() if value]:
            raise UsageError(f"{wrong[0]} is not for {self.target}: write --peak, --seq and --batch.")
        name, dtype = self.target.removeprefix("hf:"), self.dtype or "bfloat16"
        if not self.peak:
            check_published(name)
            raise UsageError(f"hf:{name} is planned for a peak: write --peak 80GB.")
        if dtype not in DTYPES:
            raise UsageError(f"--dtype {dtype} is not a dtype of a model. Write {', '.join(DTYPES)}.")
        if self.batch < 1 or self.seq < 1:
            raise UsageError(f"--batch {self.batch} --seq {self.seq} must be positive.")
        start = time.perf_counter()
        options: dict[str, Any] = {"optimizer": self.optimizer or None, "shards": self.shards}
        with collecting_rarely():
            model, inputs = published(name, DTYPES[dtype], self.batch, self.seq)
            built = time.perf_counter()
            done = fit(model, peak=self.peak, kwargs=inputs, device=self.device or "h100", **options)
        ended = time.perf_counter()
        memory = _memory()
        if self.json:
            facts = {key: value for key, value in vars(done).items() if key not in ("model", "held", "step")}
            print(dumps({**facts, "held": asdict(done.held), "memory": memory}, indent=2))
            return
        print(done)
        print(
            f"planned in {ended - built:.1f} s (built in {built - start:.1f} s)"
            + (f", {format_bytes(memory)} of memory for all of it" if memory else "")
        )
        if not self.optimizer:
            print("no optimizer is counted: write --optimizer adamw for its state")

    def _one(self, fn: Any, args: Any) -> None:
        plan = BudgetPolicy(amount(self.budget), self.cost, self.device or None).plan(fn, *args)
        print(plan.to_json() if self.json else plan)
        if self.out:
            self.out.write_text(plan.to_json())

    def _frontier(self, fn: Any, args: Any) -> None:
        frontier = pareto(fn, *args, cost=self.cost, device=self.device or None, points=self.points)
        if not self.budget:
            print(dumps(asdict(frontier), indent=2) if self.json else frontier)
        if self.csv:
            frontier.to_csv(self.csv)


def _memory() -> int | None:
    """The most bytes that this process had; None where the system does not tell."""
    if importlib.util.find_spec("resource") is None:  # Unix alone has it
        return None
    import resource

    # Linux counts KiB there, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
