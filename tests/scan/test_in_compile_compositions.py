"""scan_remat in functions that torch.compile compiles: with regions, scans, random numbers and layers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import exc
from torch.func import grad, vmap

from remat import remat, save_matmuls, scan_remat
from tests.compiled import compiled
from tests.helpers import sparse
from tests.scan.scans import BLOCK, D, backward, close, fresh as fresh, make, nested, of_loop, of_scan, step

nn = torch.nn.functional


def inside(w, h, xs):
    body = remat(lambda h, x: step(w, torch.tanh(h @ w), x), policy=save_matmuls)
    end, ys = scan_remat(body, h, xs, checkpoints=2)
    return end.sum() + ys.pow(2).sum()


def outside(w, h, xs):
    return remat(of_scan("sqrt"), policy=save_matmuls)(w, h, xs)


def functional_inside(w, h, xs):
    body = lambda h, x: (grad(lambda h: step(w, h, x)[0].sum())(h), None)  # noqa: E731
    return scan_remat(body, h, xs, checkpoints=3)[0].sum()


def under_autocast(w, h, xs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        end, _ = scan_remat(lambda h, x: (torch.tanh((h[None] @ w)[0] + x).to(h), None), h, xs)
    return end.sum()


@pytest.mark.slow
@pytest.mark.parametrize("fn", sparse([inside, nested, under_autocast, outside, functional_inside], 5))
def test_compositions(fn):
    args = make(n=BLOCK + 1)
    if fn is under_autocast:
        args = tuple(t.float() for t in args)
    expected = backward(fn, args)
    tolerance = 2e-2 if fn is under_autocast else 1e-10
    torch.testing.assert_close(backward(compiled(fn), args), expected, rtol=tolerance, atol=tolerance)
    if fn is not under_autocast:
        close(compiled(vmap(grad(fn)))(*(torch.stack([t, t]) for t in args))[1], expected[0])


def dropped(h):
    def body(h, _):
        return nn.dropout(h, 0.02) * 1.5, torch.rand_like(h)

    return scan_remat(body, h, length=BLOCK + 3, checkpoints="sqrt")


@pytest.mark.slow
@pytest.mark.parametrize("transform", sparse(["backward", "grad"], 2))
def test_masks_are_the_same_in_the_recomputation(transform):
    h = torch.ones(100, dtype=torch.float64)
    if transform == "grad":
        loss = lambda h: (lambda end: (end.sum(), end))(dropped(h)[0])  # noqa: E731
        found, end = compiled(grad(loss, has_aux=True))(h)
    else:
        end = compiled(lambda h: dropped(h)[0])(h.requires_grad_())
        (found,) = torch.autograd.grad(end.sum(), h)
    assert 0 < (found == 0).sum() < 60
    torch.testing.assert_close(found, end.detach())


def test_numbers_differ_from_step_to_step_and_call_to_call_and_follow_the_seed():
    run, h = compiled(dropped), torch.ones(100)
    rows = run(h)[1]
    assert len(rows.unique()) > 0.99 * rows.numel() and 0.45 < rows.mean() < 0.55
    assert not rows.equal(run(h)[1])
    torch.manual_seed(3)
    first = run(h)[1]
    torch.manual_seed(3)
    assert first.equal(run(h)[1])


@pytest.mark.slow
@pytest.mark.parametrize("randomness", sparse(["same", "different"], 2))
def test_randomness_of_vmap(randomness):
    rows = compiled(vmap(lambda h: dropped(h)[1], randomness=randomness))(torch.ones(2, 50))
    assert rows[0].equal(rows[1]) == (randomness == "same")


@pytest.mark.parametrize("transform", sparse(["backward", "grad"], 2))
def test_the_eager_backend(transform):
    args = make()
    run = backward if transform == "backward" else lambda f, a: grad(f, (0, 1, 2))(*a)
    whole = compiled(of_scan(2), "eager")
    if transform == "grad":
        whole = compiled(grad(of_scan(2), (0, 1, 2)), "eager")
        return close(whole(*args), run(of_loop(), args))
    close(run(whole, args), run(of_loop(), args))


# Dynamo looks at the gradients of what it resumes with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_graph_break_in_the_body_without_fullgraph():
    def loss(w, h, xs):
        def body(h, x):
            torch._dynamo.graph_break()
            return step(w, h, x)

        return scan_remat(body, h, xs, checkpoints=2)[0].sum()

    args = make()
    close(backward(torch.compile(loss, backend="aot_eager"), args), backward(loss, args))


def counting(h):
    return scan_remat(lambda c, _: ((c[0] + 1, c[1].sin()), None), (0, h), length=3)[0][1]


def widening(h):
    return scan_remat(lambda c, _: (torch.cat([c, c]), None), h, length=3)[0]


def casting(h):
    return scan_remat(lambda c, _: (c.double(), None), h, length=3)[0]


def no_pair(h):
    return scan_remat(lambda c, _: c, h, length=3)[0]


def watched(h):
    return scan_remat(lambda c, _: (c.sin(), None), h, length=3, on_step=print)[0]


def automatic(h):
    return scan_remat(lambda c, _: (c.sin(), None), h, length=3, checkpoints="auto", budget=1000)[0]


def unequal(h):
    return scan_remat(lambda c, x: (c + x, None), h, h.expand(4, D), length=3)[0]


def writing(h):
    return scan_remat(lambda c, _: (c.mul_(2), None), h.clone(), length=3)[0]


REFUSED = {
    counting: "make it a tensor",
    widening: "came in as",
    casting: "came in as",
    no_pair: "must return a pair",
    watched: "on_step is not called",
    automatic: "write the number of carries",
    unequal: "numbers of steps differ",
    writing: "wrote into its carry",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda f: f.__name__)
def test_what_is_refused(fn):
    with pytest.raises((exc.Unsupported, exc.BackendCompilerFailed, RuntimeError), match=REFUSED[fn]):
        compiled(fn)(torch.ones(D))
    # Nothing is left behind in this thread.
    assert scan_remat(lambda h, _: (h * 2, None), torch.ones(1), length=3)[0] == 8
    if fn is casting:  # found while a step was traced
        args = make(n=4)
        close(compiled(grad(of_scan("all")))(*args), grad(of_loop())(*args))
