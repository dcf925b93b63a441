"""`associative_scan_remat`, beside the same recurrence one step after another; and blocks of `unroll`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

import remat
from remat import RematError, associative_scan_remat, scan_remat
from tests.compiled import Graphs, compiled
from tests.helpers import LiveBytes, Watched, same
from tests.inside import trace_memory


def combine(left, right):
    return {"a": left["a"] * right["a"], "b": right["a"] * left["b"] + right["b"]}


def linear(a, b, w, reverse=False):
    """h = a h + b, of which `w` is captured."""
    return associative_scan_remat(
        lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1] * w / w),
        (a, b),
        reverse=reverse,
    )[1]


def stepwise(a, b, w, reverse=False):
    out, order = [], range(len(a))
    for k in reversed(order) if reverse else order:
        out.append(a[k] * out[-1] + b[k] * (w / w) ** 2 if out else b[k] * 1.0)
    return torch.stack(out[::-1] if reverse else out)


def given(n, *shape):
    torch.manual_seed(n)
    a = torch.rand(n, *shape, dtype=torch.double) + 0.2
    return a, torch.randn(n, *shape, dtype=torch.double), torch.tensor(1.3, dtype=torch.double)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 65, 100])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_length(n, reverse):
    a, b, w = (t.requires_grad_() for t in given(n, 2))
    found, expected = linear(a, b, w, reverse), stepwise(a, b, w, reverse)
    same(found, expected)
    if n == 1:
        return
    weights = torch.arange(1.0, n + 1, dtype=torch.double).unsqueeze(1)
    loss = lambda y: (y * weights).sin().sum()  # noqa: E731
    same(torch.autograd.grad(loss(found), [a, b]), torch.autograd.grad(loss(expected), [a, b]))


TRANSFORMS = {
    "grad": lambda f: grad(lambda a, b, w: f(a, b, w).sin().sum(), (0, 1)),
    "vmap of grad": lambda f: lambda a, b, w: vmap(grad(lambda a, b: f(a, b, w).sin().sum()), (1, 1))(a, b),
    "grad of vmap": lambda f: grad(lambda a, b, w: vmap(lambda a, b: f(a, b, w), (1, 1))(a, b).sin().sum()),
    "jvp": lambda f: lambda a, b, w: jvp(lambda a, b: f(a, b, w), (a, b), (b, a)),
    "jacrev": lambda f: lambda a, b, w: jacrev(lambda a: f(a, b, w).sum(1))(a),
    "hessian": lambda f: lambda a, b, w: hessian(lambda a: f(a, b, w).sin().sum())(a),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    of, args = TRANSFORMS[name], given(11, 3)
    same(of(linear)(*args), of(stepwise)(*args))


def test_double_backward_and_regions():
    args = given(20, 3)
    for run in (linear, remat.remat(linear)):
        found = []
        for f in (run, stepwise):
            a, b, w = (t.clone().requires_grad_() for t in args)
            first = torch.autograd.grad(f(a, b, w).sin().sum(), [a, b], create_graph=True)
            found.append(torch.autograd.grad(torch.stack(first).sin().sum(), [a, b]))
        same(*found)


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_combine(n):
    x = torch.ones(n, 2)
    found = associative_scan_remat(torch.add, x)
    found += 1  # memory of its own
    assert found.shape == x.shape and bool((x == 1).all())


def test_the_first_chunk_combines_nothing_that_is_no_element():
    def product(left, right):
        return left / left * left * right  # of a zero not a number

    x = (torch.rand(96, 2, dtype=torch.double) + 0.5).requires_grad_()
    found, expected = associative_scan_remat(product, x), x.cumprod(0)
    same(found, expected)
    same(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_functions_that_do_not_commute():
    torch.manual_seed(0)
    x = (torch.randn(40, 3, 3, dtype=torch.double) / 3 + torch.eye(3)).requires_grad_()
    found = associative_scan_remat(torch.matmul, x)
    expected = torch.stack([torch.linalg.multi_dot([*x[: k + 1]]) if k else x[0] for k in range(40)])
    same(found, expected)
    same(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("n", [65, 1025, 4097])
def test_the_forward_is_of_logarithmic_depth(n):
    calls = []

    def counted(left, right):
        calls.append(None)
        return left + right

    with torch.no_grad():
        associative_scan_remat(counted, torch.ones(n, 2))
    # Of a step that is checked, of what fills no chunk, and of all chunks: three calls a level.
    assert len(calls) <= 6 * math.log2(n)


@pytest.mark.parametrize("n", [257, 1025])
def test_what_is_kept_and_the_peak_of_the_backward(n):
    width, item = 4, 8
    a, b, _ = (t.requires_grad_() for t in given(n, width))
    with LiveBytes() as live:
        out = associative_scan_remat(combine, {"a": a, "b": b})["b"]
        kept = live.bytes - out.untyped_storage().nbytes()
    chunks = (n - 1) // (1 << ((n - 1).bit_length() // 2))
    assert chunks <= 2 * math.isqrt(n)
    # Of each chunk but the first the element before it; and the first one for itself.
    assert kept <= 2 * (chunks + 1) * width * item
    with LiveBytes() as live:
        torch.autograd.grad(out.sum(), [a, b])
    # Gradients of xs, and copies of the cotangent; a chunk besides.
    assert live.peak <= 6 * n * width * item


@pytest.mark.parametrize("n", [256, 512])
def test_gradients_of_chunks_are_made_without_zeros_to_add_them_to(n):
    made: list[int] = []

    def look(op, args, kwargs, out):
        if "zeros" in str(op) or "slice_backward" in str(op):
            made.extend(out.shape[:1])

    a, b, w = (t.requires_grad_() for t in given(n, 2))
    out = linear(a, b, w)
    with Watched(look):
        torch.autograd.grad(out.sum(), [a, b])
    assert max(made, default=0) <= 1


@pytest.mark.slow
def test_a_graph_has_one_loop():
    torch._dynamo.reset()
    found = []
    for n in (64, 120):  # as many elements in a chunk
        a, b, w = (t.requires_grad_() for t in given(n + 1, 2))
        compiled = Graphs(lambda a, b, w: linear(a, b, w).sin().sum())
        expected = torch.autograd.grad(linear(a, b, w).sin().sum(), [a, b])
        same(torch.autograd.grad(compiled(a, b, w), [a, b]), expected)
        found.append(compiled.forward)
    assert found[0] == found[1]


@pytest.mark.slow
def test_compiled_code_keeps_no_more():
    torch._dynamo.reset()
    n, width, item = 512, 32, 8
    a, b, _ = (t.requires_grad_() for t in given(n, width))
    loss = lambda a, b: associative_scan_remat(combine, {"a": a, "b": b})["b"].square().sum()  # noqa: E731
    fn = compiled(loss, "aot_eager_decomp_partition")
    fn(a, b).backward()
    # The result, of which the square is made, and a carry for each of 8 chunks, not the rows where it lies.
    kept = trace_memory(lambda mark: (fn(a, b), mark())[0]).kept
    assert kept <= n * width * item + 2 * 9 * width * item + 64
    peak = trace_memory(lambda mark: torch.autograd.grad(fn(a, b), [a, b])).peak
    assert peak <= 6 * n * width * item


ANY: Any = associative_scan_remat


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ANY(3, torch.ones(3)), TypeError, "combine comes first, got 3"),
        (lambda: ANY(torch.add, None), ValueError, "xs has no tensor"),
        (lambda: ANY(torch.add, (torch.ones(3), None)), TypeError, "a leaf that is None"),
        (
            lambda: ANY(torch.add, {"a": torch.ones(3), "b": torch.ones(4)}),
            ValueError,
            "differ",
        ),
        (
            lambda: ANY(lambda x, y: (x + y).double(), torch.ones(9)),
            TypeError,
            "torch.float64",
        ),
        (lambda: ANY(lambda x, y: (x, y), torch.ones(9)), TypeError, "its result has the"),
        *[
            (lambda n=n: ANY(lambda x, y: x.mul_(y), torch.ones(n)), RuntimeError, "combine wrote into")
            for n in (2, 3, 40)
        ],
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message) as found:
        call()
    assert isinstance(found.value, RematError)


# -- unroll -------------------------------------------------------------------------------------------


def rnn(w):
    return lambda h, x: (torch.tanh(h @ w + x), h.sin())


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 3, 16])
def test_unroll(unroll):
    torch._dynamo.reset()
    torch.manual_seed(0)
    w, xs = torch.randn(4, 4, requires_grad=True), torch.randn(32, 4)
    plain = scan_remat(rnn(w), torch.zeros(4), xs)[0].sum()
    ways: list[dict[str, Any]] = [{"compile": "aot_eager"}, {}]
    for options in ways:
        made = scan_remat(rnn(w), torch.zeros(4), xs, checkpoints="all", unroll=unroll, **options)[0].sum()
        same(torch.autograd.grad(made, w), torch.autograd.grad(plain, w, retain_graph=True), 1e-5)
    steps = []
    scan_remat(
        rnn(w),
        torch.zeros(4),
        xs,
        checkpoints="all",
        compile="aot_eager",
        unroll=unroll,
        on_step=lambda *a: steps.append(a),
    )
    assert [k for _, k in steps] == list(range(32))


@pytest.mark.parametrize("unroll", [0, True, 2.0, "all"])
def test_unroll_is_a_number_of_steps(unroll):
    with pytest.raises(ValueError, match="unroll=.*; write how many steps a block has, 1 or more"):
        scan_remat(rnn(torch.eye(4)), torch.zeros(4), torch.ones(3, 4), unroll=unroll)  # type: ignore[arg-type]
