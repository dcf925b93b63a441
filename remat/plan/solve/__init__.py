"""Exact and approximate solvers of the planning problem; they know no torch."""

from remat.plan.solve.hull import (
    bound,  # the lower bound that the hull proves on the price at this many bytes
    hull,  # all corners of the lower convex hull, from the fewest bytes to the lowest price
)
from remat.plan.solve.portfolio import (
    Solved,  # a solution with its certificate
    least,  # the solution with the fewest kept bytes, and among those the cheapest
    solve,  # the cheapest solution within `budget` bytes, with a proven bound
)
from remat.plan.solve.problem import (
    INF,  # more than any price or size
    Problem,  # what may be kept and what may run again, with prices
    Solution,  # a feasible choice
    complete,  # the cheapest solution that keeps at most a given set
    keep_all,  # what the backward reads, kept wherever it can be
)
