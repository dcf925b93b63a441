"""torchtitan: activation checkpointing by a policy of this library, as one of its config classes.

In a config function: `activation_checkpoint=PolicyAC.Config()` keeps what torchtitan's `SelectiveAC` keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import (  # type: ignore[reportMissingImports]
    ActivationCheckpointing,
    SelectiveAC,
)

from remat import nn, policies, presets
from remat._api import checkpoint_policy
from remat.policies import Policy
from remat.transforms import RematError

__all__ = ["PolicyAC"]

_CHECKS = {"default": "metadata"}
# Of these torchtitan recomputes every second one.
_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.linear.default}


class PolicyAC(ActivationCheckpointing):
    """Every transformer block is a region; what it keeps is the config's `policy`, or a budget.

    With neither it keeps what torchtitan's own `SelectiveAC` keeps: every second matrix product, attention,
    reduce-scatters and all-to-alls among them.

    Example:
        >>> from remat.interop.torchtitan import PolicyAC  # doctest: +SKIP
        >>> config = PolicyAC.Config(policy="save_weight_matmuls | save_attention")  # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        policy: str | None = None
        """Name of a built-in policy of `remat.policies` or of `remat.presets`, or a selector of modules
        such as `"layers.*.attention.wo :: aten.mm.default"`. Several, joined by `|`, keep what any keeps."""

        budget: float | None = None
        """Instead of a policy: the share of the activation bytes that a block may keep, from 0 to 1."""

        plan: str | None = None
        """Instead of both: the path of a plan for every rank, written by `remat.plan.MeshPlan.save`."""

    def apply(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Make regions of the blocks. With a plan all ranks compare theirs first.

        Raises:
            RematError: the plan does not fit this model or mesh; on every rank; the message names one.
        """
        if self.config.plan is None:
            super().apply(model, *args, **kwargs)
        else:
            nn.apply(model, plan=self.config.plan, **self._options())

    def policy(self) -> Policy:
        """What blocks keep. Override it for policies that no config can spell."""
        if self.config.budget is not None:
            return checkpoint_policy(budget=self.config.budget)
        if self.config.policy is None:
            kept = SelectiveAC(SelectiveAC.Config()).get_save_ops()
            products = policies.save_ops(*kept & _MATMULS)
            return policies.save_every_nth(2, products) | policies.save_ops(*kept - _MATMULS)
        first, *others = [_ready(name.strip()) for name in self.config.policy.split("|")]
        for other in others:
            first = first | other
        return first

    def _wrap_block(self, module: torch.nn.Module, *, base_fqn: str | None = None) -> torch.nn.Module:
        # In place, so that parameters keep their names for FSDP and checkpoints on disk.
        return nn.apply_to(module, policy=self.policy(), **self._options())

    def _options(self) -> dict[str, Any]:
        check = self.config.determinism_check
        return {
            "preserve_rng_state": self.config.preserve_rng_state,
            "determinism_check": _CHECKS.get(check, check),
        }


def _ready(name: str) -> Policy:
    if "*" in name or "::" in name:
        return policies.save_modules(name)
    found = getattr(policies, name, getattr(presets, name.removeprefix("presets."), None))
    if isinstance(found, Policy):
        return found
    ready = [key for key, value in vars(policies).items() if isinstance(value, Policy)]
    raise RematError(
        f"PolicyAC.Config(policy={name!r}): no such policy; there are {', '.join(sorted(ready))}."
    )
