# %% [markdown]
# # The frontier of a block
#
# What is the least that must be recomputed, for every number of bytes? `pareto` solves it on shapes
# alone. The program prints the frontier, takes three points of it as policies, and counts what they
# really keep.
#
#     python examples/budget_frontier.py

# %%
import torch
from torch import nn

from remat import checkpoint_policy, remat, saved_residuals
from remat.plan import pareto

torch.manual_seed(0)
block = nn.Sequential(
    nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)
)
x = torch.randn(128, 64, requires_grad=True)

# %% [markdown]
# Kept bytes count the block's input, which autograd holds as well.

# %%
print("no remat", saved_residuals(block, x).kept_bytes, "bytes kept")
points = {(p.kept_bytes, p.recomputed_flops) for p in pareto(block, x, torch_solvers=()).of("remat")}
for size, flops in sorted(points):
    print(f"frontier  {size:>8} bytes with the input, {flops:>12,.0f} FLOPs recomputed")

# %%
expected = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
for budget in (0.2, 0.5, "free"):
    region = remat(block, policy=checkpoint_policy(budget=budget, cost="flops"))
    kept = saved_residuals(region, x).kept_bytes
    torch.testing.assert_close(
        torch.autograd.grad(region(x).square().sum(), list(block.parameters())), expected
    )
    print(f"budget {budget!s:<6}{kept:>8} bytes kept, gradients equal")
