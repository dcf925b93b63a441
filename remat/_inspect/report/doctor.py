"""`diagnose`: whether the regions of a step save anything, and what defeats them."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from remat import debug
from remat._core import Page, Shown, format_bytes, name_of
from remat._inspect.looking import looked_at
from remat._inspect.report.causes import Finding, Witness, causes, eager, no_gradient
from remat._inspect.report.measure import Measured, NoBackward, measure
from remat._overrides import policies_by
from remat.transforms import RematError


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """What `diagnose` found.

    Attributes:
        name: the step's name.
        now: the step as it is, or None where it raised.
        plain: the step without its regions, or None where it raised.
        findings: what defeats the regions, and what to try.
    """

    name: str
    now: Measured | None
    plain: Measured | None
    findings: tuple[Finding, ...]

    @property
    def saved_bytes(self) -> int:
        """Bytes that the regions save between forward and backward; negative where they cost some."""
        return self.plain.waiting_bytes - self.now.waiting_bytes if self.now and self.plain else 0

    def page(self) -> Page:
        return Page(tuple(self._headline()), (), tuple(f"{f.said} Try: {f.advice}" for f in self.findings))

    def _headline(self) -> Iterator[str]:
        if self.now is None or self.plain is None:
            yield f"{self.name} cannot be measured"
            return
        before, after = self.plain.waiting_bytes, self.now.waiting_bytes
        verb = "save" if after < before else "save nothing:"
        gain = f" {format_bytes(before - after)} of {format_bytes(before)}" if after < before else ""
        yield (
            f"{self.name}: the regions {verb}{gain or f' {format_bytes(after)} with and without them'} "
            "between forward and backward"
        )
        yield f"peak: {format_bytes(self.now.peak)} now, {format_bytes(self.plain.peak)} without remat"
        again = self.now.total("recompute").ops
        count = len(self.now.regions)
        yield f"recomputed: {again} ops in regions of {count} name{'s' if count != 1 else ''}"
        if not self.findings:
            yield "nothing found that defeats them"

    def to_dict(self) -> dict[str, Any]:
        """The figures and findings as plain data."""
        sides = {"now": self.now, "plain": self.plain}
        figures = {
            key: None if m is None else {"waiting_bytes": m.waiting_bytes, "peak_bytes": m.peak}
            for key, m in sides.items()
        }
        findings = [asdict(finding) for finding in self.findings]
        return {"name": self.name, "saved_bytes": self.saved_bytes, **figures, "findings": findings}


def diagnose(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Diagnosis:
    """Run one step with its regions and without, and say what defeats them.

    Args:
        fn: a step: it returns something to differentiate, or runs its backward itself.
        args, kwargs: its arguments.

    Returns:
        A `Diagnosis`, which prints as text. Each of its `findings` has a cause in one word, the region, what
        was found, and what to try.
    """
    name, witness = name_of(debug.uncompiled(fn)), Witness()
    told: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as told, policies_by(witness):
            warnings.simplefilter("always")
            with looked_at(fn, args, kwargs, ops=False):
                fn(*args, **kwargs)
            witness.as_it_is = False
            with _not_compiled():
                inner = debug.uncompiled(fn)
                now = measure(inner, args, kwargs, whole=True)
                plain = measure(inner, args, kwargs, whole=True, regions=False)
    except NoBackward as error:
        return Diagnosis(name, None, None, (*eager(witness.regions), no_gradient(str(error))))
    except RematError as error:
        return Diagnosis(name, None, None, (Finding("error", "", f"{error}", _ERROR),))
    found = causes(witness.regions, now, plain, told)
    return Diagnosis(name, now, plain, tuple(found))


_ERROR = "mend what the message names; the step cannot be measured before."


@contextlib.contextmanager
def _not_compiled() -> Iterator[None]:
    # Ops of compiled code cannot be watched.
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
