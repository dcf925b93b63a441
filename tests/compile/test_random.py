"""Random ops in compiled regions: both passes draw the same, and what is kept for it is a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch.func import grad, vmap

from remat import RematError, remat, save_matmuls, save_nothing, save_ops
from tests.compiled import Graphs, compiled
from tests.helpers import crossed, same

aten = torch.ops.aten
# sin(x * r) for drawn numbers r: its derivative follows from its value, if the recomputation draws the same
# r.
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5) / 2,
    "rand_like": lambda x: x * torch.rand_like(x),
    "rand": lambda x: x * torch.rand(x.shape[-1], dtype=x.dtype),
    "randn": lambda x: x * torch.randn(x.shape[-1], dtype=x.dtype) / 4,
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1, 0.1),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_() / 8,
    "randint": lambda x: x * torch.randint(0, 2, (x.shape[-1],)),
    "multinomial": lambda x: x * torch.multinomial(torch.ones(x.shape[-1]), x.shape[-1]) / x.shape[-1],
}
SMALL = torch.linspace(0.1, 0.7, 48, dtype=torch.float64)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def sine_of(draw):
    return lambda x: torch.sin(draw(x))


def derivative(x, y):
    """Of sin(r x) by x, where it is y."""
    return (1 - y * y).sqrt() * torch.asin(y) / x


def value_and_gradient(region):
    def value(x):
        y = region(x)
        return y.sum(), y

    return grad(value, has_aux=True)


@pytest.mark.parametrize(("policy", "name"), crossed([save_nothing, save_ops(aten.sin)], DRAWS))
def test_backward_sees_the_draws_of_the_forward(name, policy):
    x = SMALL.clone().requires_grad_()
    y = compiled(remat(sine_of(DRAWS[name]), policy=policy))(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    same(gradient, derivative(x, y).detach(), 1e-7)
    assert y.unique().numel() > 2 or name in ("dropout", "bernoulli_", "randint")


@pytest.mark.parametrize("name", ["dropout", "randn", "multinomial"])
def test_grad_sees_the_draws_of_the_forward(name):
    gradient, y = compiled(value_and_gradient(remat(sine_of(DRAWS[name]))))(SMALL)
    same(gradient, derivative(SMALL, y), 1e-7)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness_of_vmap(randomness):
    region = remat(sine_of(DRAWS["rand_like"]))
    x = torch.stack([SMALL, SMALL])
    gradient, y = compiled(vmap(value_and_gradient(region), randomness=randomness))(x)
    same(gradient, derivative(x, y), 1e-7)
    assert torch.equal(y[0], y[1]) == (randomness == "same")


def test_second_order_and_nested_regions_see_one_draw():
    inner = remat(lambda x: F.dropout(x, 0.5))
    outer = remat(lambda x: inner(x) ** 3)

    def of(x):
        first, y = value_and_gradient(outer)(x)
        return first.sum(), (first, y)

    second, (first, y) = compiled(grad(of, has_aux=True))(SMALL)
    # y = (2 x)^3 where it was not dropped.
    kept = y != 0
    assert kept.any() and not kept.all()
    same(first, torch.where(kept, 24 * SMALL**2, 0.0), 1e-7)
    same(second, torch.where(kept, 48 * SMALL, 0.0), 1e-7)


def test_attention_with_dropout():
    def region(v):
        return F.scaled_dot_product_attention(query, query, v, dropout_p=0.5)

    torch.manual_seed(1)
    query = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    v = torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True)
    y = compiled(lambda v: remat(region)(v) ** 2)(v)
    (gradient,) = torch.autograd.grad(y.sum(), v)
    # y = (A v)^2 with the weights A that were drawn: <gradient, v> = 2 sum y.
    same((gradient * v).sum().detach(), 2 * y.sum().detach(), 1e-7)


def test_every_call_draws_anew_and_a_seed_repeats_them():
    run = compiled(remat(sine_of(DRAWS["dropout"])))
    x = SMALL.clone().requires_grad_()
    torch.manual_seed(3)
    first, second = run(x), run(x)
    torch.manual_seed(3)
    assert torch.equal(run(x), first) and not torch.equal(first, second)


def kept_bytes(region) -> int:
    w = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)
    graphs = Graphs(lambda x, w: region(x, w).sum())
    graphs(torch.ones(16, 8, dtype=torch.float64), w).backward()
    return graphs.saved_bytes


@pytest.mark.parametrize("policy", [save_nothing, save_matmuls], ids=repr)
def test_a_draw_keeps_eight_bytes(policy):
    def block(x, w, p):
        h = F.dropout(torch.tanh(x @ w), p, training=p > 0)
        return F.dropout(torch.tanh(h @ w), p, training=p > 0)

    without = kept_bytes(remat(lambda x, w: block(x, w, 0.0), policy=policy))
    torch._dynamo.reset()
    assert kept_bytes(remat(lambda x, w: block(x, w, 0.5), policy=policy)) == without + 2 * 8


def test_moments():
    run = compiled(lambda x: remat(lambda x: (F.dropout(x, 0.25), x * torch.randn_like(x)))(x))
    x = torch.ones(20_000, requires_grad=True)
    dropped, normal = run(x)
    same(dropped.mean().detach(), torch.tensor(1.0), 0.02)
    same((dropped != 0).float().mean(), torch.tensor(0.75), 0.02)
    same(torch.stack([normal.mean(), normal.std()]).detach(), torch.tensor([0.0, 1.0]), 0.03)


def test_a_generator_of_its_own_is_refused_with_a_way_out():
    """Where no Dynamo refuses it first."""
    generator = torch.Generator()
    region = remat(lambda x: x * torch.rand(3, generator=generator), name="noise")
    keep: Any = lambda module, _: make_boxed_func(module.forward)  # noqa: E731
    run = aot_function(lambda x: region(x).sum(), fw_compiler=keep, bw_compiler=keep)
    with pytest.raises(
        RematError, match="region 'noise' draws .* explicit torch.Generator.*pass the numbers in"
    ):
        run(torch.ones(3, requires_grad=True))


def test_a_policy_may_keep_what_an_op_drew():
    def block(x, w):
        return F.dropout((x @ w).sin(), 0.5) @ w

    masks = kept_bytes(remat(block, policy=save_ops(aten.native_dropout.default)))
    torch._dynamo.reset()
    assert masks > kept_bytes(remat(block)) + 8


@pytest.mark.parametrize(
    ("p", "train"), [(0.5, False), (0.5, None), (0.5, True), (0.0, True), (1.0, True), (1.0, None)]
)
def test_dropout_as_it_is_told(p: float, train: bool | None) -> None:
    def dropped(x):
        kept, mask = torch.native_dropout(x, p, train)
        return kept.sin() * 3, mask

    x = torch.linspace(1, 2, 64, dtype=torch.float64).requires_grad_()
    out, mask = compiled(remat(dropped))(x)
    scale = 1 / (1 - p) if train is not False and p < 1 else 1.0
    if train is False or p == 0:
        assert mask.all()
    elif p == 1:
        assert not mask.any()
    else:
        assert 0 < mask.sum() < 64
    same(out, 3 * torch.sin(x * mask * scale))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    # (torch's own rule leaves the scale out where nothing is told.)
    same(gradient, 3 * torch.cos(x * mask * scale) * mask * (1.0 if train is None else scale))


def test_attention_without_training_and_noise_that_is_none() -> None:
    """Other ops with a switch, and ones in the same region that do draw."""
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).requires_grad_()

    def several(x):
        still, _ = torch.native_dropout(x, 0.9, False)
        leaky = torch.rrelu(still, 0.1, 0.3, training=False)
        noise = torch.rand_like(x)
        return (leaky * noise).sin(), noise.clone()

    out, noise = compiled(remat(several))(x)
    expected = (torch.rrelu(x, 0.1, 0.3, training=False) * noise).sin()
    same(out, expected)
    (made,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    same(made, torch.autograd.grad(expected.sum(), x)[0])


COMPLEX = {
    "randn": lambda x: torch.randn(x.shape, dtype=torch.complex64),
    "rand": lambda x: torch.rand(x.shape, dtype=torch.complex64),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.complex64),
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.complex64),
    "normal_": lambda x: torch.empty_like(x, dtype=torch.complex64).normal_(1, 2),
    "complex128": lambda x: torch.randn(x.shape, dtype=torch.complex128),
    "like complex": lambda x: torch.randn_like(torch.complex(x, x).detach()),
}


def check_complex(backend: str) -> None:
    def drawn(x):
        made = {name: draw(x) for name, draw in COMPLEX.items()}
        terms = [(x * n.real).sin().sum() + (x * n.imag).cos().sum() for n in made.values()]
        return torch.stack(terms).sum(), made

    x = torch.ones(4000).requires_grad_()
    value, made = compiled(remat(drawn), backend)(x)
    (gradient,) = torch.autograd.grad(value, x)
    parts = [n.real * (x * n.real).cos() - n.imag * (x * n.imag).sin() for n in made.values()]
    same(gradient, torch.stack([part.detach().float() for part in parts]).sum(0), 1e-4)
    torch.manual_seed(1)
    for name, draw in COMPLEX.items():
        for part in (torch.real, torch.imag):
            mine, theirs = part(made[name].detach()), part(draw(x.detach()))
            assert mine.dtype == theirs.dtype
            assert abs(float(mine.mean() - theirs.mean())) < 0.15
            assert 0.9 < float(mine.std() / theirs.std()) < 1.1


@pytest.mark.slow
def test_complex_draws() -> None:
    check_complex("aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*code generation for complex")
def test_inductor_draws_both_parts_of_complex_numbers() -> None:
    check_complex("inductor")
