"""What tests of plans read of the inside, behind one door: graphs, solvers and prices are
tested by themselves."""

from remat._blocks import listed  # which modules are blocks
from remat._core import (
    DEVICES,  # speeds of cards
    progress,  # what a plan says of itself
)
from remat._core.flops import known_flops  # FLOPs of an op that runs
from remat._fit import held_by  # what lives throughout a step
from remat._fit.way import as_region  # a block as fit has it
from remat._torch import Repeats  # ops on tensors without data that have run before
from remat.gpu.inductor.trace import attention_of_gpus  # attention as cards run it
from remat.plan import policy  # a plan of a graph
from remat.plan.calls import cache, graph_of, trusted  # the graph of a call
from remat.plan.calls.keys import call_key  # by what calls are told apart
from remat.plan.chain import Measure  # the peaks of a stage
from remat.plan.chain.chain import Chain, Part  # chains of numbers, for brute force
from remat.plan.chain.search import best_parts  # the search, for brute force
from remat.plan.chain.stages import Choice, Stage  # stages of numbers, for brute force
from remat.plan.compared import refute, torch_plan  # torch's own plans
from remat.plan.compared.refute import beaten_by  # who refutes a point
from remat.plan.graph import (  # graphs as plans have them, prices
    Graph,
    cost_model,
    processors,
    speeds,
    speeds_of,
    workspace,
)
from remat.plan.graph.costs import Flops  # prices by name
from remat.plan.graph.flops import flops_of  # FLOPs of an op of a graph
from remat.plan.graph.measured import Measured, _table  # seconds by stopwatch
from remat.plan.graph.speeds import rate_at  # probes of this machine
from remat.plan.graph.stopwatch import best_seconds  # the stopwatch
from remat.plan.graph.traffic import traffic  # bytes that an op moves
from remat.plan.joined import over_link, place  # plans over a link
from remat.plan.joint import learned, planned_for, record  # forward and backward as one graph
from remat.plan.layout.knapsack import Repeated, added, single  # sums, for brute force
from remat.plan.layout.links import Linked  # prices between ranks
from remat.plan.layout.local import local_program  # the program of one rank
from remat.plan.layout.rank import agree  # ranks that compare plans
from remat.plan.layout.stages import Pipe  # stages, for brute force
from remat.plan.layout.trace import traced  # blocks as a layout sees them
from remat.plan.peak import highest_within, profile, step_peak  # simulated peaks
from remat.plan.plans.followed import Bound, _passed_over  # plans bound to calls
from remat.plan.policy import plan_graph  # a plan of a graph
from remat.plan.solve import (
    milp,  # solvers, by themselves
    reduce as reductions,
)
from remat.plan.solve.choices import States  # solvers, by themselves
from remat.plan.solve.host import front  # solvers, by themselves
from remat.plan.solve.hull import bound, hull  # solvers, by themselves
from remat.plan.solve.portfolio import least, solve  # solvers, by themselves
from remat.plan.solve.problem import INF, Problem, complete, keep_all  # problems of numbers, for brute force
from remat.plan.solve.reduce import contract, reduce  # solvers, by themselves
from remat.plan.solve.split import split  # solvers, by themselves
from remat.transforms import BoundedCache, registered  # caches that are bounded
from remat.transforms.compat.modes import fake_mode  # full-size blocks without memory
from remat.transforms.tape.kept_values import listen  # what regions keep, as they keep it


def torch_solution(graph: Graph, problem: Problem, share: float):
    """What torch's planner keeps of a graph at a share of what no remat does."""
    joint = graph.joint
    bases = {joint.family[joint.values[v].storage][0] for v in torch_plan(joint, share).values}
    solution = complete(problem, graph.places(bases))
    assert solution is not None
    return solution
