"""Exact and approximate solvers of the planning problem; they know no torch."""

from remat.plan.solve.host import (
    Joined,  # a choice for each region, with its proof
    Placed,  # what a region keeps on the device and on the host
    cheapest,  # a bound on the price of all choices within a budget
    few,  # some of them, at even prices
    front,  # all choices of a region that no other beats
)
from remat.plan.solve.hull import (
    bound,  # the lower bound that the hull proves on the price at this many bytes
    hull,  # all corners of the lower convex hull, from the fewest bytes to the lowest price
)
from remat.plan.solve.portfolio import (
    Solved,  # a solution with its certificate
    in_doubt,  # a rival's in its place, where prices do not tell the difference
    least,  # the solution with the fewest kept bytes, and among those the cheapest
    margin_of,  # what prices do not tell
    solve,  # the cheapest solution within `budget` bytes, with a proven bound
    tell_greedy,  # say how far a plan without SciPy may be off
)
from remat.plan.solve.problem import (
    INF,  # more than any price or size
    Problem,  # what may be kept and what may run again, with prices
    Proven,  # what has a cost, and the bound that is proven for it
    Solution,  # a feasible choice
    complete,  # the cheapest solution that keeps at most a given set
    gap_of,  # how far from optimal a cost can be at most
    keep_all,  # what the backward reads, kept wherever it can be
)
