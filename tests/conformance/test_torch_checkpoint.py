"""torch's own tests of torch.utils.checkpoint, by their names, over `remat.interop.checkpoint`.

Of test/test_autograd.py, TestAutograd; docs/measured/trust.md has the table of all.
"""

import copy

import pytest
import torch
from torch import nn
from torch.func import grad as func_grad

from remat import RematError
from remat.interop import checkpoint, checkpoint_sequential
from tests.conformance.rows import row
from tests.conformance.torchs import REENTRANT, grads_of, leaf
from tests.helpers import LiveBytes, OpCounter


def bottleneck():
    return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10))


def check_many_calls(use_reentrant, needs_grad):
    """Calls by the dozen before one backward, by keyword and without gradients of the input."""
    module = bottleneck()
    plain = copy.deepcopy(module)
    inputs = [torch.rand(1, 10, requires_grad=needs_grad) for _ in range(50)]
    outs = [checkpoint(module, input=x, use_reentrant=use_reentrant) for x in inputs]
    torch.stack(outs).mean().backward()
    torch.stack([plain(x) for x in inputs]).mean().backward()
    torch.testing.assert_close(grads_of(module), grads_of(plain))


def test_checkpointing():
    check_many_calls(True, True)


@row("pass", "by keyword, with and without gradients of the input")
@pytest.mark.parametrize("input_requires_grad", [True, False])
def test_checkpointing_without_reentrant(input_requires_grad):
    check_many_calls(False, input_requires_grad)


@pytest.mark.parametrize("enabled", [True, False])
def test_checkpointing_non_reentrant_autocast_cpu(enabled):
    dtypes = []

    def foo(x, y, z):
        x = torch.mm(x, y)
        y = torch.mm(x, z)
        z = torch.mm(z, z)
        dtypes.append(z.dtype)
        return z

    with torch.autocast("cpu", enabled=enabled, dtype=torch.bfloat16):
        loss = checkpoint(foo, leaf(3, 3), leaf(3, 3), leaf(3, 3), use_reentrant=False).sum()
    loss.backward()
    assert set(dtypes) == {torch.bfloat16 if enabled else torch.float32}


@row("adapted", "bytes alive between forward and backward, for a peak on a GPU")
@REENTRANT
def test_checkpointing_without_reentrant_memory_savings(use_reentrant):
    layers = [nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]) for _ in range(8)]

    def kept(call):
        x = leaf(100, 16)
        with LiveBytes() as live:
            for layer in layers:
                x = call(layer, x)
            return live.bytes

    plain = kept(lambda layer, x: layer(x))
    assert kept(lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)) * 2.9 < plain


class SavesAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, z):
        w = x * y * z
        out = w + w
        ctx.save_for_backward(x, y, z, w, out)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        first, second = ctx.saved_tensors, ctx.saved_tensors
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        return first[:3]


@row("adapted", "a second look at `ctx.saved_tensors` gives the same numbers; torch's raises")
def test_checkpointing_without_reentrant_custom_function_works():
    def foo(x, y, z):
        return SavesAll.apply(x * y * z, y * y * z, z * z)

    numbers = [torch.tensor(float(n), requires_grad=True) for n in (1, 2, 3)]
    got = torch.autograd.grad(checkpoint(foo, *numbers, use_reentrant=False), numbers)
    torch.testing.assert_close(got, torch.autograd.grad(foo(*numbers), numbers))


@row("adapted", "contexts are around both passes; `detach` is not counted")
def test_checkpointing_without_reentrant_with_context_fn():
    forward, again = OpCounter(), OpCounter()
    out = checkpoint(torch.exp, leaf(), context_fn=lambda: (forward, again))
    assert dict(forward.counts) == {"exp": 1} and not again.counts
    out.backward()
    assert again["exp"] == 1 and forward["exp"] == 1


@row("adapted", "nothing is reentrant, so nothing warns")
def test_checkpoint_warns_if_use_reentrant_not_passed_explcitly():
    checkpoint(lambda x: x, leaf(1))


@row("adapted", "the same")
def test_checkpoint_sequential_warns_if_use_reentrant_not_passed_explcitly():
    checkpoint_sequential([nn.Linear(3, 3) for _ in range(3)], 3, leaf(3))


@row(
    "adapted",
    "each part recomputes its own, without a context; overlapping ones are right, torch's raises",
)
def test_checkpoint_graph_execution_group():
    def fn(x):
        y = x.sin().cos()
        return y, y.sin().cos()

    x = leaf(3, 3)
    y, z = checkpoint(fn, x)
    with OpCounter() as ops:
        (of_y,) = torch.autograd.grad(z, y, torch.ones(3, 3))
        (of_x,) = torch.autograd.grad(y, x, of_y)
    assert ops["sin"] <= 2 + 2 + 1
    y, z = fn(x)
    torch.testing.assert_close(of_x, torch.autograd.grad(z, x, torch.ones(3, 3))[0])
    # Overlapping ones, which torch's group refuses, are right as well.
    out = checkpoint(lambda x: x.sin().cos(), x).sum()
    (once,) = torch.autograd.grad(out, x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, x)[0], once)


def drifting(first, later):
    calls = []

    def fn(x):
        calls.append(1)
        return (first if len(calls) == 1 else later)(x)

    return fn


def three(x):
    return x.sin().exp().sin()


def two(x):
    return x.sin().exp()


def other_shape(x):
    return x.sin() * torch.tensor([1.0, 2.0])


@row("adapted", "ops are repeated, not Python, so nothing can drift; under torch.func it raises")
@pytest.mark.parametrize(("first", "later"), [(three, two), (two, three), (two, other_shape)])
def test_checkpoint_detects_non_determinism(first, later):
    """Ops are repeated, the function is not: it cannot drift. Nested derivatives run it again and raise."""
    x = leaf(1)
    (expected,) = torch.autograd.grad(first(x).sum(), x)
    (got,) = torch.autograd.grad(checkpoint(drifting(first, later), x).sum(), x)
    torch.testing.assert_close(got, expected)
    fn = drifting(first, later)
    torch.testing.assert_close(func_grad(lambda x: checkpoint(fn, x).sum())(x.detach()), expected)
    fn = drifting(first, later)
    with pytest.raises(RematError, match="does not repeat its forward"):
        func_grad(func_grad(lambda x: checkpoint(fn, x).sum()))(x[0].detach())


@row("adapted", "Python runs once")
def test_access_saved_tensor_twice_without_recomputation_works():
    count = []

    def foo(a):
        count.append(1)
        return torch.exp(a)

    a = leaf(5)
    d = checkpoint(foo, a)
    for _ in range(2):
        torch.testing.assert_close(d.grad_fn._saved_result, torch.exp(a), rtol=0, atol=0)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    d.sum().backward()
    assert len(count) == 1
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        d.grad_fn._saved_result  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


@row("adapted", "`autograd.grad` works with `use_reentrant=True`, too")
def test_checkpoint_valid_reset_on_error():
    """`autograd.grad`, which torch's reentrant variant refuses, works; so does what comes after."""
    a = leaf(2, 2)
    (got,) = torch.autograd.grad(checkpoint(torch.exp, a, use_reentrant=True).sum(), a)
    checkpoint(torch.exp, a, use_reentrant=True).sum().backward()
    torch.testing.assert_close(got, a.grad)


@row("pass", "no error with `use_reentrant=True`")
@REENTRANT
def test_checkpointing_without_reentrant_detached_tensor(use_reentrant):
    linears = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    a = leaf(2, 2)
    for _ in range(3):
        out = checkpoint(torch.no_grad()(linears), a, use_reentrant=use_reentrant)
        assert not out.requires_grad
        out += a
        out.sum().backward()
    torch.testing.assert_close(a.grad, torch.full_like(a, 3.0))


@row("adapted", "the same memory, not the same Python object")
def test_checkpointing_without_reentrant_saved_object_identity():
    found = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx, g):  # type: ignore[override]
            found.extend(ctx.saved_tensors)
            return g, None

    a, b = torch.tensor(1.0, requires_grad=True), torch.tensor(1.0)
    checkpoint(Saves.apply, a, b).backward()
    assert found[0].data_ptr() == b.data_ptr()


def test_checkpointing_without_reentrant_correct_grad():
    a = leaf(2, 2)
    torch.exp(a).sum().backward()
    expected, a.grad = a.grad, None
    checkpoint(torch.exp, a).sum().backward()
    torch.testing.assert_close(a.grad, expected)
    torch.testing.assert_close(torch.autograd.grad(checkpoint(torch.exp, a).sum(), a)[0], expected)


def test_checkpointing_without_reentrant_dataparallel():
    a, model = leaf(2, 2), nn.Linear(2, 2, bias=False)
    (expected,) = torch.autograd.grad(model(a).sum(), a)
    got = checkpoint(nn.DataParallel(copy.deepcopy(model)), a).sum()
    torch.testing.assert_close(torch.autograd.grad(got, a)[0], expected)


def test_checkpointing_without_reentrant_parameter_used_in_an_out():
    w, x, count = leaf(10, 10), leaf(10, 10), []
    w.register_hook(lambda g: count.append(1))
    checkpoint(lambda x: w * x, w * x).sum().backward()
    assert len(count) == 1


def test_checkpointing_without_reentrant_arbitrary_input_output():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5, bias=False)

        def forward(self, given):
            return {"result": self.layer(given["tensor"])}

    model, given = Model(), {"tensor": torch.randn(5, 5)}
    plain = copy.deepcopy(model)
    checkpoint(model, given)["result"].sum().backward()
    plain(given)["result"].sum().backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain))
