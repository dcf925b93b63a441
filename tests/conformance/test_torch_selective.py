"""torch's own tests of selective checkpointing and of its module wrapper, by their names.

Of test/test_autograd.py (TestSelectiveActivationCheckpoint), distributed/fsdp/test_checkpoint_wrapper.py.
docs/measured/trust.md has the table of all.
"""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat import RematError, nn as remat_nn, offload, save_everything, save_matmuls
from remat.interop import checkpoint
from tests.conformance.rows import row
from tests.conformance.torchs import leaf
from tests.helpers import LiveBytes, OpCounter

aten = torch.ops.aten


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


def saves(*ops):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


# -- TestSelectiveActivationCheckpoint ----------------------------------------------------------------


@row("adapted", "products and living bytes, on a CPU: the same numbers")
@pytest.mark.parametrize(
    "policy", [[aten.mm.default], saves(aten.mm.default), lambda ctx, op, *a, **k: op is aten.mm.default]
)
def test_flops_and_mem(policy):
    x, y = leaf(64, 64), leaf(64, 64)

    def fn(x, y):
        return torch.mm(x.cos(), y).sin().sum()

    def measured(call):
        with LiveBytes() as live:
            out = call()
            alive = live.bytes - 4
        with OpCounter() as ops:
            out.backward()
        return alive // (64 * 64 * 4), ops.dots

    assert measured(lambda: fn(x, y)) == (2, 2)
    assert measured(lambda: checkpoint(fn, x, y)) == (0, 3)
    assert measured(lambda: checkpoint(fn, x, y, context_fn=selective(policy))) == (1, 2)


def test_output_already_has_autograd_meta():
    def fn(x, y):
        return x.view(-1), y.sin().cos()

    out = checkpoint(fn, torch.tensor([1, 2, 3]), leaf(3), context_fn=selective([aten.view.default]))
    out[1].sum().backward()


def test_bad_inputs():
    """By this library's own names, for what torch's own function does not get to see."""
    for bad in ([2], [aten.sin], 2):
        with pytest.raises((TypeError, ValueError)):
            create_selective_checkpoint_contexts(bad)
    with pytest.raises((RematError, TypeError)):
        checkpoint(torch.sin, leaf(3), policy=2)  # pyright: ignore


@row("adapted", "asked in the forward alone")
def test_policy_with_state():
    asked = []

    class Counts:
        def __call__(self, ctx, op, *args, **kwargs):
            asked.append(ctx.is_recompute)
            return CheckpointPolicy.PREFER_RECOMPUTE

    checkpoint(lambda x: x.sin().sin().sin(), leaf(3), context_fn=selective(Counts())).sum().backward()
    assert asked and not any(asked)


@row("adapted", "kept while the graph is retained")
@pytest.mark.parametrize("retain", [None, True])
def test_storage_lifetime(retain):
    """What is kept goes with the graph, without the garbage collector. After a backward that retains the
    graph torch lets go of it and refuses another; here it stays for the next."""
    refs = []

    class Finds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is aten.exp.default:
                refs.append(weakref.ref(out.untyped_storage()))
            return out

    gc.disable()
    try:
        x = leaf(3)
        with Finds(), LiveBytes() as live:
            out = checkpoint(lambda x: x.cos().exp().sin(), x, policy=save_everything)
        assert live.bytes > x.nbytes
        if retain:
            for _ in range(2):
                out.sum().backward(retain_graph=True)
        del out
        assert live.bytes == 0
    finally:
        gc.enable()


@row("adapted", "a kept value is kept as it was; torch's raises unless told")
def test_version_counter():

    def fn(x):
        return x.sin().mul_(2).cos().exp()

    x = leaf(3)
    out = checkpoint(fn, x, context_fn=selective(saves(aten.sin.default)))
    expected = torch.autograd.grad(fn(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), expected, rtol=0, atol=0)


def test_function_with_more_than_one_output():
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return op is aten.var_mean.correction

    def fn(x):
        a, b = torch.var_mean(x)
        return a * b

    x = leaf(3)
    out = checkpoint(fn, x, context_fn=selective(policy))
    with OpCounter() as ops:
        got = torch.autograd.grad(out, x)
    assert asked.count(aten.var_mean.correction) == 1 and ops["var_mean"] == 0
    torch.testing.assert_close(got, torch.autograd.grad(fn(x), x))


def test_function_with_non_tensor_output():
    """A kept op of the user's own, whose second result is a number, is not run a second time."""
    runs = []
    with torch.library._scoped_library("remat_conformance", "FRAGMENT"):

        @torch.library.custom_op("remat_conformance::sin_with_extra", mutates_args=())
        def sin_with_extra(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            runs.append(1)
            return x.sin(), 2

        sin_with_extra.register_autograd(
            lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        )
        op = torch.ops.remat_conformance.sin_with_extra

        def fn(x):
            return (op(x)[0] * x.sin().exp()).sin()

        x = leaf(3)
        out = checkpoint(fn, x, context_fn=selective([op.default]))
        got = torch.autograd.grad(out.sum(), x)
        assert len(runs) == 1
        torch.testing.assert_close(got, torch.autograd.grad(fn(x).sum(), x))


@row("adapted", "as often as one likes")
def test_can_only_trigger_recompute_once():
    x = leaf(3)
    out = checkpoint(lambda x: x.sin().cos().exp(), x, context_fn=selective(saves(aten.sin.default))).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# -- CheckpointWrapperTest: remat.nn.apply leaves the module what it is -------------------------------


def test_load_activation_checkpointed_module():
    lin, new = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    remat_nn.apply_to(lin)
    new.load_state_dict(copy.deepcopy(lin.state_dict()))
    torch.testing.assert_close(list(lin.parameters()), list(new.parameters()))
    with torch.no_grad():
        new.weight.add_(0.5)
    lin.load_state_dict(copy.deepcopy(new.state_dict()))
    torch.testing.assert_close(list(lin.parameters()), list(new.parameters()))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(10, 10)

    def forward(self, a, b, c=None, d=None, **kwargs):
        return self.lin(a), self.lin(b), self.lin(c), self.lin(d)


class OnlyKeywords(Keywords):
    def forward(self, *, a=None, b=None):  # type: ignore[override]
        return self.lin(a), self.lin(b)


def test_checkpoint_wrapper_kwarg_support():
    model, x = remat_nn.apply_to(Keywords()) or Keywords(), torch.ones(4, 10, requires_grad=True)
    out = model(x, x, c=x, d=x, e=x, f=x)
    assert isinstance(out, tuple) and len(out) == 4
    for one, other in zip(model(x, x, x, x), out, strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad
    only = OnlyKeywords()
    remat_nn.apply_to(only)
    assert len(only(a=x, b=x)) == 2


@row("pass", "the module stays what it is")
def test_forward_missing_attributes():
    lin = nn.Linear(1, 1)
    model = nn.Sequential(lin, lin)
    remat_nn.apply_to(model)
    model._foo = "bar"  # type: ignore[assignment]
    assert model[0] is lin and model._foo == "bar" and isinstance(model, nn.Sequential)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.bn = nn.Linear(10, 10), nn.BatchNorm1d(10)
        self.nested_linear = nn.Sequential(nn.Linear(10, 10))

    def forward(self, x):
        return self.bn(self.nested_linear(self.lin(x)))


def test_apply_activation_checkpointing():
    model = nn.Sequential(Normed(), Normed(), Normed())
    remat_nn.apply(model, layers=nn.Linear)
    assert len(remat_nn.regions(model)) == 6
    x = leaf(4, 10)
    for _ in range(6):
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_fqn():
    """Names stay as they are: torch's wrapper puts its own in between and takes it out again."""
    lin = nn.Linear(10, 10, bias=False)
    remat_nn.apply_to(lin)
    assert [name for name, _ in lin.named_parameters()] == list(lin.state_dict()) == ["weight"]


@row("adapted", "gradients alone: hooks are not replaced")
def test_checkpoint_wrapper_cpu_offload():
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(3)])
    plain, x = copy.deepcopy(model), torch.randn(3, 10)
    remat_nn.apply_to(model, policy=offload(save_matmuls))
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
