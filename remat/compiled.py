"""`remat` in code that `torch.compile` traces: what Dynamo sees of a region."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from remat.policies import Policy
from remat.transforms import _compile
from remat.transforms._region import Region

# Dynamo passes plain constants on, so a region made in eager is known in the graph by its number.
_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number(options: Any) -> int:
    """A number by which `options` can be found for as long as they live."""
    at = next(_numbers)
    _made[at] = options
    return at


def call(label: str, at: int, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a region while Dynamo traces."""
    return _compile.bypass(functools.partial(enter, label, at), fn, *args, **kwargs)


def enter(label: str, at: int, graph: Any) -> Callable[..., Any]:
    """The function of flat operands that runs a region's graph. (`label` is for Dynamo's messages.)"""
    return functools.partial(_run, _made[at], graph)


def _run(options: Any, graph: Any, *operands: Any) -> Any:
    body = torch.fx.Interpreter(graph).run
    policy: Policy = options.policy.bind(body, operands, {})
    return _compile.run(options.region(body, policy), operands)
