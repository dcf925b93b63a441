"""torch_remat's own tests, continued: hooks, state around a region, compiling; see test_torch_remat.py."""

import contextlib
import queue

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat import checkpoint_name, is_recomputing, register_state, remat, save_names, save_nothing
from tests.compiled import Graphs, compiled
from tests.conformance.counting import COMPILES
from tests.conformance.rows import row
from tests.conformance.test_torch_remat import BOTH, SavesOutput, region, saved
from tests.conformance.test_torch_remat_calls import leaf
from tests.helpers import sparse, unseen

# -- hooks: saved_tensors_hooks_test -------------------------------------------------------------------


class Packs(list):
    """Saved-tensor hooks that put values aside, as an offloader does; itself the list of what was packed."""

    def __init__(self):
        super().__init__()
        self.unpacked = 0

    def hooks(self):
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor):
        self.append(tensor.detach().clone())
        return len(self) - 1

    def _unpack(self, at):
        self.unpacked += 1
        return self[at]


@row(
    "pass",
    name="""
        test_op_outside_checkpoint_preserves_saved_tensors_hooks
        test_saved_tensors_hooks_fire_at_save_and_load_not_recompute
        test_saved_tensors_hooks_unpack_is_bound_per_tensor""",
)
@row("adapted", "torch's own hooks", name="test_saved_tensors_hooks_match_native_outside_checkpoint")
@pytest.mark.parametrize("place", ["outside", "around", "inside"])
def test_saved_tensors_hooks(place):
    packs, x = Packs(), leaf(2.0, 3.0)

    def body(x):
        with packs.hooks() if place == "inside" else contextlib.nullcontext():
            return saved(SavesOutput.apply)(x.sin())

    with packs.hooks() if place != "inside" else contextlib.nullcontext():
        out = saved(SavesOutput.apply)(x.sin()) if place == "outside" else remat(body)(x)
    before = packs.unpacked
    out.sum().backward()
    assert len(packs) >= 1 and before == 0 and packs.unpacked >= 1
    torch.testing.assert_close(x.grad, x.sin().exp() * x.cos())


def test_nested_native_hooks_take_precedence():
    """Also test_saved_tensors_hooks_entered_inside_save_body_take_precedence."""
    outer, inner, x = Packs(), Packs(), leaf(2.0, 3.0)
    with outer.hooks(), inner.hooks():
        out = remat(saved(SavesOutput.apply))(x)
    out.sum().backward()
    assert not outer and inner
    torch.testing.assert_close(x.grad, x.exp())


@row("adapted", "what is packed, not in which order")
def test_saved_tensors_hooks_offload_through_save_recompute_save_wedge():

    def block(x):
        return saved(SavesOutput.apply)(region(torch.relu, True)(saved(SavesOutput.apply)(x)))

    packs, x = Packs(), leaf(0.1, 0.2)
    with packs.hooks():
        out = remat(block)(x)
    out.sum().backward()
    y = leaf(0.1, 0.2)
    block(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=0)
    assert not any(t.dtype is torch.bool for t in packs)


@row("adapted", "weights pass no hook")
def test_saved_tensors_hooks_retain_parameter_ness():
    weight, kinds = nn.Parameter(torch.ones(3, 3)), []

    def pack(tensor):
        kinds.append(tensor.shape)
        return tensor

    x = torch.ones(4, 3, requires_grad=True)
    with saved_tensors_hooks(pack, lambda t: t):
        out = remat(lambda x: ((x.sin() * 2) @ weight.t()).sin())(x)
    out.sum().backward()
    assert weight.shape not in kinds and x.grad is not None


# -- state: recompute_state_hook_test ------------------------------------------------------------------


@row("adapted", "`register_state`")
@row(
    "adapted",
    "the same",
    name="""
        test_without_hooks_state_desyncs test_fork_restores_outer_state_after_recompute""",
)
@pytest.mark.parametrize("registered", BOTH)
def test_entry_and_save_op_state_restored_on_recompute(registered):
    counter, seen = [0], {False: queue.SimpleQueue(), True: queue.SimpleQueue()}

    @contextlib.contextmanager
    def put_back(value):
        now, counter[0] = counter[0], value
        try:
            yield
        finally:
            counter[0] = now

    def probe(x):
        seen[is_recomputing()].put(counter[0])
        counter[0] += 1
        return (x + unseen(x)).exp()

    x = leaf(0.1, 0.2)
    with register_state(lambda: counter[0], put_back) if registered else contextlib.nullcontext():
        out = remat(lambda x: probe(probe(x)))(x)
        counter[0] += 100
        out.sum().backward()
    first, again = [[told.get_nowait() for _ in range(told.qsize())] for told in seen.values()]
    assert first == [0, 1] and again == ([0, 1] if registered else [102, 103])
    assert counter[0] == 102


@row("adapted", "it is put back")
def test_preserve_rng_state_true_raises():
    """torch_remat puts no generator back. Here they are: also test_preserve_rng_state_defaults_off."""
    x = torch.ones(64, requires_grad=True)
    out = remat(lambda x: torch.dropout(x, 0.5, True).exp())(x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0] != 0, out != 1)


# -- compiled: compile_test ----------------------------------------------------------------------------


BLOCKS = {
    "test_compiled_grads_match_eager": torch.exp,
    "test_autograd_function_region_grads_match_eager": SavesOutput.apply,
}


@row(
    "adapted",
    "by a name: a region inside has no say in compiled code",
    name="test_save_region_not_recomputed",
)
@row("pass", name="test_recompute_region_is_recomputed")
@COMPILES
@pytest.mark.parametrize(("name", "again"), sparse([pytest.param(n, a) for n in BLOCKS for a in BOTH], 3))
def test_compiled(name, again):
    """What is saved bears a name, for a region inside has no say in compiled code.

    Also test_save_region_not_recomputed and test_recompute_region_is_recomputed.
    """
    torch._dynamo.reset()

    def block(x, w):
        return checkpoint_name(BLOCKS[name](torch.matmul(x, w)), "exp").sin().sum()

    x, w = (torch.linspace(-1, 1, 64).view(8, 8).clone().requires_grad_() for _ in "xw")
    graphs = Graphs(remat(block, policy=save_nothing if again else save_names("exp")))
    got = torch.autograd.grad(graphs(x, w), (x, w))
    torch.testing.assert_close(got, torch.autograd.grad(block(x, w), (x, w)))
    assert (graphs.forward["exp"], graphs.backward["exp"]) == (1, int(again))


@COMPILES
def test_eagerly_constructed_region_wrapper_under_compile():
    torch._dynamo.reset()
    made = saved(SavesOutput.apply)

    def block(x):
        return saved(lambda x: SavesOutput.apply(x))(made(x.sin())).sum()

    block = remat(block)
    x = leaf(1.0, 2.0)
    (got,) = torch.autograd.grad(compiled(block)(x), x)
    torch.testing.assert_close(got, torch.autograd.grad(block(x), x)[0])
