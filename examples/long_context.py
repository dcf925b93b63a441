# %% [markdown]
# # 32k tokens on one card, simulated
#
# A model of 12 blocks, 5120 wide, is to be trained on 32,768 tokens in bfloat16. Does a step fit an H100
# with 80 GB, and with which policy? Plans need shapes only: the model lies on the meta device, which has no
# memory. So the answer comes in seconds, on a machine without a GPU.
#
#     python examples/long_context.py

# %%
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat import checkpoint_policy, fit

GIB = 2**30
TOKENS, WIDTH, DEPTH = 32768, 5120, 12


class Block(nn.Module):
    def __init__(self, width, heads=40):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, q, k, v):
        if not q.is_meta:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # Which kernel attention takes depends on the machine, so the GPU's is named here.
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        h = self.attend(*qkv.transpose(1, 3).unbind(2))
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


with torch.device("meta"):
    model = nn.Sequential(*[Block(WIDTH) for _ in range(DEPTH)]).bfloat16()
    x = torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)

# %% [markdown]
# The card has 79 GiB. A parameter takes 14 bytes before the step: 2 for itself, 8 for AdamW's moments, 4
# for a copy in float32. Activations and gradients may have the rest.

# %%
card = 79 * GIB
state = 14 * sum(p.numel() for p in model.parameters())
room = card - state

# %% [markdown]
# Each block becomes a region. `fit` of a function splits one budget over all of them, or finds the largest
# budget that stays within a peak. The peak counts activations and gradients, op by op.

# %%
remat.apply(model, layers="*", policy=checkpoint_policy(budget=0.5))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a budget of all there is draws a warning, and no remat is what is asked
    step = lambda x: model(x)  # noqa: E731
    plans = {
        "no remat": fit(step, x, budget=1.0, device="h100"),
        "free": fit(step, x, budget="free", device="h100"),
        "planned": fit(step, x, peak=room, device="h100"),
    }
for name, plan in plans.items():
    verdict = "fits" if plan.peak_bytes <= room else "does not fit"
    print(f"{name:<10}{plan.kept_bytes:>12} bytes kept, peak {plan.peak_bytes / GIB:.1f} GiB, ", end="")
    print(f"{1e3 * plan.cost:.0f} ms more: {verdict} into {room / GIB:.1f} GiB")

# %% [markdown]
# The gradients are those without remat. A copy that fits this machine shows it.

# %%
torch.manual_seed(0)
small = nn.Sequential(*[Block(64, heads=4) for _ in range(4)])
tokens = torch.randn(1, 32, 64)
expected = torch.autograd.grad(small(tokens).square().mean(), list(small.parameters()))
share = plans["planned"].kept_bytes / plans["no remat"].kept_bytes
remat.apply(small, layers="*", policy=checkpoint_policy(budget=share))
found = torch.autograd.grad(small(tokens).square().mean(), list(small.parameters()))
torch.testing.assert_close(found, expected, rtol=0, atol=0)
print(f"small copy, budget {share:.2f}: gradients equal")
