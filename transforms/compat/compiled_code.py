"""Code that Inductor has made and that runs in eager code: one op to dispatch modes.

Its kernels write raw memory, and of its ops only products by libraries are dispatched, on buffers that nobody
has seen made. So a mode that looked inside would take those for all that happens.

Private names of torch. Tried on 2.13.0.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from remat.transforms.compat.patches import exchange


class CompiledCode:
    """The code of one graph. All are equal: a function is compiled anew for its run in a recomputation."""

    __slots__ = ("graph", "modes", "run")

    def __init__(self, graph: Any, run: Callable[..., Any]) -> None:
        self.graph, self.run = graph, run
        self.modes: list[Any] = []  # of the user's, which look inside as they do without us

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompiledCode)

    def __hash__(self) -> int:
        return hash(CompiledCode)

    def __repr__(self) -> str:
        return "code of torch.compile"

    def written(self, inputs: Sequence[Any]) -> Iterator[torch.Tensor]:
        """Which of its inputs it writes to."""
        for at in sorted(getattr(self.graph, "mutated_input_idxs", ())):
            if at < len(inputs) and isinstance(inputs[at], torch.Tensor):
                yield inputs[at]


class _CodeOp(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("remat_compiled_code")

    def __call__(self, code: CompiledCode, inputs: tuple[Any, ...]) -> Any:
        return super().__call__(code, inputs)


COMPILED_CODE = _CodeOp()
for _name, _key in torch._C.DispatchKey.__members__.items():
    if _name.startswith("Autograd"):
        COMPILED_CODE.fallthrough(_key)


@COMPILED_CODE.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
def _run(code: CompiledCode, inputs: tuple[Any, ...]) -> Any:
    with contextlib.ExitStack() as stack:
        for mode in code.modes:
            stack.enter_context(mode)
        return code.run(code.graph, list(inputs))


def _look_inside(mode: Any, code: CompiledCode, inputs: tuple[Any, ...]) -> Any:
    code.modes.insert(0, mode)
    return COMPILED_CODE(code, inputs)


def _without_data(mode: Any, code: CompiledCode, inputs: tuple[Any, ...]) -> Any:
    raise NotImplementedError(
        "code that torch.compile has made runs on real memory only, and this is a run on tensors without data"
    )


# -- who is compiled ----------------------------------------------------------------------------------
class _AsPython(threading.local):
    """What this thread runs as Python though torch.compile has compiled it."""

    calls = False  # all functions
    cond = False  # torch.cond, which is on its way to its operator


_left = _AsPython()
# Torch's way from a compiled function to the callback of Dynamo, once threads are asked before it is taken.
_callbacks: list[Any] = []


def _ask_threads() -> None:
    # Torch asks its stance here, one for all threads. A thread must not turn off what others compile.
    frames: Any = importlib.import_module("torch._dynamo.eval_frame")
    plain = frames._callback_from_stance
    _callbacks.append(plain)

    def callback(compiler: Any) -> Any:
        return None if _left.calls or _left.cond else plain(compiler)

    exchange(frames, "_callback_from_stance", callback)


@contextlib.contextmanager
def _leaving(**what: bool) -> Iterator[None]:
    if not _callbacks:
        _ask_threads()
    before = dict(_left.__dict__)
    _left.__dict__.update(what)
    # `fullgraph=True` wants a frame compiled, where none is being counted in this thread.
    frames: Any = sys.modules["torch._C._dynamo.eval_frame"]
    count: Any = getattr(frames, "set_fullgraph_compiled_frame_count", lambda n: n)
    counted = count(0)
    try:
        yield
    finally:
        count(counted)
        _left.__dict__.clear()
        _left.__dict__.update(before)


def uncompiled_calls() -> contextlib.AbstractContextManager[None]:
    """Within, functions that torch.compile has compiled run as Python, as they do at functorch's levels.

    What runs below the levels has a derivative there, and compiled backwards have none.
    """
    return _leaving(calls=True) if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def compiled_branches() -> contextlib.AbstractContextManager[None]:
    """Within, in branches of a torch.cond that does not compile itself, compiled functions run compiled."""
    return _leaving(cond=False)


def intercept_compiled_cond(here: Callable[[], bool]) -> None:
    """Have torch.cond not compile itself where `here()`: its operator gets the branches as they are.

    It compiles itself within an environment that it asks for, a private function of all operators on
    functions (2.11 to 2.13). Others than torch.cond are compiled as without us.
    """
    utils: Any = torch._higher_order_ops.utils  # pyright: ignore[reportAttributeAccessIssue]
    plain = utils.setup_compilation_env

    @contextlib.contextmanager
    def uncompiled() -> Iterator[Any]:
        with plain() as backend, _leaving(cond=True):
            yield backend

    def environment() -> Any:
        asking: Any = sys._getframe(1)
        if asking.f_code.co_name == "_hop_compile_and_call":
            asking = asking.f_back
        return uncompiled() if asking.f_code is torch.cond.__code__ and here() else plain()

    exchange(utils, "setup_compilation_env", environment)


# -- what modes see -----------------------------------------------------------------------------------
# Inductor's own way to call its code, once modes see that as one op.
code_seen: list[Any] = []


def seen_as_one_op(ours: type[Any]) -> None:
    """From now on modes of the kind `ours` see Inductor's code as one op.

    Call this where a mode begins, until it is done: Dynamo is imported late in many programs.
    """
    if code_seen or "torch._dynamo" not in sys.modules:
        return
    from torch._inductor.output_code import CompiledFxGraph
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    plain = CompiledFxGraph.__call__
    table = COMPILED_CODE.python_key_table

    def called(self: Any, inputs: Any) -> Any:
        modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()
        if not any([isinstance(mode, ours) for mode in modes]):
            return plain(self, inputs)
        for kind in map(type, modes):
            if not issubclass(kind, ours) and kind not in table:
                COMPILED_CODE.py_impl(kind)(_without_data if kind is FakeTensorMode else _look_inside)
        return COMPILED_CODE(CompiledCode(self, plain), tuple(inputs))

    code_seen.append(plain)
    exchange(CompiledFxGraph, "__call__", called)
