"""`python -m remat env`: what this machine can do, and how fast."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Any

import torch

from remat._core import processor, to_install
from remat.plan import LIGHT, speeds_of

# Of the speeds those that are seconds; of `LIGHT` they are bytes a second, of the others FLOPs a second.
SECONDS = ("call", "op", "region")
# Extra -> the packages that it brings.
EXTRAS = {
    "cli": ("tyro", "einops"),
    "plan": ("scipy",),
    "hf": ("transformers",),
    "bench": ("torch_remat",),
}


@dataclass
class Env:
    """Say what this machine can do: versions, devices, extras, whether torch.compile has a compiler.

    The speeds are those that plans count with: of the nearest processor known, or measured here.
    """

    json: bool = False
    """Print one JSON object."""

    measure: bool = False
    """Measure the speeds of this machine, which takes some seconds, and remember them for its plans."""

    def __call__(self) -> int:
        if self.measure:
            speeds_of(accelerator()).measure()
        facts = machine() | {"compile": compiler(), "speeds": speeds()}
        facts |= {"extras": {name: extra(name) for name in EXTRAS}}
        print(json.dumps(facts, indent=2) if self.json else "\n".join(lines(facts)))
        return 0


def machine(device: str | None = None) -> dict[str, Any]:
    """What a figure must be read with: versions, processor or accelerator, cores, threads."""
    kind = torch.device(device).type if device else accelerator()
    return {
        # Of the code that runs: an editable install may be recorded under an older version.
        "remat": sys.modules["remat"].__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name() if kind == "cuda" else processor(),
        "accelerator": kind,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def accelerator() -> str:
    """What torch would compute on here: "cuda", or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def version(package: str) -> str | None:
    """The installed version of a package, None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def extra(name: str) -> dict[str, str | None]:
    """Package -> version, None where it is missing."""
    return {package: version(package) for package in EXTRAS[name]}


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on a CPU, or None."""
    names = (os.environ.get("CXX"), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def speeds() -> dict[str, float]:
    """What plans count with on this machine's device: FLOP/s and bytes/s in float32; seconds of a call, of an
    op in an eager step beside its kernel, and those that a region of 30 ops adds."""
    found = speeds_of(accelerator())
    if not found.known:
        return {}
    seconds = {"call": found.call(), "op": found.op(), "region": found.region(30)}
    return seconds | found.attained(torch.float32)


def lines(facts: dict[str, Any]) -> list[str]:
    """The facts as text, a line each."""
    apart = ("extras", "compile", "speeds")
    plain = [f"{key:<12} {value}" for key, value in facts.items() if key not in apart]
    compiles = facts["compile"] or "no C++ compiler found: torch.compile runs with backend='aot_eager' only"
    rates = spelled(facts["speeds"]) if facts["speeds"] else []
    return [*plain, f"{'compile':<12} {compiles}", *rates, *extras(facts["extras"])]


def spelled(speeds: dict[str, float]) -> list[str]:
    """The speeds as two lines of text."""
    rates = {kind: f"{kind} {rate / 1e9:,.3g}" for kind, rate in speeds.items() if kind not in SECONDS}
    heavy = ", ".join(text for kind, text in rates.items() if kind not in LIGHT)
    light = ", ".join(rates[kind] for kind in LIGHT)
    call, op, region = (f"{speeds[what] * 1e6:.2g} us" for what in SECONDS)
    beside = f"{call} a call, {op} an op of a step, {region} more for a region of 30"
    return [f"{'speeds':<12} float32, {heavy} GFLOP/s", f"{'':<12} {light} GB/s; {beside}"]


def extras(found: dict[str, dict[str, str | None]]) -> list[str]:
    """A line for each extra: what of it is there, and how to install what is not."""

    def tell(name: str, packages: dict[str, str | None]) -> str:
        have = ", ".join(f"{package} {number}" for package, number in packages.items() if number)
        missing = [package for package, number in packages.items() if not number]
        hint = f"missing {', '.join(missing)}: {to_install(name)}" if missing else ""
        return f"{'[' + name + ']':<12} {'; '.join(filter(None, [have, hint]))}"

    return [tell(name, packages) for name, packages in found.items()]
