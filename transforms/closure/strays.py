"""Captured tensors that nothing tells of: found by their values, below all functorch levels.

TorchScript, extensions and the insides of operators on functions take a tensor past every torch function.
Below its level such a tensor loses its wrapper, and with it its derivative: ops meet the plain tensor inside.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from remat.transforms.closure.convert import ClosureConversion
from remat.transforms.closure.paths import of_captured
from remat.transforms.compat import (
    DispatchMode,
    dual_level_open,
    functions_as_they_are,
    is_batched,
    is_dead,
    is_wrapped,
    tree_leaves,
    unwrap_once,
    unwrapped,
)
from remat.transforms.errors import RematError
from remat.transforms.pytree import smooth


def refuse_strays(
    name: str,
    function: Callable[..., Any],
    conversion: ClosureConversion | None,
    outside: Iterable[torch.Tensor],
) -> None:
    """Raise where one of `outside`, what ops met and the function did not make, would lose its derivative.

    Args:
        name, function: the region or scan, and the user's function.
        conversion: what `function` ran under, None if it did not run: constants that torch functions were
            given are in order.
        outside: tensors below all levels, operands left out.
    """
    # What a backward inside makes, and a tangent of an operand, are tensors of their own below all levels:
    # nobody can tell them from a stray.
    if conversion is None or conversion.pulled or dual_level_open():
        return
    with functions_as_they_are():
        strays = {id(t): t for t in outside if id(t) not in conversion.met and smooth(t)}
        lost = next((t for t in strays.values() if t.requires_grad and not conversion.is_inside(t)), None)
        if lost is None and strays:
            lost = _carrier(strays)
    if lost is not None:
        called = of_captured(function, unwrapped(lost))
        said = f"{called!r} ({tuple(lost.shape)})" if called else f"a tensor of shape {tuple(lost.shape)}"
        raise RematError(
            f"{name} reads {said} from outside without a torch function, so its derivative would be lost. "
            "TorchScript, extensions and functions given to operators on functions do that. Pass it as an "
            "argument; in a scan, put it in the carry or in xs."
        )


def _carrier(strays: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """A living tensor that holds one of these and has a derivative or a batch dimension."""
    # Rare: an op met a tensor that neither the region nor any torch function knows.
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor) and is_wrapped(value) and id(unwrapped(value)) in strays:
            tensor = value
            while is_wrapped(tensor):
                if not is_dead(tensor) and (is_batched(tensor) or tensor.requires_grad):
                    return value
                tensor = unwrap_once(tensor)
    return None


class StrayWatch(DispatchMode):
    """Notes the tensors that ops meet and did not make; `known` are operands."""

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self.outside: list[torch.Tensor] = []
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        for tensor in known:
            if isinstance(tensor, torch.Tensor):
                self._add(unwrapped(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                known = self._known.get(id(value))
                if known is None or known() is not value:
                    self._add(value)
                    self.outside.append(value)
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._add(value)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)
