"""A step, compiled for a GPU that need not be there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from remat._core import Device, collecting_rarely, isolated, isolating, known_flops, to_install
from remat._torch import dynamo_errors
from remat.debug import Recomputed, RegionNodes, regions_in, uncompiled
from remat.gpu.cards import card
from remat.gpu.inductor import (
    Block,
    Chip,
    Execution,
    Hollow,
    Launch,
    Lowered,
    Traced,
    cubin,
    cut,
    fakes,
    line_of,
    lowered,
    places,
    saved,
    traced,
    triton_wanted,
)
from remat.gpu.rates import seconds_of
from remat.gpu.report import GpuGraph, GpuReport, Kernel
from remat.plan.joint import gpu_workspace
from remat.transforms import RematError, flatten, is_tensor, leaves_behind, map_only, tree_leaves
from remat.transforms.closure import Bindings, reached
from remat.transforms.compat import is_fake
from remat.transforms.compiled import RECOMPUTED
from remat.transforms.scan.traced import KERNELS, living_with


def compile_for(
    device: str, step: Callable[..., Any], /, *args: Any, machine_code: bool = True, **kwargs: Any
) -> GpuReport:
    """The code that `torch.compile` would run for a step on a GPU, and what it takes. No GPU is needed.

    The step is traced on shapes, and Inductor lowers it for the card. Its Triton kernels become machine code.
    The wrapper that Inductor writes is executed with nothing but its allocations counted. Nothing runs on a
    GPU: times are those of a roofline model, at the speeds that large kernels attain. A GPU would
    time several configurations of some kernels; here the first is taken.

    Args:
        device: "a100", "h100", "h200" or "b200".
        step: a function or module that `torch.compile` can compile as one graph, or the result of
            `torch.compile`; with `remat` regions inside, or torch's checkpoint. If a result requires grad,
            its backward is compiled too.
        args, kwargs: as for a call, on any device, "meta" and fake ones included. Only shapes and types are
            read from them.
        machine_code: whether Triton kernels are compiled to machine code, for registers and spills; most of
            the time goes there.

    Returns:
        A `GpuReport`: forward and backward, or the one graph, of the step.

    Raises:
        RematError: Triton is missing; the step breaks the graph or reads a number (`.item()`); an op has no
            lowering. It names the op and the line.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.gpu import compile_for
        >>> w = torch.empty(1024, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
        >>> step = lambda w: remat(lambda w: (w @ w).relu())(w).sum()
        >>> report = compile_for("h100", step, w)  # doctest: +SKIP
        >>> report.survived, report.fits  # doctest: +SKIP
        (True, True)
        >>> try:
        ...     compile_for("h900", step, w)
        ... except RuntimeError as error:
        ...     print(error)
        code can be made for a100, h100, h200, b200, not for 'h900'. Write device='h100'.
    """
    chip, speeds = card(device)
    if wanted := triton_wanted():
        raise RematError(
            f"code for {device} needs Triton, which compiles kernels on any machine and is not installed: "
            f"for torch {torch.__version__} pip install {wanted}, or {to_install('gpu')}."
        )
    with collecting_rarely():
        traces, held = trace(step, args, kwargs, chip)
        return _report(device, chip, speeds, traces, held, machine_code)


def trace(step: Callable[..., Any], args: Any, kwargs: Any, chip: Chip | None = None) -> tuple[Traced, int]:
    """The graphs of a step for a GPU, or without one for the CPU; bytes of its arguments and parameters."""
    step = uncompiled(step)
    # Whatever is in reach holds fake tensors of the CPU meanwhile.
    held = Bindings(reached(*flatten((step, args, kwargs))[0]), states=True)
    with (
        isolating(step, args, kwargs) as reach,
        contextlib.ExitStack() as afterwards,
        isolated(),
        fakes() as like,
        held.replaced(known := _Known(like)),
    ):
        afterwards.callback(reach.without, is_fake)
        args, kwargs = map_only(torch.Tensor, known, (args, kwargs))

        def run(compiled: Callable[..., Any]) -> None:
            out = compiled(*args, **kwargs)
            ends = [t for t in tree_leaves(out) if is_tensor(t) and t.requires_grad]
            if ends:
                ones = [torch.ones_like(t) for t in ends]
                torch.autograd.grad(ends, leaves_behind(ends), ones, allow_unused=True)

        with _told():
            # Steps of scans are compiled after the step, and hold what its graphs name.
            scans: list[Any] = []
            with living_with(scans):
                traces = traced(step, run, chip=chip, kernels=KERNELS)
            traces.scans = scans
    if traces.forward is None:
        raise RematError("the step computes nothing on tensors: there is no code to make.")
    return traces, known.bytes


class _Known:
    """A fake tensor for each tensor, the same for the same one."""

    def __init__(self, like: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.like = like
        self.made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.made:
            self.made[id(tensor)] = tensor, self.like(tensor)
        return self.made[id(tensor)][1]

    @property
    def bytes(self) -> int:
        return sum(fake.nbytes for _, fake in self.made.values())


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What Dynamo says of a step that it cannot trace, as one message with the user's line."""
    try:
        yield
    except dynamo_errors() as error:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, RematError):
            raise inner from None
        text = str(error)
        stack = text.partition("from user code")[2]
        found = places(stack)
        where = f", at {':'.join(found[-1])}" if found else ""
        if "while_loop.py" in stack and "marked as skipped" in text:
            raise RematError(
                f"how many steps a loop takes depends on numbers{where}, and the step is compiled from "
                "shapes alone. Write scan_remat, whose length is known."
            ) from error
        raised = re.search(r"raised exception (\w+\(.*\))", text)
        why = None if raised else re.search(r"Explanation: (.*)", text)
        first = raised[1] if raised else f"{type(inner).__name__}: {inner}" if inner else text
        parts = (part.strip(" .") for part in (first.strip().splitlines()[0], why[1] if why else ""))
        said = ". ".join(dict.fromkeys(part for part in parts if part))
        raise RematError(
            f"the step cannot be compiled as one graph{where}: {said}. Code is made from shapes alone. "
            "Let the step return tensors. Read numbers (`.item()`, `float(t)`) and print outside of it."
        ) from error


def _report(
    device: str, chip: Chip, speeds: Device, traces: Traced, held: int, machine_code: bool
) -> GpuReport:
    assert traces.forward is not None
    one = traces.backward is None
    first = lowered(traces.forward, chip, False, one)
    run = Simulation(first, chip, traces.blocks)
    graphs = [_graph(first, run.execution, chip, speeds, machine_code)]
    codes = [first]
    if traces.backward is not None:
        codes.append(lowered(traces.backward, chip, True, False, traces.donated))
        run.backward(codes[1])
        graphs.append(_graph(codes[1], run.execution, chip, speeds, machine_code))
    regions = _survivors(traces, codes)
    for block, code in zip(traces.blocks, run.blocks, strict=True):
        regions += _survivors(block.graph, [code])
    forward, backward, step = (None, None, graphs[0]) if one else (graphs[0], graphs[1], None)
    differing = _differing([*codes, *run.blocks], chip)
    return GpuReport(
        device, forward, backward, step, run.kept, held, speeds.memory, tuple(regions), differing
    )


def _survivors(traces: Traced, codes: list[Lowered]) -> list[Recomputed]:
    """What became of the recomputations that the graphs were traced with."""
    wanted, found = RegionNodes(), RegionNodes()
    wanted.add(traces.joint)
    for code in codes:
        found.add(code.nodes)
        found.add_unread(code.unread)
    return regions_in(wanted, found)


def _differing(codes: list[Lowered], chip: Chip) -> tuple[str, ...]:
    """Recomputed reductions that no kernel of the forward computes in the same blocks."""
    forward: dict[Any, set[Any]] = {}
    again: list[tuple[Any, str, list[str]]] = []
    for code in codes:
        for node, texts in code.reductions.items():
            key = _reduction(node)
            if region := _region(node):
                again.append((key, f"{node.target} of region {region!r}, at {line_of(node)}", texts))
            else:
                forward.setdefault(key, set()).add(tuple(texts))
    found = {}
    for key, where, texts in again:
        before = {cut(list(one), chip) for one in forward.get(key, ())}
        now = cut(texts, chip) if before else ()
        if before and now not in before:
            found[f"{where}: {' + '.join(now)}, in the forward {' + '.join(min(before))}"] = None
    return tuple(found)


def _region(node: torch.fx.Node) -> str:
    """The region that a node recomputes, empty for others."""
    # What a pass has written, a softmax, knows nothing of where it comes from; what it reads does.
    nodes = (node,) if "stack_trace" in node.meta else (node, *node.all_input_nodes)
    keys = [n.meta["custom"][RECOMPUTED] for n in nodes if RECOMPUTED in n.meta.get("custom", {})]
    return keys[0].partition(" ")[2] if keys else ""


def _reduction(node: torch.fx.Node) -> Any:
    """What a reduction and its recomputation have in common."""
    given = torch.fx.map_arg((node.args, node.kwargs), lambda n: str(getattr(n.meta.get("val"), "shape", "")))
    return node.target, repr(given), node.meta.get("stack_trace")


class Simulation:
    """The wrappers of a step, executed on shapes: forward first, results kept as a caller keeps them.

    Args:
        code: of the forward, or of the whole step.
        chip: what it is for; None for the CPU.
        blocks: of the steps of the step's scans.

    Attributes:
        kept: bytes that the forward hands to the backward and the caller does not hold.
        blocks: the code of the blocks, in their order.
    """

    def __init__(self, code: Lowered, chip: Chip | None, blocks: Sequence[Block] = ()) -> None:
        self.execution = Execution(chip, KERNELS, gpu_workspace if chip else None)
        self.kept = 0
        self.blocks = [self._lowered(block, chip) for block in blocks]
        self._code = code
        args = [self.execution.given(value) for value in code.inputs]
        self._returned = self.execution.run(code.source, args)

    def _lowered(self, block: Block, chip: Chip | None) -> Lowered:
        assert block.graph.forward is not None
        code = lowered(block.graph.forward, chip, False, True)
        block.run = partial(self.execution.call, code.source)
        return code

    def backward(self, code: Lowered) -> None:
        """Run the backward's wrapper on what the forward's returned."""
        own = saved(self._code.outputs, self._returned, code.names)
        self.kept = self.execution.own_bytes(own.values())
        args = [
            own[name] if name in own else self.execution.given(value)
            for name, value in zip(code.names, code.inputs, strict=True)
        ]
        # Saved values go as the backward does with them; what is also a result stays with the caller.
        self._returned = [
            value for name, value in zip(self._code.outputs, self._returned, strict=True) if name not in own
        ]
        del own
        self._returned += self.execution.run(code.source, args)


def _graph(code: Lowered, execution: Execution, chip: Chip, speeds: Device, machine_code: bool) -> GpuGraph:
    kernels = tuple(_kernel(launch, chip, speeds, machine_code) for launch in execution.launches)
    called = tuple(execution.called)
    return GpuGraph(code.source, kernels, execution.peak, code.not_capturable, called)


def _kernel(launch: Launch, chip: Chip, speeds: Device, machine_code: bool) -> Kernel:
    if launch.op is None:
        moved = speeds.seconds(0, launch.read + launch.written)
        made = Kernel(launch.name, "triton", launch.read, launch.written, 0, moved, launch.live)
        if not machine_code or not launch.text:
            return made
        told = cubin(launch.name, launch.text, chip)
        return replace(
            made, registers=told.registers, spills=told.spills, shared=told.shared, cubin=told.bytes
        )
    is_hollow = lambda value: isinstance(value, Hollow)  # noqa: E731
    flops = known_flops(launch.op, launch.args, launch.kwargs, launch.outputs, is_hollow) or 0
    seconds = seconds_of(launch, flops, speeds)
    name = launch.name.removesuffix(".default").removesuffix(".out")
    return Kernel(name, "extern", launch.read, launch.written, flops, seconds, launch.live)
