#!/usr/bin/env bash
# A weight that four checkpoints share is cast once in the forward under autocast, and four times more in the backward.
#
# Seen on torch 2.13.0, CPU. Autocast casts a weight once and keeps the copy in a cache until its context ends. A
# checkpoint's recomputation enters an autocast context of its own, with an empty cache that goes at its end, so
# each region casts the weight again. The fifth cast of the backward is that of the gradient, which is there without
# checkpoints.
#
# Output seen:
#     without checkpoints: 1 cast of the weight's size in the forward, 1 in the backward
#     with checkpoints:    1 cast of the weight's size in the forward, 5 in the backward
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == (64, 64)
        return func(*args, **(kwargs or {}))


assert torch.__version__.startswith("2.13.0"), torch.__version__
w, x = nn.Parameter(torch.randn(64, 64)), torch.randn(2, 64, requires_grad=True)


def block(x):
    return torch.tanh(x @ w)


found = []
for checkpointed in (False, True):
    with Casts() as casts:
        y = x
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(4):
                y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
        forward = casts.count
        y.float().sum().backward()
    found += [forward, casts.count - forward]
print(f"without checkpoints: {found[0]} cast of the weight's size in the forward, {found[1]} in the backward")
print(f"with checkpoints:    {found[2]} cast of the weight's size in the forward, {found[3]} in the backward")
assert found == [1, 1, 1, 5], found
PROGRAM
