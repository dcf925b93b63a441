"""Regions in graphs that Inductor compiles for the card at hand, and in its CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.func import grad, vmap

from remat import RematError, checkpoint_policy, remat, scan_remat
from remat.policies import offload, save_attention, save_matmuls, save_names, save_nothing
from tests.cuda.card import ON_A_CARD, batch, bytes_of, gradients, models, near, same, step_of

# What torch warns of on a card is not of regions.
pytestmark = [ON_A_CARD, pytest.mark.filterwarnings("ignore")]
POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "attention": save_matmuls | save_attention,
    "names": save_names("hidden"),
    "offload": offload(save_matmuls),
    "budget": checkpoint_policy(budget=0.5),
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_are_as_without_regions(policy: str, mode: str) -> None:
    plain, ours = models(policy=POLICIES[policy])
    call = torch.compile(ours, mode=mode, fullgraph=True)
    for seed in range(4):
        x = batch(seed)
        torch.compiler.cudagraph_mark_step_begin()
        near([t.clone() for t in gradients(ours, call, x)[:-1]], gradients(plain, plain, x)[:-1])
    skipped = counters["inductor"]["cudagraph_skips"]
    # Around what travels to the host torch cuts the graph, and captures its parts.
    assert mode == "default" or policy == "offload" or not skipped, skipped


def test_kept_bytes_are_in_order_with_the_fence_in_the_graph() -> None:
    found: dict[str, tuple[int, int]] = {}
    for name, policy in {"none": None, **{n: POLICIES[n] for n in ("nothing", "matmuls", "offload")}}.items():
        torch._dynamo.reset()
        plain, ours = models(depth=6, policy=policy)
        model = plain if policy is None else ours
        run = torch.compile(model, fullgraph=True)
        x = batch(rows=8)

        def step(mark: Any, run: Any = run, model: Any = model, x: Tensor = x) -> None:
            loss = run(x)
            mark()
            torch.autograd.grad(loss, list(model.parameters()))

        found[name] = bytes_of(step)
    print(found)
    assert found["nothing"][0] < found["matmuls"][0] < found["none"][0]
    assert found["nothing"][1] < found["none"][1]
    assert found["offload"][0] <= 1.1 * found["nothing"][0]


def test_dropout_is_the_same_in_forward_and_backward() -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).exp()

    x = batch(dtype=torch.float32).requires_grad_()
    run = torch.compile(lambda x: remat(block)(remat(block)(x)), fullgraph=True)
    for _ in range(3):
        out = run(x)
        (found,) = torch.autograd.grad(out.sum(), x)
        # Where the outer mask is 0 the result is 1, and no gradient comes.
        assert bool((found[out == 1] == 0).all()) and bool((out == 1).any())
        assert bool((found[out != 1] != 0).any())


def test_transforms_in_one_graph() -> None:
    def block(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh()

    x, w = batch(rows=3, length=8, dtype=torch.float32), batch(2, 1, 256, torch.float32)[0] / 16
    for make in (lambda f: grad(f), lambda f: vmap(grad(f), (None, 0)), lambda f: grad(grad_of(f))):
        plain = make(lambda w, x: block(w, block(w, x)).square().sum())
        ours = make(lambda w, x: remat(block)(w, remat(block)(w, x)).square().sum())
        near([torch.compile(ours, fullgraph=True)(w, x)], [plain(w, x)])


def grad_of(f: Any) -> Any:
    return lambda w, x: grad(f)(w, x).square().sum()


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"policy": save_matmuls}], ids=str)
def test_a_scan_compiles_its_steps(options: dict[str, Any]) -> None:
    def body(carry: Tensor, w: Tensor) -> tuple[Tensor, None]:
        return (carry @ w).tanh(), None

    x = batch(rows=1, length=64, dtype=torch.float32)[0].requires_grad_()
    ws = (batch(2, 12, 256, torch.float32) / 16).requires_grad_()
    carry = x
    for w in ws:
        carry, _ = body(carry, w)
    expected = torch.autograd.grad(carry.square().sum(), (x, ws))
    torch.set_float32_matmul_precision("highest")
    for inside in (False, True):
        run = (lambda x, ws: scan_remat(body, x, ws, **options)[0]) if inside else None
        call: Any = (
            torch.compile(run, fullgraph=True)
            if run is not None
            else lambda x, ws: scan_remat(body, x, ws, compile=True, **options)[0]
        )
        for _ in range(2):
            got = torch.autograd.grad(call(x, ws).square().sum(), (x, ws))
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_flex_attention_and_a_kernel_of_the_users() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    from tests.compile.triton_kernel import Added

    def causal(score: Tensor, b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, score, -float("inf"))

    def block(x: Tensor, w: Tensor) -> Tensor:
        return Added.apply(flex_attention(x @ w, x, x, score_mod=causal), x).sin()  # type: ignore[union-attr]

    x = batch(rows=2).unflatten(-1, (4, -1)).transpose(1, 2).contiguous().float().requires_grad_()
    w = torch.eye(64, device="cuda").mul(1.1).requires_grad_()
    plain = torch.compile(lambda x: block(block(x, w), w).square().sum(), fullgraph=True)
    ours = torch.compile(lambda x: remat(block)(remat(block)(x, w), w).square().sum(), fullgraph=True)
    expected = torch.autograd.grad(plain(x), (x, w))
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(ours(x), (x, w)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["nothing", "matmuls"])
def test_a_kernel_that_writes_in_place(policy: str) -> None:
    """In eager code a Triton kernel is no op: what it wrote is noticed, or the region says that it cannot."""
    from tests.compile.triton_kernel import Added, add_kernel

    def block(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).sin()
        with torch.no_grad():
            add_kernel[(h.numel() // 256,)](h, h, h, h.numel(), BLOCK=256)  # pyright: ignore
        return Added.apply(h.cos(), x)  # type: ignore[return-value]

    x = batch(rows=1, dtype=torch.float32)[0].requires_grad_()
    w = (batch(2, 1, 256, torch.float32)[0] / 16).requires_grad_()
    expected = torch.autograd.grad(block(x, w).square().sum(), (x, w))
    for _ in range(2):
        try:
            got = torch.autograd.grad(remat(block, policy=POLICIES[policy])(x, w).square().sum(), (x, w))
        except RematError:
            continue
        same(list(got), list(expected))


def test_a_compiled_step_with_an_optimizer() -> None:
    found = []
    for model in models(policy=save_matmuls):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        call = torch.compile(model, fullgraph=True)
        losses = []
        for seed in range(5):
            loss = call(batch(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def test_blocks_one_by_one() -> None:
    plain, ours = models(policy=save_matmuls | save_attention)
    expected = gradients(plain, plain, batch())
    for block in ours.blocks:
        block.compile(fullgraph=True)
    for _ in range(2):
        near(gradients(ours, ours, batch())[:-1], expected[:-1])
    step_of(ours, batch())(lambda: None)
