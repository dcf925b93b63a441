"""What compiled regions keep, beside what torch.compile alone keeps of the same function."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from remat import checkpoint_policy, remat, save_nothing
from tests.helpers import crossed

VIEWS = {"permute", "alias", "view", "t", "transpose", "expand", "detach", "slice", "select"}


def kept_bytes(fn, *args):
    """Bytes that Inductor's partitioner keeps for the backward and that are no memory of arguments."""
    kept = []

    def forward(graph, _):
        first, *rest = graph.graph.find_nodes(op="output")[0].args[0]
        made = {n for n in rest if isinstance(n, torch.fx.Node) and not of_arguments(n)}
        kept.append(sum(n.meta["val"].nbytes for n in made if isinstance(n.meta["val"], torch.Tensor)))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*args).backward()
    return kept[0]


def of_arguments(node):
    while node.op == "call_function" and str(node.target).removeprefix("aten.").split(".")[0] in VIEWS:
        node = node.args[0]
    return node.op == "placeholder"


PROGRAMS = {
    "norm and product": lambda x, w: torch.relu(2 * F.layer_norm(x, (x.shape[-1],)) @ w).sum(),
    "sigmoid and product": lambda x, w: torch.relu(torch.sigmoid(x) @ w).sum(),
    "softmax": lambda x, w: F.gelu(x @ w).softmax(-1).square().sum(),
    "dropout": lambda x, w: F.dropout(torch.relu(x @ w), 0.5).mean(),
    "comparison": lambda x, w: ((x @ w) > 0).to(x.dtype).mul(x @ w).sum(),
    "pointwise and clamp": lambda x, w: (x.sin().exp().cos() @ w).clamp(0, 1).sum(),
    "two products": lambda x, w: torch.relu(torch.tanh(x @ w[:, :64]) @ w).sum(),
    "norm and gelu": lambda x, w: F.gelu(F.layer_norm(x, (x.shape[-1],)) @ w).sum(),
    "maximum": lambda x, w: torch.maximum(x @ w, x[:, :1]).amax(-1).sum(),
}
# Under these a plan's products were kept beside a compiler that keeps masks of them.
KEPT_MORE = [("norm and product", 0.9), ("dropout", "free"), ("pointwise and clamp", 0.9)]
CASES = [
    *KEPT_MORE,
    *(
        pytest.param(name, budget, marks=pytest.mark.slow)
        for name, budget in (("softmax", 0.5), ("comparison", 0.9), ("maximum", 0.3))
    ),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A budget of")
@pytest.mark.parametrize(("name", "budget"), CASES)
def test_budgets_keep_at_most_what_the_compiler_keeps(name, budget):
    torch.manual_seed(0)
    args = torch.randn(64, 64, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    region = remat(PROGRAMS[name], policy=checkpoint_policy(budget=budget))
    assert kept_bytes(region, *args) <= kept_bytes(PROGRAMS[name], *args)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A budget of")
def test_a_function_is_not_planned_as_another_of_the_same_arguments():
    """After some compilations of one function others were planned by its graph, and kept 49,408 bytes."""
    args = torch.randn(64, 64, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    for name in ("comparison",) * 5 + ("norm and gelu",):
        kept = kept_bytes(remat(PROGRAMS[name], policy=checkpoint_policy(budget=0.1)), *args)
    assert kept == 0


@pytest.mark.parametrize(
    ("name", "policy"), crossed(PROGRAMS, [save_nothing, checkpoint_policy(budget=1.0)], every=2)
)
def test_keeps_at_most_what_the_compiler_keeps(name, policy):
    torch.manual_seed(0)
    args = torch.randn(64, 64, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    assert kept_bytes(remat(PROGRAMS[name], policy=policy), *args) <= kept_bytes(PROGRAMS[name], *args)


@pytest.mark.parametrize(("name", "budget"), [("norm and product", 0.9), ("sigmoid and product", 1.0)])
def test_gradients_of_a_budget_that_the_compiler_needs_no_plan_for(name, budget):
    args = torch.randn(64, 64, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    region = remat(PROGRAMS[name], policy=checkpoint_policy(budget=budget))
    region = torch.compile(region, backend="aot_eager")
    ours, right = [torch.autograd.grad(fn(*args), args) for fn in (region, PROGRAMS[name])]
    torch.testing.assert_close(ours, right)
