"""Regions on a card, without a compiler: autograd's threads, random streams, memory and streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from remat import checkpoint_name, checkpoint_policy, fit, remat, scan_remat
from remat.policies import offload, save_attention, save_everything, save_matmuls, save_names, save_nothing
from tests.cuda.card import (
    LENGTH,
    ON_A_CARD,
    Block,
    Model,
    batch,
    bytes_of,
    gradients,
    models,
    near,
    same,
    step_of,
)

# What torch warns of on a card is not of regions.
pytestmark = [ON_A_CARD, pytest.mark.filterwarnings("ignore")]
POLICIES = {
    "nothing": save_nothing,
    "matmuls": save_matmuls,
    "attention": save_matmuls | save_attention,
    "names": save_names("hidden"),
    "offload": offload(save_matmuls) | offload(save_names("hidden")),
    "budget": checkpoint_policy(budget=0.5),
    "measured": checkpoint_policy(budget=0.5, cost="measured"),
}


@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize("policy", POLICIES)
def test_three_steps_have_the_same_bits_as_without_regions(policy: str, drop: float) -> None:
    plain, ours = models(drop=drop, policy=POLICIES[policy])
    for seed in range(3):
        x = batch(seed)
        same(gradients(ours, ours, x), gradients(plain, plain, x))


@pytest.mark.parametrize("policy", ["nothing", "matmuls", "offload"])
def test_under_autocast(policy: str) -> None:
    plain, ours = models(dtype=torch.float32, policy=POLICIES[policy])
    x = batch(dtype=torch.float32)

    def cast(model: Model) -> Any:
        def call(x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model(x)

        return call

    for _ in range(2):
        same(gradients(ours, cast(ours), x), gradients(plain, cast(plain), x))


def test_dropout_in_attention_is_drawn_again_and_no_random_number_more() -> None:
    def drawn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = batch(rows=2).unflatten(-1, (4, -1)).transpose(1, 2).requires_grad_()
    for run in (remat(drawn), remat(drawn, policy=save_everything)):
        torch.cuda.manual_seed(3)
        expected = torch.autograd.grad(drawn(x).float().sum(), x)
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.autograd.grad(run(x).float().sum(), x)[0], expected[0])
        assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_generator_of_the_card_is_where_it_would_be() -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x * torch.empty_like(x).normal_(generator=generator).add(1).exp()).sin()

    states, found = [], []
    for run in (noisy, remat(noisy)):
        made = torch.Generator("cuda").manual_seed(5)
        x = batch(dtype=torch.float32).requires_grad_()
        for _ in range(2):
            found.append(torch.autograd.grad(run(x, made).sum(), x)[0])
        states.append(made.get_state())
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert torch.equal(*states)


def test_kept_bytes_and_peaks_are_in_order_and_not_above_torchs() -> None:
    found: dict[str, tuple[int, int]] = {}
    for name, policy in {"none": None, **{n: POLICIES[n] for n in ("nothing", "matmuls", "offload")}}.items():
        plain, ours = models(depth=6, policy=policy)
        model = plain if policy is None else ours
        step = step_of(model, batch(rows=8))
        found[name] = bytes_of(step)
    theirs = models(depth=6)[0]
    blocks = list(theirs.blocks)

    def checkpointed(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x.float().square().mean()

    theirs.forward = checkpointed
    step = step_of(theirs, batch(rows=8))
    found["torch checkpoint"] = bytes_of(step)
    print(found)
    assert found["nothing"][0] < found["matmuls"][0] < found["none"][0]
    assert found["nothing"][1] < found["matmuls"][1] < found["none"][1]
    # What is sent to the host is not on the card.
    assert found["offload"][0] <= 1.05 * found["nothing"][0]
    assert found["nothing"][0] <= found["torch checkpoint"][0]
    assert found["nothing"][1] <= 1.01 * found["torch checkpoint"][1]


def test_copies_to_the_host_never_race() -> None:
    """Large values, so that copies lag behind, and twenty steps: each has the same bits.

    Without attention, whose backward adds in any order where a sequence is long.
    """
    plain, ours = models(depth=4, attends=False, policy=offload(save_matmuls))
    x = batch(rows=64, length=512)
    expected = gradients(plain, plain, x)
    for _ in range(20):
        same(gradients(ours, ours, x), expected)


def test_on_a_stream_of_the_users() -> None:
    plain, ours = models(policy=offload(save_matmuls))
    x = batch()
    expected = gradients(plain, plain, x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(side):
            got = gradients(ours, ours, x)
        torch.cuda.synchronize()
        same(got, expected)


@pytest.mark.parametrize("policy", ["nothing", "matmuls", "offload"])
def test_second_derivatives(policy: str) -> None:
    plain, ours = models(depth=2, dtype=torch.float32, policy=POLICIES[policy])
    x = batch(rows=2, length=16, dtype=torch.float32)

    def penalty(model: Model) -> list[Tensor]:
        given = x.clone().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (force,) = torch.autograd.grad(model(given), given, create_graph=True)
            loss = force.square().sum()
            loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [force.detach(), *found]

    expected = penalty(plain)
    for _ in range(2):
        same(penalty(ours), expected, 1e-5)


def test_a_gradient_inside_a_region() -> None:
    """Autograd runs again in its own thread, within a recomputation."""

    def energy(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).tanh().square().sum()

    def forces(x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            here = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(remat(energy)(here, w), here, create_graph=True)[0]

    x, w = batch(rows=1, length=8, dtype=torch.float64)[0], batch(2, 1, 256, torch.float64)[0]
    x.requires_grad_(), w.requires_grad_()
    expected = torch.autograd.grad(forces(x, w).square().sum(), (x, w))
    for _ in range(2):
        got = torch.autograd.grad(remat(forces)(x, w).square().sum(), (x, w))
        same(list(got), list(expected), 1e-10)


@pytest.mark.parametrize("policy", ["nothing", "matmuls", "offload"])
def test_under_transforms(policy: str) -> None:
    def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return checkpoint_name((x @ p["w"]).tanh(), "hidden") @ p["v"]

    def loss(region: Any) -> Any:
        return lambda p, x: region(p, region(p, x)).square().sum()

    x = batch(rows=3, length=4, dtype=torch.float64)[..., :6]
    p = {"w": batch(2, 1, 6, torch.float64)[0, :, :6], "v": batch(3, 1, 6, torch.float64)[0, :, :6]}
    plain, ours = loss(block), loss(remat(block, policy=POLICIES[policy]))
    ways: dict[str, Any] = {
        "grad": lambda f: list(grad(f)(p, x).values()),
        "vmap grad": lambda f: list(vmap(grad(f), (None, 0))(p, x).values()),
        "jvp": lambda f: list(jvp(f, (p, x), (p, x.cos()))),
        "jacrev": lambda f: list(jacrev(f)(p, x).values()),
        "hessian": lambda f: [hessian(lambda w: f({"w": w, "v": p["v"]}, x))(p["w"])],
        "grad grad": lambda f: list(
            grad(lambda p: sum(g.square().sum() for g in grad(f)(p, x).values()))(p).values()
        ),
    }
    for run in ways.values():
        expected = run(plain)
        for _ in range(2):
            same(run(ours), expected, 1e-10)


def test_a_functional_model() -> None:
    plain, ours = models(policy=save_matmuls)
    x = batch()

    def loss(model: Model) -> Any:
        return lambda p: functional_call(model, p, (x,))

    expected = grad(loss(plain))(dict(plain.named_parameters()))
    for _ in range(2):
        got = grad(loss(ours))(dict(ours.named_parameters()))
        near(list(got.values()), list(expected.values()))


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"policy": save_matmuls}], ids=str)
def test_scans(options: dict[str, Any]) -> None:
    def body(carry: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        out = (carry @ w).tanh()
        return out, out.sum()

    x = batch(rows=1, length=64, dtype=torch.float32)[0].requires_grad_()
    ws = (batch(2, 12, 256, torch.float32) / 16).requires_grad_()
    carry, sums = x, []
    for w in ws:
        carry, y = body(carry, w)
        sums.append(y)
    expected = torch.autograd.grad(carry.square().sum() + torch.stack(sums).sum(), (x, ws))
    for _ in range(3):
        carry, ys = scan_remat(body, x, ws, **options)
        same(list(torch.autograd.grad(carry.square().sum() + ys.sum(), (x, ws))), list(expected))


def test_fit_keeps_its_promise_on_the_card() -> None:
    plain, _ = models(depth=8)
    x = batch(rows=16, length=4 * LENGTH)
    step = step_of(plain, x)
    most = bytes_of(step)[1]
    expected = gradients(plain, plain, x)
    held = x.nbytes + sum(p.nbytes for p in plain.parameters())
    report = fit(plain, x, peak=int(held + 0.5 * most))
    print(report)
    got = gradients(plain, plain, x)
    same(got, expected)
    peak = bytes_of(step)[1]
    print({"no remat": most, "fit": peak, "limit": 0.5 * most})
    assert peak <= 1.05 * 0.5 * most


def captured(model: Model, x: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of a step, and the loss and gradients that a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(model(x), list(model.parameters()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(x)
        found = torch.autograd.grad(loss, list(model.parameters()))
    return graph, [loss.detach(), *found]


def test_a_region_is_captured_in_a_graph_of_the_card() -> None:
    """`torch.cuda.graph` around forward and backward: nothing in a region asks the card for a number."""
    plain, ours = models(policy=save_matmuls, preserve_rng_state=False)
    x = batch()
    graph, found = captured(ours, x)
    x.copy_(batch(9))
    graph.replay()
    torch.cuda.synchronize()
    expected = gradients(plain, plain, batch(9))
    same(found, expected[:-1])


def test_captured_with_the_default_of_random_states() -> None:
    plain, ours = models(policy=save_matmuls)
    x = batch()
    expected = gradients(plain, plain, x)
    graph, found = captured(ours, x)
    graph.replay()
    torch.cuda.synchronize()
    same(found, expected[:-1])


def test_a_block_of_the_card_and_one_of_the_host() -> None:
    """One region with tensors of both, as where layers are on different devices."""

    def both(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout((x.cpu() @ w).sin(), 0.5).to(x.device) * F.dropout(x, 0.5)

    x, w = batch(rows=1, length=256, dtype=torch.float64)[0].requires_grad_(), torch.rand(256, 256).double()
    w.requires_grad_()
    found = []
    for run in (both, remat(both), remat(both, policy=save_matmuls)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(run(x, w).square().sum(), (x, w)))
    for got in found[1:]:
        same(list(got), list(found[0]))


def test_blocks_are_found_and_wrapped() -> None:
    from remat import nn as remat_nn

    plain, ours = models()
    x = batch()
    expected = gradients(plain, plain, x)
    remat_nn.apply(ours, policy=save_matmuls, layers=Block)
    for _ in range(2):
        same(gradients(ours, ours, x), expected)


@pytest.mark.parametrize("how", ["grad", "vmap", "backward"])
def test_steps_of_a_scan_draw_on_the_default_device(how: str) -> None:
    def step(h: Tensor) -> Tensor:
        return h[..., torch.randperm(4)].sin() * torch.rand(4)

    def looped(x: Tensor) -> Tensor:
        return step(step(x)).sum()

    def scanned(x: Tensor) -> Tensor:
        return scan_remat(lambda h, _: (step(h), None), x, length=2, checkpoints=1)[0].sum()

    x = batch(rows=1, length=2, dtype=torch.float64)[0, :, :4].requires_grad_()
    ways: dict[str, Any] = {
        "grad": lambda f: grad(f)(x.detach()),
        "vmap": lambda f: vmap(f, randomness="same")(x.detach()[None]),
        "backward": lambda f: torch.autograd.grad(f(x), x)[0],
    }
    found = []
    with torch.device("cuda"):
        for f in (looped, scanned, scanned):
            torch.manual_seed(3)
            found.append(ways[how](f))
    torch.testing.assert_close(found[1:], [found[0]] * 2)
