"""What regions keep, told to Python's `logging`: JAX's `jax_log_checkpoint_residuals`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from remat.transforms.compat import storage_key
from remat.transforms.region import is_recomputing
from remat.transforms.tape import Kept, listen

logger = logging.getLogger("remat")


def wanted() -> bool:
    """Whether a region that runs forward now should tell what it keeps."""
    # By this logger's own level: regions that are looked at are slower, and others' debugging asked for none.
    return 0 < logger.level <= logging.DEBUG and not is_recomputing()


def told(name: str, call: Callable[[], Any]) -> Any:
    """`call()`, which runs the forward of region `name`, and a message of what that kept, if anything."""
    with listen() as heard:
        out = call()
    # An argument that autograd holds as well is one block of memory: the first to tell of it has it.
    blocks = {storage_key(k.tensor): k for k in reversed(heard) if k.region == name}
    kept = list(reversed(blocks.values()))
    inputs = [_described(k) for k in kept if k.op is None]
    values = [_described(k) for k in kept if k.op is not None]
    parts = [f"saving inputs with shapes:{_lines(inputs)}"] if inputs else []
    parts += [f"saving these intermediates:{_lines(values)}"] if values else []
    if parts:
        logger.debug("region %r %s", name, "\nand ".join(parts))
    return out


def _described(kept: Kept) -> str:
    tensor = kept.tensor
    kind = f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
    named = "" if kept.name is None else f"named {kept.name!r}, "
    return f"{kind}, {tensor.nbytes} bytes, {named}{kept.why if kept.op is None else kept.op}"


def _lines(entries: list[str]) -> str:
    return "".join([f"\n  {entry}" for entry in entries])
