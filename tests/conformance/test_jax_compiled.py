"""The rows of JAX's tests that speak of jit and caching: jit is torch.compile; see test_jax_remat.py."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from remat import (
    checkpoint_name,
    policies,
    remat,
    save_nothing,
    save_ops,
    save_weight_matmuls as save_unbatched,
)
from remat.interop import from_torch_policy
from remat.interop.jax import checkpoint, checkpoint_policies
from remat.policies import (
    Policy,
    as_policy,
    offload,
    save_all_but_names,
    save_attention,
    save_collectives,
    save_costlier_than,
    save_every_nth,
    save_everything,
    save_larger_than,
    save_matmuls,
    save_names,
    where,
)
from tests.conformance.counting import COMPILES
from tests.conformance.rows import jax
from tests.conformance.test_jax_remat import Dot, Rebuilt
from tests.helpers import OpCounter, rand, sparse

pytestmark = [
    COMPILES,
    # Of Dynamo, about code of torch's own.
    pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
aten = torch.ops.aten
X, W = rand(3), rand(2, 2)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the graphs after AOT autograd, forward and backward."""

    def __init__(self):
        self.forward, self.backward = [], []

    def __call__(self, module, inputs):
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return aot_autograd(
            fw_compiler=self.keep(self.forward),
            bw_compiler=self.keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )(module, inputs)

    @staticmethod
    def keep(graphs):
        from functorch.compile import make_boxed_func  # type: ignore[reportPrivateImportUsage]

        def compiler(module, inputs):
            graphs.append(module)
            return make_boxed_func(module.forward)

        return compiler

    def count(self, name, which="backward"):
        graphs = getattr(self, which)
        nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        return sum(getattr(node.target, "_opname", "") == name for node in nodes)


def compiled(fn, backend: Any = "aot_eager"):
    return torch.compile(fn, backend=backend, fullgraph=True)


def sin_sin(x):
    return torch.sin(torch.sin(x))


@jax(7, "pass", "compile of remat, of grad, backward of compiled")
@pytest.mark.parametrize("wrap", [remat, lambda f: remat(f, policy=lambda info: False), checkpoint])
def test_remat_jit(wrap):
    g = wrap(sin_sin)
    torch.testing.assert_close(compiled(g)(X), sin_sin(X))
    expected = torch.cos(torch.sin(X)) * torch.cos(X)
    torch.testing.assert_close(compiled(grad(lambda x: g(x).sum()))(X), expected)
    leaf = X.clone().requires_grad_()
    compiled(g)(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, expected)


@jax(16)
def test_remat_jit2():
    """A region without arguments that closes over a value of the compiled function."""

    def f(x):
        y = 2 * x
        return remat(lambda: y * 1)()

    leaf = X.clone().requires_grad_()
    out = compiled(f)(leaf)
    out.sum().backward()
    torch.testing.assert_close((out.detach(), leaf.grad), (2 * X, torch.full_like(X, 2)))


def three_dots(x):
    for _ in range(3):
        x = torch.sin((x @ x) * 1e-3)
    return x


@jax(31, "pass", "2 sin, 6 dots in the compiled backward graph")
def test_remat_checkpoint_dots_jit():
    graphs = Graphs()
    f = compiled(remat(three_dots, policy=checkpoint_policies.checkpoint_dots), graphs)
    leaf = W.clone().requires_grad_()
    f(leaf).sum().backward()
    assert (graphs.count("sin"), graphs.count("cos"), graphs.count("mm")) == (2, 3, 6)
    torch.testing.assert_close(leaf.grad, grad(lambda x: three_dots(x).sum())(W))


@jax(73)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_excess_precision_hell(backend):
    """JAX's program as it stands: jit of remat under a policy that keeps all. A compiler that leaves out the
    rounding between the product and the cast does so in the forward and in the backward, or in neither."""
    x = (1 + torch.finfo(torch.bfloat16).eps) * torch.eye(2, dtype=torch.bfloat16)
    region = compiled(remat(lambda x: Rebuilt.apply(Dot.apply(x)), policy=save_everything), backend)
    out = region(x.requires_grad_())
    (rebuilt,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(rebuilt.float(), out.detach(), rtol=0, atol=0)


@jax(24)
def test_no_cse_widget():
    """Recomputation survives the pass that merges equal ops; where there is none, there is no fence."""
    graphs = Graphs()
    f = compiled(remat(sin_sin), graphs)
    f(X.clone().requires_grad_()).sum().backward()
    assert (graphs.count("sin"), graphs.count("cos")) == (1, 2)
    graphs, plain = Graphs(), Graphs()
    with torch.no_grad():
        compiled(remat(sin_sin), graphs)(X)
        compiled(lambda x: sin_sin(x), plain)(X)
    targets = [[n.target for g in each.forward for n in g.graph.nodes] for each in (graphs, plain)]
    assert targets[0] == targets[1]


@jax(5)
@jax(6)
@jax(47)
@jax(48)
@jax(49)
@jax(50)
@jax(51)
@pytest.mark.parametrize("static", [(), (1,)])
def test_caching(static):
    """JAX's linearize, vjp and fwd caching, and retracing: twenty calls compile once."""
    graphs = Graphs()
    region = remat(lambda x, double: torch.sin(2 * x if double else x), static_argnums=static)
    step = compiled(lambda x: region(x, True), graphs)
    for _ in range(20):
        step(X.clone().requires_grad_()).sum().backward()
    assert (len(graphs.forward), len(graphs.backward)) == (1, 1)


def attention(x, w):
    q = checkpoint_name(x @ w, "q")
    return torch.sin(torch.einsum("td,sd->ts", q, x).softmax(-1) @ torch.tanh(q))


def mlp(x, w):
    """Products with a bias, of which vmap makes a product and a sum."""
    h = checkpoint_name(torch.tanh(F.linear(x, w, w[0])), "q")
    return torch.sin(torch.addmm(w[1], F.linear(h, w, bias=w[2]), w))


VERDICTS = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "unbatched": save_unbatched,
    "ops": save_ops(aten.tanh, aten._softmax),
    "names": save_names("q"),
    "all but names": save_all_but_names("q"),
    "rule": lambda info: info.index % 2 == 0,
    "everything": save_everything,
    "attention": save_attention,
    "collectives": save_collectives,  # of which these functions have none
    "every second": save_every_nth(2, save_matmuls),
    "where": where(lambda info: info.index < 6, save_matmuls),
    "larger": save_larger_than(12 * 8),
    "cheaper": save_costlier_than(0.99),
    "offloaded matmuls": offload(save_matmuls),
    "offloaded names": offload(save_names("q")),
    "offloaded": offload(save_unbatched),
    "one or the other": save_names("q") | save_ops(aten._softmax),
    "both": save_matmuls & ~save_larger_than(12 * 8),
    "not": ~save_matmuls,
    "all but": save_everything & ~save_unbatched,
    "torch's": from_torch_policy([aten.mm.default, aten.bmm.default]),
    "with a bias": save_ops(aten.addmm),
    "inputs": importlib.import_module("remat.policies._selective").HostInputs(save_matmuls),
}
# What goes by the position of an op, or by bytes in memory, is another matter for a batch.
BY_EXAMPLE = [name for name in VERDICTS if name not in ("rule", "where", "larger", "both")]
COSTLY = ("mm", "bmm", "addmm", "tanh", "_softmax", "sin")


def test_every_policy_is_in_the_table():
    made = {type(as_policy(policy)) for policy in VERDICTS.values()}
    ready = {getattr(policies, name) for name in vars(policies) if name.startswith(("save_", "offload"))}
    named = {policy for policy in ready if isinstance(policy, Policy)}
    assert named <= set(map(as_policy, VERDICTS.values()))
    modules = ("_base", "_ready", "_selective", "_unbatched")
    found_named = vars(importlib.import_module("remat.policies._base"))["Named"]
    found = [c for m in modules for c in vars(importlib.import_module(f"remat.policies.{m}")).values()]
    own = {"__call__", "asked"}
    kinds = {c for c in found if isinstance(c, type) and issubclass(c, Policy) and own & vars(c).keys()}
    assert {kind for kind in kinds if not kind.__name__.startswith("_")} - {Policy} <= {*made, found_named}


@pytest.mark.parametrize(
    ("policy", "program"),
    sparse(
        (pytest.param(name, (mlp, attention)[i % 3 % 2]) for i, name in enumerate(VERDICTS) if i % 2 == 0), 4
    ),
)
def test_verdicts_are_the_same_compiled_and_under_vmap(policy, program):
    """What runs in forward and backward together, eager, compiled, and vmapped over examples, in and out."""

    def counted(run):
        return tuple(run(name) for name in COSTLY)

    region = remat(program, policy=VERDICTS[policy])
    x, w = rand(3, 4), rand(4, 4)
    xs = torch.stack([x, 2 * x])

    def loss(x, w):
        return region(x, w).sum()  # pyright: ignore

    with OpCounter() as eager:
        expected = grad(loss, (0, 1))(x, w)
    graphs = Graphs()
    torch.testing.assert_close(compiled(grad(loss, (0, 1)), graphs)(x, w), expected)
    assert counted(lambda n: graphs.count(n, "forward")) == counted(lambda n: eager[n])
    with OpCounter() as batched:
        per_example = vmap(grad(loss, (0, 1)), (0, None))(xs, w)
    torch.testing.assert_close(per_example[0][0], expected[0])
    with OpCounter() as outside:
        grad(lambda x, w: vmap(region, (0, None))(x, w).sum(), (0, 1))(xs, w)  # pyright: ignore
    for ops in (batched, outside) if policy in BY_EXAMPLE else ():
        # One matmul of the user's is one op, whatever its kind.
        assert ops.dots == eager.dots
        assert [ops[n] for n in COSTLY[3:]] == [eager[n] for n in COSTLY[3:]]
