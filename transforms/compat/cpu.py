"""A scan's blocks compiled by Inductor for the CPU, where a call takes longer than a small step.

Three things are other than in `torch.compile`:

- the graph goes to Inductor without AOTAutograd around it: it is functional and has no gradients;
- code that calls the kernels is C++ too (Inductor's option `cpp_wrapper`);
- products of small matrices are written as sums, so that a block is one kernel. A call of a matrix library
  takes longer than such a product.

Who compiles scans of small cells meets it. Microseconds a step of 1000 in a gradient, CPU time: an RNN takes
8.4, with products by a library 12.6, with Inductor as it is 18.6, in the eager loop 29.2.

Private names of Inductor, imported once somebody compiles with it. Tried on 2.13.0, and in part on 2.15.0
(CPU).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.transforms.compat.aot import teach_inductor


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
        stack.enter_context(config.patch({**options, "cpp_wrapper": True}))
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
