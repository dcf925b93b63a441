"""What tests of regions read of the library's inside, each with its reason."""

from remat.ambient import numpy_random, python_random  # state of the user's that is captured
from remat.cli.measure import Work  # a step's ops, as the command line counts them
from remat.transforms.compat import (  # torch's bindings that call ops, of which each is tried
    direct_call,
    dual_level_known_if_any,  # forward-mode levels are counted for all threads
    modes,
)
from remat.transforms.eager import Frame  # a call in plain autograd: recorded, or followed
from remat.transforms.ops import tensors_in  # the tensors in an op's operands or results
from remat.transforms.tape import (
    program,  # steps that run again are listed once
    reachability,  # the table of what is saved for its shape alone
)

__all__ = [
    "Frame", "Work", "direct_call", "dual_level_known_if_any", "modes", "numpy_random",
    "program", "python_random", "reachability", "tensors_in",
]  # fmt: skip
