"""torch's own tests of torch.utils.checkpoint, by their names, over `remat.interop.checkpoint`.

Of test/test_autograd.py, TestNestedCheckpoint; docs/measured/trust.md has the table of all.
"""

import weakref

import pytest
import torch

from remat.interop import checkpoint
from tests.conformance.rows import row
from tests.conformance.torchs import EARLY_STOP, leaf
from tests.helpers import OpCounter


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
    expected = grad(total(grad(total(h))))(a).detach()
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


@row("adapted", "what nobody reads never runs again, whatever is said")
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


@row("adapted", "the same")
@EARLY_STOP
def test_nested_checkpoint_set_early_stop_no_recompution_needed(early_stop):
    """A sine saves its argument alone: nothing is computed twice."""
    for fn in (torch.sin, torch.clone):
        with OpCounter() as ops:
            checkpoint(fn, leaf(), early_stop=early_stop).backward()
        assert ops["sin"] + ops["clone"] == 1
