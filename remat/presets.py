"""MaxText's remat policies as values, for blocks of transformers, torchtitan and others with such names.

They keep or send to the host what modules of some *roles* make, whatever the model calls them: the query's
projection is `q_proj` in Llama and `attention.self.query` in BERT.
"""

from __future__ import annotations

from collections.abc import Mapping

from remat._core import Decision
from remat.policies import Policy, by_role, save_nothing as full

__all__ = [
    "custom",
    "full",
    "minimal",
    "minimal_offloaded",
    "minimal_with_context",
    "qkv_proj_offloaded",
    "save_dot_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_with_context_except_mlp",
    "save_out_proj",
    "save_qkv_proj",
]

_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_MLP = ("mlp_gate", "mlp_up", "mlp_down")


def _preset(name: str, *roles: str, to: str = "device") -> Policy:
    return by_role(f"presets.{name}", dict.fromkeys(roles, to))


minimal = _preset("minimal", *_QKV, "out_proj", *_MLP)
"""Keep all projections of attention and MLP: the least is recomputed.

Example:
    >>> from remat import presets
    >>> presets.minimal
    presets.minimal
"""

minimal_with_context = _preset("minimal_with_context", *_QKV, "attention_out", "out_proj", *_MLP)
"""`minimal`, and the result of fused attention (MaxText's `context`).

Example:
    >>> from remat import presets
    >>> presets.minimal_with_context
    presets.minimal_with_context
"""

minimal_offloaded = _preset("minimal_offloaded", *_QKV, "out_proj", *_MLP, to="offload")
"""What `minimal` keeps, in host memory.

Example:
    >>> from remat import presets
    >>> presets.minimal_offloaded
    presets.minimal_offloaded
"""

save_dot_except_mlp = _preset("save_dot_except_mlp", *_QKV, "out_proj")
"""Keep the projections of attention.

Example:
    >>> from remat import presets
    >>> presets.save_dot_except_mlp
    presets.save_dot_except_mlp
"""

save_dot_except_mlpwi = _preset("save_dot_except_mlpwi", *_QKV, "out_proj", "mlp_down")
"""Keep the projections of attention and the last one of the MLP.

Example:
    >>> from remat import presets
    >>> presets.save_dot_except_mlpwi
    presets.save_dot_except_mlpwi
"""

save_dot_with_context_except_mlp = _preset(
    "save_dot_with_context_except_mlp", *_QKV, "attention_out", "out_proj"
)
"""Keep the projections of attention and the result of fused attention.

Example:
    >>> from remat import presets
    >>> presets.save_dot_with_context_except_mlp
    presets.save_dot_with_context_except_mlp
"""

save_qkv_proj = _preset("save_qkv_proj", *_QKV)
"""Keep query, key and value.

Example:
    >>> from remat import presets
    >>> presets.save_qkv_proj
    presets.save_qkv_proj
"""

qkv_proj_offloaded = _preset("qkv_proj_offloaded", *_QKV, to="offload")
"""Query, key and value, in host memory. (MaxText's leaves a fused `qkv_proj` out.)

Example:
    >>> from remat import presets
    >>> presets.qkv_proj_offloaded
    presets.qkv_proj_offloaded
"""

save_out_proj = _preset("save_out_proj", "out_proj")
"""Keep the last projection of attention.

Example:
    >>> from remat import presets
    >>> presets.save_out_proj
    presets.save_out_proj
"""


def custom(settings: Mapping[str, Decision | str], *, strict: bool = False) -> Policy:
    """A policy from what is to become of each role, as MaxText's `remat_policy: custom`.

    Args:
        settings: for a role (`"query_proj"`; MaxText's names too, as `"mlpwi_0"` and `"context"`), or for a
            pattern of module paths (`"*.linear_attn.*"`): `"device"`, `"offload"` or `"remat"`, or a
            `Decision`. What is not said is recomputed.
        strict: a region without any of the roles, or a pattern that means none of its modules, raises. By
            default it warns where the region has other roles, and raises where it has none at all.

    Returns:
        The policy.

    Raises:
        RematError: a name that is neither role nor pattern, two settings for one role (also a TypeError).
            When a region is called: settings that say two things of one module.

    Example:
        >>> from remat import presets
        >>> presets.custom({"query_proj": "device", "mlpwi_0": "offload"})
        presets.custom({'query_proj': 'device', 'mlpwi_0': 'offload'})
    """
    return by_role(f"presets.custom({dict(settings)!r})", settings, strict)
