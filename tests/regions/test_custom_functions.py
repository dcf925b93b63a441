"""Functions and ops with derivatives of their own, as attention and fused-loss kernels are."""

import pytest
import torch
from torch.func import grad, vmap

from remat import remat
from remat.policies import save_everything, save_nothing, save_ops
from tests.helpers import POLICIES, rand, same


class OldStyle(torch.autograd.Function):
    """No setup_context: torch.func cannot differentiate it, plain autograd can."""

    @staticmethod
    def forward(ctx, x, scale):
        out = torch.exp(x * scale)
        ctx.save_for_backward(x, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, g):
        _, out = ctx.saved_tensors
        return g * out * ctx.scale, None


class NewStyle(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return torch.exp(x * scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g * out * ctx.scale, None


calls = {"forward": 0, "backward": 0}


@torch.library.custom_op("remat_tests::scaled_exp", mutates_args=())
def scaled_exp(x: torch.Tensor, scale: float) -> torch.Tensor:
    calls["forward"] += 1
    return torch.exp(x * scale)


@torch.library.custom_op("remat_tests::scaled_exp_backward", mutates_args=())
def scaled_exp_backward(g: torch.Tensor, out: torch.Tensor, scale: float) -> torch.Tensor:
    calls["backward"] += 1
    return g * out * scale


def setup(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def backward(ctx, g):
    (out,) = ctx.saved_tensors
    return scaled_exp_backward(g, out, ctx.scale), None


scaled_exp.register_autograd(backward, setup_context=setup)
scaled_exp.register_fake(lambda x, scale: torch.empty_like(x))

FUNCTIONS = {
    "old style": OldStyle.apply,
    "new style": NewStyle.apply,
    "custom op": scaled_exp,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_plain_autograd(kind, policy):
    fn = FUNCTIONS[kind]

    def region(x, w):
        return torch.sin(fn(torch.tanh(x @ w), 0.5)) @ w

    def run(region):
        x, w = rand(3, 3).requires_grad_(), rand(3, 3, seed=1).requires_grad_()
        out = region(x, w)
        first = torch.autograd.grad(out.square().sum(), (x, w), retain_graph=True)
        return out, first, torch.autograd.grad(out.sum(), (x, w))

    same(run(remat(region, policy=POLICIES[policy])), run(region))


@pytest.mark.parametrize("policy", ["nothing", "matmuls", "rule"])
def test_new_style_under_torch_func(policy):
    def plain(x):
        return torch.sin(NewStyle.apply(torch.tanh(x), 0.5)).sum()  # type: ignore[union-attr]

    region = remat(plain, policy=POLICIES[policy])
    x = rand(2, 3)
    same(grad(region)(x), grad(plain)(x))
    same(vmap(grad(region))(x), vmap(grad(plain))(x))


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [(save_nothing, 2), (save_ops(torch.ops.remat_tests.scaled_exp), 1), (save_everything, 1)],
)
def test_custom_op_runs_as_often_as_its_policy_says(policy, forwards):
    calls.update(forward=0, backward=0)
    x = rand(3).requires_grad_()
    remat(lambda x: scaled_exp(x.sin(), 2.0) * 3, policy=policy)(x).sum().backward()
    assert calls == {"forward": forwards, "backward": 1}


def test_function_without_a_derivative():
    @torch.library.custom_op("remat_tests::indices", mutates_args=())
    def indices(x: torch.Tensor) -> torch.Tensor:
        return x.argsort().clone()

    region = remat(lambda x: torch.exp(x)[indices(x)] * torch.arange(3))
    x = rand(3).requires_grad_()
    got = torch.autograd.grad(region(x).sum(), x)
    same(got, torch.autograd.grad((torch.exp(x)[x.argsort()] * torch.arange(3)).sum(), x))


def test_function_whose_backward_needs_a_value_that_is_no_output():
    class Stash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.cos())
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    x = rand(3).requires_grad_()
    same(
        torch.autograd.grad(remat(lambda x: Stash.apply(x * 2).exp())(x).sum(), x),  # type: ignore[union-attr]
        torch.autograd.grad((x * 2).sin().exp().sum(), x),
    )


class OnTheContext(torch.autograd.Function):
    """Keeps a tensor as an attribute, of which no saved-tensor hook is told; `held` says in what."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor, held):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, factor, held = inputs
        ctx.kept = held(factor)

    @staticmethod
    def backward(ctx, g):
        kept = ctx.kept
        while not isinstance(kept, torch.Tensor):
            kept = next(iter(kept.values() if isinstance(kept, dict) else kept))
        return g * kept, None, None


HELD = {"itself": lambda t: t, "a list": lambda t: [t], "a dict of pairs": lambda t: {"t": (t, 1)}}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("held", HELD)
def test_tensor_that_a_function_keeps_as_an_attribute(held, policy):
    """An argument that nothing else reads, and a value that the region makes for it alone."""
    w, x = rand(4), rand(3, 4)

    def both(w, x):
        made = OnTheContext.apply(x, w.sin(), HELD[held])
        return OnTheContext.apply(made, w, HELD[held]).sum()

    region = remat(both, policy=POLICIES[policy])
    for transform in (grad(lambda x: region(w, x)), vmap(grad(lambda x: region(w, x)))):
        same(transform(x), (w * w.sin()).expand(3, 4))
    leaf = x.clone().requires_grad_()
    for _ in range(3):
        same(torch.autograd.grad(region(w, leaf), leaf)[0], (w * w.sin()).expand(3, 4))
