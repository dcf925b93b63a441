"""torch's own tests of torch.utils.checkpoint, by their names, over `remat.interop.checkpoint`.

Of test/test_autograd.py (TestAutograd, TestNestedCheckpoint) and test/test_utils.py (TestCheckpoint). Selective
ones are in test_torch_selective.py, compiled ones in test_torch_compiled.py; docs/trust.md has the table of all.
"""

import copy
import random
import weakref

import pytest
import torch
from torch import nn
from torch.func import grad as func_grad

from remat import RematError
from remat.interop import checkpoint, checkpoint_sequential
from tests.helpers import LiveBytes, OpCounter

REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])
EARLY_STOP = pytest.mark.parametrize("early_stop", [True, False])


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def grads_of(model):
    return [p.grad for p in model.parameters()]


def bottleneck():
    return nn.Sequential(nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10))


# -- TestAutograd -------------------------------------------------------------------------------------


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


@REENTRANT
def test_checkpointing_without_reentrant_memory_savings(use_reentrant):
    """Of torch a peak on a GPU; here what is alive between forward and backward."""
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


def test_checkpointing_without_reentrant_custom_function_works():
    """Torch's refuses a second look at `ctx.saved_tensors`; here it gives the same numbers again."""

    def foo(x, y, z):
        return SavesAll.apply(x * y * z, y * y * z, z * z)

    numbers = [torch.tensor(float(n), requires_grad=True) for n in (1, 2, 3)]
    got = torch.autograd.grad(checkpoint(foo, *numbers, use_reentrant=False), numbers)
    torch.testing.assert_close(got, torch.autograd.grad(foo(*numbers), numbers))


def test_checkpointing_without_reentrant_with_context_fn():
    forward, again = OpCounter(), OpCounter()
    out = checkpoint(torch.exp, leaf(), context_fn=lambda: (forward, again))
    assert dict(forward.counts) == {"exp": 1} and not again.counts
    out.backward()
    assert again["exp"] == 1 and forward["exp"] == 1


def test_checkpoint_warns_if_use_reentrant_not_passed_explcitly():
    """Nothing is reentrant, so there is nothing to warn of: warnings are errors in this suite."""
    checkpoint(lambda x: x, leaf(1))


def test_checkpoint_sequential_warns_if_use_reentrant_not_passed_explcitly():
    checkpoint_sequential([nn.Linear(3, 3) for _ in range(3)], 3, leaf(3))


def test_checkpoint_graph_execution_group():
    """Two backwards over disjoint parts: each recomputes its own part, without saying that they are disjoint."""

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


@pytest.mark.parametrize(("first", "later"), [(three, two), (two, three), (two, other_shape)])
def test_checkpoint_detects_non_determinism(first, later):
    """Plain autograd: ops are repeated and the function is not, so it cannot drift. torch.func: it raises."""
    x = leaf(1)
    (got,) = torch.autograd.grad(checkpoint(drifting(first, later), x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(first(x).sum(), x)[0])
    fn = drifting(first, later)
    with pytest.raises(RematError, match="does not repeat its forward"):
        func_grad(lambda x: checkpoint(fn, x).sum())(x.detach())


def test_access_saved_tensor_twice_without_recomputation_works():
    """Python runs once, however often autograd's node is asked for what it saved."""
    count = []

    def foo(a):
        count.append(1)
        return torch.exp(a)

    a = leaf(5)
    d = checkpoint(foo, a)
    for _ in range(2):
        torch.testing.assert_close(d.grad_fn._saved_result, torch.exp(a), rtol=0, atol=0)
    d.sum().backward()
    assert len(count) == 1
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        d.grad_fn._saved_result  # noqa: B018


def test_checkpoint_valid_reset_on_error():
    """`autograd.grad`, which torch's reentrant variant refuses, works; so does what comes after."""
    a = leaf(2, 2)
    (got,) = torch.autograd.grad(checkpoint(torch.exp, a, use_reentrant=True).sum(), a)
    checkpoint(torch.exp, a, use_reentrant=True).sum().backward()
    torch.testing.assert_close(got, a.grad)


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


def test_checkpointing_without_reentrant_saved_object_identity():
    """A tensor from outside comes back as the memory that it is, in torch's as the very object."""
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


# -- TestNestedCheckpoint -----------------------------------------------------------------------------


def grad(fn):
    def wrapper(x):
        with torch.enable_grad():
            return torch.autograd.grad(fn(x), x, create_graph=True)[0]

    return wrapper


def c(fn, **options):
    return lambda *args, **kwargs: checkpoint(fn, *args, **options, **kwargs)


def total(fn):
    return lambda x: fn(x).sum()


def nodes_of(out):
    seen, queue = {}, [out.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen[node] = None
            queue += [following for following, _ in node.next_functions]
    return list(seen)


class Handle:
    """Something that lives as long as the node that holds it."""


def check_graph_dies(fn, x):
    def scope():
        refs = []
        for node in nodes_of(fn(x)):
            handle = node.metadata["held"] = Handle()
            refs.append(weakref.ref(handle))
        return refs

    refs = scope()
    assert refs and all(ref() is None for ref in refs)


def f(x):
    return x.sin().exp().sin()


def with_inner_gradients(x):
    torch.autograd.grad(x.sin().exp().sin(), x)
    return x.sin()


@EARLY_STOP
@pytest.mark.parametrize("fn", [f, with_inner_gradients])
def test_nested_checkpoint(fn, early_stop):
    def k(fn):
        return c(fn, early_stop=early_stop)

    x = leaf()
    table = (
        (fn, (k(fn), k(k(fn)))),
        (grad(fn), (grad(k(fn)), grad(k(k(fn))))),
        (grad(grad(fn)), (grad(k(grad(fn))), k(grad(grad(k(fn)))), grad(k(grad(k(fn)))))),
        (grad(grad(grad(fn))), (grad(k(grad(grad(k(fn))))), grad(k(grad(k(grad(k(fn)))))))),
    )
    for plain, others in table:
        for other in others:
            torch.testing.assert_close(other(x), plain(x))
            check_graph_dies(other, x)


def test_nested_checkpoint_two_children():
    def g(x):
        return x.cos().sin().exp()

    def h(x):
        return g(f(x))

    def hc(x):
        return c(g)(c(f)(x))

    a = leaf(3, 3)
    expected = grad(total(grad(total(h))))(a)
    for fn in (grad(total(grad(total(c(hc))))), grad(total(c(grad(total(c(hc))))))):
        torch.testing.assert_close(fn(a), expected)
        check_graph_dies(fn, a)


def test_nested_checkpoint_non_tensor_inputs_and_outputs():
    def fn(k, a, b, f):
        return f(k * a * b.exp()), 1, "abcd"

    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    out, one, text = checkpoint(fn, 3, a, b, torch.sin)
    assert (one, text) == (1, "abcd")
    expected = torch.autograd.grad(fn(3, a, b, torch.sin)[0], (a, b))
    torch.testing.assert_close(torch.autograd.grad(out, (a, b)), expected)


def test_nested_checkpoint_kwargs():
    def fn(a, blah=None):
        out = a.sin().exp()
        return (out if blah is None else out * blah).sin().exp()

    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    expected = torch.autograd.grad(fn(a, blah=b), (a, b))
    torch.testing.assert_close(torch.autograd.grad(checkpoint(fn, a, blah=b), (a, b)), expected)


def test_nested_checkpoint_same_graph():
    count = []
    out = checkpoint(lambda a: a.sin().cos().sin(), leaf())
    out.grad_fn.next_functions[0][0].register_hook(lambda *_: count.append(1))
    out.backward()
    assert len(count) == 1


def test_nested_checkpoint_reentrant_backwards():
    def fn(a):
        x = a.sin().cos()
        return x, x.sin()

    a = torch.tensor(1.0, requires_grad=True)
    x, out = checkpoint(fn, a)
    out.grad_fn.register_hook(lambda *_: x.backward(retain_graph=True))
    out.backward(retain_graph=True)
    once, whole = (torch.autograd.grad(fn(a)[i], a)[0] for i in (0, 1))
    torch.testing.assert_close(a.grad, once + whole)


@EARLY_STOP
def test_nested_checkpoint_set_early_stop(early_stop):
    """What nobody reads is not recomputed, wherever it stands and whatever is said; Python runs once."""
    count = []

    def fn(x):
        count.append(1)
        return x.sin().cos().clone()

    out = checkpoint(fn, leaf(), early_stop=early_stop)
    with OpCounter() as ops:
        out.backward()
    assert len(count) == 1 and ops["clone"] == 0
    # One is the cosine's derivative.
    assert ops["sin"] == 2 and ops["cos"] == 1


@EARLY_STOP
def test_nested_checkpoint_set_early_stop_no_recompution_needed(early_stop):
    """A sine saves its argument alone: nothing is computed twice."""
    for fn in (torch.sin, torch.clone):
        with OpCounter() as ops:
            checkpoint(fn, leaf(), early_stop=early_stop).backward()
        assert ops["sin"] + ops["clone"] == 1


# -- test_utils: TestCheckpoint -----------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter = 0

    def forward(self, x):
        self.counter += 1
        return (x * torch.tensor(2.0)).sin()


@REENTRANT
def test_checkpoint_trigger(use_reentrant):
    """Ops run twice in the first segment, as in torch; Python, and so the counters, once."""
    modules = [Counts() for _ in range(10)]
    out = checkpoint_sequential(modules, 2, leaf(3, 4), use_reentrant=use_reentrant)
    with OpCounter() as ops:
        out.sum().backward()
    assert [m.counter for m in modules] == [1] * 10
    assert ops["sin"] == 4


def six():
    sizes = [(100, 50), (50, 20), (20, 5)]
    return nn.Sequential(*[layer for a, b in sizes for layer in (nn.Linear(a, b), nn.ReLU())])


@REENTRANT
def test_checkpoint_valid(use_reentrant):
    """create_graph through a sequence, which torch's reentrant variant refuses."""
    model, x = six(), leaf(1, 100)

    def gradients(out):
        return torch.autograd.grad(out, x, torch.ones(1, 5), create_graph=True)

    got = checkpoint_sequential(list(model), 2, x, use_reentrant=use_reentrant)
    torch.testing.assert_close(gradients(got), gradients(model(x)))


def check_sequential(model, variants, use_reentrant):
    x = leaf(1, 100)
    parameters = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), parameters)
    for variant in variants:
        out = checkpoint_sequential(variant, 2, x, use_reentrant=use_reentrant)
        torch.testing.assert_close(out, model(x))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), parameters), expected)


@REENTRANT
def test_checkpoint(use_reentrant):
    model = six()
    check_sequential(model, [list(model.children()), model], use_reentrant)


@REENTRANT
def test_checkpoint_module_list(use_reentrant):
    model = six()
    check_sequential(model, [nn.ModuleList(model)], use_reentrant)


def test_checkpoint_sequential_deprecated_multiple_args():
    with pytest.raises((TypeError, RematError)):
        checkpoint_sequential(nn.Sequential(nn.Identity()), 1, leaf(1), leaf(1), False, 3)  # type: ignore[call-arg]


def test_checkpoint_sequential_deprecated_no_args():
    with pytest.raises(TypeError):
        checkpoint_sequential(nn.Sequential(nn.Identity()), 1)  # type: ignore[call-arg]


@REENTRANT
def test_checkpoint_rng_cpu(use_reentrant):
    for _ in range(5):
        x = leaf(2000)
        state = torch.get_rng_state()
        out = checkpoint(nn.Dropout(), nn.Dropout()(x), use_reentrant=use_reentrant)
        (got,) = torch.autograd.grad(out.sum(), x)
        torch.set_rng_state(state)
        (expected,) = torch.autograd.grad(nn.Dropout()(nn.Dropout()(x)).sum(), x)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_checkpoint_not_preserve_rng_state_and_without_reentrant():
    checkpoint(nn.Dropout(), leaf(2), preserve_rng_state=False).sum().backward()


def test_checkpoint_non_tensor():
    def run(a, b):
        return a if b is None else a + b

    checkpoint(run, leaf(1, 100), None, use_reentrant=True).sum().backward()


def mixed(t1, t2, scale, t3):
    t4 = t1 + t2 * t3
    t5 = t1 * t2 + t3
    t4 *= scale
    t5 *= scale
    return scale, t4, None, True, t5, "bar", t1


def test_checkpoint_non_tensor_inputs_outputs():
    t1, t2, t3, scale = leaf(10), leaf(10), torch.rand(10), random.randint(0, 10)
    expected = mixed(t1, t2, scale, t3)
    got = checkpoint(mixed, t1, t2, scale, t3, use_reentrant=True)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for i in (1, 4):
        got[i].sum().backward(retain_graph=True)
    grads, t1.grad, t2.grad = (t1.grad, t2.grad), None, None
    torch.autograd.backward([expected[1].sum(), expected[4].sum()])
    torch.testing.assert_close(grads, (t1.grad, t2.grad))


def test_checkpoint_no_tensors():
    numbers = [random.random() for _ in range(3)]
    args = (*numbers[:2], 3, numbers[2])
    assert checkpoint(mixed, *args, use_reentrant=True) == mixed(*args)


def test_checkpoint_partial_grad():
    """A result without gradient is no error: torch's reentrant variant raises."""
    a, b = leaf(1, 4), torch.randn(1, 4)
    checkpoint(lambda a, b: (a, b), a, b, use_reentrant=True)[0].sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(1, 4))
    assert not checkpoint(lambda b, a: b, b, a, use_reentrant=True).requires_grad


@pytest.mark.parametrize("retain", [False, True])
def test_checkpointing_without_reentrant_early_free(retain):
    """What was recomputed goes as the backward goes; of torch read from a GPU's allocator."""
    alive = []

    def fn(x):
        for _ in range(3):
            x = x.square()
            x.register_hook(lambda g: alive.append(live.bytes))
        return x.square().sum()

    x = leaf(1000)
    x.grad = torch.zeros_like(x)
    with LiveBytes() as live:
        checkpoint(fn, x).backward(retain_graph=retain)
    assert len(alive) == 3 and alive[0] > alive[-1]


def test_infer_device_state_recursive_meta():
    x = torch.rand(10, device="meta", requires_grad=True)
    assert checkpoint(lambda given: given["foo"].sin().sin(), {"foo": x}).device.type == "meta"


def test_checkpoint_preserves_device_context():
    """Tensors made without a device, in a recomputation by Python and in one by ops."""
    devices = []

    def fn(x):
        made = torch.empty(4)
        devices.append(made.device.type)
        return (x.sin() * made).sin()

    x = torch.rand(4, device="meta", requires_grad=True)
    with torch.device("meta"):
        out = checkpoint(fn, x)
    out.sum().backward()
    with torch.device("meta"):
        func_grad(lambda x: checkpoint(fn, x).sum())(x.detach())
    assert set(devices) == {"meta"} and len(devices) >= 3
