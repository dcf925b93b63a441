"""scan_remat in functions that torch.compile compiles whole: one op each way, steps compiled once."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.func import grad, hessian, jacrev, jvp, vmap

from remat import RematError, checkpoint_policy, save_matmuls, save_nothing, scan_remat
from remat.schedules import Multilevel, Revolve, Segmented
from remat.transforms import value_and_grad
from tests.compiled import Graphs, compiled, ops
from tests.helpers import crossed, rand, sparse
from tests.scan.inside import entry
from tests.scan.scans import BLOCK, D, backward, close, fresh as fresh, make, nested, of_loop, of_scan, step

nn = torch.nn.functional


SCHEDULES = ["all", "sqrt", Segmented(5), Revolve(4), Multilevel(1, 2), Segmented(BLOCK)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoints", "reverse"),
    crossed(SCHEDULES, [False, True], every=4),
)
def test_backward(checkpoints, reverse):
    args = make()
    close(backward(compiled(of_scan(checkpoints, reverse)), args), backward(of_loop(reverse), args))


TRANSFORMS = {
    "grad": lambda f: grad(f, (0, 1, 2)),
    "value_and_grad": lambda f: value_and_grad(f, (0, 1, 2)),
    "grad of grad": lambda f: grad(lambda *a: grad(f)(*a).pow(2).sum(), (0, 1, 2)),
    "hessian": lambda f: hessian(f, 1),
    "jvp of grad": lambda f: lambda *a: jvp(grad(f, (0, 1, 2)), a, a),
    "jvp": lambda f: lambda *a: jvp(f, a, a),
    "vmap": vmap,
    "vmap of grad": lambda f: vmap(grad(f, (0, 1, 2))),
    "vmap of grad over carries": lambda f: vmap(grad(f, (0, 1, 2)), (None, 0, None)),
    "grad of vmap": lambda f: grad(lambda *a: vmap(f)(*a).sum(), (0, 1, 2)),
}


# Blocks of steps, which "sqrt" compiles, take long under every level of derivatives.
BLOCKS = [
    pytest.param(t, "sqrt", marks=pytest.mark.slow, id=f"{t}-sqrt") for t in ("vmap of grad", "jvp of grad")
]
TURNS = [pytest.param(t, 2, id=f"{t}-2") for t in list(TRANSFORMS)[::2]] + BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "checkpoints"), TURNS)
def test_transforms(transform, checkpoints):
    args = make(2, n=BLOCK + 2) if "vmap" in transform else make(n=BLOCK + 2)
    if transform == "vmap of grad over carries":
        args = (args[0][0], args[1], args[2][0])
    change = TRANSFORMS[transform]
    close(compiled(change(of_scan(checkpoints)))(*args), change(of_loop())(*args))


class Counting:
    """A backend that notes the ops of every graph it is given."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, module, inputs, **_):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        def note(graph, _):
            self.graphs.append(ops(graph))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=note, bw_compiler=note)(module, inputs)


def test_one_op_each_way_and_one_compiled_step_whatever_the_length():
    def made(n):
        torch._dynamo.reset()
        backend = Counting()
        run = compiled(of_scan("all"), backend)
        backward(run, make(n=n))
        first = len(backend.graphs)
        backward(run, make(n=n))
        assert len(backend.graphs) == first, "the second call compiled something"
        return backend.graphs

    short, long = made(10), made(1_000)
    assert short == long
    assert len(short) == 4  # the graph and its backward; a block of steps and its pull-back
    outer = [graph for graph in short if graph["scan_forward"] or graph["scan_pull"]]
    assert sum(outer[0].values()) < 20 and not any(graph["tanh"] for graph in outer)
    # The pull-back reads the carries that the forward has kept.
    assert [graph["tanh"] for graph in short if graph not in outer] == [BLOCK, 0]


@pytest.mark.parametrize("passed_on", [False, True])
def test_a_kept_product_runs_once_where_the_carry_is_the_only_result(passed_on):
    """A part of the carry that a step hands on is there anyway; what is kept after it serves as before."""
    w, backend = torch.eye(D, dtype=torch.float64).requires_grad_(), Counting()

    def loss(w):
        def step(carry, _):
            *same, h = carry
            return (*same, torch.tanh((h @ w).sin() * sum(same, 1.0))), None

        h, options = torch.ones(1, D, dtype=torch.float64), {"checkpoints": "all", "policy": save_matmuls}
        return scan_remat(step, (2 * h, h) if passed_on else (h,), length=BLOCK, **options)[0][-1].sum()

    torch.autograd.grad(compiled(loss, backend)(w), w)
    # Of each step's product the two of its gradient, and neither the product itself nor the next carry.
    assert (backend.graphs[-1]["mm"], backend.graphs[-1]["tanh"]) == (2 * BLOCK, 0)


def test_no_recompilation():
    run = Graphs(of_scan(2))
    backward(run, make())
    frames = run.frames  # the function, one step, its pull-back
    assert frames == 3
    backward(run, make())
    assert run.frames == frames


@pytest.mark.slow
def test_few_carries_are_kept():
    def kept(checkpoints):
        torch._dynamo.reset()
        run = Graphs(of_scan(checkpoints))
        backward(run, make(n=400))
        return (run.saved_bytes - 400 * D * 8) // (D * 8)

    assert kept(4) < 12
    assert kept(40) - kept(4) == 36


def test_large_steps_are_compiled_one_at_a_time():
    run = Counting()
    w = torch.randn(200, 200, dtype=torch.float64)
    loss = lambda h: scan_remat(lambda h, _: (torch.tanh(h @ w), None), h, length=3)[0].sum()  # noqa: E731
    h = torch.randn(100, 200, dtype=torch.float64)
    close(compiled(grad(loss), run)(h), grad(loss)(h))
    made = [graph["tanh"] for graph in run.graphs if graph["tanh"]]
    assert made == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batched", "n", "stacked"), [(False, 3, False), (False, 600, True), (True, 3, True)]
)
def test_what_large_steps_keep_is_copied_only_into_stacks(batched, n, stacked, monkeypatch):
    """Copies double what is written. Beyond some hundred results, and under vmap, there are stacks."""
    monkeypatch.setattr(entry, "BLOCK", 1)
    copies, put = [], entry._put
    monkeypatch.setattr(entry, "_put", lambda *args: copies.append(1) or put(*args))
    if batched:
        args, of = make(2, n=n), lambda fn: vmap(grad(fn, (0, 1, 2)))
        close(compiled(of(of_scan("all")))(*args), of(of_loop())(*args))
    else:
        args = make(n=n)
        close(backward(compiled(of_scan("all")), args), backward(of_loop(), args))
    assert bool(copies) is stacked


@pytest.mark.slow
def test_budgets_of_a_scan():
    """Floats that differ from call to call, and a plan for a step among other ops."""

    def loss(policy, w, h, xs):
        body = lambda h, x: step(w, torch.tanh(h @ w), x)  # noqa: E731
        end, ys = scan_remat(body, h[None], xs, checkpoints="all", policy=policy)
        return end.sum() + ys.pow(2).sum()

    args = make(n=BLOCK)
    saved = []
    for budget in (1.0, "free"):
        step_of = functools.partial(loss, checkpoint_policy(budget=budget))
        run = Graphs(step_of)
        close(backward(run, args), backward(step_of, args))
        saved.append(run.saved_bytes)
    assert saved[0] > saved[1]


@pytest.mark.slow
@pytest.mark.parametrize("transform", sparse(["backward", "vmap of grad", "jacobian"]))
def test_policy_of_a_scan(transform):
    def ends(w, h, xs, policy=save_matmuls):
        body = lambda h, x: step(w, torch.tanh(h @ w), x)  # noqa: E731
        end, ys = scan_remat(body, h[None], xs, checkpoints="all", policy=policy)
        return end[0] + ys.pow(2).sum()

    loss = lambda *args, **options: ends(*args, **options).sum()  # noqa: E731
    args = make(n=BLOCK)
    if transform == "backward":
        saved = []
        for policy in (save_matmuls, save_nothing):
            run = Graphs(functools.partial(loss, policy=policy))
            close(backward(run, args), backward(loss, args))
            saved.append(run.saved_bytes)
        # One product a step: the other one's tanh is the next carry, from which the backward starts.
        assert saved[0] - saved[1] == BLOCK * D * 8
    elif transform == "jacobian":
        close(compiled(jacrev(ends, 1))(*args), jacrev(ends, 1)(*args))
    else:
        found = compiled(vmap(grad(loss)))(*(torch.stack([t, t]) for t in args))
        close(found[1], grad(loss)(*args))


@pytest.mark.slow
def test_what_a_graph_stands_for_goes_with_it():
    def count():
        gc.collect()
        return len(entry._entries)

    torch._dynamo.reset()  # earlier tests' graphs hold theirs until then
    before = count()
    args = make(n=BLOCK)
    run = compiled(nested)
    backward(run, args)
    assert count() > before
    # A backward that is still to come holds what it needs.
    leaves = [t.requires_grad_() for t in args]
    total = run(*leaves)
    torch._dynamo.reset()
    del run
    close(torch.autograd.grad(total, leaves), backward(nested, args))
    del total
    assert count() == before and not entry._for_good


def test_no_steps():
    def run(h, xs):
        return scan_remat(lambda h, x: (h + x, {"y": h * x, "none": None}), h, xs)

    end, ys = compiled(run)(torch.ones(D), torch.ones(0, D))
    assert end.equal(torch.ones(D)) and ys["y"].shape == (0, D) and ys["none"] is None


def test_a_step_that_reads_memory_by_its_layout_is_refused_where_that_is_another():
    """Compiled steps are given contiguous tensors: the value was another without a message."""

    def step(h, _):
        return h.as_strided((2, 4), (4, 1)).sum() + h.sin(), None

    x = rand(3, 8)[:, ::2]
    run = compiled(lambda x: scan_remat(step, x, length=2)[0])
    with pytest.raises(BackendCompilerFailed, match="as_strided, which reads memory by its layout"):
        run(x)
    with pytest.raises(RematError, match="as_strided, which reads memory by its layout"):
        scan_remat(step, x, length=2, compile="aot_eager")
    torch._dynamo.reset()
    torch.testing.assert_close(run(x.contiguous()), scan_remat(step, x.contiguous(), length=2)[0])
