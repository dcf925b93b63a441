"""torch's own databases of ops and modules, with their samples: what torch tests itself by.

`expecttest`, which torch's test library imports, is a package for torch's developers. The databases need
nothing of it but a base class, so an empty one stands in where it is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class Program(NamedTuple):
    """A function that holds a region, and its leaves: `build(wrap)` makes both anew.

    `exact` is False where torch returns whatever was in memory. `twice`: torch has second derivatives.
    """

    name: str
    build: Callable[[Wrap], tuple[Callable[..., Any], list[Tensor]]]
    exact: bool = True
    twice: bool = True


@functools.cache
def databases() -> tuple[dict[str, Any], dict[str, Any]]:
    """Ops and modules by their names, each once."""
    if importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.ACCEPT = False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.opinfo import core as opinfo

    # It reads the source of every frame of the stack to find a unittest, which nobody here is.
    for holder in (common_utils, opinfo):
        setattr(holder, "extract_test_fn", lambda: None)  # noqa: B010
    ops = {f"{op.name}.{op.variant_test_name}".strip("."): op for op in reversed(op_db)}
    return dict(reversed(ops.items())), {module.name: module for module in module_db}


UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.bfloat16, torch.int64, torch.bool)


def _spread(samples: Iterator[Any], most: int) -> list[Any]:
    """The first sample, and others spread over the first two dozen: near ones are much alike."""
    seen = list(itertools.islice(samples, 24 if most > 1 else 1))
    return seen[:: max(1, len(seen) // most)][:most]


def _dense(leaf: Any) -> bool:
    return leaf.layout is torch.strided


def inexact(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _own(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _read(values: list[Tensor]) -> list[Tensor]:
    """A later reader of each value, whose derivative needs it."""
    return [t * t for t in values if inexact(t) and _dense(t)]


def _op_program(call: Callable[..., Any], sample: Any, write: bool = False) -> Callable[[Wrap], Any]:
    """A region that copies its arguments, calls the op and reads the results.

    With `write` it writes into the results before, and reads the arguments again: who shares memory shows.
    """
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def fn(*args: Tensor) -> Any:
        copies = [t.clone() if _dense(t) else t for t in args]
        full = list(leaves)
        for place, copy in zip(places, copies, strict=True):
            full[place] = copy
        first, rest, kwargs = pytree.tree_unflatten(full, spec)
        found = tensors(call(first, *rest, **kwargs))
        if write:
            for t in found[:1]:
                t.mul_(2)
            return _read(found), _read(copies)
        return found, _read(found)

    return lambda wrap: (wrap(fn), [_own(leaves[i]) for i in places])


def op_programs(name: str, most: int = 3) -> Iterator[Program]:
    """An op as a function, in place where there is such a variant, and written to where it shares memory."""
    op = databases()[0][name]
    dtype = next((d for d in DTYPES if op.supports_dtype(d, "cpu")), None)
    if dtype is None or name.startswith("jiterator"):
        return  # GPUs only
    grads = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    exact = op.name.split(".")[-1] not in UNINITIALIZED
    samples = _spread(op.sample_inputs("cpu", dtype, requires_grad=grads), most)
    for i, sample in enumerate(samples):
        yield Program(f"{name}[{i}]", _op_program(op, sample), exact, op.supports_gradgrad)
    for sample in samples[:1]:
        if op.inplace_variant is not None:
            yield Program(f"{name}[in place]", _op_program(op.inplace_variant, sample), exact, False)
        if shares(op, sample):
            yield Program(f"{name}[written]", _op_program(op, sample, write=True), exact, False)


def shares(op: Any, sample: Any) -> bool:
    """Whether a result lies in the memory of an argument or of another result."""
    given = tensors((sample.input, sample.args, sample.kwargs))
    if not all(_dense(t) for t in given):
        return False
    found = tensors(op(sample.input, *sample.args, **sample.kwargs))
    memories = [t.untyped_storage()._cdata for t in [*given, *found] if _dense(t)]
    return len(memories) - len(set(memories)) > len(given) - len({t.untyped_storage()._cdata for t in given})


class Undeclared(TorchDispatchMode):
    """Notes the ops whose results share memory with what they were given, or with another, unsaid."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs)) if _dense(t)}
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else [out]
        for value, returned in zip(results, itertools.cycle(func._schema.returns), strict=False):
            for t in tensors(value):
                if returned.alias_info is None and _dense(t) and t.untyped_storage().nbytes():
                    if t.untyped_storage()._cdata in given:
                        self.found.add(str(func))
                    given.add(t.untyped_storage()._cdata)
        return out


def _of_module(info: Any, given: Any) -> Callable[[Wrap], Any]:
    """A region that is the module: parameters are captured, buffers are looked at after the call."""

    def build(wrap: Wrap) -> tuple[Callable[..., Any], list[Tensor]]:
        torch.manual_seed(0)
        made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        module: nn.Module = made.train(given.training).double()
        args, kwargs = given.forward_input.args, given.forward_input.kwargs
        if info.is_lazy:
            module(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        parameters = dict(module.named_parameters())
        holder = _Holder(module, wrap(module))

        def fn(*values: Tensor) -> Any:
            full = list(leaves)
            for place, value in zip(places, values, strict=False):
                full[place] = value
            args, kwargs = pytree.tree_unflatten(full, spec)
            given = dict(zip(parameters, values[len(places) :], strict=True))
            if all(given[name] is p for name, p in parameters.items()):
                return holder(*args, **kwargs), [b.detach().clone() for b in module.buffers()]
            named = {f"module.{name}": p for name, p in given.items()}
            return torch.func.functional_call(holder, named, args, kwargs)

        return fn, [*(_own(leaves[i]) for i in places), *parameters.values()]

    return build


class _Holder(nn.Module):
    def __init__(self, module: nn.Module, region: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.region = [region]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.region[0](*args, **kwargs)


def module_programs(name: str, training: bool, most: int = 3) -> Iterator[Program]:
    info = databases()[1][name]
    options = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": training}
    inputs = info.module_inputs_func(info, **options)
    for i, given in enumerate(_spread(iter(inputs), most)):
        given = _Given(given.constructor_input, given.forward_input, training)
        kind = "train" if training else "eval"
        yield Program(f"{name}[{kind} {i}]", _of_module(info, given), twice=info.supports_gradgrad)


class _Given(NamedTuple):
    constructor_input: Any
    forward_input: Any
    training: bool
