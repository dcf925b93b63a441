"""Regions for the layers of a model that is there already."""

# The settings of a region are on its module, under names that no module of the user's has.
# pyright: reportPrivateUsage=false, reportUnnecessaryIsInstance=false

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from remat._api import OPTIONS, remat, unknown_option
from remat._blocks import LayerError as LayerError, Layers as Layers, fitting, regions as regions_of
from remat._core import described
from remat._region import ModuleView
from remat.policies import Policy, PolicyLike, policy_given, save_nothing
from remat.transforms import (
    RematError,
    blank,
    laid_out_as,
    names_of,
    set_class,
    subclass,
    subclasses,
    unannounced,
)

__all__ = ["apply", "regions", "remove"]

M = TypeVar("M", bound=torch.nn.Module)


def apply(
    model: M,
    *args: Any,
    policy: PolicyLike | None = save_nothing,
    layers: Layers = "*.layers.*",
    every: int = 1,
    plan: Any = None,
    **options: Any,
) -> M:
    """Make every layer's `forward` a region, in place.

    Parameter names, state dicts, hooks, `isinstance`, `copy.deepcopy` and pickling stay as they are; hooks
    run outside of the region, once each. Applying again replaces what was applied before. Apply it before
    `fully_shard` and `torch.compile`.

    Args:
        model: any module.
        policy: what the regions keep; anything that `remat(policy=...)` accepts.
        layers: which submodules. A pattern (or several) for their qualified names, in which `*` stands for
            anything. If a module and its parent both fit, the parent is taken. Or a class or classes of
            modules. Or a module, or several of them (a `ModuleList`, too). Or a function of the qualified
            name and the module.
        every: take the first of every so many of them.
        plan: a `remat.plan.MeshPlan`, or the path of one, in place of `policy`, `layers` and `every`: the
            blocks that it names become regions. In a process group all ranks must call this together.
        options: other arguments of `remat.remat`, such as `determinism_check`.

    Returns:
        `model`.

    Raises:
        RematError: no submodule fits (also a ValueError); the message lists those there are. Or the plan does
            not fit, on every rank if it does not fit one; the message names the rank.

    Example:
        >>> import torch
        >>> from remat import save_matmuls
        >>> from remat.nn import apply, regions
        >>> model = torch.nn.Module()
        >>> model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
        >>> regions(apply(model, policy=save_matmuls))
        ['layers.0', 'layers.1', 'layers.2']
    """
    if args or not isinstance(model, torch.nn.Module):
        raise LayerError(_no_model("apply", model, args))
    if plan is not None:
        for name, found in _planned(plan, policy, layers, every).policies(model).items():
            apply_to(model.get_submodule(name), policy=found, **options)
        return model
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise LayerError(f"remat.apply(every={every!r}): every is 1 or more; write every=2 for every second.")
    if unknown := {name: value for name, value in options.items() if name not in OPTIONS}:
        raise unknown_option("remat.apply", unknown, "layers", "every", "plan")
    for name in fitting(model, layers)[::every]:
        apply_to(model.get_submodule(name), policy=policy, **options)
    return model


def settings_of(module: torch.nn.Module) -> dict[str, Any] | None:
    """How `module` was made a region, None where it is none."""
    return dict(module._remat_settings) if isinstance(module, Region) else None


def _planned(plan: Any, *others: Any) -> Any:
    from remat.plan import MeshPlan, agree

    if others != (save_nothing, "*.layers.*", 1):
        raise RematError("remat.apply(plan=...): the plan says which layers keep what; leave the others out.")
    if isinstance(plan, (str, os.PathLike)):
        try:
            return MeshPlan.load(plan)  # type: ignore[arg-type]
        except RematError as error:
            # Other ranks may have read theirs, and wait for what this one says.
            agree("", str(error))
    if not isinstance(plan, MeshPlan):
        kind = cast("object", plan).__class__.__name__
        raise RematError(
            f"remat.apply(plan=...) got a {kind}: write a remat.plan.MeshPlan or the "
            "path of one. What is to hold for each block alone goes to policy=..., such as a remat.plan.Plan."
        )
    return plan


def apply_to(module: M, *, policy: PolicyLike | None = save_nothing, **options: Any) -> M:
    """Make the `forward` of `module` itself a region, in place; `apply` does so for layers.

    Example:
        >>> import torch
        >>> from remat.nn import apply_to, regions
        >>> regions(apply_to(torch.nn.Linear(2, 2)))
        ['']
    """
    if not isinstance(module, torch.nn.Module):
        raise LayerError(_no_model("apply_to", module))
    settings = {"policy": policy_given(policy), **options}
    # Wrong options are told here, not in the first forward.
    remat(torch.sin, **settings)  # type: ignore[call-overload]
    if isinstance(module, ModuleView):
        raise LayerError(
            f"remat.nn.apply_to: this {type(module).__name__} is what remat(module) returned; apply it "
            "to the module itself, or say policy=... there."
        )
    remove_from(module)
    # Alike for all layers of a class, whose compiled graphs are then copies of one.
    settings.setdefault("name", type(module).__name__)
    module.__dict__["_remat_settings"] = settings
    set_class(module, _region_class(type(module)))
    return module


def remove(model: M) -> M:
    """Make all layers ordinary modules again, in place.

    Args:
        model: what `apply` was called on, or any part of it.

    Returns:
        `model`.

    Example:
        >>> import torch
        >>> from remat import nn
        >>> model = nn.apply(torch.nn.Sequential(torch.nn.Linear(2, 2)), layers="*")
        >>> nn.regions(nn.remove(model))
        []
    """
    if not isinstance(model, torch.nn.Module):
        raise LayerError(_no_model("remove", model))
    for module in model.modules():
        remove_from(module)
    return model


def regions(model: torch.nn.Module) -> list[str]:
    """Qualified names of the submodules that `apply` made regions of.

    Example:
        >>> import torch
        >>> from remat import nn
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> nn.regions(nn.apply(model, layers=torch.nn.Linear))
        ['0']
    """
    if not isinstance(model, torch.nn.Module):
        raise LayerError(_no_model("regions", model))
    return regions_of(model)


@unannounced
class Region(torch.nn.Module):
    """Mixed into the class of a module whose forward is a region."""

    _remat_class: type[torch.nn.Module]
    _remat_forward: Callable[..., Any]
    _remat_settings: dict[str, Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made here and cannot be found by name.
        return _blank, (self._remat_class,), self.__dict__

    def __repr__(self) -> str:
        return f"remat({self._remat_class.__repr__(self)}, policy={self._remat_settings['policy']!r})"


def _region_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    # A class knows its subclasses, and does not hold them.
    for made in subclasses(cls):
        if names_of(made).get("_remat_class") is cls:
            return made

    # A subclass, not a wrapper, as FSDP2 does: the names of parameters stay. And not an attribute of the
    # instance: a copy of the module would go on calling the forward of the one it was copied from.
    @functools.wraps(cls.forward)
    def forward(self: Region, *args: Any, **kwargs: Any) -> Any:
        # A method under another name: Dynamo follows neither `types.MethodType` nor `super()` to be wrapped.
        return remat(self._remat_forward, **self._remat_settings)(*args, **kwargs)  # type: ignore[call-overload]

    about = {"forward": forward, "_remat_forward": cls.forward, "_remat_class": cls}
    return subclass(cls, laid_out_as(cls, Region), about)


def _blank(cls: type[torch.nn.Module]) -> torch.nn.Module:
    return blank(_region_class(cls))


def remove_from(module: torch.nn.Module) -> None:
    """Make `module` itself an ordinary module again."""
    if isinstance(module, Region):
        if type(module) is not _region_class(module._remat_class):
            raise LayerError(
                f"{type(module).__name__} was made from a region's class (by fully_shard, say): call "
                "remat.apply before that, and once."
            )
        set_class(module, module._remat_class)
        del module.__dict__["_remat_settings"]


def _no_model(name: str, model: Any, args: tuple[Any, ...] = ()) -> str:
    if args:
        option = "policy" if isinstance(args[0], Policy) else "layers"
        given = "..." if isinstance(args[0], torch.nn.Module) else repr(args[0])
        return f"remat.{name}(model, {given}): options are given by name. Write {option}={given}."
    if isinstance(model, type):
        return f"remat.{name} takes a module, got the class {model.__name__}. Write {model.__name__}(...)."
    advice = " For a function write remat(fn, policy=...)." if name.startswith("apply") else ""
    return f"remat.{name} takes a module, got {described(model)}.{advice}"
