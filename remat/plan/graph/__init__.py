"""From a joint graph and a cost model to the planning problem."""

from remat.plan.graph.costs import (
    CostModel,  # a price for each op
    Flops,  # prices in floating point operations
    cost_model,  # a cost model from its name
)
from remat.plan.graph.graph import (
    Graph,  # the region's joint graph as a planning problem
)
from remat.plan.graph.kernels import (
    workspace,  # bytes that live while an op runs, besides what it reads and makes
)
from remat.plan.graph.roofline import (
    LATENCY,  # seconds until a collective begins to send
    Roofline,  # prices in seconds, from speeds of a device
)
from remat.plan.graph.speeds import (
    LIGHT,  # kinds of ops whose speed is bytes a second
    Speeds,  # what a device of this machine attains
    measuring,  # within, what is not known of it is probed
    speeds_of,  # those of a device
)
from remat.plan.graph.stopwatch import (
    in_turns,  # median seconds of calls that take turns
)
from remat.plan.graph.traffic import (
    is_view,  # whether an op only hands out another look at storages that its arguments have
)
