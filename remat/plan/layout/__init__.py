"""A plan for every rank of a job, made in one process: the mesh, what a rank's share of the model runs and
holds, and what each block keeps."""

from remat.plan.layout.layout import (
    Layout,  # how a model is spread over devices
)
from remat.plan.layout.mesh_plan import (
    MeshPlan,  # a plan for every rank, as a value
)
from remat.plan.layout.rank import (
    agree,  # raise on every rank where any has another plan, or something wrong
)
from remat.plan.layout.search import (
    plan_mesh,  # the plan of a model spread by a layout
)
