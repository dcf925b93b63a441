"""Inductor without AOTAutograd around it, for small graphs on the CPU.

Private names of Inductor, imported once somebody compiles with it. Tried on 2.13.0, and in part on 2.15.0
(CPU).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.compat.aot import teach_inductor

# What only kernels of one graph read lies on the stack: an allocation takes longer than a small kernel.
# Inductor sees to it that ops outside of kernels get none of it. No buffer becomes another one, so that a
# result is allocated as one.
_ON_STACK = {
    "aot_inductor.allow_stack_allocation": True,
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
}


def options_of(compiler: Any) -> dict[str, Any] | None:
    """The options of a backend that is Inductor, None where it is another."""
    if isinstance(compiler, torch._TorchCompileInductorWrapper):
        return dict(compiler.config)
    name = getattr(compiler, "__name__", ""), getattr(compiler, "__module__", "")
    return {} if name == ("inductor", "torch._dynamo.backends.inductor") else None


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's own rules, by op: a copy."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def compiled(
    graph: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    options: dict[str, Any],
    rules: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """A functional graph without gradients, compiled; called with what `inputs` stand for.

    Args:
        options: Inductor's.
        rules: how ops are decomposed.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    teach_inductor()
    # The graph has its casts written out, and what it calls must not add others.
    casts = torch._C._is_any_autocast_enabled()
    with contextlib.ExitStack() as stack:
        patches = {**options, "cpp_wrapper": True}
        if stack.enter_context(results_on_heap()):
            patches |= _ON_STACK
        stack.enter_context(config.patch(patches))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        plain = dispatch_functionalize(graph, FunctionalTensorMode())
        lowered = make_fx(plain, decomposition_table=rules, tracing_mode="fake")(*inputs)
        lowered = joint_graph_passes(lowered)
        # Strides of results are part of what was traced: they are inputs of the next block.
        out: Any = lowered.graph.output_node()
        out.meta["user_visible_output_idxs"] = list(range(len(out.args[0])))
        fakes = [node.meta["val"] for node in lowered.graph.find_nodes(op="placeholder")]
        made: Any = compile_fx_inner(lowered, fakes, cpp_wrapper=True, is_inference=True)
    call = made.current_callable

    def run(*values: torch.Tensor, made: Any = made) -> Any:  # `made` cleans up when it is let go of
        return call(list(values))

    def run_without_casts(*values: torch.Tensor) -> Any:
        with torch._C._DisableAutocast():
            return run(*values)

    return run_without_casts if casts else run


class _Local(threading.local):
    inside = False


_local = _Local()
_lock = threading.Lock()
_count = 0  # threads that are inside, nested entries counted
_original: Any = None
_METHOD = "can_stack_allocate_buffer"


@contextlib.contextmanager
def results_on_heap() -> Iterator[bool]:
    """Within, on this thread, results of a graph are allocated as ever; no where this Inductor has no stack.

    On the stack they would be copied to memory that the next call writes to again. The method that decides
    is replaced by the first thread that comes and put back by the last one that leaves.
    """
    global _count, _original
    owner = _wrapper_class()
    if owner is None:
        yield False
        return
    with _lock:
        if _count == 0:
            _original = getattr(owner, _METHOD)
            setattr(owner, _METHOD, _can_lie_on_stack)
        _count += 1
    before, _local.inside = _local.inside, True
    try:
        yield True
    finally:
        _local.inside = before
        with _lock:
            _count -= 1
            if _count == 0:
                setattr(owner, _METHOD, _original)


def _wrapper_class() -> Any:
    try:
        from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import CppWrapperCpuArrayRef
    except ImportError:
        return None
    return CppWrapperCpuArrayRef if hasattr(CppWrapperCpuArrayRef, _METHOD) else None


def _can_lie_on_stack(self: Any, buffer: Any) -> bool:
    from torch._inductor.virtualized import V

    if _local.inside and buffer.get_name() in V.graph.get_output_names():
        return False
    return _original(self, buffer)
