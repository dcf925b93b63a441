"""What plans are compared with: the ready policies, torch's plans, and the clock."""

from remat.plan.compared.ready import (
    BUILT_IN_POLICIES,  # the ready policies, by the names that reports give them
    ready,  # what each of them would keep
    saved_by,  # what one policy would keep
)
from remat.plan.compared.refute import (
    beaten_by,  # which measured point beats another
    measured,  # seconds of regions, in turns
)
from remat.plan.compared.torch_plans import (
    SOLVERS,  # torch's solvers
    TorchPlan,  # what torch's partitioner would keep
    compiler_keeps_no_more,  # whether torch.compile alone keeps no more than a plan
    torch_plan,  # torch's plan of a graph
)
