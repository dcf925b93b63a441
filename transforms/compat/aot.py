"""Private names of torch's compiler; `autograd.py` has the others.

Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite, unless a line says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from remat.transforms.compat.autograd import (
    JVP,
    dual_level_open,
    levels,
    note_dual_level,
)

# Functions of Dynamo's graphs that take the number of a functorch level, and at which position.
_LEVEL_ARGUMENTS = {
    "_wrap_for_grad": 1,
    "_unwrap_for_grad": 1,
    "_add_batch_dim": 2,
    "_remove_batch_dim": 1,
    "_unwrap_batched": 1,
}


def level_argument(function: Any) -> int | None:
    """Which argument of a function in Dynamo's graph is the number of a functorch level, None for none."""
    return _LEVEL_ARGUMENTS.get(getattr(function, "__name__", ""))


def dual_level_known_if_any() -> contextlib.AbstractContextManager[None]:
    """`dual_level_known` where a forward-mode level is active, torch.func's or a plain `dual_level`."""
    return dual_level_known() if in_forward_mode() else contextlib.nullcontext()


def in_forward_mode() -> bool:
    """Whether a forward-mode level is active, torch.func's or a plain `dual_level`."""
    return dual_level_open() or any(kind == JVP for _, kind, _ in levels())


@contextlib.contextmanager
def dual_level_known() -> Iterator[None]:
    """Tell torch.func.jvp of a forward-mode level that it does not know of: it would open a second one.

    One such level is a plain `forward_ad.dual_level`. Another is one that a traced graph has opened below
    Python's own count: make_dual and unpack_dual do not find that either.
    """
    from torch._functorch import eager_transforms

    forward_ad = torch.autograd.forward_ad
    # All threads share the two numbers, so they are left alone where they are right, and counted back.
    level, nesting = forward_ad._current_level < 0, eager_transforms.JVP_NESTING < 1
    if level:
        forward_ad._current_level = 0
    eager_transforms.JVP_NESTING += nesting
    before = note_dual_level(True)
    try:
        yield
    finally:
        note_dual_level(before)
        eager_transforms.JVP_NESTING -= nesting
        if level:
            forward_ad._current_level = -1


def example_of(size: Any) -> int:
    """A size as a number: that of the example where it is symbolic, one where it depends on data."""
    if isinstance(size, int):
        return size
    return 1 if size.node.hint is None else int(size.node.hint)


def example_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements, in the example where sizes are symbolic."""
    return tensor.element_size() * math.prod(map(example_of, tensor.shape))


def at_hand(number: Any) -> Any:
    """A number; of a symbol the one that it has in the example, if it has any. It guards nothing."""
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        hint = number.node.hint
        return number if hint is None else hint
    return number


_compiling = threading.local()


def compiler() -> Callable[..., Any] | None:
    """What compiles the graph that is being traced: (graph, inputs) -> callable; None if nobody knows.

    Dynamo calls its backend while its translator is still there, which knows it.
    """
    inner = getattr(_compiling, "compiler", None)
    if inner is not None:
        return inner
    translator = _translator()
    found = None if translator is None else translator.output.compiler_fn
    # Dynamo wraps backends to write down what fails.
    return getattr(found, "_torchdynamo_orig_backend", found)


def at_work() -> Callable[..., Any] | None:
    """`compiler()`, where it is what Dynamo calls, and not a compiler of steps of a scan."""
    return compiler() if getattr(_compiling, "compiler", None) is None else None


def live_with_graph(thing: Any) -> bool:
    """Keep `thing` for as long as the code that Dynamo is making now; whether it is making any."""
    translator = _translator()
    if translator is None:
        return False
    # What is called once the code is gone, and let go of then.
    translator.output.cleanups.append(functools.partial(bool, thing))
    return True


def _translator() -> Any | None:
    """What Dynamo translates by now, if it does."""
    from torch._dynamo.symbolic_convert import tls

    return getattr(tls, "current_tx", None)


def traced_functionally(
    function: Callable[..., Any], values: list[torch.Tensor], inner: Callable[..., Any]
) -> torch.fx.GraphModule:
    """A graph of aten ops of `function` at `values`, functionalized as AOTAutograd does; regions and scans
    in it write themselves out as they do there. `inner` compiles the steps of such scans. (2.11, 2.13, 2.15)
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    before = getattr(_compiling, "compiler", None)
    _compiling.compiler = inner
    try:
        with torch.no_grad():
            plain = dispatch_functionalize(function, FunctionalTensorMode())
            return make_fx(plain, tracing_mode="fake")(*values)
    finally:
        _compiling.compiler = before


def compiled_bare(
    compiler: Callable[..., Any], graph: torch.fx.GraphModule, inputs: list[torch.Tensor]
) -> Callable[..., Any]:
    """`graph` compiled by a backend, without what keeps Dynamo from looking inside: that takes longer than a
    small step, and Dynamo does not look here."""
    made = compiler(graph, inputs)
    return getattr(made, "_torchdynamo_orig_callable", made)


def stands_on(compiler: Any) -> torch.device | None:
    """Where tensors stand while graphs are traced for a compiler that makes code for a device which need not
    be there. None: where they are."""
    # torch.compile wraps a backend of the user's.
    return getattr(getattr(compiler, "compiler_fn", compiler), "device", None)


def above_all(fake: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Let autograd and functorch work in the kernel of an op: it is called below them, and compiled graphs
    run with all of them off. `fake`: in a fake kernel, which runs while AOTAutograd traces.

    (2.11, 2.13, 2.15)
    """
    c: Any = torch._C
    keys, included = c.DispatchKey, c._dispatch_tls_local_include_set()
    excluded = c._dispatch_tls_local_exclude_set()
    for name in _ABOVE:
        if hasattr(keys, name):
            excluded = excluded.remove(getattr(keys, name))
    if fake:
        included = included.remove(keys.Functionalize).remove(keys.PythonTLSSnapshot)
        excluded = excluded.add(keys.Functionalize)
    return c._ForceDispatchKeyGuard(included, excluded)


_ABOVE = (
    "ADInplaceOrView AutogradFunctionality AutogradNestedTensor AutogradOther Batched BatchedNestedTensor "
    "Conjugate FuncTorchBatched FuncTorchDynamicLayerBackMode FuncTorchDynamicLayerFrontMode "
    "FuncTorchGradWrapper FuncTorchVmapMode Functionalize Negative PythonTLSSnapshot VmapMode ZeroTensor"
).split()


def teach_inductor() -> None:
    """Tell Inductor how to lower the library's own ops; imports Inductor."""
    from remat.transforms.compat import inductor  # noqa: F401


def backend(name: str) -> Callable[..., Any]:
    """The compiler that torch.compile knows as `name`: (graph, inputs) -> callable."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)
