"""Where a call enters the engine: in eager, or in a graph that is being traced."""

from remat.transforms.entry.compiled import (
    Given,  # what a region was called with, in numbers
    Graph,  # a function that Dynamo traced, as a function of flat operands
    outermost_traced,  # whether no other region is being run around here
    run_graph,  # call a region whose function is `graph`
)
from remat.transforms.entry.dispatch import (
    outermost,  # whether no other region is being recorded or recomputed around here
    run,  # call `region`
    run_transparently,  # call `function` and keep what autograd keeps, regions inside it included
    under_hooks,  # whether saved-tensor hooks of the user's are around, which may count what is packed
)
