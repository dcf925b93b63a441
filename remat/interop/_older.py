"""`diffusers.enable`, for the version before."""

from __future__ import annotations

from typing import Any

from remat.interop._checkpoint import CheckpointFunction
from remat.policies import policy_given, save_nothing


def enable(model: Any, policy: Any = save_nothing, **options: Any) -> Any:
    """Deprecated: a diffusers model takes `remat.interop.CheckpointFunction(policy)` itself."""
    run = CheckpointFunction(policy_given(policy), options)
    model.enable_gradient_checkpointing(gradient_checkpointing_func=run)
    return model
