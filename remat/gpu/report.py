"""What a compiler makes of a step for a GPU, in figures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from remat._core import format_bytes
from remat.debug import Recomputed

MARK = "compiled for, not run on"


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel.

    Attributes:
        name: of the kernel that Inductor wrote, or of torch's op.
        kind: "triton" (the code is in the wrapper) or "extern" (a library's kernel, by torch).
        read, written: bytes.
        flops: of matrix products, convolutions and attention; 0 for kernels that Inductor wrote.
        seconds: what its bytes or its FLOPs take at least, at the speeds that the card attains.
        live: bytes alive while it runs, above what the caller holds.
        registers: of a thread, in a Triton kernel that was compiled to machine code. None elsewhere.
        spills: 4-byte words of a thread that did not fit into registers, likewise.
        shared: bytes of shared memory of a block, likewise.
        cubin: bytes of machine code, likewise.

    Example:
        >>> from remat.gpu import Kernel
        >>> Kernel("aten.mm", "extern", read=4096, written=2048, flops=65536, seconds=1e-6, live=2048).bytes
        6144
    """

    name: str
    kind: Literal["triton", "extern"]
    read: int
    written: int
    flops: int
    seconds: float
    live: int
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    cubin: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes that it reads and writes."""
        return self.read + self.written


@dataclass(frozen=True)
class GpuGraph:
    """The code of one graph: a forward, a backward, or a whole step.

    Attributes:
        source: the wrapper that Inductor writes, a Python module with its Triton kernels.
        kernels: in the order in which they are launched.
        peak: the most bytes that are alive while it runs, above what the caller holds. In a backward's are
            what the forward kept, and the gradients.
        not_capturable: what keeps it out of a CUDA graph; empty if nothing does.
        blocks: wrappers of the blocks of steps that its scans call, each once, in the order of their first
            calls. Their kernels are among `kernels`, as often as they are called.

    Example:
        >>> from remat.gpu import GpuGraph, Kernel
        >>> mm = Kernel("aten.mm", "extern", read=4096, written=2048, flops=65536, seconds=1e-6, live=2048)
        >>> graph = GpuGraph("", (mm, mm), peak=2048)
        >>> graph.seconds, graph.flops, graph.timeline
        (2e-06, 131072, (2048, 2048))
    """

    source: str
    kernels: tuple[Kernel, ...]
    peak: int
    not_capturable: str = ""
    blocks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The sum over its kernels; gaps between launches are left out."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def flops(self) -> int:
        """Of all its kernels."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def timeline(self) -> tuple[int, ...]:
        """Bytes alive at each launch."""
        return tuple(kernel.live for kernel in self.kernels)


@dataclass(frozen=True)
class GpuReport:
    """What `compile_for` found. Nothing of it was measured on a GPU.

    Attributes:
        device: the card, such as "h100".
        forward, backward: their code, None where the step is one graph.
        step: the code of a step that is one graph, None elsewhere.
        kept: bytes that the forward keeps for the backward, above what the caller holds.
        held: bytes that the caller holds: arguments and parameters.
        memory: bytes that the card has.
        regions: what each region recomputes in the code.
        differing: a line for each recomputed reduction that is cut into other blocks than in the forward. It
            adds in another order, so its last bits can differ.

    Example:
        >>> from remat.gpu import GpuGraph, GpuReport, Kernel
        >>> mm = Kernel("aten.mm", "extern", read=4096, written=2048, flops=65536, seconds=1e-6, live=2048)
        >>> step = GpuGraph("", (mm,), peak=2048)
        >>> report = GpuReport("h100", None, None, step, kept=0, held=4096, memory=79 << 30, regions=())
        >>> report.peak, report.fits, report.survived
        (2048, True, True)
    """

    device: str
    forward: GpuGraph | None
    backward: GpuGraph | None
    step: GpuGraph | None
    kept: int
    held: int
    memory: int
    regions: tuple[Recomputed, ...]
    differing: tuple[str, ...] = ()

    @cached_property
    def graphs(self) -> tuple[GpuGraph, ...]:
        """Those of the step, in order."""
        return tuple(self._named.values())

    @property
    def _named(self) -> dict[str, GpuGraph]:
        named = {"forward": self.forward, "backward": self.backward, "step": self.step}
        return {name: graph for name, graph in named.items() if graph is not None}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Of the whole step, in order."""
        return tuple(kernel for graph in self.graphs for kernel in graph.kernels)

    @property
    def peak(self) -> int:
        """The most bytes alive during the step, above what the caller holds."""
        return max(graph.peak for graph in self.graphs)

    @property
    def seconds(self) -> float:
        """Roofline time of the step."""
        return sum(graph.seconds for graph in self.graphs)

    @property
    def flops(self) -> int:
        """Of the step."""
        return sum(graph.flops for graph in self.graphs)

    @property
    def survived(self) -> bool:
        """Whether all that was to be recomputed is recomputed in the code."""
        return all(region.survived for region in self.regions)

    @property
    def not_capturable(self) -> str:
        """What keeps its graphs out of CUDA graphs; empty if nothing does."""
        named = ((name, graph.not_capturable) for name, graph in self._named.items())
        return "; ".join(f"{name}: {reason}" for name, reason in named if reason)

    @property
    def fits(self) -> bool:
        """Whether what the caller holds and the peak fit into the card's memory."""
        return self.held + self.peak <= self.memory

    def __str__(self) -> str:
        lost = [region.region for region in self.regions if not region.survived]
        spilled = sum(bool(kernel.spills) for kernel in self.kernels)
        lines = [
            f"{self.device}, {MARK}: peak {format_bytes(self.peak)} above the {format_bytes(self.held)} that "
            f"the caller holds, {format_bytes(self.kept)} kept; {len(self.kernels)} launches, "
            f"{self.flops:.4g} FLOPs, {1e3 * self.seconds:.3g} ms by the roofline",
            *(f"region {name!r} lost its recomputation" for name in lost),
        ]
        lines += [f"other bits are possible: {line}" for line in self.differing]
        if spilled:
            lines.append(f"{spilled} of the launched kernels spill registers")
        lines += [_line(name, graph) for name, graph in self._named.items()]
        return "\n".join(lines)


def _line(name: str, graph: GpuGraph) -> str:
    triton = sum(kernel.kind == "triton" for kernel in graph.kernels)
    moved = format_bytes(sum(kernel.bytes for kernel in graph.kernels))
    captured = f"; not in a CUDA graph: {graph.not_capturable}" if graph.not_capturable else ""
    return (
        f"    {name}: {triton} Triton and {len(graph.kernels) - triton} other kernels, {moved} moved, peak "
        f"{format_bytes(graph.peak)}, {1e3 * graph.seconds:.3g} ms{captured}"
    )
