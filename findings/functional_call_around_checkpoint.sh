#!/usr/bin/env bash
# torch.func.functional_call around a module with a checkpoint inside: silently wrong gradients.
#
# Seen on torch 2.13.0, CPU. functional_call puts the given tensors into the module for the forward and takes them
# out at its end. The non-reentrant checkpoint runs the module's code again in the backward, when the module has its
# own parameters back: shapes agree, so its check passes, and the saved values are those of other weights. No error
# and no warning.
#
# Output seen (the module without a checkpoint is right to rounding):
#     without checkpoint: off by 0.00
#     with checkpoint:    off by 2.45 where gradients are up to 1.70
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.layer, self.checkpointed = nn.Linear(4, 4), checkpointed

    def block(self, x):
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
given = {name: torch.randn_like(p).requires_grad_() for name, p in Net(False).named_parameters()}
x, (w, b) = torch.randn(2, 4), given.values()
right = torch.autograd.grad(torch.tanh(linear(torch.tanh(linear(x, w, b)), w, b)).sum(), (w, b))
off = []
for checkpointed in (False, True):
    found = torch.autograd.grad(functional_call(Net(checkpointed), given, (x,)).sum(), (w, b))
    off.append(max(float((one - two).abs().max()) for one, two in zip(found, right, strict=True)))
print(f"without checkpoint: off by {off[0]:.2f}")
print(f"with checkpoint:    off by {off[1]:.2f} where gradients are up to {max(float(g.abs().max()) for g in right):.2f}")
assert off[0] < 1e-5 and off[1] > 0.1, off
PROGRAM
