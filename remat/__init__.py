"""JAX-style functional rematerialization for PyTorch."""

import difflib
import importlib
import os
from typing import TYPE_CHECKING, Any

if not os.path.isdir(os.path.join(__path__[0], "transforms")):
    # A checkout without symbolic links (Windows): the engine is found beside the package.
    __path__.append(os.path.dirname(__path__[0]))

from remat._api import checkpoint_policy as checkpoint_policy
from remat._api import remat as remat
from remat._core import Decision as Decision
from remat._core import OpInfo as OpInfo
from remat._intermediates import capture as capture
from remat._intermediates import capture_grads as capture_grads
from remat._names import checkpoint_name as checkpoint_name
from remat._scan import scan_layers as scan_layers
from remat._scan import scan_remat as scan_remat
from remat._scan import while_remat as while_remat
from remat.ambient import register_ambient as register_ambient
from remat.policies import Policy as Policy
from remat.policies import PolicyLike as PolicyLike
from remat.policies import offload_matmuls as offload_matmuls
from remat.policies import offload_names as offload_names
from remat.policies import place_of
from remat.policies import register_op as register_op
from remat.policies import save_all_but_names as save_all_but_names
from remat.policies import save_attention as save_attention
from remat.policies import save_collectives as save_collectives
from remat.policies import save_everything as save_everything
from remat.policies import save_matmuls as save_matmuls
from remat.policies import save_names as save_names
from remat.policies import save_nothing as save_nothing
from remat.policies import save_ops as save_ops
from remat.policies import save_unbatched_matmuls as save_unbatched_matmuls
from remat.transforms import RematError as RematError
from remat.transforms.region import is_recomputing as is_recomputing

if TYPE_CHECKING:
    from remat import debug, gpu, interop, plan, policies, schedules, transforms
    from remat import nn as nn
    from remat._fit import fit
    from remat._inspect import Residual, print_saved_residuals, saved_residuals
    from remat._inspect.report import compare, explain
    from remat.plan import pareto, plan_model

__version__ = "0.2.0"
__all__ = [
    "Decision",
    "OpInfo",
    "Policy",
    "PolicyLike",
    "RematError",
    "Residual",
    "capture",
    "capture_grads",
    "checkpoint_name",
    "checkpoint_policy",
    "compare",
    "debug",
    "explain",
    "fit",
    "gpu",
    "interop",
    "is_recomputing",
    "offload_matmuls",
    "offload_names",
    "pareto",
    "plan",
    "plan_model",
    "policies",
    "print_saved_residuals",
    "register_ambient",
    "register_op",
    "remat",
    "save_all_but_names",
    "save_attention",
    "save_collectives",
    "save_everything",
    "save_matmuls",
    "save_names",
    "save_nothing",
    "save_ops",
    "save_unbatched_matmuls",
    "saved_residuals",
    "scan_layers",
    "scan_remat",
    "schedules",
    "transforms",
    "while_remat",
]

# Loaded when they are first asked for: the planner and the reports are large, and most steps need neither.
_LATER = {
    **dict.fromkeys(("Residual", "print_saved_residuals", "saved_residuals"), "remat._inspect"),
    **dict.fromkeys(("compare", "explain"), "remat._inspect.report"),
    **dict.fromkeys(("pareto", "plan_model"), "remat.plan"),
    "fit": "remat._fit",
}
_ROOMS = ("debug", "gpu", "interop", "jax_names", "layers", "nn", "plan")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"remat.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'remat' has no attribute {name!r}{_hint(name)}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


# What stands elsewhere, or has another name here.
_ELSEWHERE = {
    "checkpoint": "remat.remat, or remat.interop.checkpoint for torch's",
    "checkpoint_sequential": "remat.interop.checkpoint_sequential",
    "create_selective_checkpoint_contexts": "policy=remat.save_ops(...)",
    "CheckpointPolicy": "remat.Decision",
    "checkpoint_policies": "remat.jax_names.checkpoint_policies",
    **{name: f"remat.nn.{name}" for name in ("apply", "apply_to", "regions", "remove")},
    **{name: f"remat.plan.{name}" for name in ("Layout", "plan_chain")},
    **dict.fromkeys(("register_cost", "register_costly_op"), "remat.register_op"),
    **{name: f"remat.layers.{name}" for name in ("stack_params", "unstack_params")},
}


def _hint(name: str) -> str:
    """What to write in place of a name that is not here."""
    if name.startswith("_"):
        return ""
    if place := _ELSEWHERE.get(name) or place_of(name):
        return f": write {place}"
    near = difflib.get_close_matches(name, [*__all__, *_ELSEWHERE], n=1)
    return f": did you mean {near[0]}?" if near else ""


def __dir__() -> list[str]:
    # `nn` is no part of `from remat import *`: it would take the place of `torch.nn`.
    return sorted([*__all__, "__version__", "nn"])
