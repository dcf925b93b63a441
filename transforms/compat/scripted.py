"""Modules of TorchScript: their tensors lie in C++, past torch functions and past tables of Python's."""

from __future__ import annotations

from typing import Any

import torch

# What C++ holds of a module, by name. The wrappers of `torch.jit` around these are no dicts and find nothing.
_TABLES: Any = (torch._C.ParameterDict, torch._C.BufferDict)
_MODULES: Any = torch._C.ModuleDict
_KINDS: Any = (torch._C.ScriptModule, torch._C.ScriptObject)


def scripted_places(attributes: dict[str, Any]) -> list[tuple[Any, str, torch.Tensor]]:
    """Where a scripted or traced module with these attributes holds tensors: C++ module, name, tensor.

    Nothing for other modules. One that is frozen has its tensors in its code.
    """
    # Of what `torch.jit.trace` returns, the module is one of its attributes.
    inner = attributes.get("_actual_script_module")
    held = attributes if inner is None else object.__getattribute__(inner, "__dict__")
    module = held.get("_c")
    if not isinstance(module, _KINDS):
        return []
    found, stack = [], [module]
    for part in stack:
        found += [(part, name, tensor) for table in _TABLES for name, tensor in table(part).items()]
        stack += [child for _, child in _MODULES(part).items()]
    return found


def scripted_now(module: Any, name: str) -> torch.Tensor:
    """The tensor that a module holds there."""
    return module.getattr(name)


def set_scripted(place: tuple[Any, str], tensor: torch.Tensor) -> None:
    """Let a module hold another tensor there."""
    module, name = place
    module.setattr(name, tensor)
