"""Collectives as values that names, prices and plans speak of, on one rank of a fake process group."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as sent
from torch.testing._internal.distributed.fake_pg import FakeStore

from remat import checkpoint_name, checkpoint_policy, remat, save_names, save_nothing, saved_residuals
from tests.helpers import OpCounter
from tests.plan.inside import DEVICES, Linked, cost_model, record

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
# (Torch has renamed one of the functions.)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
LINK = DEVICES["h100"].link


@pytest.fixture(autouse=True, scope="module")
def group():
    """Two ranks, of which the other one sends nothing: numbers mean nothing here."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def scattered(x, group):
    return sent.reduce_scatter_tensor_autograd(x, "sum", 0, group)


def exchanged(x, group):
    return sent.all_to_all_single_autograd(x, None, None, group)


@pytest.mark.parametrize(
    ("send", "op", "rows"),
    [(scattered, c10d.reduce_scatter_tensor, 2), (exchanged, c10d.all_to_all_single, 4)],
)
def test_a_named_collective_is_not_sent_again(group, send, op, rows):
    """Its gradient sends by another op, an all-gather, or again an all-to-all."""

    def block(x, w):
        return (checkpoint_name(send(x @ w, group), "sent").sin() @ w).sin()

    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    ran = {}
    for policy in (None, save_names("sent"), save_nothing):
        region = block if policy is None else remat(block, policy=policy)
        for _ in range(2):
            loss = region(x, w).sum()
            with OpCounter() as backward:
                loss.backward()
            ran[policy] = backward[op.__name__]
    assert ran[save_names("sent")] == ran[None] == ran[save_nothing] - 1
    (kept,) = [r for r in saved_residuals(remat(block, policy=save_names("sent")), x, w) if r.why == "policy"]
    assert (kept.op.overloadpacket, kept.name, kept.shape) == (op, "sent", (rows, 8))


def test_prices(group):
    """The larger of what goes in and comes out, over the link, and a latency; by the ring of a group."""
    x = torch.empty(4096, 1024, device="meta", requires_grad=True)
    moved = x.nbytes

    def block(x):
        whole = sent.all_gather_tensor_autograd(exchanged(scattered(x, group), group).sin(), 0, group)
        return sent.all_reduce(whole.sin().detach(), "sum", group) + whole

    joint = record(block, (x,), {})
    roofline = cost_model("roofline", "h100")
    whole, near = (
        {
            op.target.overloadpacket: model.price(joint, op)
            for op in joint.forward
            if op.target.namespace == "_c10d_functional" and op.target is not c10d.wait_tensor.default
        }
        for model in (roofline, Linked(roofline, "h100", {group.group_name: 2}))
    )
    assert whole == pytest.approx(
        {
            c10d.reduce_scatter_tensor: 10e-6 + moved / LINK,
            c10d.all_to_all_single: 10e-6 + moved / 2 / LINK,
            c10d.all_gather_into_tensor: 10e-6 + moved / LINK,
            c10d.all_reduce: 10e-6 + moved / LINK,
        }
    )
    # Half of it is there already; an all-reduce is a reduce-scatter and an all-gather.
    assert near == pytest.approx(
        {
            c10d.reduce_scatter_tensor: 10e-6 + moved / 2 / LINK,
            c10d.all_to_all_single: 10e-6 + moved / 4 / LINK,
            c10d.all_gather_into_tensor: 10e-6 + moved / 2 / LINK,
            c10d.all_reduce: 10e-6 + moved / LINK,
        }
    )


@pytest.mark.parametrize(
    ("contracted", "kept"), [(2048, c10d.wait_tensor), (1 << 16, aten.mm)], ids=["mm cheap", "mm dear"]
)
def test_a_plan_weighs_a_reduce_scatter_against_a_matmul(group, contracted, kept):
    """Results of one size, of which one may be kept: that which costs more to make again.

    (A wait returns the memory that the collective has filled.)
    """
    rows, width = 1024, 1024

    def block(x, a, w):
        return scattered(x.sin(), group).sin() + (a @ w).sin()

    shapes = (2 * rows, width), (rows, contracted), (contracted, width)
    given = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    budget = sum(t.nbytes for t in given) + rows * width * 4
    policy = checkpoint_policy(budget=budget, cost="roofline", device="h100")
    plan = policy.plan(block, *given)
    assert [plan.ops[at] for at in plan.saved] == [str(kept.default)]
