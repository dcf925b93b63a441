"""Budget plans: the region's joint graph, prices, exact solvers, and plans as values."""

import functools

from remat._deprecated import old
from remat.plan.budget import check_budget as check_budget
from remat.plan.budget import check_peak as check_peak
from remat.plan.calls import graph_of as graph_of
from remat.plan.chain import Choice as Choice
from remat.plan.chain import Measure as Measure
from remat.plan.chain_plan import ChainPlan as ChainPlan
from remat.plan.chain_plan import plan_stages as plan_stages
from remat.plan.chosen import Chosen as Chosen
from remat.plan.chosen import Portfolio as Portfolio
from remat.plan.compared import BUILT_IN_POLICIES as BUILT_IN_POLICIES
from remat.plan.graph import CostModel as CostModel
from remat.plan.graph import Flops as Flops
from remat.plan.graph import Graph as Graph
from remat.plan.graph import Roofline as Roofline
from remat.plan.graph import cost_model as cost_model
from remat.plan.graph import measuring as measuring
from remat.plan.graph import speeds_of as speeds_of
from remat.plan.layout import Layout as Layout
from remat.plan.layout import MeshPlan as MeshPlan
from remat.plan.layout import agree as agree
from remat.plan.layout import plan_mesh as plan_mesh
from remat.plan.model import plan_regions as plan_regions
from remat.plan.model import plans_by_budget as plans_by_budget
from remat.plan.pareto import Frontier as Frontier
from remat.plan.pareto import pareto as pareto
from remat.plan.plans import LINKS as LINKS
from remat.plan.plans import ModelPlan as ModelPlan
from remat.plan.plans import Plan as Plan
from remat.plan.plans import carried as carried
from remat.plan.policy import BudgetPolicy as BudgetPolicy
from remat.plan.policy import budget_policy as budget_policy
from remat.plan.solve import complete as complete
from remat.plan.step import WholeStep as WholeStep
from remat.plan.step import ran_step_of as ran_step_of
from remat.plan.step import step_of as step_of

__all__ = ["Layout", "MeshPlan", "pareto"]

__getattr__ = functools.partial(old, __name__)
