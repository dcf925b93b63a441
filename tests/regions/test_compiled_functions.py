"""Eager regions, and looks, around functions that torch.compile has compiled: the compiled code runs, and
goes on to run afterwards."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from remat import (
    checkpoint_policy,
    explain,
    remat,
    save_attention,
    save_everything,
    save_matmuls,
    save_nothing,
    save_ops,
    saved_residuals,
)
from tests.helpers import crossed, sparse

# Dynamo looks at gradients of everything; flex attention wants to be compiled.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not a leaf Tensor", "ignore:.*flex_attention called"),
    pytest.mark.filterwarnings("ignore:.*cannot be planned"),
]
W = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
POLICIES: dict[str, Any] = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "everything": save_everything,
    "sines": save_ops(torch.ops.aten.sin),
    "all": checkpoint_policy(lambda info: True),
    "budget": checkpoint_policy(budget="free"),
}
BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


class Program:
    """A function of `x` and a weight; `as_python` counts how often it ran uncompiled."""

    def __init__(self, body: Callable[..., Any], backend: str | None, full: bool = True) -> None:
        self.as_python, self.buffer = 0, torch.ones(4, dtype=torch.float64)

        def core(x: Tensor, weight: Tensor, buffer: Tensor) -> Any:
            if not torch.compiler.is_compiling():
                self.as_python += 1
            return body(x, weight, buffer)

        self.core: Any = torch.compile(core, backend=backend, fullgraph=full) if backend else core

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.core(x.cos(), weight, self.buffer).exp()


def products(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    return torch.sin((x.sin() @ weight).cos() @ W)


def averages(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    buffer.mul_(0.9).add_(x.detach().mean(0))
    return (x @ weight).sin() * buffer.clone()


def routes(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    scores, chosen = (x @ weight).topk(2)
    return torch.zeros_like(x).scatter(-1, chosen, scores.softmax(-1)) @ W


def views(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    return (x.t() @ weight).view(2, 8).t().reshape(-1, 4).tanh()


BODIES = {f.__name__: f for f in (products, averages, routes, views)}


def steps(fn: Callable[..., Any], program: Program, count: int = 3) -> list[Tensor]:
    found = []
    for shift in range(count):
        x = (torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4) + shift).requires_grad_()
        weight = W.clone().requires_grad_()
        out = fn(x, weight)
        grads = torch.autograd.grad((out * out).sum(), (x, weight))
        found += [out.detach(), *grads, program.buffer.clone()]
    return found


def check(body: str, backend: str, wrap: Callable[[Any], Any]) -> None:
    plain, program = Program(BODIES[body], None), Program(BODIES[body], backend)
    made = steps(wrap(program), program)
    torch.testing.assert_close(made, steps(plain, plain), rtol=0, atol=1e-11)
    assert program.as_python == 0


@pytest.mark.parametrize(
    ("policy", "body"), list(zip(POLICIES, itertools.cycle(["products", "averages"]), strict=False))
)
def test_a_region_of_a_compiled_function(policy: str, body: str) -> None:
    check(
        "products" if policy == "budget" else body, "aot_eager", lambda fn: remat(fn, policy=POLICIES[policy])
    )


@pytest.mark.parametrize("body", ["routes", "views"])
def test_what_compiled_functions_do(body: str) -> None:
    check(body, "aot_eager", remat)


@pytest.mark.slow
def test_inductor_code_in_a_region() -> None:
    """Its kernels write raw memory, of which ops tell a half: gradients were off by 25."""
    check("products", "inductor", lambda fn: remat(fn, policy=save_matmuls))


@pytest.mark.parametrize("backend", BACKENDS)
def test_regions_in_regions(backend: str) -> None:
    def nested(fn: Any) -> Any:
        inner = remat(fn, policy=save_matmuls)
        return remat(lambda x, weight: inner(x.sin(), weight).cos())

    plain, program = Program(averages, None), Program(averages, backend)
    expected = steps(lambda x, weight: plain(x.sin(), weight).cos(), plain)
    torch.testing.assert_close(steps(nested(program), program), expected, rtol=0, atol=1e-11)
    assert program.as_python == 0


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "vmap", "jvp", "hessian"])
def test_torch_func_runs_compiled_functions_as_python_as_torch_does(transform: str) -> None:
    program, plain = Program(products, "aot_eager", full=False), Program(products, None)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    ways: dict[str, Callable[[Any], Any]] = {
        "grad": lambda f: torch.func.grad(lambda x: f(x, W).sum())(x),
        "vjp": lambda f: torch.func.vjp(lambda x: f(x, W), x)[1](x),
        "jacrev": lambda f: torch.func.jacrev(lambda x: f(x, W))(x),
        "hessian": lambda f: torch.func.hessian(lambda x: f(x, W).sum())(x),
        "vmap": lambda f: torch.func.vmap(lambda x: f(x[None], W))(x),
        "jvp": lambda f: torch.func.jvp(lambda x: f(x, W), (x,), (x.cos(),)),
    }
    way, region = ways[transform], remat(program, policy=save_matmuls)
    for _ in range(2):
        torch.testing.assert_close(way(region), way(plain), rtol=0, atol=1e-11)


LOOKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "saved_residuals": lambda f, x, w: saved_residuals(f, x, w),
    "explain": lambda f, x, w: explain(f, x, w),
    "policies": lambda f, x, w: explain(f, x, w, policies=True),
    "region": lambda f, x, w: remat(f)(x, w),
    "budget": lambda f, x, w: remat(f, policy=checkpoint_policy(budget=0.5))(x, w),
    "torch.func": lambda f, x, w: torch.func.grad(lambda x: remat(f)(x, w).sum())(x.detach()),
}


@pytest.mark.parametrize(
    "look", [pytest.param(k, marks=[pytest.mark.slow] * (k == "policies")) for k in LOOKS]
)
def test_a_look_leaves_compiled_code_on(look: str) -> None:
    full = look in ("explain", "region", "torch.func")
    program, plain = Program(averages, "aot_eager", full), Program(averages, None)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
    weight = W.clone().requires_grad_()
    if look == "torch.func":
        LOOKS[look](lambda x, w: program(x, w).cos(), x, weight)
    else:
        LOOKS[look](program, x, weight)
    reports = look in ("saved_residuals", "explain", "policies")
    assert not reports or torch.equal(program.buffer, torch.ones(4, dtype=torch.float64))
    program.as_python, program.buffer = 0, plain.buffer.clone()
    torch.testing.assert_close(steps(program, program, 1), steps(plain, plain, 1), rtol=0, atol=1e-11)
    assert program.as_python == 0


@pytest.mark.parametrize("policy", sparse(["attention", "nothing", "budget"]))
def test_flex_attention_in_eager_code(policy: str) -> None:
    chosen = save_attention if policy == "attention" else POLICIES[policy]
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))

    def block(scale: Tensor) -> Tensor:
        return flex_attention(q, k, v).mul(scale).sin()  # type: ignore[union-attr]

    region = remat(block, policy=chosen)
    for _ in range(2):
        scale = torch.randn(1, requires_grad=True)
        (expected,) = torch.autograd.grad(block(scale).sum(), scale)
        torch.testing.assert_close(torch.autograd.grad(region(scale).sum(), scale)[0], expected)
    scale = torch.randn(1, requires_grad=True)
    kept = saved_residuals(region, scale)
    assert policy == "budget" or any("flex" in str(one.op) for one in kept) == (policy == "attention")
    assert "flex_attention" in str(explain(block, scale))


def loop(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        start = torch.tensor(0), x.detach()
        _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), start)
    return (x @ weight * y).sin()


def steps_in_a_scan(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    carry, ys = scan(lambda c, row: ((c @ weight).sin(), (c @ weight * row).cos()), x[0].clone(), x)
    return ys + carry


def rows(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    along: Any = mapped
    return along(lambda row: (row @ weight).sin(), x).cos()


def products_along(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, (x @ weight).sin(), dim=0, combine_mode="generic").cos()


SLOW = [pytest.param(f, marks=pytest.mark.slow) for f in (steps_in_a_scan, rows, products_along)]


@pytest.mark.parametrize("body", [loop, *SLOW])
def test_operators_of_torch_that_compile_themselves(body: Callable[..., Any]) -> None:
    """`RematError` or 'Please convert all Tensors to FakeTensors first' before, but for the last."""
    plain, program = Program(body, None), Program(body, None)
    made = steps(remat(program, policy=save_matmuls), program)
    torch.testing.assert_close(made, steps(plain, plain), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("around", "full"), [("region", False), ("torch.func", True), ("recomputed", True)])
def test_a_compiled_function_in_a_branch_of_torch_cond(around: str, full: bool) -> None:
    program, plain = Program(products, "aot_eager", full), Program(products, None)

    def block(inner: Program) -> Any:
        return lambda x, w: torch.cond(x.sum() > -99, lambda x: inner(x, w).sin(), lambda x: x.cos(), (x,))

    region = remat(block(program), policy=save_matmuls)
    if around == "torch.func":
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
        made = torch.func.grad(lambda x: region(x, W).sum())(x)
        expected = torch.func.grad(lambda x: (plain(x, W).sin()).sum())(x)
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-11)
    fn = remat(lambda x, w: region(x.sin(), w)) if around == "recomputed" else lambda x, w: region(x.sin(), w)
    program.as_python = 0
    found = steps(fn, program)
    torch.testing.assert_close(found, steps(lambda x, w: plain(x.sin(), w).sin(), plain), rtol=0, atol=1e-11)
    assert program.as_python == 0
    steps(program, program)
    assert program.as_python == 0


class Layer(torch.nn.Module):
    """Dropout, a batch norm and a moving average: draws and buffers in one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(4, 4).double(), torch.nn.BatchNorm1d(4).double()
        self.average: Any
        self.register_buffer("average", torch.zeros(4, dtype=torch.float64))
        self.as_python = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.as_python += 1
        h = self.inner(x).sin()
        self.average.mul_(0.9).add_(h.detach().mean(0))
        return F.dropout(self.norm(h), 0.3, True) + self.average.clone()


def trained(layer: Layer, step: Callable[[Tensor], Tensor], count: int = 3) -> list[Tensor]:
    found = []
    for shift in range(count):
        x = (torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4) + shift).requires_grad_()
        torch.manual_seed(shift)
        out = step(x)
        inputs = [x, *layer.parameters()]
        grads = torch.autograd.grad((out * out).sum(), inputs, materialize_grads=True)
        found += [out.detach(), *grads, *[b.clone() for b in layer.buffers()], torch.get_rng_state()]
    return found


def in_checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(fn, x, use_reentrant=False)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "region": lambda fn, policy: remat(fn, policy=policy),
    "in a region": lambda fn, policy: remat(lambda x: remat(fn, policy=policy)(x)),
    "in torch's checkpoint": lambda fn, policy: in_checkpoint(remat(fn, policy=policy)),
    "around torch's checkpoint": lambda fn, policy: remat(in_checkpoint(fn), policy=policy),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["matmuls", "budget"])
def test_a_compiled_module_with_draws_and_buffers(policy: str, backend: str) -> None:
    torch.manual_seed(1)
    plain = Layer()
    layer = copy.deepcopy(plain)
    expected = trained(plain, torch.compile(plain, backend=backend, fullgraph=True))
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    found = trained(layer, remat(compiled, policy=POLICIES[policy]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert not layer.as_python


@pytest.mark.parametrize(("way", "policy"), crossed(WAYS, ["nothing", "matmuls", "sines"]))
def test_a_compiled_function_that_draws(way: str, policy: str) -> None:
    """In regions and torch's checkpoint around each other, and draws of eager code beside."""
    layer = Layer().eval()
    drawn = lambda x: F.dropout(layer.inner(x.sin()), 0.5).cos()  # noqa: E731
    core = torch.compile(drawn, backend="aot_eager", fullgraph=True)

    def step(x: Tensor) -> Tensor:
        return F.dropout(core(F.dropout(x, 0.2)).sinh(), 0.3)

    expected = trained(layer, step)
    found = trained(layer, WAYS[way](step, POLICIES[policy]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("policy", [None, "nothing"])
def test_a_compiled_function_that_contains_a_region(policy: str | None) -> None:
    """The inner region is one of the graph, whatever the eager region around keeps."""
    inner = remat(lambda x, weight: (x.sin() @ weight).sin() @ W, policy=save_matmuls)

    def body(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        return inner(x.cos(), weight).tanh()

    plain, program = Program(body, None), Program(body, "aot_eager")
    fn = remat(program, policy=POLICIES[policy]) if policy else program
    saved_residuals(program, torch.ones(4, 4, dtype=torch.float64), W.clone().requires_grad_())
    torch.testing.assert_close(steps(fn, program), steps(plain, plain), rtol=0, atol=1e-11)
    assert program.as_python == 0


@pytest.mark.filterwarnings("ignore:A budget of 0.5 is below")  # Inductor's code keeps what it keeps
@pytest.mark.parametrize(
    ("backend", "budget"),
    [
        ("aot_eager", 0.5),
        *[pytest.param("inductor", budget, marks=pytest.mark.slow) for budget in ("free", 1.0, "1KiB")],
    ],
)
def test_fullgraph_in_a_budget(backend: str, budget: Any) -> None:
    plain, program = Program(products, None), Program(products, backend)
    region = remat(program, policy=checkpoint_policy(budget=budget))
    torch.testing.assert_close(steps(region, program), steps(plain, plain), rtol=0, atol=1e-11)
    torch.testing.assert_close(steps(program, program), steps(plain, plain), rtol=0, atol=1e-11)
    assert program.as_python == 0


def test_a_graph_for_the_forward_and_one_for_the_recomputation_whatever_the_steps() -> None:
    """Dynamo compiles a function anew in a region: twenty steps stay below its limit of eight."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain, program = Program(products, None), Program(products, backend)  # type: ignore[arg-type]
    region = remat(program, policy=save_matmuls)
    torch.testing.assert_close(steps(region, program, 20), steps(plain, plain, 20), rtol=0, atol=1e-11)
    steps(program, program, 2)
    assert program.as_python == 0
    assert len(graphs) <= 3


def test_a_thread_does_not_turn_off_what_others_compile() -> None:
    """Under torch.func compiled functions run as Python in that thread alone.

    A switch of the process was put back in the wrong order by two threads: nothing was compiled ever after.
    """
    # Locks, which a region around does not look into.
    other_in, first_in, other_out = (threading.Lock() for _ in range(3))
    for lock in (other_in, first_in, other_out):
        lock.acquire()

    def reached(lock: Any) -> None:
        if lock.locked():
            lock.release()

    def wait_for(lock: Any) -> None:
        assert lock.acquire(timeout=20)
        lock.release()

    def other(x: Tensor) -> Tensor:
        reached(other_in)
        wait_for(first_in)
        return x.sin()

    def first(x: Tensor) -> Tensor:
        reached(first_in)
        wait_for(other_out)
        return x.cos()

    def run() -> None:
        torch.func.grad(lambda x: remat(other)(x).sum())(torch.ones(3))
        reached(other_out)

    def compiled() -> bool:
        program = Program(products, "aot_eager")
        steps(program, program, 1)
        return program.as_python == 0

    assert compiled()
    thread = threading.Thread(target=run)
    thread.start()
    wait_for(other_in)
    while_other_runs = compiled()
    torch.func.grad(lambda x: remat(first)(x).sum())(torch.ones(3))
    thread.join()
    assert (while_other_runs, compiled()) == (True, True)


@pytest.mark.slow
def test_reports_say_that_policies_do_not_reach_in() -> None:
    program = Program(products, "inductor")
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
    assert "remat_compiled_code" in str(explain(remat(program, policy=save_matmuls), x, W.clone()))
