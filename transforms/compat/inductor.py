"""How Inductor compiles the library's own ops: a fence costs nothing, a seeded draw fuses like torch's own.

Its classes derive from Inductor's, which must not be imported until somebody compiles with it. Without it the
ops run as they are, right but slower. Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._inductor import config, inductor_prims, ir
from torch._inductor.codegen.wrapper import MemoryPlanningLine, NullLine
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering, to_dtype
from torch._inductor.virtualized import V

_ops = torch.ops.remat


class _Fence(ir.FallbackKernel):
    """Another name for a buffer, which the scheduler takes for a kernel that reads the fence's operands."""

    def codegen(self, wrapper: Any) -> None:
        source: Any = self.inputs[0]
        wrapper.writeline(_Emptied(wrapper, self))
        wrapper.writeline(f"{self.get_name()} = {source.codegen_reference()}")


class _Arrived(_Fence):
    """A fence on a value that was fetched from the host: it waits for the copy."""

    def codegen(self, wrapper: Any) -> None:
        super().codegen(wrapper)
        wrapper.writeline(f"torch.ops.remat.arrived.wait({self.get_name()})")


@dataclass
class _Emptied(MemoryPlanningLine):
    """Inductor holds dead buffers for later kernels of the same size to write to, as long as its estimate of
    the peak allows. The estimate counts what fused kernels never allocate. So a backward held the buffers of
    one block beside those of the next. What is dead where a recomputation begins is freed.
    """

    node: Any

    def plan(self, state: Any) -> MemoryPlanningLine:
        state.reuse_pool.clear()
        return NullLine(self.wrapper)


def _lower_fence(value: Any, after: Any, op: Any = _ops.fence.default, kind: type[_Fence] = _Fence) -> Any:
    # A result of the graph must not share memory with an input of it, and C++ has no second name for a
    # tensor.
    node = V.graph.current_node
    if V.graph.cpp_wrapper or (_escapes(node) and not (op is _ops.sent.default and _alone(node))):
        return fallback_handler(op, add_to_fallback_set=False)(value, after)
    out: Any = kind.create(op, value, after)
    # Up to 2.13 a result is a buffer of its own, that the kernel packs; on 2.15 one result is the kernel.
    kernel = out if isinstance(out, _Fence) else out.inputs[0]
    if not _hands_over(node, kernel.inputs[0]):
        kernel.alias_names.append(kernel.inputs[0].get_name())
    return ir.TensorBox.create(out)


def _lower_travel(op: Any) -> Any:
    lower = fallback_handler(op, add_to_fallback_set=False)

    def run(*args: Any) -> Any:
        # Parts of a graph would be captured around it, and a part copies what it is given as it begins: host
        # memory, or a value that is on its way. (On an H100, 2.11: refused, and then wrong gradients.)
        stack = V.graph.current_node.meta.get("stack_trace", "")
        V.graph.disable_cudagraphs_reason = f"host memory in {op}. Found from : \n {stack}"
        return lower(*args)

    return run


def _lower_once(value: Any) -> Any:
    value.realize()  # or each kernel that reads it would compute it
    return value


def _hands_over(fence: torch.fx.Node, source: Any) -> bool:
    """Whether the memory is the fenced value's own from then on: later kernels may write their results there.

    So it is for what a backward gets from its forward and nobody reads before the fence. Other buffers,
    once the scheduler holds them for dead, are given to the next kernel that asks; an input is not.
    """
    given: Any = fence.args[0]
    return isinstance(source, ir.DonatedBuffer) and len(given.users) == 1


def _escapes(node: torch.fx.Node) -> bool:
    """Whether a value, or a view of it, is a result of the graph."""
    return any(user.op == "output" or (_may_alias(user) and _escapes(user)) for user in node.users)


def _alone(fence: torch.fx.Node) -> bool:
    """Whether a graph makes a value anew, and has no name for its memory but the fence's: as a result it may
    go by that name."""
    made: Any = fence.args[0]
    others = [user for user in made.users if user is not fence]
    anew = made.op == "call_function" and not _may_alias(made)
    return anew and not any(user.op == "output" or _may_alias(user) for user in others)


def _may_alias(node: torch.fx.Node) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return node.op == "call_function"
    # Ops that do nothing, such as an expand to the same size or a cast to the same type, Inductor leaves out.
    return op.is_view or op in _MAYBE_NOTHING or op in _FENCES


_FENCES = (_ops.fence.default, _ops.sent.default, _ops.arrived.default)
_MAYBE_NOTHING = {
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
}


def _lower_draw(name: str, mode: str) -> Any:
    op = getattr(_ops, name).default
    slow = fallback_handler(op, add_to_fallback_set=False)

    def lower(size: Any, seed: Any, dtype: torch.dtype) -> Any:
        if config.fallback_random or dtype == torch.float64:
            return slow(size, seed, dtype)
        # The seed is a draw itself, which must not be repeated for every element.
        seed.realize()
        return to_dtype(lowerings[inductor_prims.random](size, seed, mode), dtype)

    return lower


register_lowering(_ops.fence.default, type_promotion_kind=None)(_lower_fence)
_lower_sent = partial(_lower_fence, op=_ops.sent.default)
register_lowering(_ops.sent.default, type_promotion_kind=None)(_lower_sent)
_lower_arrived = partial(_lower_fence, op=_ops.arrived.default, kind=_Arrived)
register_lowering(_ops.arrived.default, type_promotion_kind=None)(_lower_arrived)
for _op in (_ops.send.default, _ops.fetch.default):
    register_lowering(_op, type_promotion_kind=None)(_lower_travel(_op))
register_lowering(_ops.once.default, type_promotion_kind=None)(_lower_once)
register_lowering(_ops.uniform.default, type_promotion_kind=None)(_lower_draw("uniform", "rand"))
register_lowering(_ops.normal.default, type_promotion_kind=None)(_lower_draw("normal", "randn"))
