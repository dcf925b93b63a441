"""Functions and ops with derivatives of their own, as attention and fused-loss kernels are."""

import pytest
import torch

from remat import remat
from remat.policies import save_everything, save_nothing, save_ops
from tests.helpers import rand

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
