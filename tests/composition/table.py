"""One table of policies, for reports and graphs, and numbers; programs are in the bank."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from remat import checkpoint_policy
from remat.policies import (
    offload,
    save_attention,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    save_weight_matmuls,
)

aten = torch.ops.aten
# Where arguments are: REMAT_TEST_DEVICE=cuda runs the table on a card.
DEVICE = torch.device(os.environ.get("REMAT_TEST_DEVICE", "cpu"))


def every_second(info: Any) -> bool:
    return info.index % 2 == 0


POLICIES = {
    "nothing": save_nothing,
    "everything": save_everything,
    "matmuls": save_matmuls,
    "unbatched": save_weight_matmuls,
    "attention": save_attention,
    "ops": save_ops(aten.sin, aten.tanh, aten.exp, aten.native_dropout),
    "rule": checkpoint_policy(every_second),
    "names": save_names("hidden"),
    "offload": offload(save_matmuls) | offload(save_names("hidden")),
    "algebra": (save_matmuls | save_attention) & ~save_ops(aten.bmm),
}


def rand(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Numbers that depend on the shape and the seed alone, never on the global generator."""
    generator = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).to(DEVICE)
