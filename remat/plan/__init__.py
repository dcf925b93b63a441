"""Budget plans: the region's joint graph, prices, exact solvers, and plans as values."""

import functools

from remat._deprecated import old
from remat.plan.budget import LINKS as LINKS, check_budget as check_budget, check_peak as check_peak
from remat.plan.calls import graph_of as graph_of
from remat.plan.chain import Choice as Choice, Measure as Measure
from remat.plan.chain_plan import ChainPlan as ChainPlan, plan_stages as plan_stages
from remat.plan.chosen import Chosen as Chosen, Portfolio as Portfolio
from remat.plan.compared import BUILT_IN_POLICIES as BUILT_IN_POLICIES
from remat.plan.graph import (
    LIGHT as LIGHT,
    CostModel as CostModel,
    Flops as Flops,
    Graph as Graph,
    Roofline as Roofline,
    cost_model as cost_model,
    measuring as measuring,
    speeds_of as speeds_of,
)
from remat.plan.layout import Layout as Layout, MeshPlan as MeshPlan, agree as agree, plan_mesh as plan_mesh
from remat.plan.model import plan_regions as plan_regions, plans_by_budget as plans_by_budget
from remat.plan.pareto import Frontier as Frontier, pareto as pareto
from remat.plan.plans import ModelPlan as ModelPlan, Plan as Plan, carried_out as carried_out
from remat.plan.policy import BudgetPolicy as BudgetPolicy
from remat.plan.solve import complete as complete
from remat.plan.step import WholeStep as WholeStep, ran_step_of as ran_step_of, step_of as step_of

__all__ = ["Layout", "MeshPlan", "pareto"]

__getattr__ = functools.partial(old, __name__)
