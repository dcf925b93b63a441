"""Plans as values, and how calls follow them."""

from remat.plan.plans.followed import (
    WAIT,  # the op by which a collective's result arrives
    Following,  # a policy that knows each op by its place
    carried_out,  # the policy of plans
)
from remat.plan.plans.model_plan import (
    ModelPlan,  # a plan of all regions of a model
    handling,  # regions that are met inside are handed to a function
    meet,  # a region hands itself over
    met,  # whether somebody wants the regions that are met
)
from remat.plan.plans.plan import (
    Plan,  # what a region keeps, op by op, with its price and the proof
)
