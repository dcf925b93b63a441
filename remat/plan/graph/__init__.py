"""From a joint graph and a cost model to the planning problem."""

from remat.plan.graph.costs import DEVICES, CostModel, Flops, Roofline, cost_model, is_view
from remat.plan.graph.graph import Graph

__all__ = [
    "DEVICES",  # speeds of devices by name, for the roofline
    "Flops",  # prices in floating point operations
    "Roofline",  # prices in seconds, from speeds of a device
    "CostModel",  # a price for each op
    "cost_model",  # a cost model from its name
    "is_view",  # whether an op only hands out another look at storages that its arguments have
    "Graph",  # the region's joint graph as a planning problem
]
