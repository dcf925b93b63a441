"""`python -m remat gpu MODULE:STEP`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import tyro

from remat._api import remat
from remat._overrides import traced_under
from remat.cli.cards import show
from remat.cli.models import FAMILIES
from remat.cli.options import StepOptions
from remat.cli.rows import NONE, parse
from remat.cli.target import load
from remat.gpu import GpuReport, compile_for
from remat.gpu.inductor import fakes
from remat.policies import Policy, save_everything


@dataclass(kw_only=True)
class Gpu(StepOptions):
    """Compile one step for a GPU under several policies; nothing runs on a GPU, and none is needed.

    Regions and scans of the step take the policy in place of their own. A step without any is made a region.
    The table has the simulated peak, above arguments and parameters, and the time by a roofline model.
    """

    device: Literal["a100", "h100", "h200", "b200"] = "h100"
    """The card."""
    dtype: str = "bfloat16"
    """Of the inputs, or of the model."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Once for each: none, 'save_matmuls | save_attention', budget=0.4, names=q,k, MODULE:RULE. Without it:
    none, save_nothing and save_matmuls."""
    json: bool = False
    """Print one JSON object instead of the table."""
    code: bool = False
    """Also compile the kernels to machine code, and count those that spill registers."""

    def __call__(self) -> int:
        fn, args = self.shapes()
        chosen = self.policy or (NONE.name, "save_nothing", "save_matmuls")
        policies = [(text, save_everything if text == NONE.name else parse(text)) for text in chosen]
        rows = [
            (text if text == NONE.name else repr(policy), partial(self.under, policy, fn, args))
            for text, policy in policies
        ]
        return show(self.target, self.device, rows, self.json)

    def under(self, policy: Policy, fn: Callable[..., Any], args: tuple[Any, ...]) -> GpuReport:
        """The report under one policy; a step without regions and scans is made a region."""
        with traced_under(policy):
            report = compile_for(self.device, fn, *args, machine_code=self.code)
        scans = any(graph.blocks for graph in report.graphs)
        if report.regions or scans or policy == save_everything:
            return report
        return compile_for(self.device, remat(fn, policy=policy), *args, machine_code=self.code)

    def shapes(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step and its arguments; built-in models have no memory."""
        if self.target in FAMILIES or self.target.startswith("hf:"):
            options: dict[str, Any] = {key: getattr(self, key) for key in StepOptions.__dataclass_fields__}
            with fakes():
                options["device"] = "cpu"
                return StepOptions(**options).step()
        return load(self.target, self.input, self.dtype)
