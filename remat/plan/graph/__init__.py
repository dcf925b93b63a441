"""From a joint graph and a cost model to the planning problem."""

from remat.plan.graph.costs import (
    DEVICES,  # speeds of devices by name, for the roofline
    CostModel,  # a price for each op
    Flops,  # prices in floating point operations
    Roofline,  # prices in seconds, from speeds of a device
    cost_model,  # a cost model from its name
)
from remat.plan.graph.graph import (
    Graph,  # the region's joint graph as a planning problem
)
from remat.plan.graph.traffic import (
    is_view,  # whether an op only hands out another look at storages that its arguments have
)
