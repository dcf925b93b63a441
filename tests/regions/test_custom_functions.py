"""Functions and ops with derivatives of their own, as attention and fused-loss kernels are."""

import pytest
import torch
from torch.func import grad, vmap

from remat import remat
from remat.policies import save_everything, save_nothing, save_ops
from tests.helpers import FEW, POLICIES, crossed, rand, same

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


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [(save_nothing, 2), (save_ops(torch.ops.remat_tests.scaled_exp), 1), (save_everything, 1)],
)
def test_custom_op_runs_as_often_as_its_policy_says(policy, forwards):
    calls.update(forward=0, backward=0)
    x = rand(3).requires_grad_()
    remat(lambda x: scaled_exp(x.sin(), 2.0) * 3, policy=policy)(x).sum().backward()
    assert calls == {"forward": forwards, "backward": 1}


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


@pytest.mark.parametrize(("held", "policy"), crossed(HELD, FEW, every=2))
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
