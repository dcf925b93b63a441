"""A traced graph as Inductor's code for a GPU, or for the CPU, without a compiler of kernels."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from remat._core import first_line
from remat.gpu.inductor.machine import DEVICE, Chip, pretended
from remat.gpu.inductor.reductions import reductions_noted
from remat.gpu.inductor.trace import STATIC, line_of, places
from remat.transforms import RematError


@dataclass(frozen=True)
class Lowered:
    """The code of one graph.

    Attributes:
        source: of the wrapper, a Python module with `call(args)`; kernels are texts in it.
        inputs: fake tensors that stand for the arguments of `call`, None for what is no tensor.
        names: of those arguments.
        outputs: the nodes that `call` returns, by name; None for constants.
        nodes: those of the graph whose values are computed in the code, views and fences included.
        unread: the others. All that is read of their values is shapes.
        reductions: texts of the kernels of each reduction of the graph; none for the CPU.
        not_capturable: why the code cannot go into a CUDA graph; empty if it can.
        strides: how the code lays what it returns, by the names of `outputs`.
    """

    source: str
    inputs: list[Any]
    names: list[str]
    outputs: list[str | None]
    nodes: list[Node]
    unread: list[Node]
    reductions: dict[Node, list[str]]
    not_capturable: str
    strides: dict[str, tuple[int, ...]]


def lowered(
    module: GraphModule,
    chip: Chip | None,
    is_backward: bool,
    is_inference: bool,
    donated: Sequence[int] = (),
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Lowered:
    """The code that `torch.compile` would run on this GPU, or on the CPU. `module` is used up; memory of the
    `donated` arguments may be written to. `strides` are those of the forward's code, for a backward.

    Raises:
        RematError: an op has no lowering.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    results: Any = module.graph.output_node().args[0]
    outputs = [getattr(result, "name", None) for result in results]
    before = list(module.graph.nodes)
    with contextlib.ExitStack() as stack:
        mode = detect_fake_mode(_values(module))
        assert mode is not None
        stack.enter_context(pretended(chip) if chip else contextlib.nullcontext())
        for context in (V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch.no_grad()):
            stack.enter_context(context)
        # The sizes of what each kernel reads and writes stand in its text then; the wrapper imports Triton.
        stack.enter_context(config.patch(profile_bandwidth=chip is not None, fx_graph_cache=False))
        view_to_reshape(module)
        if chip:
            _retarget(module, mode)
        _lay(module, strides, mode)
        compile_fx._recursive_record_original_output_strides(module)
        with _told(module):
            post_grad_passes(module, is_inference)
            inputs = _inputs(module)
            graph = GraphLowering(
                module, example_inputs=inputs, is_backward=is_backward, is_inference=is_inference
            )
            graph.bw_donated_idxs = list(donated)
            stack.enter_context(V.set_graph_handler(graph))
            stack.enter_context(V.set_extern_kernel_nodes([]))
            stack.enter_context(compile_fx.maybe_disable_comprehensive_padding(inputs))
            graph.run(*inputs)
            noted = stack.enter_context(reductions_noted())
            source = graph.codegen()[0].value
    computed, why, laid = _computed(graph, before, module), _why_not(graph, module), _laid(outputs, graph)
    unread = [node for node in before if node not in set(computed)]
    return Lowered(_plain(source), inputs, names, outputs, computed, unread, noted, why, laid)


def _inputs(module: GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]


def _values(module: GraphModule) -> list[Any]:
    values = [node.meta.get("val") for node in module.graph.nodes]
    return [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


def _laid(outputs: list[str | None], graph: Any) -> dict[str, tuple[int, ...]]:
    """Strides of what the code returns, by name: a convolution's channels may come last, for one."""
    pairs = zip(outputs, graph.graph_outputs, strict=True)
    tensors = [(name, out) for name, out in pairs if name is not None and hasattr(out, "get_layout")]
    return {
        name: tuple(map(int, out.get_layout().stride)) for name, out in tensors if out.has_tensor_output()
    }


def _lay(module: GraphModule, strides: Mapping[str, tuple[int, ...]], mode: Any) -> None:
    """Let arguments lie as the forward's code has laid them, and what is computed of them follow."""
    changed = False
    for node in module.graph.find_nodes(op="placeholder"):
        value, stride = node.meta.get("val"), strides.get(node.name)
        if stride is not None and isinstance(value, torch.Tensor) and value.stride() != stride:
            with mode:
                node.meta["val"] = value.as_strided(value.shape, stride)
            changed = True
    if changed:
        FakeTensorProp(module, mode=mode).propagate_dont_convert_inputs(*_inputs(module))


def _plain(source: str) -> str:
    """The wrapper without the lines of the profiler."""
    return re.sub(r"^ *(start|end)_graph\(.*\)\n", "", source, flags=re.MULTILINE)


def _retarget(module: GraphModule, mode: Any) -> None:
    """Let every value of the graph lie on the GPU."""
    known: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        if id(value) not in known:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
            known[id(value)] = made
        return known[id(value)]

    with mode:
        for part in module.modules():
            if not isinstance(part, GraphModule):
                continue
            for node in part.graph.nodes:
                for key in ("val", "example_value", "eager_input_vals"):
                    if key in node.meta:
                        node.meta[key] = pytree.tree_map(moved, node.meta[key])
                if node.op == "call_function":
                    node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), _device)  # type: ignore[misc]
            part.recompile()


def _device(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) and value.type == "cpu" else value


@contextlib.contextmanager
def _told(module: GraphModule) -> Iterator[None]:
    """An op without a lowering, by its name and the user's line."""
    from torch._inductor import exc

    try:
        yield
    except exc.OperatorIssue as error:
        text = str(error)
        target = re.search(r"target: (\S+)", text)
        op = target[1] if target else "an op"
        nodes = [n for n in module.graph.nodes if str(n.target) == op]
        where = line_of(nodes[0]) if nodes else "an unknown line"
        raise RematError(
            f"Inductor cannot lower {op} for a GPU, at {where}: {text.splitlines()[0]}"
        ) from error
    except RematError:
        raise
    except Exception as error:
        raise RematError(
            f"Inductor makes no code for a GPU of {_blamed(error)}: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def _blamed(error: Exception) -> str:
    """The op that was being lowered, and the user's line."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        group = frame.f_locals.get("nodes")
        found: list[Any] = (
            [getattr(one, "node", None) for one in group] if isinstance(group, (list, tuple)) else []
        )
        origins = [o for ir in found if hasattr(ir, "get_origins") for o in ir.get_origins()]
        if origins:
            return f"{origins[-1].target}, at {line_of(origins[-1])}"
    return "the step"


def _computed(graph: Any, before: list[Node], module: GraphModule) -> list[Node]:
    """The nodes that a kernel of the code computes, or that a pass has written in other words."""
    origins = {
        origin
        for group in graph.scheduler.nodes
        for one in group.get_nodes()
        if one.node is not None
        for origin in one.node.get_origins()
    }
    there = set(module.graph.nodes)
    return [node for node in before if node in origins or node not in there]


def _why_not(graph: Any, module: GraphModule) -> str:
    """What torch would say against a CUDA graph, and the user's line."""
    from torch._inductor import cudagraph_utils

    if reason := graph.disable_cudagraphs_reason:
        found = places(reason)
        return reason.split(". Found from")[0] + (f", at {':'.join(found[-1])}" if found else "")
    first = getattr(cudagraph_utils, "get_first_incompatible_cudagraph_node", None)
    if first is None:
        from torch._inductor.utils import get_first_incompatible_cudagraph_node as first
    if (node := first(module)) is not None:
        return f"{node.target}, at {line_of(node)}"
    for device, node in graph.device_node_mapping.items():
        if device.type != DEVICE.type:
            return f"{node.target} on {device.type}, at {line_of(node)}"
    # What has the same address in every call may be written to: parameters and buffers of modules.
    static = module.meta.get(STATIC, ())
    given = list(module.graph.find_nodes(op="placeholder"))
    for at in graph.mutated_input_idxs:
        if at not in static:
            # The copy at the end stems from no line, what it copies does.
            values = [node for user in given[at].users for node in (user, *user.all_input_nodes)]
            lines = [line_of(n) for n in values if n.op != "placeholder" and "stack_trace" in n.meta]
            return f"a write to an argument, at {lines[0] if lines else 'an unknown line'}"
    return ""
