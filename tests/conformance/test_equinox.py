"""equinox's own tests of its checkpointed loops and of filter_checkpoint, by their names.

Of tests/test_while_loop.py, test_scan.py and test_checkpoint.py; docs/measured/trust.md has the table. Its
while_loop of kind "checkpointed" is `while_remat`, its `.at[i].set` a `torch.where`. `buffers=`, memory that
XLA updates in place, is only a carry here.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.func import grad, grad_and_value, jacrev, jvp, vmap

from remat import remat, scan_remat, while_remat
from tests.conformance.equinoxs import SIZE, Problem, put, total
from tests.conformance.rows import row
from tests.helpers import vjp
from tests.scan.test_schedules import GOLDEN


def take(values, at):
    """`values[at]`, which vmap has for no tensor."""
    return values.gather(0, at.reshape(1))[0]


@pytest.fixture
def problem():
    return Problem()


@row("pass", "`kind` and `buffers` have no counterpart")
@pytest.mark.parametrize("checkpoints", [1, 9])
def test_notangent_forward(problem, checkpoints):
    with torch.no_grad():
        got = problem.run(*problem.args, 5, checkpoints=checkpoints)
    torch.testing.assert_close(got, problem.plain(*problem.args, 5))


@row("pass", "`jvp`")
def test_forward(problem):
    inputs = problem.val1, problem.val2
    tangents = tuple(torch.ones_like(t) for t in inputs)
    run = lambda f, **options: jvp(lambda *v: f(*v, problem.params, 5, **options), inputs, tangents)  # noqa: E731
    torch.testing.assert_close(run(problem.run, checkpoints=9), run(problem.plain))


@row(
    "pass",
    "17 schedules, every second of known length: values, gradients, and each step that the backward "
    "evaluates, in order",
)
@pytest.mark.parametrize(
    ("with_max_steps", "checkpoints", "steps", "golden"),
    [pytest.param(i % 2 == 0, *g) for i, g in enumerate(GOLDEN)],
)
def test_backward_checkpointed(problem, with_max_steps, checkpoints, steps, golden):
    """The steps that the backward evaluates, in their order: Stumm and Walther's, then Wang and Moin's."""
    order = []

    def note(kind, step):
        order.append(step)

    def f(val1, val2, params):
        options = {"checkpoints": checkpoints, "on_step": note, "max_steps_only": with_max_steps}
        return total(problem.run(val1, val2, params, steps, **options))

    got = grad_and_value(f, (0, 1, 2))(*problem.args)
    expected = grad_and_value(lambda *args: total(problem.plain(*args, steps)), (0, 1, 2))(*problem.args)
    torch.testing.assert_close(got, expected)
    assert order == [*range(steps), *map(int, golden.split(","))]


@row("pass", "by `max_steps` alone")
def test_backward_bounded(problem):
    got = grad(lambda *args: total(problem.run(*args, 14, max_steps_only=True)), (0, 1, 2))(*problem.args)
    expected = grad(lambda *args: total(problem.plain(*args, 14)), (0, 1, 2))(*problem.args)
    torch.testing.assert_close(got, expected)


@row("pass", name="test_vmap_primal_unbatched_cond")
@row("pass", "each example stops by itself", name="test_vmap_primal_batched_cond")
@pytest.mark.parametrize("cond", ["unbatched", pytest.param("batched", marks=pytest.mark.slow)])
def test_vmap_primal(problem, cond):
    """Under a condition that is one for all, and one that each example has."""
    starts = torch.tensor([0, 3, 0])
    inputs = torch.randn(3, 2).double(), torch.randn(3, SIZE).double()

    def batched(f, **options):
        def of_one(val1, val2, params, start):
            return total(f(val1, val2, params, 14, start=start if cond == "batched" else 0, **options))

        return vmap(grad_and_value(of_one, (0, 1, 2)), (0, 0, None, 0))(*inputs, problem.params, starts)

    torch.testing.assert_close(batched(problem.run, checkpoints=4), batched(problem.plain))


@row("pass", "`jacrev`")
def test_vmap_cotangent(problem):
    run = lambda f, **options: jacrev(lambda v, p: f(v, problem.val2, p, 6, **options), (0, 1))  # noqa: E731
    args = problem.val1, problem.params
    torch.testing.assert_close(run(problem.run, checkpoints=4)(*args), run(problem.plain)(*args))


@row("adapted", "evaluations are counted, no clock")
def test_speed_grad_checkpointed_while():
    for checkpoints in (20, 40):
        runs = []

        def body(carry, runs=runs):
            runs.append(1)
            return carry[0] + 1, torch.tanh(carry[1])

        x = torch.ones(2, requires_grad=True)
        steps = 2 * checkpoints
        while_remat(lambda c, n=steps: c[0] < n, body, (0, x), checkpoints=checkpoints)[1].sum().backward()
        assert 2 * steps <= len(runs) <= 3 * steps


@row("pass", "two loops deep, per example, with and without reading what was written")
@pytest.mark.parametrize("read", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nested_loops(read):
    """How diffrax saves at given times: a loop over intervals, in it one over steps, each example its own."""
    ts = torch.stack([torch.linspace(0, 4, 12), torch.linspace(0, 3, 12)]).double()
    final, start = torch.tensor([11, 10]), torch.tensor([0, 2])

    def loops(loop, step, val1, rest, ts, final):
        def inner(carry):
            step, done, val1, (val2, val3, val4) = carry
            val1 = val1 * (1 + 0.05 * torch.sin(100 * val1 + 3))
            set2 = set3 = set4 = val1
            if read:
                at = (step * 7) % torch.clamp(step, min=1)
                set2 = val1 + take(val2, at)
                set3 = 0.8 * val1 + take(val2, at) + take(val3, at)
                set4 = val1 + torch.tanh(take(val2, at) * take(val4, at))
            return step + 1, done, val1, (put(val2, step, set2), put(val3, step, set3), put(val4, step, set4))

        def outer(carry):
            step, val1, rest = carry
            val1 = val1 * (1 + 0.05 * torch.sin(105 * val1 + 1))
            done = torch.floor(take(ts, step) + 1)
            more = lambda c: (take(ts, c[0].clamp(max=11)) < c[1]) & (c[0] < 12)  # noqa: E731
            step, _, val1, rest = loop(more, inner, (step, done, val1, rest), 10)
            return step, val1, rest

        return loop(lambda c: c[0] < final, outer, (step, val1, rest), 6)[1:]

    def as_scan(more, body, carry, most):
        flat, spec = pytree.tree_flatten(carry)
        for _ in range(most):
            old = pytree.tree_unflatten(flat, spec)
            new, go = pytree.tree_leaves(body(old)), more(old)
            flat = [torch.where(go, a, b) for a, b in zip(new, flat, strict=True)]
        return pytree.tree_unflatten(flat, spec)

    ours = lambda more, body, carry, most: while_remat(more, body, carry, max_steps=most)  # noqa: E731
    rest = tuple(torch.zeros(2, 12).double() for _ in range(3))
    val1 = torch.tensor([0.3, 0.6]).double()

    def run(loop):
        def loss(val1, step, rest, ts, final):
            last, saved = loops(loop, step, val1, rest, ts, final)
            return last.sin() + total(s.cos() for s in saved)

        return vmap(grad_and_value(loss))(val1, start, rest, ts, final)

    torch.testing.assert_close(run(ours), run(as_scan))


def test_zero_buffer():
    loop = lambda x: while_remat(  # noqa: E731
        lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1]), (0, x), max_steps=5
    )[1]
    empty = torch.zeros(5, 0)
    assert jvp(loop, (empty,), (empty,))[0].shape == empty.shape
    assert grad(lambda x: loop(x).sum())(empty).shape == empty.shape


@row("adapted", "gradients of every result by every carry, in place of which are zero by structure")
def test_symbolic_zero():

    def body(carry):
        a, b, c, d, e, f = carry
        return c, d, b.detach(), d, f, e

    def plain(carry: Any) -> Any:
        for _ in range(5):
            carry = body(carry)
        return carry

    init: Any = tuple(torch.tensor(float(i)) for i in (1, 2, 3, 4))
    ints = torch.tensor(5), torch.tensor(6)
    loop = lambda *init: while_remat(lambda c: True, body, (*init, *ints), max_steps=5)  # noqa: E731
    outs, expected = loop(*init), plain((*init, *ints))
    torch.testing.assert_close(outs, expected)
    every = (0, 1, 2, 3)
    for i in every:
        got = grad(lambda *init, i=i: torch.as_tensor(loop(*init)[i]).sin(), every)(*init)
        expected = grad(lambda *init, i=i: plain((*init, *ints))[i].sin(), every)(*init)
        torch.testing.assert_close(got, expected)


@row("pass", "a loop over a number")
def test_disable_jit():
    assert while_remat(lambda c: True, lambda c: 5, 3, max_steps=3) == 5


@row("pass", "with its gradient")
def test_buffer_index():
    def body(carry):
        return torch.cat([carry[:, :1], torch.zeros(3, 4)], 1)

    x = torch.ones(3, 5, requires_grad=True)
    out = while_remat(lambda c: True, body, x, max_steps=2)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 0, 0, 0, 0]).expand(3, 5))


def test_nondifferentiable_body1():
    """A carry that is cut off in the body, an integer, None, and a tensor that is written to by place."""

    def body(carry):
        step, x, y, z, _ = carry
        return step + 1, x + y.detach(), y + 1, put(z, step, y), None

    def f(loop: Any, x, z, y):
        _, x, y, z, none = loop((0, x, y, z, None))
        assert none is None
        return x + y + z.sum()

    def plain(carry):
        for _ in range(3):
            carry = body(carry)
        return carry

    def ours(carry: Any) -> Any:
        return while_remat(lambda c: True, body, carry, max_steps=3)

    args = torch.tensor(1.2), torch.tensor([-5.0, -5, -5]), torch.tensor(0.7)
    got, expected = (
        grad_and_value(lambda x, z, y, loop=loop: f(loop, x, z, y), (0, 1, 2))(*args)
        for loop in (ours, plain)
    )
    torch.testing.assert_close(got, expected)


@row("adapted", "gradients, in place of what equinox prints")
def test_nondifferentiable_body2():
    """What has a derivative takes several steps to find out; the last one's is dropped in the body."""

    def body(carry):
        x, y, z, w = carry
        return x + 1, x + y, y + z, w.detach() * 2

    ones = tuple(torch.tensor(1.0) for _ in range(4))

    def f(*carry):
        _, y, _, w = while_remat(lambda c: True, body, carry, max_steps=3)
        return y + w

    assert grad(f, (0, 1, 2, 3))(*ones) == (3.0, 1.0, 0.0, 0.0)


@row("adapted", "the same; plain autograd and `torch.func`")
@pytest.mark.parametrize("by", ["backward", "grad"])
def test_body_fun_grads(by):

    def f(x, y):
        return total(
            while_remat(lambda c: True, lambda c: (c[0] * x, c[1] + 1), (torch.tensor(1.0), y), max_steps=3)
        )

    x, y = (
        torch.tensor(1.5, requires_grad=by == "backward"),
        torch.tensor(1.0, requires_grad=by == "backward"),
    )
    got = torch.autograd.grad(f(x, y), (x, y)) if by == "backward" else grad(f, (0, 1))(x, y)
    torch.testing.assert_close(got, (torch.tensor(3 * 1.5**2), torch.tensor(1.0)))


@row("adapted", "no gradient; equinox evaluates no step for it, this library does")
def test_trivial_vjp():

    def f(x):
        return while_remat(lambda c: True, lambda c: c, (x, torch.tensor(0.0)), max_steps=3)[1]

    assert grad(f)(torch.tensor(1.0)) == 0
    x = torch.tensor(1.0, requires_grad=True)
    assert torch.autograd.grad(f(x), x, allow_unused=True) == (None,)


@row("adapted", "an integer carry")
@pytest.mark.parametrize("pred", [True, False])
def test_buffer_at_set(pred):
    body = lambda c: torch.where(torch.tensor(pred), put(c, 0, 1), c)  # noqa: E731
    out = while_remat(lambda c: True, body, torch.tensor([0]), max_steps=1)
    assert torch.equal(out, torch.tensor([int(pred)]))


class Carry(NamedTuple):
    is_none: None
    is_bool: torch.Tensor
    is_int: torch.Tensor
    unperturbed: torch.Tensor
    perturbed1: torch.Tensor
    perturbed2: torch.Tensor
    perturbed_buffer: torch.Tensor
    unperturbed_buffer: torch.Tensor


@row(
    "adapted",
    "no gradient where there is none. A float that none reaches says `requires_grad` nevertheless",
)
def test_unperturbed_output():
    """What has no derivative comes out with none, or with zero; what gets one in the loop has it."""

    def body(c):
        return Carry(
            c.is_none,
            c.is_bool,
            c.is_int,
            c.unperturbed,
            c.perturbed2,
            c.perturbed2,
            put(c.perturbed_buffer, 0, c.perturbed2),
            put(c.unperturbed_buffer, 0, c.unperturbed),
        )

    x = torch.tensor(2.0, requires_grad=True)
    one = torch.tensor(1.0)
    init = Carry(
        None, torch.tensor(True), torch.tensor(1), one, one, x, torch.tensor([3.0]), torch.tensor([4.0])
    )
    out = while_remat(lambda c: True, body, init, max_steps=1)
    assert type(out) is Carry and out.is_none is None
    perturbed = {"perturbed1", "perturbed2", "perturbed_buffer"}
    graded = {name for name in Carry._fields if getattr(getattr(out, name), "requires_grad", False)}
    assert perturbed <= graded and not graded & {"is_bool", "is_int"}
    for name in graded:
        (got,) = torch.autograd.grad(getattr(out, name).sum(), x, retain_graph=True, allow_unused=True)
        assert got == (1 if name in perturbed else None)


@pytest.mark.parametrize("length", [4, None])
@pytest.mark.parametrize("by_vjp", [True, False])
def test_scan(length, by_vjp):
    def step(carry, x):
        (carry1, carry2), (x1, x2) = carry, x
        carry1, carry2 = carry1 + 1, carry2 - 1
        return (carry1, carry2), (2 * x1 + carry1, 2 * x2 + carry2)

    def plain(init, xs):
        ys = []
        for x in zip(*xs, strict=True):
            init, y = step(init, x)
            ys.append(y)
        return tuple(torch.stack(y) for y in zip(*ys, strict=True)), init

    def ours(init, xs):
        final, ys = scan_remat(step, init, xs, length=length, checkpoints=2)
        return ys, final

    init, xs = (0, 2), (torch.arange(4.0), torch.arange(8.0).reshape(4, 2))
    torch.testing.assert_close(ours(init, xs), plain(init, xs))
    if by_vjp:
        cts = torch.randn(4), torch.randn(4, 2)
        got, expected = (vjp(lambda *xs, f=f: f(init, xs)[0], *xs)[1](cts) for f in (ours, plain))
        torch.testing.assert_close(got, expected)


@row("pass", "bitwise")
def test_checkpoint():
    """filter_checkpoint of a module is a region of it; the gradients are its own."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(1, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.ones(1)
    got, expected = (
        torch.autograd.grad(f(x).sum(), list(mlp.parameters()), materialize_grads=True)
        for f in (remat(mlp), mlp)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
