"""Hugging Face diffusers: the function that its `enable_gradient_checkpointing` takes."""

from __future__ import annotations

from typing import Any

from remat.interop._checkpoint import CheckpointFunction
from remat.policies import policy_given, save_nothing

__all__ = ["enable"]


def enable(model: Any, policy: Any = save_nothing, **options: Any) -> Any:
    """Turn on the gradient checkpointing of a diffusers `ModelMixin`, with this library behind it.

    The same as `model.enable_gradient_checkpointing(gradient_checkpointing_func=CheckpointFunction(policy))`.

    Args:
        model: a diffusers model.
        policy: what every block keeps; anything that `remat(policy=...)` accepts.
        options: other arguments of `remat.remat`.

    Returns:
        `model`.

    Raises:
        ValueError: diffusers' own, for a model that cannot checkpoint.

    Example:
        >>> from remat import save_attention
        >>> from remat.interop import diffusers
        >>> unet = diffusers.enable(UNet2DConditionModel(**config), policy=save_attention)  # doctest: +SKIP
    """
    run = CheckpointFunction(policy_given(policy), options)
    model.enable_gradient_checkpointing(gradient_checkpointing_func=run)
    return model
