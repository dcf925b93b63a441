"""The graphs that Inductor would make code of, from a step that runs on nothing but shapes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.traceback import preserve_node_meta

from remat.gpu.inductor.attention import attention_of_gpus
from remat.gpu.inductor.machine import Chip, triton_target
from remat.transforms import RematError
from remat.transforms.compat import teach_inductor

# Which arguments of a graph have the same address in every call, in its `meta`.
STATIC = "remat_static"
Made = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Traced:
    """What a step comes down to, on fake tensors of the CPU.

    Attributes:
        joint: forward and backward as they were traced, before a partitioner chose what to keep.
        forward: the graph of the forward; of the whole step where that has no backward of its own.
        backward: the graph of the backward, None without one.
        donated: which of the backward's arguments it may write to, as nobody else has them.
        blocks: of the steps of its scans, one for each graph that a scan compiles.
        scans: what the graphs name.
    """

    joint: list[torch.fx.Node] = field(default_factory=list)
    forward: torch.fx.GraphModule | None = None
    backward: torch.fx.GraphModule | None = None
    donated: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    scans: list[Any] = field(default_factory=list)


class Block:
    """A block of a scan's steps: its graph, and what is called in place of compiled code.

    Attributes:
        graph: its graph, as that of a step without a backward.
        run: what a call gives for the list of its arguments; results of the right shapes at first.
    """

    _boxed_call = True

    def __init__(self) -> None:
        self.graph = Traced()
        self.run: Callable[[list[Any]], list[Any]] | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        assert self.run is not None
        return self.run(args)


@contextlib.contextmanager
def fakes() -> Iterator[Made]:
    """Gives a function that makes a fake tensor of the CPU like the one it gets; operations within on such
    tensors compute shapes only."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, FakeTensor) and t.fake_mode is mode and t.device.type == "cpu":
            return t
        made = torch.empty_strided(t.shape, _strides(t), dtype=t.dtype)
        if isinstance(t, torch.nn.Parameter):
            return torch.nn.Parameter(made, t.requires_grad)
        return made.requires_grad_(t.requires_grad)

    with mode:
        yield like


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    if t.layout != torch.strided:
        raise RematError(f"a {t.layout} tensor cannot be compiled for a GPU here: pass a strided one.")
    return t.stride()


def traced(
    step: Callable[..., Any],
    run: Callable[[Callable[..., Any]], None],
    *,
    chip: Chip | None = None,
    kernels: Kernels = MappingProxyType({}),
) -> Traced:
    """The graphs of a step, inside of `fakes`. `run` calls what it is given, which is the step compiled, and
    takes gradients. Without a `chip` they are those of this machine's CPU. `kernels` are what ops run that
    compile graphs of their own: the ops of scans."""
    with mock.patch.dict(os.environ, {"TORCH_WARM_POOL": "0"}):
        # Where Triton is installed its import starts processes that compile kernels; here none are.
        import torch._inductor.async_compile  # noqa: F401

    teach_inductor()
    backend = _Backend(chip is not None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_watching(backend.found))
        if chip is not None:
            stack.enter_context(attention_of_gpus(chip.capability))
            stack.enter_context(_as_on_gpus())
        run(torch.compile(_own(step), backend=backend, fullgraph=True, dynamic=False))
        backend.compile_blocks(kernels)
    return backend.found


Kernels = Mapping[Any, Callable[..., Any]]


class _Backend:
    """The compiler of a step, and of blocks of its scans' steps: it keeps the graphs and makes no code.

    Attributes:
        device: where tensors stand while a graph for a GPU is traced.
    """

    def __init__(self, gpu: bool) -> None:
        self.found = Traced()
        self.gpu, self.done = gpu, False
        self.device = torch.device("cpu") if gpu else None

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        if self.gpu:
            _as_on_cpu(module)
        if not self.done:
            return compile_fx(module, inputs, inner_compile=self._inner)
        block = Block()
        self.found.blocks.append(block)

        def inner(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
            self._check(module)
            block.graph.forward, block.run = module, _stand_in(module)
            return block

        with _watching(block.graph):
            return compile_fx(module, inputs, inner_compile=inner)

    def _inner(self, module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        from torch._inductor.utils import get_donated_idxs

        self._check(module)
        module.meta[STATIC] = options.get("static_input_idxs") or ()
        found = self.found
        if options.get("is_backward"):
            found.backward, found.donated = module, get_donated_idxs() or []
        elif found.forward is None:
            found.forward = module
        else:
            raise RematError("the step is compiled in several graphs; write it as one function of tensors.")
        return _stand_in(module)

    def _check(self, module: torch.fx.GraphModule) -> None:
        for node in module.graph.nodes if self.gpu else ():
            _refuse(node)

    def compile_blocks(self, kernels: Kernels) -> None:
        """Have each scan compile its blocks, as its first run does: run it on tensors without data."""
        self.done = True
        # What a region wants recomputed, and the user's lines, stand beside the nodes of a graph.
        with preserve_node_meta():
            self._run_scans(kernels)

    def _run_scans(self, kernels: Kernels) -> None:
        outer = [graph for graph in (self.found.forward, self.found.backward) if graph is not None]
        # A block that has scans in it comes to this list before they add theirs.
        inner = (block.graph.forward for block in self.found.blocks)
        for module in itertools.chain(outer, inner):
            for node in module.graph.nodes if module is not None else ():
                if (kernel := kernels.get(node.target)) is not None:
                    kernel(*torch.fx.map_arg(node.args, lambda given: _like(given.meta["val"])))


def _watching(found: Traced) -> contextlib.AbstractContextManager[Any]:
    """Within, Inductor shows a graph before any of its passes: what a region wants recomputed is there."""
    from torch._inductor import config

    # Nothing is compiled here, so Inductor need not start processes for that.
    return config.patch(joint_custom_pre_pass=_Seen(found), fx_graph_cache=False, compile_threads=1)


@contextlib.contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Let Dynamo trace on the CPU what torch has for GPUs: backwards of `flex_attention`, Triton kernels."""
    from torch.nn.attention import flex_attention
    from torch.utils import _triton

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(flex_attention, "_validate_device", lambda *_: None))
        if _triton.has_triton_package():
            stack.enter_context(mock.patch.object(_triton, "has_triton", lambda: True))
            # Which arguments a kernel writes to is found in its intermediate code, the same for every GPU.
            stack.enter_context(triton_target(90))
        yield


def _own(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step behind a code object of its own, with which all that Dynamo notes of it goes."""

    def step_for_gpu(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    code = step_for_gpu.__code__.replace()
    return types.FunctionType(code, globals(), "step", None, step_for_gpu.__closure__)


class _Seen:
    """A pass that only looks."""

    def __init__(self, found: Traced) -> None:
        self.found = found

    def __call__(self, graph: torch.fx.Graph) -> None:
        graph.eliminate_dead_code()
        copy = torch.fx.Graph()
        copy.graph_copy(graph, {})
        # Graphs in it, such as the scores of attention, come before it: they are no kernels of their own.
        self.found.joint = list(copy.nodes)

    def uuid(self) -> None:
        return None


def _as_on_cpu(module: torch.fx.GraphModule) -> None:
    """Let a step that casts on GPUs cast: its tensors stand on the CPU while it is traced."""
    enter: Any = getattr(torch.amp, "_enter_autocast")  # noqa: B009
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=enter):
                node.args = ("cpu", *node.args[1:])
            part.recompile()


def _stand_in(module: torch.fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """In place of compiled code: results of the right shapes."""
    (results,) = module.graph.output_node().args
    values = [getattr(r, "meta", {}).get("val", r) for r in results]  # type: ignore[union-attr]

    def call(args: list[Any]) -> list[Any]:
        args.clear()
        return [_like(value) for value in values]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _refuse(node: torch.fx.Node) -> None:
    """Raise for what no GPU can run, and for what needs numbers where there are shapes alone."""
    name, op = str(node.target), node.target
    if "_local_scalar_dense" in name or name == "aten.item.default":
        raise RematError(
            f"the step reads a number from a tensor (`.item()`, `float(t)`), at {line_of(node)}, and is "
            "compiled from shapes alone. Keep it a tensor, or read it outside of the step."
        )
    if op in (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop):
        raise RematError(
            f"what torch.{name} runs depends on numbers, at {line_of(node)}, and the step is compiled from "
            "shapes alone. Write torch.where in place of torch.cond, scan_remat in place of a loop."
        )
    # (The same op selects by a mask or by positions: only the former depends on numbers.)
    made = node.meta.get("val")
    sizes = made.shape if isinstance(made, torch.Tensor) else ("unknown",)
    known = all(isinstance(size, int) for size in sizes)
    if isinstance(op, OpOverload) and torch.Tag.dynamic_output_shape in op.tags and not known:
        raise RematError(
            f"how large a result of {name} is depends on numbers, at {line_of(node)}, and the step is "
            "compiled from shapes alone. Write it with a size that is known, as torch.where has."
        )
    if isinstance(op, OpOverload) and _on_cpus_alone(op):
        raise RematError(
            f"{name} was made for CPUs alone, at {line_of(node)}. Register a kernel for GPUs too: "
            f"custom_op(..., device_types=...) without 'cpu', or register_kernel('cuda')."
        )
    if "_for_cpu" in name or name.startswith(("mkldnn", "onednn")):
        raise RematError(
            f"{name} runs on CPUs only, at {line_of(node)}: a GPU has no kernel for it. Call what torch.nn "
            "has for it instead."
        )


def _on_cpus_alone(op: OpOverload) -> bool:
    """Whether an op that Python made has kernels, and none that a GPU would take."""
    made = OPDEFS.get(f"{op.namespace}::{op._opname}")
    return made is not None and not {None, "cuda"} & set(made._backend_fns)


def line_of(node: torch.fx.Node) -> str:
    """`file:line` of the user's code that a node stems from."""
    found = places(node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else "an unknown line"


def places(stack: str) -> list[tuple[str, str]]:
    """File and line of the calls in a stack, without those of torch, and of this library that call what users
    hand it."""
    found = re.findall(r'File "([^"]+)", line (\d+)', stack)
    called = [place for place in found if place[0] != __file__ and not _OURS.search(place[0])]
    # An op of the user's is called by torch's code.
    return [place for place in called if not place[0].startswith(_TORCH)] or called


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = re.compile(r"[/\\]remat[/\\]_")
