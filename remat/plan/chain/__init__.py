"""Plans for functions called one after another."""

from remat.plan.chain.chain import (
    Chain,  # stages one after another, with what is alive where
    Part,  # consecutive stages that are recomputed together
)
from remat.plan.chain.search import (
    best_parts,  # the cheapest parts found that keep within a peak of `limit` bytes
    packed,  # the cheapest choice of each stage, and a bound on the price of any
)
from remat.plan.chain.stages import (
    Choice,  # a plan for a stage, with its price and its bytes
    Measure,  # what the plans of one graph take
    Stage,  # a function of a chain, in numbers
    frontier,  # plans from the least to the most that can be kept, and mixtures of them
)
