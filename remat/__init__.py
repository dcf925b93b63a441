"""JAX-style functional rematerialization for PyTorch."""

import difflib
import importlib
import os
from typing import TYPE_CHECKING, Any

if not os.path.isdir(os.path.join(__path__[0], "transforms")):
    # A checkout without symbolic links (Windows): the engine is found beside the package.
    __path__.append(os.path.dirname(__path__[0]))

from remat._api import (
    checkpoint_policy as checkpoint_policy,
    remat as checkpoint,  # the field's usual name
    remat as remat,
)
from remat._core import Decision as Decision, OpInfo as OpInfo
from remat._deprecated import OLD, old
from remat._inspect import Residual as Residual, saved_residuals as saved_residuals
from remat._intermediates import capture as capture, capture_grads as capture_grads
from remat._names import checkpoint_name as checkpoint_name
from remat._scan import (
    associative_scan_remat as associative_scan_remat,
    scan_layers as scan_layers,
    scan_remat as scan_remat,
    stack_params as stack_params,
    tiled as tiled,
    unstack_params as unstack_params,
    while_remat as while_remat,
)
from remat.ambient import register_state as register_state
from remat.nn import apply as apply, regions as regions, remove as remove
from remat.policies import (
    Policy as Policy,
    PolicyLike as PolicyLike,
    UnmatchedName as UnmatchedName,
    offload as offload,
    place_of,
    register_op as register_op,
    save_all_but_names as save_all_but_names,
    save_attention as save_attention,
    save_collectives as save_collectives,
    save_costlier_than as save_costlier_than,
    save_every_nth as save_every_nth,
    save_everything as save_everything,
    save_larger_than as save_larger_than,
    save_matmuls as save_matmuls,
    save_modules as save_modules,
    save_names as save_names,
    save_nothing as save_nothing,
    save_ops as save_ops,
    save_weight_matmuls as save_weight_matmuls,
)
from remat.transforms import RematError as RematError
from remat.transforms.region import is_recomputing as is_recomputing

if TYPE_CHECKING:
    from remat import debug, gpu, interop, losses, nn as nn, plan, policies, presets, schedules, transforms
    from remat._fit import fit
    from remat._inspect.report import explain

__version__ = "0.2.0"

__all__ = [
    "Decision",
    "OpInfo",
    "Policy",
    "PolicyLike",
    "RematError",
    "UnmatchedName",
    "apply",
    "associative_scan_remat",
    "capture",
    "capture_grads",
    "checkpoint",
    "checkpoint_name",
    "checkpoint_policy",
    "debug",
    "explain",
    "fit",
    "gpu",
    "interop",
    "is_recomputing",
    "losses",
    "offload",
    "plan",
    "policies",
    "presets",
    "regions",
    "register_op",
    "register_state",
    "remat",
    "remove",
    "save_all_but_names",
    "save_attention",
    "save_collectives",
    "save_costlier_than",
    "save_every_nth",
    "save_everything",
    "save_larger_than",
    "save_matmuls",
    "save_modules",
    "save_names",
    "save_nothing",
    "save_ops",
    "save_weight_matmuls",
    "saved_residuals",
    "scan_layers",
    "scan_remat",
    "schedules",
    "stack_params",
    "tiled",
    "transforms",
    "unstack_params",
    "while_remat",
]

# Loaded when they are first asked for: the planner and the reports are large, and most steps need neither.
_LATER = {
    "explain": "remat._inspect.report",
    "fit": "remat._fit",
}
_ROOMS = ("debug", "gpu", "interop", "jax_names", "layers", "losses", "nn", "plan", "presets")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"remat.{name}")
    if name in OLD["remat"]:
        return old("remat", name)
    if name not in _LATER:
        raise AttributeError(f"module 'remat' has no attribute {name!r}{_hint(name)}")
    found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return found


# What stands elsewhere, or has another name here.
_ELSEWHERE = {
    "checkpoint_sequential": "remat.interop.checkpoint_sequential",
    "create_selective_checkpoint_contexts": "policy=remat.save_ops(...)",
    "CheckpointPolicy": "remat.Decision",
    "checkpoint_policies": "remat.jax_names.checkpoint_policies",
    "apply_to": "remat.nn.apply_to",
    **{name: f"remat.plan.{name}" for name in ("Layout", "MeshPlan", "Frontier")},
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


class _Later:
    """A name of the package that is loaded when it is used."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return __getattr__(self.__name__)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # `inspect.signature` and `help` look through what is wrapped.
        found = __getattr__(self.__name__)
        return found if name == "__wrapped__" else getattr(found, name)


# After `from remat import remat` the function stands where the package would: it has the package's names.
remat.__dict__.update({name: globals().get(name, _Later(name)) for name in [*__all__, *_ROOMS]})
