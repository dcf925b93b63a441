"""Regions that `torch.compiler.nested_compile_region` marks are lowered once for all of their calls."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from remat import remat, save_matmuls
from remat.debug import recomputed
from remat.policies import save_larger_than, save_nothing
from remat.transforms import value_and_grad
from tests.compile.inside import fx
from tests.compiled import compiled
from tests.helpers import gradients, rand, same

marked = torch.compiler.nested_compile_region


@pytest.fixture
def once(monkeypatch):
    """Every compiler lowers a subgraph once."""
    monkeypatch.setattr(fx, "is_inductor", lambda _: True)


class Calls:
    """`fn`, compiled by AOTAutograd and Inductor's partitioner; its graphs then run as they are.

    Attributes:
        forward, backward: how often the last graphs call each of their subgraphs, and each op by its name.
        saved_bytes: what the forward hands to the backward.
    """

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.forward, self.backward = Counter[str](), Counter[str]()
        self.saved_bytes = 0
        backend = aot_autograd(
            fw_compiler=functools.partial(self._show, "forward"),
            bw_compiler=functools.partial(self._show, "backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        self.run = compiled(fn, backend, **options)

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def _show(self, way: str, module: torch.fx.GraphModule, _: Any) -> Any:
        names = [n.args[0].target if _calls(n) else str(n.target) for n in module.graph.nodes]
        setattr(self, way, Counter(names))
        given = [n for n in module.graph.find_nodes(op="placeholder") if "tangents" not in n.name]
        if way == "backward":
            values = [n.meta["val"] for n in given]
            self.saved_bytes = sum(v.numel() * v.itemsize for v in values if isinstance(v, Tensor))
        return make_boxed_func(module.forward)

    @property
    def subgraphs(self) -> tuple[list[int], list[int]]:
        """How often each subgraph is called, in the forward and in the backward."""
        return _counts(self.forward), _counts(self.backward)


def _calls(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph


def _counts(found: Counter[str]) -> list[int]:
    # Each call has a node for its subgraph, of the same name.
    return sorted(count // 2 for name, count in found.items() if name.startswith("remat_region_"))


def mlp(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ w["up"]) @ w["down"]


def other(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ w["up"]) @ w["down"]


def weights(count: int = 5) -> list[dict[str, Tensor]]:
    made = [{"up": rand(8, 16, seed=i), "down": rand(16, 8, seed=-i - 1)} for i in range(count)]
    return pytree.tree_map(lambda t: t.requires_grad_(), made)


def chain(*blocks: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(ws, x):
        for i, w in enumerate(ws):
            x = blocks[i % len(blocks)](w, x)
        return x.square().sum()

    return run


def stepped(run: Callable[..., Tensor], ws: Any, x: Tensor) -> Any:
    """The value and all gradients."""
    loss = run(ws, x)
    return loss, torch.autograd.grad(loss, [*pytree.tree_leaves(ws), x])


# -- what becomes of the graph ---------------------------------------------------------------------------


def test_equal_blocks_are_one_subgraph_each_way(once):
    ws, x = weights(), rand(4, 8).requires_grad_()
    run, unmarked = (Calls(chain(remat(fn, policy=save_matmuls))) for fn in (marked(mlp), mlp))
    same(stepped(run, ws, x), stepped(chain(mlp), ws, x), 1e-12)
    # The first one, which the subgraphs are made of, stays where it is.
    assert run.subgraphs == ([4], [4])
    stepped(unmarked, ws, x)
    assert unmarked.subgraphs == ([], [])
    assert run.saved_bytes == unmarked.saved_bytes > 0
    assert run.forward["aten.mm.default"] == 2 < unmarked.forward["aten.mm.default"] == 10


@pytest.mark.slow
def test_under_torch_func(once):
    ws, x = weights(), rand(4, 8)

    def step(block):
        return lambda ws, x: value_and_grad(chain(block))(ws, x)

    run = Calls(step(remat(marked(mlp))))
    same(run(ws, x), step(mlp)(ws, x), 1e-12)
    # The first block is another one: nobody asks for the gradient of its x.
    assert run.subgraphs[0] == [3, 3] or run.subgraphs[0] == [3, 4]


def test_blocks_that_differ_are_subgraphs_of_their_own(once):
    ws, x = weights(6), rand(4, 8).requires_grad_()
    run = Calls(chain(remat(marked(mlp)), remat(marked(other))))
    same(stepped(run, ws, x), stepped(chain(mlp, other), ws, x), 1e-12)
    assert run.subgraphs == ([2, 2], [2, 2])


def test_results_that_share_memory_are_written_out(once):
    def block(w, x):
        return (x.sin() + w["square"]).t()  # the gradient of w is a view of the cotangent

    ws, x = [{"square": rand(8, 8, seed=i).requires_grad_()} for i in range(4)], rand(8, 8).requires_grad_()
    run = Calls(chain(remat(marked(block))))
    same(stepped(run, ws, x), stepped(chain(block), ws, x), 1e-12)
    # Every other block is given another layout.
    assert run.subgraphs == ([1, 1], [])


def test_captured_tensors_and_tables(once):
    scale = rand(8, seed=9).requires_grad_()

    def block(w, x):
        table = torch.arange(8, dtype=x.dtype).cos()  # computed once, read by every call
        return x + F.gelu(x * table * scale @ w["up"]) @ w["down"]

    ws, x = weights(), rand(4, 8).requires_grad_()
    run: Any = Calls(chain(remat(marked(block))))
    leaves = [*pytree.tree_leaves(ws), x, scale]
    found, expected = (torch.autograd.grad(f(ws, x), leaves) for f in (run, chain(block)))
    same(found, expected, 1e-12)
    assert run.subgraphs == ([4], [4])
    assert run.forward["aten.cos.default"] == 1


def test_each_call_draws_for_itself_and_again_in_the_backward(once):
    def block(w, x):
        return F.dropout(x.sin() * w, 0.5)

    def run(w, x):
        return [region(w, x) for _ in range(4)]

    region: Any = remat(marked(block))
    w, x = rand(64, seed=3).requires_grad_(), rand(64)
    step = Calls(run)
    outs = step(w, x)
    kept = [out != 0 for out in outs]
    assert len({tuple(k.tolist()) for k in kept}) == 4
    for out, mask in zip(outs, kept, strict=True):
        (found,) = torch.autograd.grad(out.sum(), w, retain_graph=True)
        same(found, x.sin() * mask / 0.5, 1e-12)
    assert step.subgraphs[0] == [3]


# -- where marks are found -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Marked(Block):
    @marked
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", (Block, Marked))
def test_modules(once, kind):
    blocks = nn.ModuleList([kind() for _ in range(5)]).double()
    x = rand(4, 8).requires_grad_()
    regions: list[Any] = [remat(block if kind is Marked else marked(block)) for block in blocks]
    assert all(type(region).__name__ == kind.__name__ for region in regions)

    def run(regions):
        def loss(x):
            for region in regions:
                x = region(x)
            return x.square().sum()

        return loss

    step = Calls(run(regions))
    leaves = [*blocks.parameters(), x]
    found, expected = (torch.autograd.grad(f(x), leaves) for f in (step, run(blocks)))
    same(found, expected, 1e-12)
    assert step.subgraphs == ([4], [4])


def test_a_region_within_what_is_marked(once):
    inner = remat(lambda x: x.sin().exp())

    class Outer(nn.Module):
        @marked
        def forward(self, x: Tensor) -> Tensor:
            return inner(x).tanh() + inner(x * 2)

    def run(block):
        return lambda x: block(block(x)).sum()

    x = rand(4, 8).requires_grad_()
    found, expected = (torch.autograd.grad(f(x), x) for f in (Calls(run(remat(Outer()))), run(Outer())))
    same(found, expected, 1e-12)


@pytest.mark.slow
def test_a_mark_around_regions_warns():
    ws, x = weights(), rand(4, 8).requires_grad_()
    with pytest.warns(UserWarning, match=r"'mlp' is part of .*Mark the region's own"):
        found = stepped(Calls(chain(marked(remat(mlp)))), ws, x)
    same(found, stepped(chain(mlp), ws, x), 1e-12)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(Calls(chain(remat(marked(mlp)))), ws, x)


def test_a_wrapper_of_something_marked_is_not_skipped():
    @functools.wraps(marked(mlp))
    def doubled(w, x):
        return 2 * mlp(w, x)

    doubled.__dict__.update(marked(mlp).__dict__)
    (w,), x = weights(1), rand(4, 8)
    same(remat(doubled)(w, x), 2 * mlp(w, x), 1e-12)
    region: Any = remat(marked(marked(mlp)))
    assert region.__wrapped__ is mlp and region.__name__ == "mlp"


# -- where they are written out ------------------------------------------------------------------------------


def test_other_compilers_are_given_no_subgraphs():
    ws, x = weights(), rand(4, 8).requires_grad_()
    run = Calls(chain(remat(marked(mlp))))
    same(stepped(run, ws, x), stepped(chain(mlp), ws, x), 1e-12)
    assert run.subgraphs == ([], [])


@pytest.mark.slow
def test_what_inductor_cannot_call_is_written_out(once):
    ws, x = weights(), rand(4, 8).requires_grad_()
    for option in ("cpp_wrapper", "triton.cudagraphs"):
        torch._dynamo.reset()
        run = Calls(chain(remat(marked(mlp))))
        with config.patch({option: True}):
            same(stepped(run, ws, x), stepped(chain(mlp), ws, x), 1e-12)
        assert run.subgraphs == ([], [])


@pytest.mark.slow
def test_inductor_writes_a_function_for_all_of_them():
    ws, x = weights(6), rand(4, 8).requires_grad_()
    block = remat(marked(mlp), policy=save_matmuls)

    def step(block, compile_):
        return stepped(compile_(chain(block)), ws, x)

    with config.patch(fx_graph_cache=False):
        found, codes = run_and_get_code(step, block, functools.partial(torch.compile, fullgraph=True))
    same(found, step(mlp, lambda f: f), 1e-10)
    lines = [line for code in codes for line in code.splitlines()]
    made = [line for line in lines if line.startswith("def remat_region_")]
    calls = [line for line in lines if " = remat_region_" in line and "_args" in line]
    assert 2 <= len(made) <= 4 and len(calls) >= 2 * 4


def test_each_call_is_reported_as_a_region_of_its_own():
    found = recomputed(chain(remat(marked(mlp))), weights(), rand(4, 8).requires_grad_())
    assert [entry.region for entry in found] == ["mlp"] * 5
    assert all(entry.survived and entry.ops["erf"] == 1 for entry in found)
    assert len({entry.bytes for entry in found}) == 1


@pytest.mark.parametrize("policy", (save_nothing, save_larger_than(0)))
def test_kept_values_are_not_what_is_written_to_results_later(once, policy):
    region: Any = remat(marked(lambda x: torch.exp(x)), policy=policy)

    def run(x):
        for _ in range(3):
            y = region(x * 0.1)
            y.mul_(2.0)
            x = y + 1
        return x.sum()

    def without(x):
        for _ in range(3):
            x = torch.exp(x * 0.1) * 2.0 + 1
        return x.sum()

    x = rand(4, 8).requires_grad_()
    same(gradients(compiled(run)(x), [x]), gradients(without(x), [x]))
