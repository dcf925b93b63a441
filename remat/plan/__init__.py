"""Budget plans: the region's joint graph, prices, exact solvers, and plans as values."""

from remat._core import register_cost as register_cost
from remat.plan.chain_plan import ChainPlan as ChainPlan
from remat.plan.chain_plan import plan_chain as plan_chain
from remat.plan.graph import CostModel as CostModel
from remat.plan.graph import Flops as Flops
from remat.plan.graph import Roofline as Roofline
from remat.plan.graph import speeds_of as speeds_of
from remat.plan.model import ModelPlan as ModelPlan
from remat.plan.model import plan_model as plan_model
from remat.plan.pareto import Frontier as Frontier
from remat.plan.pareto import pareto as pareto
from remat.plan.plan import Plan as Plan
from remat.plan.policy import BudgetPolicy as BudgetPolicy
from remat.plan.policy import budget_policy as budget_policy

__all__ = [
    "BudgetPolicy",
    "ChainPlan",
    "CostModel",
    "Flops",
    "Frontier",
    "ModelPlan",
    "Plan",
    "Roofline",
    "pareto",
    "plan_chain",
    "plan_model",
    "register_cost",
]
