"""Names of the version before: each is found for one more, and warns once of what to write."""

from __future__ import annotations

import importlib
from typing import Any

from remat._core import warn_user

_CATALOGUE, _READY = "remat.policies._catalogue", "remat.policies._ready"
_POLICIES = {
    "offload_matmuls": ("remat.offload(remat.save_matmuls)", _READY),
    "offload_names": ("remat.offload(remat.save_names(...))", _READY),
    "register_cost": ("remat.register_op(op, flops=...)", _CATALOGUE),
    "register_costly_op": ("remat.register_op(op, kind=...)", _CATALOGUE),
    "save_cheaper_than": ("remat.save_costlier_than", "remat"),
    "save_every": ("remat.save_every_nth", "remat"),
    "save_unbatched_matmuls": ("remat.save_weight_matmuls", "remat"),
}
_PLANS = {
    "plan_chain": ("remat.fit([stage1, stage2], x, peak=...)", "remat._fit.older"),
    "plan_model": ("remat.fit(fn, *args, budget=...)", "remat._fit.older"),
}
_AMBIENT = {"register_ambient": ("remat.register_state", "remat")}
# Of each module: the old name, what to write, and the module that has it, by the old name or by the new one.
OLD: dict[str, dict[str, tuple[str, str]]] = {
    "remat": {
        **_POLICIES,
        **_AMBIENT,
        "compare": ("remat.explain(fn, *args, policies=...)", "remat._inspect.report"),
        "pareto": ("remat.plan.pareto", "remat.plan"),
        "plan_model": _PLANS["plan_model"],
        "print_saved_residuals": ("print(remat.saved_residuals(fn, *args))", "remat._inspect"),
    },
    "remat.policies": _POLICIES,
    "remat.plan": {**_PLANS, "register_cost": _POLICIES["register_cost"]},
    "remat.ambient": _AMBIENT,
    "remat.layers": {
        name: (f"remat.{name}", "remat") for name in ("scan_layers", "stack_params", "unstack_params")
    },
    "remat.interop.diffusers": {
        "enable": (
            "model.enable_gradient_checkpointing(gradient_checkpointing_func="
            "remat.interop.CheckpointFunction(policy))",
            "remat.interop._older",
        )
    },
    "remat.scan": {"scan_remat": ("remat.scan_remat", "remat")},
}
_told: set[tuple[str, str]] = set()


def old(module: str, name: str) -> Any:
    """What `module` had as `name`; for the `__getattr__` of a module.

    Raises:
        AttributeError: it had nothing of that name.
    """
    if name not in OLD[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    write, place = OLD[module][name]
    if (module, name) not in _told:
        _told.add((module, name))
        warn_user(f"{module}.{name} is deprecated: write {write}.", DeprecationWarning)
    found = importlib.import_module(place)
    return getattr(found, write.rpartition(".")[2] if place == "remat" else name)
