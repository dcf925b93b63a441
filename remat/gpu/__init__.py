"""A step's code for a GPU that need not be there: compiled for it, not run on it."""

from remat.gpu.cards import CARDS as CARDS  # the GPUs that code can be made for
from remat.gpu.compile import (
    Simulation as Simulation,  # the wrappers of a step, executed on shapes
    compile_for as compile_for,
    trace as trace,  # the graphs of a step, on shapes
)
from remat.gpu.report import (
    MARK as MARK,  # what stands beside every figure
    GpuGraph as GpuGraph,
    GpuReport as GpuReport,
    Kernel as Kernel,
)

__all__ = ["compile_for"]
