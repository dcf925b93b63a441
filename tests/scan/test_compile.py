"""Scans with compile=True: compiled blocks of steps, their number, and when steps run as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from remat import (
    checkpoint_name,
    checkpoint_policy,
    save_everything,
    save_matmuls,
    save_names,
    save_nothing,
    scan_remat,
)
from remat.schedules import Revolve, Segmented
from tests.compiled import ops
from tests.helpers import crossed
from tests.scan.inside import UnrolledStep, entry

D = 3
SIZE = 4


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks of four steps: what is tested does not depend on it, and less is compiled."""
    monkeypatch.setattr(entry, "BLOCK", SIZE)


@pytest.fixture
def args():
    torch.manual_seed(0)
    n = 2 * SIZE + 3
    return tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((D, D), (D,), (n, D)))


def rnn(w):
    def body(h, x):
        h = torch.tanh(h @ w + x)
        return h, h.sin() * x

    return body


def gradients(body: Any, h: Any, xs: Any, targets: Any, **options: Any) -> Any:
    end, ys = scan_remat(body, h, xs, **options)
    leaves = [t for t in tree_leaves((end, ys)) if isinstance(t, torch.Tensor)]
    total = torch.stack([t.pow(3).sum() for t in leaves if t.is_floating_point()]).sum()
    return torch.autograd.grad(total, targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoints", "reverse"),
    crossed(["all", "sqrt", Segmented(SIZE, Revolve(1)), Segmented(2 * SIZE), 2], [True, False], every=4),
)
def test_gradients(checkpoints, reverse, args):
    w, h, xs = args
    found = gradients(rnn(w), h, xs, args, checkpoints=checkpoints, reverse=reverse, compile="aot_eager")
    torch.testing.assert_close(found, gradients(rnn(w), h, xs, args, reverse=reverse))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoints", "n", "size"), crossed(["all", "sqrt"], [3, 2 * SIZE + 1], [1, SIZE], every=8)
)
def test_rows_whose_gradient_does_not_reach_the_last_steps(checkpoints, n, size, monkeypatch):
    monkeypatch.setattr(entry, "BLOCK", size)
    torch.manual_seed(0)
    w, h, xs = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((D, D), (D,), (n, D)))

    def delayed(carry, x):
        a, b, c = carry
        return (a * 0.5 + x.sin(), b + a.cos(), c + (b @ w).tanh()), None

    def loss(**options):
        return scan_remat(delayed, (h, h, h), xs, **options)[0][2].square().sum()

    expected = torch.autograd.grad(loss(), (w, h, xs))
    inside = torch.compile(lambda: loss(checkpoints=checkpoints), backend="aot_eager")
    for compiled in (lambda: loss(checkpoints=checkpoints, compile="aot_eager"), inside):
        torch.testing.assert_close(torch.autograd.grad(compiled(), (w, h, xs)), expected)


@pytest.mark.slow
def test_graphs_whatever_the_length_and_none_for_another_closure(args, monkeypatch):
    _, h, _ = args
    made = []
    compiled = UnrolledStep._compiled

    def counted(self, graph, *cotangents):
        made[-1] += 1
        return compiled(self, graph, *cotangents)

    monkeypatch.setattr(UnrolledStep, "_compiled", counted)

    def value(n):
        # Another weight, another closure, the same code: as in a training loop.
        w = torch.randn(D, D, dtype=torch.float64, requires_grad=True)

        def body(h, x):
            return torch.cos(h @ w) + x, None

        xs = torch.linspace(0, 1, n, dtype=torch.float64)
        end, _ = scan_remat(body, h, xs, checkpoints="sqrt", compile="aot_eager")
        end.sum().backward()
        assert w.grad is not None

    for n in (3 * SIZE, 40 * SIZE, 7 * SIZE + 1):
        made.append(0)
        value(n)
    # A block, its pull-back, and the pull-back of one whose carries are there already.
    assert made == [2, 1, 0]


def test_compiled_steps_are_run_in_blocks(args, monkeypatch):
    w, h, xs = args
    calls = {"run": 0, "pull": 0}
    for name in calls:
        method = getattr(UnrolledStep, name)

        def counted(self, *a, name=name, method=method):
            calls[name] += 1
            return method(self, *a)

        monkeypatch.setattr(UnrolledStep, name, counted)
    events = []

    def hook(phase, step):
        events.append((phase, step))

    found = gradients(rnn(w), h, xs, args, checkpoints="all", compile="aot_eager", on_step=hook)
    assert calls == {"run": 2, "pull": 2}
    n = len(xs)
    assert [k for phase, k in events if phase == "forward"] == list(range(n))
    assert [k for phase, k in events if phase == "reverse"] == list(range(n))[::-1]
    torch.testing.assert_close(found, gradients(rnn(w), h, xs, args))


@pytest.mark.parametrize("why", ["random", "a number in the carry", "torch.func", "hooks"])
def test_what_blocks_cannot_do_runs_as_it_is(why, args):
    w, h, xs = args
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)

    def run(compile):
        def body(h, x):
            return torch.tanh(h @ w + x), None

        def noisy(h, x):
            return torch.nn.functional.dropout(torch.tanh(h @ w + x), 0.3), None

        def numbered(carry, x):
            return (body(carry[0], x)[0] * (1 + carry[1]), carry[1] + 1), None

        torch.manual_seed(1)
        options = {"checkpoints": "all", "compile": compile}
        if why == "random":
            return gradients(noisy, h, xs, args, **options)
        if why == "a number in the carry":
            return gradients(numbered, (h, 0), xs, args, **options)
        if why == "torch.func":
            return torch.func.grad(lambda h: scan_remat(body, h, xs, **options)[0].sum())(h)
        with pack:
            return gradients(body, h, xs, args, **options)

    torch.testing.assert_close(run("aot_eager"), run(False))


def test_second_order_of_a_compiled_scan(args):
    w, h, xs = args

    def second(**options):
        end, ys = scan_remat(rnn(w), h, xs, checkpoints="all", **options)
        first = torch.autograd.grad(end.sum() + ys.sum(), args, create_graph=True)
        return torch.autograd.grad(torch.stack([g.pow(2).sum() for g in first]).sum(), args)

    torch.testing.assert_close(second(compile="aot_eager"), second())


def test_a_carry_that_changes_is_refused():
    xs = torch.ones(SIZE, D)
    with pytest.raises(TypeError, match=r"float32\[3\].*float64\[3\]"):
        scan_remat(lambda h, x: (h.double(), None), torch.ones(D), xs, checkpoints="all", compile="aot_eager")


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are handed to the backend."""
    found: list[torch.fx.GraphModule] = []
    compiled = UnrolledStep._compiled

    def noted(self, graph, *cotangents):
        found.append(graph)
        return compiled(self, graph, *cotangents)

    monkeypatch.setattr(UnrolledStep, "_compiled", noted)
    return found


def gated(w):
    def body(h, x):
        h = checkpoint_name(torch.sin(h @ w + x), "in")
        h = checkpoint_name(torch.sigmoid(h @ w), "out") * x
        return h, h.sum()

    return body


# How often a step's sin, matrix products (two of them) and sigmoid run again in the pull-back.
POLICIES = {
    "nothing": (save_nothing, (1, 2, 1)),
    "matmuls": (save_matmuls, (1, 0, 1)),
    "a name": (save_names("in"), (0, 2, 1)),
    "names": (save_names("in", "out"), (0, 1, 0)),
    "everything": (save_everything, (0, 0, 0)),
    # No product runs again, in the fewest bytes: the second one's sigmoid serves what is behind it.
    "budget": (checkpoint_policy(budget="free"), (1, 0, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(POLICIES)[::2])
def test_policies_inside_compiled_steps(name, args, graphs):
    w, h, xs = args
    policy, expected = POLICIES[name]
    run = lambda **options: gradients(gated(w), h[None], xs, args, policy=policy, **options)  # noqa: E731
    found = run(compile="aot_eager", checkpoints="all")
    torch.testing.assert_close(found, run(checkpoints="all"))
    pulled = ops(graphs[-1])
    # Two products a step for the carry, two for the weight; what is more is computed again.
    again = pulled["sin"], pulled["mm"] - 4 * SIZE, pulled["sigmoid"]
    assert again == tuple(SIZE * count for count in expected)


@pytest.mark.slow
def test_a_weights_gradient_is_added_up_step_by_step(args, graphs):
    w, h, xs = args
    found = gradients(rnn(w), h[None], xs, args, checkpoints="all", compile="aot_eager")
    torch.testing.assert_close(found, gradients(rnn(w), h[None], xs, args))
    # A product a step for the carry and one for the weight, which is added to the sum of the blocks before.
    pulled = ops(graphs[-1])
    assert (pulled["mm"], pulled["add"], pulled["cat"]) == (2 * SIZE, 3 * SIZE, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "tables"), [(4, 1), (3, 0)])
def test_constants_that_a_block_holds_take_a_quarter_of_an_operand(rows, tables, graphs):
    step = lambda h, _: (h * torch.arange(8.0).cos(), None)  # noqa: E731
    scan_remat(step, torch.ones(rows, 8), length=SIZE, compile=True)
    assert ops(graphs[-1])["once"] == tables


@pytest.mark.slow
def test_a_hook_that_a_module_gets_later():
    net, x = torch.nn.Linear(4, 4), torch.ones(4)
    scanned = lambda: scan_remat(lambda h, _: (net(h), None), x, length=3, compile="aot_eager")[0]  # noqa: E731

    def doubled(module: Any, args: Any, out: Any) -> Any:
        return out * 2

    scanned()
    net.register_forward_hook(doubled)
    torch.testing.assert_close(scanned(), net(net(net(x))))
