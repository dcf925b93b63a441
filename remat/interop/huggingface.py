"""Hugging Face transformers: its gradient checkpointing with this library's regions and policies."""

from __future__ import annotations

import inspect
from typing import Any

from remat._core import warn_user
from remat.interop._checkpoint import CheckpointFunction
from remat.policies import policy_given, save_nothing
from remat.transforms import RematError

__all__ = ["enable"]


def enable(model: Any, policy: Any = save_nothing, **options: Any) -> Any:
    """Turn on a `PreTrainedModel`'s gradient checkpointing, with this library behind it.

    Works under `torch.func` too. `TrainingArguments(gradient_checkpointing=True)` leaves the policy in place,
    with a warning: turning the model's checkpointing on again would put torch's function back.

    Args:
        model: a transformers model; adapters (PEFT) on it are fine.
        policy: what every layer keeps; anything that `remat(policy=...)` accepts.
        options: other arguments of `remat.remat`.

    Returns:
        `model`.

    Raises:
        RematError: the model's classes know no gradient checkpointing (also a TypeError).

    Example:
        >>> from remat import save_matmuls
        >>> from remat.interop import huggingface
        >>> model = AutoModelForCausalLM.from_config(config)  # doctest: +SKIP
        >>> huggingface.enable(model, policy=save_matmuls).train()  # doctest: +SKIP
    """
    run = CheckpointFunction(policy_given(policy), options)
    for module in model.modules():
        vars(module).pop(_SWITCH, None)
    _switch_on(model)
    layers = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    if not layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no layers that can checkpoint; use remat.apply(model, ...)."
        )
    for layer in layers:
        layer._gradient_checkpointing_func = run
    for module in model.modules():
        if hasattr(type(module), _SWITCH):
            setattr(module, _SWITCH, _Switch(module, run))
    return model


# What all of transformers' methods that turn checkpointing on and off end with.
_SWITCH = "_set_gradient_checkpointing"


class _Switch:
    """A model's own switch, but that a policy stays when checkpointing is turned on once more."""

    def __init__(self, model: Any, run: CheckpointFunction) -> None:
        self.model, self.run = model, run

    def __call__(self, enable: bool = True, gradient_checkpointing_func: Any = None, **options: Any) -> None:
        run = gradient_checkpointing_func
        if enable and not isinstance(run, CheckpointFunction):
            warn_user(
                f"{type(self.model).__name__} has regions already: policy={self.run.policy!r} stays, and "
                "torch's checkpoint is not put in its place. Leave gradient_checkpointing=False, or call "
                "model.gradient_checkpointing_disable() first."
            )
            run = self.run
        if not enable:
            vars(self.model).pop(_SWITCH, None)
        given = {} if run is None else {"gradient_checkpointing_func": run}
        getattr(type(self.model), _SWITCH)(self.model, enable=enable, **given, **options)


class UnsupportedModel(RematError, TypeError):
    """A model without the hook that is asked for.

    It is a `RematError` and a `TypeError`.

    Example:
        >>> import torch
        >>> from remat.interop import huggingface
        >>> try:
        ...     huggingface.enable(torch.nn.Linear(2, 2))
        ... except huggingface.UnsupportedModel as error:
        ...     print(error)
        Linear is not a transformers model that can checkpoint; use remat.apply.
    """


def _switch_on(model: Any) -> None:
    """Let transformers set its flags."""
    # Named activation_... since 5.23, where the old name warns.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        method = getattr(model, name, None)
        if method is None:
            continue
        keyword = next(k for k in inspect.signature(method).parameters if k.endswith("checkpointing_kwargs"))
        method(**{keyword: {"use_reentrant": False}})
        # It makes embeddings require grad for reentrant checkpointing, in a hook that torch.func refuses.
        if getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None):
            model.disable_input_require_grads()
        return
    raise UnsupportedModel(
        f"{type(model).__name__} is not a transformers model that can checkpoint; use remat.apply."
    )
