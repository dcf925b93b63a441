# %% [markdown]
# # Offload
#
# Values with a name wait in host memory, in place of being kept or recomputed. On an accelerator they
# travel on a stream of their own. Without one they are copied, in the same order, so the program runs
# anywhere and counts the same bytes.
#
#     python examples/offload.py

# %%
import torch
import torch.nn.functional as F

from remat import checkpoint_name, offload, remat, save_names, saved_residuals

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
weights = [
    (torch.randn(64, 256, device=device) / 8, torch.randn(256, 64, device=device) / 16) for _ in range(6)
]
x = torch.randn(512, 64, device=device)


def block(up, down, x):
    hidden = checkpoint_name(F.layer_norm(x, x.shape[-1:]) @ up, "hidden")
    return x + F.gelu(hidden) @ down


# %%
def loss_with(block):
    def loss(weights):
        h = x
        for up, down in weights:
            h = block(up, down, h)
        return h.square().mean()

    return loss


# %% [markdown]
# The products named "hidden" are the most expensive values to recompute. Keep them, or send them away.

# %%
versions = {
    "no remat": block,
    "save_nothing": remat(block),
    "save_names": remat(block, policy=save_names("hidden")),
    "offload": remat(block, policy=offload(save_names("hidden"))),
}
expected = torch.func.grad(loss_with(block))(weights)
for name, version in versions.items():
    found = saved_residuals(loss_with(version), weights)
    torch.testing.assert_close(torch.func.grad(loss_with(version))(weights), expected)
    print(f"{name:<16}{found.kept_bytes:>10} bytes kept, {found.host_bytes:>8} on the host, gradients equal")
