# %% [markdown]
# # A mixture of experts
#
# Each token goes to two of eight experts. What must not be recomputed differently is the choice: the
# region keeps it by name, so the experts see the same tokens in both passes, and the router's product is
# not computed again.
#
#     python examples/mixture_of_experts.py

# %%
import torch
import torch.nn.functional as F
from torch import nn

from remat import checkpoint_name, remat, save_names, saved_residuals


class Experts(nn.Module):
    def __init__(self, width=64, hidden=256, count=8, active=2) -> None:
        super().__init__()
        self.active = active
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) / hidden**0.5)

    def forward(self, x):
        tokens = self.norm(x)
        scores = checkpoint_name(self.router(tokens), "route")
        weights, chosen = scores.softmax(-1).topk(self.active, -1)
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            h = F.silu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, rows, h * weights[rows, place, None])
        return x + out


# %%
torch.manual_seed(0)
layers = nn.ModuleList(Experts() for _ in range(4))
x = torch.randn(512, 64)


def loss_with(wrap):
    def loss(x):
        for layer in layers:
            x = wrap(layer)(x)
        return x.square().mean()

    return loss


# %% [markdown]
# How many tokens an expert gets is data. Regions under plain autograd replay the ops of the forward, so
# data-dependent sizes are fine; in compiled code they are graph breaks, with or without remat.

# %%
versions = {
    "no remat": lambda layer: layer,
    "remat": remat,
    "keep the route": remat(policy=save_names("route")),
}
parameters = list(layers.parameters())
expected = torch.autograd.grad(loss_with(lambda layer: layer)(x), parameters)
for name, wrap in versions.items():
    loss = loss_with(wrap)
    kept = saved_residuals(loss, x).kept_bytes
    torch.testing.assert_close(torch.autograd.grad(loss(x), parameters), expected)
    print(f"{name:<16}{kept:>10} bytes kept, gradients equal")
