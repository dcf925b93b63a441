"""Seams that exist already: calls shaped like torch.utils.checkpoint's, and hooks of model libraries.

Modules of their own: `remat.interop.huggingface`, `remat.interop.torchtitan`.
"""

from remat.interop._checkpoint import (
    CheckpointFunction as CheckpointFunction,
    checkpoint as checkpoint,
    checkpoint_sequential as checkpoint_sequential,
)
from remat.interop._torch_policy import from_torch_policy as from_torch_policy

__all__ = ["CheckpointFunction", "checkpoint", "checkpoint_sequential", "from_torch_policy"]
