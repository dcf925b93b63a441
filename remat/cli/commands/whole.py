"""`python -m remat plan hf:CONFIG --peak ...`: a step of a model of real size, on no device."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import asdict
from json import dumps

from remat._core import collecting_rarely, format_bytes
from remat._fit import fit
from remat.cli.errors import UsageError
from remat.cli.models import check_published, published
from remat.cli.options import DTYPES


def plan_published(
    name: str,
    *,
    peak: str,
    dtype: str,
    batch: int,
    seq: int,
    device: str,
    optimizer: str,
    shards: int,
    json: bool,
) -> None:
    """Print what the blocks of a model do for its step to stay within a peak, and what planning took."""
    if not peak:
        check_published(name)
        raise UsageError(f"hf:{name} is planned for a peak: write --peak 80GB.")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not a dtype of a model. Write {', '.join(DTYPES)}.")
    if batch < 1 or seq < 1:
        raise UsageError(f"--batch {batch} --seq {seq} must be positive.")
    start = time.perf_counter()
    options = {"optimizer": optimizer or None, "device": device or "h100", "shards": shards}
    with collecting_rarely():
        model, inputs = published(name, DTYPES[dtype], batch, seq)
        built = time.perf_counter()
        done = fit(model, peak=peak, kwargs=inputs, **options)
    ended = time.perf_counter()
    memory = _memory()
    if json:
        facts = {key: value for key, value in vars(done).items() if key not in ("model", "held", "step")}
        print(dumps({**facts, "held": asdict(done.held), "memory": memory}, indent=2))
        return
    print(done)
    print(
        f"planned in {ended - built:.1f} s (built in {built - start:.1f} s)"
        + (f", {format_bytes(memory)} of memory for all of it" if memory else "")
    )
    if not optimizer:
        print("no optimizer is counted: write --optimizer adamw for its state")


def _memory() -> int | None:
    """The most bytes that this process had; None where the system does not tell."""
    if importlib.util.find_spec("resource") is None:  # Unix alone has it
        return None
    import resource

    # Linux counts KiB there, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
