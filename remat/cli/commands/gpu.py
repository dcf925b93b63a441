"""`python -m remat gpu MODULE:STEP`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from remat._api import remat
from remat._region import traced_under
from remat.cli.cards import Row, show
from remat.cli.checked import writable
from remat.cli.models import FAMILIES
from remat.cli.options import StepOptions
from remat.cli.rows import NONE, parse
from remat.cli.target import load
from remat.gpu import trace
from remat.policies import Policy, save_everything, save_nothing
from remat.transforms.compat.gpu import fakes
from remat.transforms.compiled import RECOMPUTED


@dataclass(kw_only=True)
class Gpu(StepOptions):
    """Compile one step for a GPU under several policies; nothing runs on a GPU, and none is needed.

    The regions of the step take the policy in place of their own. A step without regions is made one. The
    table has the simulated peak, above arguments and parameters, and the time by a roofline model.
    """

    device: Literal["a100", "h100", "h200", "b200"] = "h100"
    """The card."""
    dtype: str = "bfloat16"
    """Of the inputs, or of the model."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Once for each: none, 'save_matmuls | save_attention', budget=0.4, names=q,k, MODULE:RULE. Without it:
    none, save_nothing and save_matmuls."""
    png: Path | None = None
    """Draw peaks against times there."""
    json: bool = False
    """Print one JSON object instead of the table."""
    no_code: bool = False
    """Do not compile the kernels to machine code: no spills then, in less time."""

    def __call__(self) -> int:
        writable("--png", self.png)
        fn, args = self.shapes()
        chosen = self.policy or ("none", "save_nothing", "save_matmuls")
        rows = list(under_each(fn, args, chosen))
        return show(self.target, self.device, rows, self.json, self.png, not self.no_code)

    def shapes(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step and its arguments; built-in models have no memory."""
        if self.target in FAMILIES or self.target.startswith("hf:"):
            options = {key: getattr(self, key) for key in StepOptions.__dataclass_fields__}
            with fakes():
                return StepOptions(**options | {"device": "cpu"}).step()
        return load(self.target, self.input, self.dtype)


def under_each(fn: Callable[..., Any], args: tuple[Any, ...], policies: tuple[str, ...]) -> Iterator[Row]:
    """A row for each policy."""
    with traced_under(save_nothing):
        has_regions = any(RECOMPUTED in n.meta.get("custom", {}) for n in trace(fn, args, {})[0].joint)
    for text in policies:
        policy: Policy = save_everything if text == NONE.name else parse(text)
        if has_regions:
            yield (text if text == NONE.name else repr(policy)), partial(traced_under, policy), fn, args
        else:
            step = fn if text == NONE.name else remat(fn, policy=policy)
            yield (text if text == NONE.name else repr(policy)), contextlib.nullcontext, step, args
