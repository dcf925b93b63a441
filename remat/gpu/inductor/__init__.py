"""Inductor's code for a GPU, made and read on a machine that may have none: nothing runs on a GPU here."""

from remat.gpu.inductor.cubins import (
    Cubin,  # what Triton's compiler says of a kernel
    cubin,  # the machine code of a kernel
)
from remat.gpu.inductor.execution import (
    Execution,  # wrappers of one step, run on shapes
    Hollow,  # a tensor's shape and type
    Launch,  # one kernel that a wrapper starts
    saved,  # what a forward hands to its backward
)
from remat.gpu.inductor.lowering import (
    Lowered,  # the code of one graph
    lowered,  # a graph as code for a GPU, or for the CPU
)
from remat.gpu.inductor.machine import (
    Chip,  # what compilers ask of a GPU
    triton_wanted,  # the version of Triton to install, None where one is there
)
from remat.gpu.inductor.reductions import cut  # how kernels of reductions are cut into blocks
from remat.gpu.inductor.trace import (
    Block,  # a block of a scan's steps
    Traced,  # what a step comes down to
    fakes,  # makes fake tensors of the CPU
    line_of,  # the user's line of a node
    places,  # the user's lines in a stack
    traced,  # the graphs of a step
)
