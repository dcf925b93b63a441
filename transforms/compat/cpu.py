"""A scan's blocks compiled by Inductor for the CPU, where a call takes longer than a small step.

Three things are other than in `torch.compile`:

- the graph goes to Inductor without AOTAutograd around it: it is functional and has no gradients;
- code that calls the kernels is C++ too (Inductor's option `cpp_wrapper`);
- products of small matrices are written as sums, so that a block is one kernel. A call of a matrix library
  takes longer than such a product.

Private names of Inductor, imported once somebody compiles with it. Tried on 2.13.0, and in part on 2.15.0
(CPU).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

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


def compiled_for_cpu(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """A functional graph without gradients, compiled with these options of Inductor's; called with what
    `inputs` stand for."""
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
        lowered = make_fx(plain, decomposition_table=_decompositions(), tracing_mode="fake")(*inputs)
        lowered = joint_graph_passes(lowered)
        # Strides of results are part of what was traced: they are inputs of the next block.
        out: Any = lowered.graph.output_node()
        out.meta["user_visible_output_idxs"] = list(range(len(out.args[0])))
        fakes = [node.meta["val"] for node in lowered.graph.find_nodes(op="placeholder")]
        made: Any = compile_fx_inner(lowered, fakes, cpp_wrapper=True, is_inference=True)
    call = getattr(made, "current_callable", made)  # a graph without ops is its own code

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


aten = torch.ops.aten

# Rows of 16 numbers that a product may add up and still be faster as a sum; 4 x 64 by 64 x 64 has 1024.
_MOST = 2048

_ROW = 16


# -- small products, as sums ------------------------------------------------------------------------------


def fits_cpu(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a graph is for the CPU, and of torch's own ops: others are unknown to C++."""
    own = all(
        getattr(node.target, "namespace", "aten") in ("aten", "prims")
        for node in graph.graph.nodes
        if node.op == "call_function"
    )
    return own and all(t.device.type == "cpu" for t in inputs)


def transposes_given(module: torch.fx.GraphModule, consts: int) -> list[int]:
    """Let a graph take the transposes of some of its first inputs, after all others; says of which.

    They are those of small products: a sum runs along the rows of its right factor. Blocks all read the same
    constants, so the transpose is written once a scan.
    """
    graph: Any = module.graph
    inputs, given = graph.find_nodes(op="placeholder"), []
    last = inputs[-1]
    for i, const in enumerate(inputs[:consts]):
        users = [user for t in const.users if _transposes(t) for user in t.users if _is_small(user, t)]
        if not users:
            continue
        value = const.meta["val"]
        with graph.inserting_after(last):
            last = graph.placeholder(f"transposed_{i}")
        last.meta["val"] = value.t().new_empty(tuple(value.t().shape))
        for user in users:
            user.args = (*user.args[:-1], last)
        given.append(i)
    module.graph.eliminate_dead_code()
    module.recompile()
    return given


def _transposes(node: Node) -> bool:
    if node.target is aten.t.default:
        return node.args[0].meta["val"].dim() == 2  # type: ignore[union-attr]
    if node.target is aten.transpose.int:
        return sorted(d % 2 for d in node.args[1:]) == [0, 1] and node.meta["val"].dim() == 2  # type: ignore[operator]
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]


def _is_small(node: Node, right: Node) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.args[-1] is not right:
        return False
    left: Any = node.args[-2]
    return _small(left.meta["val"], right.meta["val"])


def _small(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the product of two matrices is better a sum."""
    if a.dtype not in (torch.float32, torch.float64) or b.dtype != a.dtype:
        return False
    (m, k), n = a.shape, b.shape[1]
    return 0 < m * k * -(-n // _ROW) <= _MOST


def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    table[aten.mm.default] = _or_as_before(_product, table.get(aten.mm.default))
    table[aten.addmm.default] = _or_as_before(_sum_and_product, table.get(aten.addmm.default))
    return table


def _or_as_before(rule: Callable[..., Any], before: Any) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        found = rule(*args, **kwargs)
        return before(*args, **kwargs) if found is NotImplemented and before is not None else found

    return decomposed


def _sum_and_product(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    found = _product(a, b) if beta == alpha == 1 else NotImplemented
    return found if found is NotImplemented else found + c


def _product(a: torch.Tensor, b: torch.Tensor) -> Any:
    # Rows of the right factor must lie in memory as they are.
    if not (_small(a, b) and b.is_contiguous()):
        return NotImplemented
    return torch.ops.remat.product.default(a, b)


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


_library = torch.library.Library("remat", "FRAGMENT")

# A product of matrices that Inductor writes as a sum (`compat.inductor`).
_library.define("product(Tensor a, Tensor b) -> Tensor")

_library.impl("product", _multiplied, "CompositeExplicitAutograd")

torch.library.register_fake("remat::product", _multiplied, lib=_library)
