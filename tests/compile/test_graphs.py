"""What is in the graphs that a compiler gets: which ops run again, what is kept, how often it compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.func import functional_call, grad, vmap

from remat import checkpoint_name, checkpoint_policy, remat, save_all_but_names, save_matmuls, save_names
from remat.policies import Policy, save_everything, save_nothing, save_ops, save_weight_matmuls
from remat.transforms import value_and_grad
from tests.compiled import Graphs, compiled, dots, ops
from tests.helpers import OpCounter, custom, rand, same

aten = torch.ops.aten
POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "unbatched": save_weight_matmuls,
    "names": save_names("h"),
    "others": save_all_but_names("h"),
    "ops": save_ops(aten.sigmoid),
    "budget": checkpoint_policy(budget=0.9),
    "rule": checkpoint_policy(lambda info: info.index > 0),
}


def block(w: Tensor, x: Tensor) -> Tensor:
    """Every policy above keeps something else of it."""
    h = checkpoint_name(torch.tanh(x @ w), "h")
    return torch.sin(torch.bmm(h[None], w[None])[0]) + torch.sigmoid(h)


def shared() -> tuple[Tensor, Tensor]:
    return rand(4, 4), rand(2, 4)


RECOMPUTED = ("mm", "bmm", "tanh", "sigmoid", "sin", "cos")


def run_again(policy: str) -> list[int]:
    """How often each op runs in the backward pass of eager code."""
    w, x = shared()
    loss = remat(block, policy=POLICIES[policy])(w.requires_grad_(), x).sum()
    with OpCounter() as eager:
        loss.backward()
    return [eager[op] for op in RECOMPUTED]


def test_every_policy_keeps_something_else():
    counts = [run_again(policy) for policy in POLICIES]
    assert all(counts.count(found) == 1 for found in counts), counts


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_recomputes_what_it_recomputes_in_eager(policy):
    region = remat(block, policy=POLICIES[policy])
    w, x = shared()
    graphs = Graphs(lambda w, x: region(w, x).sum())
    graphs(w.requires_grad_(), x).backward()
    assert [graphs.backward[op] for op in RECOMPUTED] == run_again(policy)


@pytest.mark.parametrize("policy", ["nothing", "names", "rule"])
def test_vmap_of_grad_recomputes_what_it_recomputes_in_eager(policy):
    region = remat(block, policy=POLICIES[policy])
    w, x = shared()
    per_sample = vmap(grad(lambda w, x: region(w, x).sum()), (None, 0))
    graphs = Graphs(per_sample)
    graphs(w, x[:, None])
    with OpCounter() as eager:
        per_sample(w, x[:, None])
    assert dots(graphs.forward) == eager.dots
    for op in ("tanh", "sigmoid", "sin", "cos"):
        assert graphs.forward[op] == eager[op], op


def chain(depth: int, policy: Policy = save_nothing):
    region = remat(lambda w, x: torch.tanh(x @ w).sin(), policy=policy)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(depth):
            x = region(w, x)
        return x.sum()

    return loss


def test_one_forward_and_one_recomputation():
    w, x = shared()
    graphs = Graphs(chain(5))
    graphs(w.requires_grad_(), x.requires_grad_()).backward()
    assert graphs.forward["mm"] == 5 and graphs.backward["mm"] == 5 + 2 * 5
    assert graphs.frames == 1


def test_one_forward_and_one_recomputation_in_one_graph():
    w, x = shared()
    graphs = Graphs(grad(chain(5), (0, 1)))
    graphs(w, x)
    assert graphs.forward["mm"] == 5 + 5 + 2 * 5 and not graphs.backward


@pytest.mark.slow
def test_a_second_order_gradient_recomputes_the_first_one_once():
    w, x = shared()
    first = grad(chain(3))
    graphs = Graphs(grad(lambda w, x: first(w, x).square().sum()))
    graphs(w, x)
    plain = Graphs(grad(lambda w, x: grad(chain(3, save_everything))(w, x).square().sum()))
    plain(w, x)
    # Forward and first backward run once more, no op more often than that.
    assert plain.forward["mm"] < graphs.forward["mm"] <= 3 * plain.forward["mm"]


def test_nested_regions_run_the_inner_function_once_per_level():
    inner = remat(lambda w, x: torch.tanh(x @ w).sin())
    outer = remat(lambda w, x: inner(w, inner(w, x).exp()))
    w, x = shared()
    graphs = Graphs(lambda w, x: outer(w, x).sum())
    graphs(w.requires_grad_(), x.requires_grad_()).backward()
    # Two inner regions: again in the outer's recomputation, of which the last result is not needed, and
    # each again in its own.
    assert graphs.forward["mm"] == 2 and graphs.backward["mm"] - 2 * 2 in (3, 4)


def test_an_outer_region_that_saves_spares_the_inner_one():
    inner = remat(lambda w, x: torch.tanh(x @ w).sin())
    outer = remat(lambda w, x: inner(w, x.exp()).exp(), policy=save_matmuls)
    w, x = shared()
    graphs = Graphs(lambda w, x: outer(w, x).sum())
    graphs(w.requires_grad_(), x.requires_grad_()).backward()
    assert graphs.backward["mm"] == 2


def test_what_is_kept_is_the_inputs_of_the_regions():
    w, x = shared()
    depth, row = 4, 8 * x.numel()
    graphs = Graphs(chain(depth))
    graphs(w.requires_grad_(), x.requires_grad_()).backward()
    assert graphs.saved_bytes == depth * row + 8 * w.numel()
    plain = Graphs(chain(depth, save_everything))
    plain(w, x).backward()
    assert plain.saved_bytes > graphs.saved_bytes


def test_save_everything_adds_nothing_to_the_graph():
    w, x = shared()
    graphs = Graphs(chain(2, save_everything))
    graphs(w.requires_grad_(), x).backward()
    assert graphs.backward["fence"] == 0 and graphs.backward["mm"] == 3


def test_the_second_call_compiles_nothing():
    w, x = shared()
    graphs = Graphs(chain(3, save_matmuls))
    for seed in range(3):
        graphs(w.requires_grad_(), rand(2, 4, seed=seed)).backward()
    assert graphs.frames == 1


@pytest.mark.parametrize(("how", "policy"), [("dynamic", save_nothing), ("marked", save_matmuls)])
def test_dynamic_shapes_compile_once(how, policy):
    loss = chain(2, policy)
    w, _ = shared()
    w.requires_grad_()
    graphs = Graphs(loss, dynamic=True if how == "dynamic" else None)
    for rows in (3, 5, 7):
        x = rand(rows, 4)
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
        same(torch.autograd.grad(graphs(w, x), w), torch.autograd.grad(chain(2, save_everything)(w, x), w))
    assert graphs.frames == 1 and graphs.backward["mm"] == 3 + (2 if policy == save_nothing else 0)


@pytest.mark.slow
def test_dynamic_batch_of_per_sample_gradients_compiles_once():
    w, _ = shared()
    per_sample = vmap(grad(chain(2)), (None, 0))
    graphs = Graphs(per_sample, dynamic=True)
    for rows in (3, 5):
        x = rand(rows, 1, 4)
        same(graphs(w, x), per_sample(w, x))
    assert graphs.frames == 1


@pytest.mark.slow
def test_every_wrapped_function_has_a_compilation_of_its_own():
    w, x = shared()
    # One code object for all would run into Dynamo's limit of recompilations.
    for i in range(torch._dynamo.config.recompile_limit + 2):
        region = remat(lambda w, x, i=i: torch.tanh(x @ w) * i, name=f"block{i}")
        same(compiled(region)(w, x), torch.tanh(x @ w) * i)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x))) * scale


class Network(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.wrapped = [wrap(block) for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for region in self.wrapped:
            x = region(x, scale=0.5)
        return x.square().sum()


def test_modules():
    network = Network(lambda block: remat(block, policy=save_matmuls)).double()
    plain = Network(lambda block: block).double()
    graphs = Graphs(network)
    for seed in range(2):
        for model, run in ((network, graphs), (plain, plain)):
            model.zero_grad()
            run(rand(2, 4, seed=seed)).backward()
        same([p.grad for p in network.parameters()], [p.grad for p in plain.parameters()])
    assert graphs.frames == 1
    # Of each block a product for its weight, one for what went into it, and what is not kept.
    assert graphs.backward["mm"] + graphs.backward["addmm"] == 6


@pytest.mark.slow
def test_a_training_step_in_one_graph():
    network = Network(remat).double()

    def step(params, x):
        loss, gradient = value_and_grad(lambda p: functional_call(network, p, (x,)))(params)
        return loss, {name: p - 0.1 * gradient[name] for name, p in params.items()}

    params = {name: p.detach() for name, p in network.named_parameters()}
    graphs = Graphs(step)
    same(graphs(params, rand(2, 4)), step(params, rand(2, 4)))
    assert graphs.frames == 1 and graphs.forward["fence"] > 0


def test_methods_and_static_arguments():
    class Scaled:
        @remat(static_argnums=2, static_argnames="flag")
        def run(self, x, mode, *, flag):
            return torch.tanh(x).sin() * (2 if mode == "double" else 1) * (3 if flag else 1)

    x = rand(3).requires_grad_()
    for mode, flag in (("double", True), ("single", False)):
        torch._dynamo.reset()
        got = compiled(lambda x, mode=mode, flag=flag: Scaled().run(x, mode, flag=flag).sum())(x)
        want = (torch.tanh(x).sin() * (2 if mode == "double" else 1) * (3 if flag else 1)).sum()
        same(torch.autograd.grad(got, x), torch.autograd.grad(want, x))


def test_custom_ops_and_old_style_functions():
    doubled = custom(torch.sin, lambda g, x: 2 * g * x.cos())

    def region(x):
        return torch.ops.remat_tests.square(doubled(x.tanh()))

    x = rand(3).requires_grad_()
    got = torch.autograd.grad(compiled(lambda x: remat(region)(x).sum(), "aot_eager")(x), x)
    same(got, torch.autograd.grad(region(x).sum(), x))


@torch.library.custom_op("remat_tests::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


square.register_fake(torch.empty_like)
square.register_autograd(
    lambda ctx, g: g * 2 * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_without_gradients_the_function_runs_as_it_is():
    w, x = shared()
    graphs = Graphs(chain(2))
    with torch.no_grad():
        same(graphs(w.requires_grad_(), x), chain(2, save_everything)(w, x))
    assert graphs.forward["mm"] == 2 and graphs.forward["fence"] == 0


def test_ahead_of_time_without_dynamo():
    w, x = shared()
    w.requires_grad_()
    loss, found = chain(2, save_matmuls), {}

    def keep(name) -> Any:
        def compiler(module, _):
            found[name] = ops(module)
            return make_boxed_func(module.forward)

        return compiler

    cut = min_cut_rematerialization_partition
    run = aot_function(loss, fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=cut)
    same(torch.autograd.grad(run(w, x), w), torch.autograd.grad(chain(2, save_everything)(w, x), w))
    assert found["forward"]["mm"] == 2 and found["backward"]["mm"] == 3


# Dynamo's own, where it resumes after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_graph_break_in_a_region_runs_it_in_eager(capsys):
    def noisy(w, x):
        print("broken")
        return torch.tanh(x @ w).sin()

    w, x = shared()
    w.requires_grad_()
    region = remat(noisy)
    run = torch.compile(lambda w, x: region(w, x * 2).sum() * 3, backend="aot_eager")
    want = torch.autograd.grad(torch.tanh(2 * x @ w).sin().sum() * 3, w)
    same(torch.autograd.grad(run(w, x), w), want)
    assert "broken" in capsys.readouterr().out


@pytest.mark.slow
def test_callables_of_every_kind():
    w, x = shared()

    class Product:
        def __call__(self, x):
            return torch.tanh(x @ w).sin()

        def method(self, x):
            return self(x)

    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softplus()).double()
    kinds: list[Any] = [
        Product(),
        Product().method,
        functools.partial(torch.pow, exponent=3),
        torch.sin,
        layer,
    ]
    for fn in kinds:
        torch._dynamo.reset()

        def loss(x, fn=fn):
            return remat(policy=save_nothing)(fn)(x).square().sum()  # pyright: ignore

        graphs = Graphs(grad(loss))
        same(graphs(x), grad(lambda x, fn=fn: fn(x).square().sum())(x))
        assert graphs.forward["fence"] > 0, fn


def test_the_backend_that_runs_the_graph_as_it_is():
    w, x = shared()
    loss = chain(2)
    same(compiled(grad(loss), "eager")(w, x), grad(loss)(w, x))
    w.requires_grad_()
    same(torch.autograd.grad(compiled(loss, "eager")(w, x), w), torch.autograd.grad(loss(w, x), w))


FENCED: dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    # What comes first, the data alone: weights only join it.
    "weights": (1, lambda x, w, b: torch.tanh(torch.addmm(b, x, w)).sin()),
    "views": (1, lambda x, w, b: torch.tanh(x @ w.t() + b[:, None].t()).sin()),
    "norm": (1, lambda x, w, b: torch.tanh(F.layer_norm(x, (4,), b, b) @ w).sin()),
    # Something is computed from each by itself.
    "own": (3, lambda x, w, b: torch.tanh(torch.sin(x) @ torch.exp(w) + torch.cos(b)).sin()),
    "left": (2, lambda x, w, b: torch.tanh((w @ x.t()).t() * x.exp()).sin()),
    # A product with a constant is one of the operand alone.
    "constant": (1, lambda x, w, b: torch.tanh((torch.ones(4, 4, dtype=w.dtype) @ w).tanh() @ x.t()).sin()),
}


@pytest.mark.parametrize("case", FENCED)
def test_only_what_a_recomputation_starts_from_is_fenced(case):
    expected, fn = FENCED[case]
    x, w, b = rand(8, 4), rand(4, 4).requires_grad_(), rand(4)
    x.requires_grad_()
    graphs = Graphs(lambda *args: remat(fn)(*args).sum())
    got = torch.autograd.grad(graphs(x, w, b), [x, w], allow_unused=True)
    same(got, torch.autograd.grad(fn(x, w, b).sum(), [x, w], allow_unused=True))
    assert graphs.backward["fence"] == expected
    # All is computed again, and nothing but the arguments is handed on (and what needs none of them).
    assert case == "constant" or graphs.saved_bytes <= 8 * (x.numel() + w.numel() + b.numel())


def test_the_fence_is_the_identity_for_every_derivative():
    from tests.compile.inside import fence

    x, other = rand(3), rand(3, seed=1)
    fenced = lambda x: (fence(x.sin(), [other, x]) ** 3).sum()  # noqa: E731
    plain = lambda x: (x.sin() ** 3).sum()  # noqa: E731
    for transform in (grad, torch.func.hessian, lambda f: lambda x: torch.func.jvp(grad(f), (x,), (other,))):
        same(transform(fenced)(x), transform(plain)(x))
    batch = torch.stack([x, other])
    same(vmap(grad(fenced))(batch), vmap(grad(plain))(batch))
    same(fence(x, []), x)
    torch.library.opcheck(torch.ops.remat.fence.default, (x, [other]), test_utils="test_schema")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "policy"),
    [("vmap(grad)", save_matmuls), ("hessian", ~save_matmuls)],
    ids=str,
)
def test_a_bias_added_in_place_to_a_view_of_a_captured_product(transform, policy):
    """Which levels differentiate the operands decides what ops that comes down to: every recomputation has
    those of the forward, whichever level it pulls back for, AOTAutograd's for the parameters included."""
    w, b = (torch.nn.Parameter(t) for t in (rand(2, 3, 3), rand(2, 3)))

    def fn(x: Tensor) -> Tensor:
        h = torch.einsum("thc,hcd->thd", x.sin().view(-1, 2, 3), w).add_(b).flatten(1)
        return (torch.tanh(h) @ h.T).square().sum()

    made = {
        "vmap(grad)": lambda f: vmap(grad(f)),
        "hessian": lambda f: torch.func.hessian(f),
    }[transform]
    x = rand(2, 2, 6) if transform == "vmap(grad)" else rand(2, 6)
    found, right = compiled(made(remat(fn, policy=policy)))(x), made(fn)(x)
    same(found, right)
    for got, expected in zip(
        *[torch.autograd.grad(o.sin().sum(), (w, b)) for o in (found, right)], strict=True
    ):
        same(got, expected)
