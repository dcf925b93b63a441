"""Policies by the modules that run ops: by patterns of their paths, and by the roles they have in blocks."""

# What users pass is checked, whatever its type was said to be.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat._core import Decision, OpInfo, fits, starred
from remat._torch import module_path, paths_of
from remat.policies._base import FromCallable, Numbered, Policy, PolicyError
from remat.policies._ready import OfKind, op_named, save_ops
from remat.transforms import RematError, registered, traits

_PRODUCTS = OfKind("products", ("matmul", "bmm"))
_ATTENTION = OfKind("attention", ("attention",))
# The attention itself is no module: it is told by its op.
ATTENTION = "attention_out"
# The modules that have a role, the first that fits. Names of transformers' blocks and of torchtitan's.
ROLES: dict[str, tuple[str, ...]] = {
    "moe_router": (
        *(
            "*.router",
            "*.router.gate",
            "*.mlp.gate",
            "*.mlp.gate.wg",
            "*.moe.gate",
            "*.block_sparse_moe.gate",
        ),
        "*.shared_expert_gate",
    ),
    "moe_gate": ("*.experts.*gate_proj", "*.experts.*w1"),
    "moe_up": ("*.experts.*up_proj", "*.experts.*w3", "*.experts.*v1"),
    "moe_down": ("*.experts.*down_proj", "*.experts.*w2"),
    # All of these, and the products of experts of which nobody can tell which one they are.
    "moe_experts": ("*.experts", "*.experts.*"),
    "query_proj": ("*.q_proj", "*.wq", "*.Wq", "*.query", "*.q_lin", "*.q_b_proj", "*Attention.q"),
    "key_proj": ("*.k_proj", "*.wk", "*.Wk", "*.key", "*.k_lin", "*Attention.k"),
    "value_proj": ("*.v_proj", "*.wv", "*.Wv", "*.value", "*.v_lin", "*Attention.v"),
    "qkv_proj": (
        *("*.qkv_proj", "*.query_key_value", "*.c_attn", "*.Wqkv", "*.wqkv", "*.kv_b_proj", "*.wkv_b"),
        "*.in_proj_qkvz",
    ),
    "out_proj": (
        *("*.o_proj", "*attn.out_proj", "*attention.out_proj", "*attention.wo", "*.out_lin", "*attn.c_proj"),
        *("*attn.dense", "*attention.dense", "*attention.output.dense", "*Attention.o"),
    ),
    "mlp_gate": ("*.gate_proj", "*.w1", "*.wi_0"),
    "mlp_up": (
        *("*.up_proj", "*.gate_up_proj", "*.w3", "*.wi_1", "*.wi", "*.fc1", "*.c_fc", "*.fc_in", "*.lin1"),
        *("*.dense_h_to_4h", "*.intermediate.dense", "*.ffn.0"),
    ),
    "mlp_down": (
        *("*.down_proj", "*.w2", "*.fc2", "*mlp.c_proj", "*.fc_out", "*.lin2", "*.dense_4h_to_h", "*.ffn.2"),
        *("*[0-9].output.dense", "output.dense", "*.DenseReluDense.wo"),
    ),
}
# MaxText's names for them.
_ALIASES = {
    **{
        "context": ATTENTION,
        "mlpwi_0": "mlp_gate",
        "mlpwi_1": "mlp_up",
        "mlpwi": "mlp_up",
        "mlpwo": "mlp_down",
    },
    **{"kv_proj": "qkv_proj", "mla_q": "query_proj", "mla_kv": "qkv_proj"},
    **{"moe_mlpwi_0": "moe_gate", "moe_mlpwi_1": "moe_up", "moe_mlpwo": "moe_down"},
}
# The block's own arguments: held, or sent to the host.
_INPUT = "decoder_layer_input"
_VERDICTS = {"remat": Decision.RECOMPUTE, "device": Decision.SAVE, "offload": Decision.OFFLOAD}
_Rule = tuple[str, Decision, Policy | None]


@functools.lru_cache(4096)
def role_of(path: str) -> str | None:
    """The role of the module at a path, None for none. No module has two."""
    return next((role for role, patterns in ROLES.items() if any(fits(p, path) for p in patterns)), None)


@functools.lru_cache(16384)
def _means(key: str, path: str) -> bool:
    """Whether what runs in the module at a path is meant: by its role, or by a pattern for it, or around."""
    if key == ATTENTION or key in ROLES:
        role = role_of(path)
        experts = key == "moe_experts" and role in ("moe_gate", "moe_up", "moe_down")
        return key == ATTENTION or role == key or experts
    return any(fits(key, whole) for whole in itertools.accumulate(path.split("."), "{}.{}".format))


class _OfModules(Policy):
    """A policy that reads `info.module`: what holds of a region holds of others where its module lies.

    Attributes:
        within: where the region's module lies, in a call of the region; None where one call tells nothing of
            the next, since the region's function may call any module.
    """

    needs_modules = True
    within: Any

    @property
    def asks_again(self) -> bool:  # type: ignore[override]
        return self.within is None

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        while isinstance(fn, functools.partial):
            fn = fn.func
        graph, owner = getattr(fn, "module", None), getattr(fn, "__self__", fn)
        if isinstance(graph, torch.fx.GraphModule):
            within = tuple(map(self._place, paths_of(graph)))
        elif isinstance(owner, torch.nn.Module):
            within = self._place(module_path(owner))
        else:
            return self
        return dataclasses.replace(self, within=within)  # type: ignore[type-var]

    def _place(self, path: str) -> str:
        return path


@dataclass(frozen=True, repr=False)
class ByModule(_OfModules, Numbered):
    """Verdicts for what runs in modules.

    Attributes:
        rules: patterns of paths or roles, with the verdict, and with a policy that says of which ops.
        label: how it prints.
        strict: whether a pattern that means no module of a region raises instead of warning.
        sends_inputs: whether the region's arguments go to the host.
    """

    rules: tuple[_Rule, ...]
    label: str
    strict: bool = False
    sends_inputs: bool = False
    within: Any = None

    def __call__(self, info: OpInfo) -> Decision:
        if traits(info.op).view:
            return Decision.RECOMPUTE  # it has no memory of its own, and another module may have made that
        met = {
            key: verdict
            for key, verdict, ops in self.rules
            if (ops is None or ops(info) is Decision.SAVE) and _means(key, info.module)
        }
        if len(set(met.values())) > 1:
            said = ", ".join(f"{key!r} says {verdict.name}" for key, verdict in met.items())
            raise RematError(
                f"{self!r} says two things of {info.op} in the module {info.module!r} of region "
                f"{info.region!r}: {said}. Leave one of them out, or write a pattern for fewer modules."
            )
        return next(iter(met.values()), Decision.RECOMPUTE)

    def decide_by_op(self, op: Any) -> Decision | None:
        none = all(ops is not None and ops.decide_by_op(op) is Decision.RECOMPUTE for *_, ops in self.rules)
        return Decision.RECOMPUTE if none else None

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        bound: Any = super().bind(fn, args, kwargs)
        # Calls at one place are bound to one and the same object.
        return registered[bound.number] if hasattr(bound, "number") else bound

    def _place(self, path: str) -> str:
        return path if any(re.search(r"\d", key) for key, *_ in self.rules) else starred(path)

    def unmet(self, modules: Collection[str]) -> Iterator[tuple[str, bool]]:
        # A pattern for one layer means nothing of the others.
        missing = [key for key, *_ in self.rules if not any(_means(starred(key), path) for path in modules)]
        patterns = [key for key in missing if key not in ROLES]
        yield from ((repr(key), self.strict) for key in patterns)
        # A block has its products apart or fused, and one of several kinds has not all: one role is enough.
        if missing and len(missing) == len(self.rules) and not patterns:
            yield "one of the roles " + ", ".join(missing), self.strict or not any(map(role_of, modules))

    def __repr__(self) -> str:
        return self.label


@dataclass(frozen=True, repr=False)
class RuleOfModules(_OfModules, FromCallable):
    """The verdicts of a user's function of an `OpInfo` that reads `info.module`."""

    within: Any = None

    @property
    def asks_again(self) -> bool:  # type: ignore[override]
        return self.stateful or self.within is None


def save_modules(*patterns: str, strict: bool = False) -> ByModule:
    """Save what runs in these modules and in the modules inside of them; recompute everything else.

    `save_modules("*.mlp") & save_matmuls` saves their products alone.

    Args:
        patterns: for the modules' paths, in the language of `remat.apply(layers=...)`: `*` stands for
            anything. A path begins at the outermost module that runs, as `model.layers.0.self_attn.o_proj`
            does in a model of transformers. torchtitan's selectors, `"layers.*.attention.wo ::
            aten.mm.default"`, mean these ops there alone. A pattern that means no module of a region warns.
        strict: raise `RematError` instead of warning.

    Raises:
        RematError: no pattern, one that is no string, or an op that there is not (also a TypeError).

    Example:
        >>> import torch
        >>> from remat import remat, save_modules, saved_residuals
        >>> block = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        >>> fn = remat(block, policy=save_modules("0"))
        >>> saved_residuals(fn, torch.ones(2, 4)).kept_bytes
        128
    """
    if not patterns or not all(isinstance(pattern, str) and pattern.strip() for pattern in patterns):
        got = next((repr(p) for p in patterns if not isinstance(p, str) or not p.strip()), "no pattern")
        raise PolicyError(f'save_modules got {got}: write patterns for paths, as save_modules("*.o_proj").')
    shown = ", ".join(map(repr, patterns))
    label = f"save_modules({shown}{', strict=True' if strict else ''})"
    return ByModule(tuple([_selected(pattern) for pattern in patterns]), label, strict)


def _selected(pattern: str) -> _Rule:
    """A pattern, or one of torchtitan's selectors, as a rule."""
    path, said, ops = map(str.strip, pattern.partition("::"))
    if not said:
        return path, Decision.SAVE, None
    names = [name.strip().removeprefix("torch.ops.") for name in ops.split(",")]
    try:
        return path, Decision.SAVE, save_ops(*map(op_named, names))
    except AttributeError as error:
        raise PolicyError(
            f"save_modules({pattern!r}): there is no op {ops!r} ({error}). Write it as torch.ops has it, "
            '"layers.*.attention.wo :: aten.mm.default".'
        ) from error


def by_role(label: str, settings: Mapping[str, Decision | str], strict: bool = False) -> ByModule:
    """The policy that decides for roles, by MaxText's names too, and for patterns of modules."""
    rules: dict[str, _Rule] = {}
    for name, value in settings.items():
        verdict = _VERDICTS.get(value, value) if isinstance(value, str) else value
        if not isinstance(name, str) or not isinstance(verdict, Decision):
            raise PolicyError(
                f'presets.custom({{{name!r}: {value!r}}}): write a role or a pattern, and "remat", "device" '
                f'or "offload". The roles are {", ".join((*ROLES, ATTENTION))}.'
            )
        if name == _INPUT:
            continue
        role = _ALIASES.get(name, name)
        known = role in ROLES or role == ATTENTION
        if not known and "*" not in role and "." not in role:
            raise PolicyError(
                f"presets.custom got {name!r}, which is no role: there are {', '.join((*ROLES, ATTENTION))}. "
                f'For modules of that name write "*.{name}".'
            )
        if known and verdict is Decision.RECOMPUTE:
            continue  # as everything that is not said
        ops = (_ATTENTION if role == ATTENTION else _PRODUCTS) if known else None
        if (before := rules.setdefault(role, (role, verdict, ops)))[1] is not verdict:
            raise PolicyError(
                f"presets.custom got {before[1].name} and {verdict.name} for {role}, which {name!r} is "
                "another name of. Leave one of them out."
            )
    sends = settings.get(_INPUT) in ("offload", Decision.OFFLOAD)
    return ByModule(tuple(rules.values()), label, strict, sends)
