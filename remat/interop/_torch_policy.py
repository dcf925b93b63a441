"""Policies of torch.utils.checkpoint's selective checkpointing, as policies of this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from remat._core import Decision, OpInfo
from remat.policies import Policy, PolicyError, check_verdict, save_ops

_DECISIONS = {
    CheckpointPolicy.MUST_SAVE: Decision.SAVE,
    CheckpointPolicy.PREFER_SAVE: Decision.SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: Decision.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Decision.RECOMPUTE,
}
# Newer than torch 2.11; eager torch recomputes what they name, silently.
for _name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"):
    if hasattr(CheckpointPolicy, _name):
        _DECISIONS[getattr(CheckpointPolicy, _name)] = Decision.OFFLOAD


@dataclass(frozen=True, repr=False)
class TorchPolicy(Policy):
    """The verdicts of a function `(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool`."""

    policy_fn: Callable[..., Any]
    # Such functions count in their closures (torchtitan's every second matmul): no call may be left out.
    counts = True

    def __call__(self, info: OpInfo) -> Decision:
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = info.outputs[0] if len(info.outputs) == 1 else info.outputs
        answer = self.policy_fn(context, info.op, *info.args, **info.kwargs)
        return _DECISIONS[answer] if answer in _DECISIONS else check_verdict(self, info, answer)

    def __repr__(self) -> str:
        return f"from_torch_policy({getattr(self.policy_fn, '__qualname__', None) or repr(self.policy_fn)})"


@dataclass(frozen=True, repr=False)
class ContextPolicy(Policy):
    """The policy inside what `context_fn` makes, made anew for every forward, as torch does."""

    context_fn: Callable[[], Any]
    counts = True

    def fresh(self) -> Policy:
        contexts = self.context_fn()
        found = policy_function(contexts)
        if found is None:
            raise PolicyError(
                f"checkpoint(context_fn=...): got {contexts!r}, expected what "
                "create_selective_checkpoint_contexts makes, every time. In code that torch.compile compiles "
                "nothing else can be entered around a region: enter it inside the function."
            )
        return TorchPolicy(found)

    def __call__(self, info: OpInfo) -> Decision | bool:
        return self.fresh()(info)

    def __repr__(self) -> str:
        return f"from_torch_policy({getattr(self.context_fn, '__qualname__', None) or repr(self.context_fn)})"


def policy_function(contexts: Any) -> Callable[..., Any] | None:
    """The policy function in a pair made by `create_selective_checkpoint_contexts`, None for another pair."""
    return (
        getattr(contexts[0], "policy_fn", None)
        if isinstance(contexts, tuple) and len(contexts) == 2
        else None
    )


def from_torch_policy(policy: Any) -> Policy:
    """A policy written for torch's selective checkpointing.

    Args:
        policy: what torch's `create_selective_checkpoint_contexts` takes: a function
            `(ctx, op, *args, **kwargs)` to a `CheckpointPolicy` or bool, or a list of ops. Tensors come as
            `TensorMeta` (shape, size, dim, numel, dtype, device; no data). MUST and PREFER are the same here;
            the CPU_OFFLOAD values offload.

    Raises:
        RematError: neither a function nor a list (also a TypeError). An answer that is neither a
            `CheckpointPolicy` nor a bool raises when it is given; torch takes it for "recompute".

    Example:
        >>> import torch
        >>> from torch.utils.checkpoint import CheckpointPolicy
        >>> from remat import remat
        >>> from remat.interop import from_torch_policy
        >>> def matmuls(ctx, op, *args, **kwargs):
        ...     mine = op is torch.ops.aten.mm.default
        ...     return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE
        >>> block = remat(lambda w, x: torch.tanh(x @ w), policy=from_torch_policy(matmuls))
    """
    if isinstance(policy, (list, tuple, set, frozenset)):
        return save_ops(*policy)
    if not callable(policy) or isinstance(policy, Policy):
        raise PolicyError(
            f"from_torch_policy got {policy!r} of type {type(policy).__name__}: write a function "
            "(ctx, op, *args, **kwargs) -> CheckpointPolicy, or a list of ops."
        )
    return TorchPolicy(policy)
