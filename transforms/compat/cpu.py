"""A scan's blocks compiled by Inductor for the CPU, where a call takes longer than a small step.

Three things are other than in `torch.compile`:

- the graph goes to Inductor without AOTAutograd around it: it is functional and has no gradients
  (`compat.inductor_cpu`);
- code that calls the kernels is C++ too (Inductor's option `cpp_wrapper`);
- products of small matrices are written as sums, so that a block is one kernel. A call of a matrix library
  takes longer than such a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from remat.transforms.compat.inductor_cpu import compiled as compat_compiled
from remat.transforms.compat.inductor_cpu import decompositions

aten = torch.ops.aten
# Rows of 16 numbers that a product may add up and still be faster as a sum; 4 x 64 by 64 x 64 has 1024.
_MOST = 2048
_ROW = 16


def fits_cpu(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a graph is for the CPU, and of torch's own ops: others are unknown to C++."""
    own = all(
        getattr(node.target, "namespace", "aten") in ("aten", "prims")
        for node in graph.graph.nodes
        if node.op == "call_function"
    )
    return own and all(t.device.type == "cpu" for t in inputs)


def compiled_for_cpu(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], options: dict[str, Any]
) -> Callable[..., Any]:
    """A functional graph without gradients, compiled; called with what `inputs` stand for."""
    return compat_compiled(graph, inputs, options, _decompositions())


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
    table = decompositions()
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
