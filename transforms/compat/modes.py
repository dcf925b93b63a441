"""Dispatch modes, torch's own for tracing included.

Private names of torch, each with its reason. Supported: torch 2.11 to 2.15. Unless a line says otherwise a
name was tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch._C import _autograd as _autograd_c
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._higher_order_ops.cond import cond_op
from torch._ops import (
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
    _compute_keyset,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from remat.transforms.compat.autograd import hooks_allowed, is_tracing, top_hooks
from remat.transforms.compat.compiled_code import code_seen, seen_as_one_op

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """`function`, of which Dynamo compiles no frame, nor any of what it calls.

    Where a graph breaks in compiled code, Dynamo looks at every frame below, this library's among them. It
    finds nothing there to compile, and looks again in each call. Explicit calls of `torch.compile` still
    compile.
    """
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[reportAttributeAccessIssue]
    skip = frames._FrameAction.SKIP
    code = function.__code__  # type: ignore[reportFunctionMemberAccess]
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return function


def is_composite(op: Any) -> bool:
    """Whether an op is made of others, which a dispatch mode sees in its place. (Torch tells of kernels by
    private names alone.)"""
    if not isinstance(op, OpOverload) or not torch._C._dispatch_has_kernel(op.name()):
        # Some overloads are TorchScript's alone.
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


# -- dispatch modes -----------------------------------------------------------------------------------
class DispatchMode(TorchDispatchMode):
    """The base of every dispatch mode here.

    It has not the switch that torch wraps around each call of a mode, which turns Dynamo off inside: that
    costs more than the rest of a call, and imports Dynamo at the first.
    """

    supports_higher_order_operators = True
    # What torch.compile has compiled runs compiled: Dynamo leaves a function alone for good that it meets
    # under a mode which answers False. (Selective checkpointing answers so, too.) Torch asks where a mode
    # begins, in each call of a region: this is True without a call of Python.
    ignore_compile_internals: Any = staticmethod(True.__bool__)

    def __enter__(self) -> Any:
        if not code_seen:
            seen_as_one_op(DispatchMode)
        return super().__enter__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in cls.__dict__:
            # torch.cond compiles itself in eager code: Dynamo meets this frame below it, to be left alone.
            uncompiled(cls.__dict__["__torch_dispatch__"])


def traced_as_it_runs() -> bool:
    """Whether make_fx writes down what runs now, and no compiler has asked for it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None and not is_tracing()


# What torch.jit.trace writes to, None where it does not.
jit_trace: Callable[[], Any] = torch._C._get_tracing_state


def direct_call(op: Any, tensors: int = 0) -> Callable[..., Any]:
    """What calling `op` comes down to, without the Python method in between.

    `tensors`: how many of its first arguments are tensors, where none goes by keyword. Then it may be one of
    torch's bindings, which read their arguments faster and call the same op (`tests/regions/test_guard.py`
    compares them).
    """
    binding, least = _bindings.get(op, (None, 0))
    return binding if binding is not None and tensors >= least else getattr(op, "_op", op)


def _bound(least: int, where: Any, *names: str) -> dict[Any, tuple[Callable[..., Any], int]]:
    found: dict[Any, tuple[Callable[..., Any], int]] = {}
    for name in names:
        packet, _, overload = name.partition(".")
        if (binding := getattr(where, packet, None)) is not None:
            found[getattr(getattr(torch.ops.aten, packet), overload or "default")] = binding, least
    return found


_c: Any = torch._C
_functions = _c._VariableFunctions
# With the number of first arguments that have to be tensors: a number there could mean another overload.
_bindings = {
    **_bound(1, _functions, "t", "transpose.int", "permute", "unsqueeze", "select.int", "unbind.int"),
    **_bound(1, _functions, "rsqrt", "relu", "sigmoid", "tanh", "neg", "exp", "sin", "cos", "_softmax"),
    **_bound(1, _functions, "native_layer_norm", "mean.dim", "pow.Tensor_Scalar"),
    **_bound(1, _c.TensorBase, "view", "expand"),
    **_bound(1, _c._nn, "gelu", "silu"),
    **_bound(2, _functions, "mm", "bmm", "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"),
    **_bound(3, _functions, "addmm", "baddbmm"),
}


# The operator that torch.cond calls: what torch-function modes see of it.
cond: Any = cond_op


def intercept_under_modes(op: Any, kernel: Callable[..., Any]) -> None:
    """Have `kernel` run in place of an operator on functions where a dispatch mode is active, and in place of
    its rules for levels of torch.func.

    A mode itself is asked below autograd only, when the operator has made its node. `kernel` may return
    NotImplemented; the operator then does what it does without it. `PythonTLSSnapshot` is the key that modes
    add above autograd, for which no operator on functions has a kernel.
    """
    key = torch._C.DispatchKey.PythonTLSSnapshot

    def first(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        if out is not NotImplemented:
            return out
        keys = _compute_keyset(args, kwargs, op.non_fallthrough_keys.remove(key))
        return op.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)

    op.py_impl(key)(first)

    def at_level(rule: Callable[..., Any], interpreter: Any, *args: Any) -> Any:
        out = kernel(*args)
        return rule(interpreter, *args) if out is NotImplemented else out

    op.functorch_table.update(
        {level: functools.partial(at_level, rule) for level, rule in op.functorch_table.items()}
    )


def unseen(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Within, ops on `tensor` reach no dispatch mode; those on a subclass do, which are computed there."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return torch._C._DisableTorchDispatch() if plain else contextlib.nullcontext()


# How many dispatch modes are active, torch's own for tracing included.
modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack


@contextlib.contextmanager
def modes_aside(kind: type[TorchDispatchMode]) -> Iterator[None]:
    """Within, dispatch modes of this kind see nothing; others do, in their order."""
    stack = active_modes()
    first = next((at for at, mode in enumerate(stack) if isinstance(mode, kind)), len(stack))
    others = [mode for mode in stack[first:] if not isinstance(mode, kind)]
    for _ in stack[first:]:
        torch._C._pop_torch_dispatch_stack(None)
    for mode in others:
        torch._C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for _ in others:
            torch._C._pop_torch_dispatch_stack(None)
        for mode in stack[first:]:
            torch._C._push_on_torch_dispatch_stack(mode)


def dispatch_is_off() -> bool:
    """Whether ops reach no dispatch mode here: within torch's own making of fake tensors."""
    return torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.Python)


def watched() -> bool:
    """Whether saved-tensor hooks or a dispatch mode follow what runs here, as an enclosing region does."""
    return top_hooks() is not None or modes_active() > 0


# Those modes, outermost first.
active_modes: Callable[[], list[TorchDispatchMode]] = _get_current_dispatch_mode_stack

_INFRASTRUCTURE = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def memory_is_real() -> bool:
    """Whether new tensors have memory: not while something is traced or tried without data (2.11 to 2.15)."""
    if modes_active() == 0:
        return True
    return all([torch._C._get_dispatch_mode(kind) is None for kind in _INFRASTRUCTURE])


# -- tracing without data -----------------------------------------------------------------------------
def fake_mode(leaves: list[Any]) -> Any:
    """The fake mode of the first fake tensor among `leaves`, else a new one that takes real tensors too."""
    from torch._subclasses import FakeTensor, FakeTensorMode

    for leaf in leaves:
        if issubclass(type(leaf), FakeTensor):
            # Parameters that a function captures may be real beside fake arguments.
            leaf.fake_mode.allow_non_fake_inputs = True
            return leaf.fake_mode
    made = FakeTensorMode(allow_non_fake_inputs=True)
    _made.modes.append(weakref.ref(made))
    return made


class _Made(threading.local):
    """The fake modes that were made on this thread while somebody watches for what is left of them."""

    def __init__(self) -> None:
        self.modes: list[weakref.ref[Any]] | collections.deque[Any] = collections.deque(maxlen=0)


_made = _Made()


@contextlib.contextmanager
def fakes_watched() -> Iterator[list[weakref.ref[Any]]]:
    """Within, the fake modes that `fake_mode` makes are noted: one lives as long as a tensor of it does."""
    before, modes = _made.modes, list[weakref.ref[Any]]()
    _made.modes = modes
    try:
        yield modes
    finally:
        _made.modes = before


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no data because it is fake."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def outside_all_modes() -> Iterator[None]:
    """Step out of every dispatch mode and functorch level, so that a trace inside leaves none in theirs."""
    from torch.utils._python_dispatch import _disable_current_modes

    # While AOTAutograd traces, hooks are not called at all: that too belongs to what is left.
    tracing = _autograd_c._saved_tensors_hooks_set_tracing(False)
    try:
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            # The refusal of hooks belongs to the levels that were left.
            with hooks_allowed():
                yield
    finally:
        _autograd_c._saved_tensors_hooks_set_tracing(tracing)


# A forward-mode derivative known to be zero is a tensor without memory. Two ops take one as far as dispatch
# modes, and their kernels, called from there, read that memory: torch ends with a segmentation fault (2.13,
# any mode, `torch.func.jvp` of `torch.add(x, c, alpha=0.3)`). So they get kernels that run above the modes.
_aten = torch.library.Library("aten", "IMPL")


def _scaled_zero(zero: torch.Tensor, factor: Any) -> torch.Tensor:
    kind = torch.result_type(zero, factor)
    return torch._efficientzerotensor(zero.shape, dtype=kind, device=zero.device)  # pyright: ignore[reportPrivateImportUsage]


def _shifted_zero(zero: torch.Tensor, other: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.zeros(zero.shape, dtype=zero.dtype, device=zero.device).add(other, alpha=alpha)


with warnings.catch_warnings():
    # torch warns that these come in the place of what passes such tensors on.
    warnings.simplefilter("ignore")
    _aten.impl("mul.Scalar", _scaled_zero, "ZeroTensor")
    _aten.impl("add.Scalar", _shifted_zero, "ZeroTensor")

# -- optimizers ------------------------------------------------------------------------------------------
# Steps of torch's fused optimizers, which write to parameters and move no version counter.
#
# Private names of torch, each with its reason. Supported: torch 2.11 to 2.15.


# What fused optimizers call, and what may be called by hand.
_STEPS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def watch_fused_steps(tell: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Have `tell` called with the parameters that a fused step has written to. To be called once.

    `ADInplaceOrView` is the key at which torch counts writes up; these ops have no kernel there (2.13). In
    code that Inductor compiles, no op is called and nothing is told.
    """
    for name in _STEPS:
        packet: Any = getattr(torch.ops.aten, name, None)
        for overload in ("default", "tensor_lr") if packet is not None else ():
            if (op := getattr(packet, overload, None)) is not None:
                _aten.impl(op.name().removeprefix("aten::"), _told(op, tell), "ADInplaceOrView")


def _told(op: Any, tell: Callable[[Sequence[torch.Tensor]], None]) -> Callable[..., None]:
    def step(parameters: Any, *args: Any, **kwargs: Any) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            op(parameters, *args, **kwargs)
        tell(parameters)

    return step
