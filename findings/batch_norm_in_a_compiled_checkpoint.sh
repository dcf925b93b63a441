#!/usr/bin/env bash
# Batch norm inside a checkpoint counts every step twice, and once as soon as the model is compiled.
#
# Seen on torch 2.13.0, CPU. The checkpoint runs the layer again in the backward, and batch norm writes its running
# statistics in training, whoever calls it: they move twice by momentum in each step. Under torch.compile the writes
# leave the graph once, at the end of the forward, and what is computed again writes nothing. So one model has other
# statistics in evaluation, depending on whether it was compiled. Gradients agree.
#
# Output seen, after one step of a mean of 1 with momentum 0.1:
#     without checkpoint: 1 batch counted, running mean 0.10
#     checkpoint:         2 batches counted, running mean 0.19
#     and torch.compile:  1 batch counted, running mean 0.10
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
x = torch.randn(64, 3)
x = x - x.mean(0) + 1
found, gradients = [], []
for name in ("without checkpoint", "checkpoint", "and torch.compile"):
    norm = nn.BatchNorm1d(3)

    def step(x):
        y = norm(x) if name == "without checkpoint" else checkpoint(norm, x, use_reentrant=False)
        return (y * x).sum()

    (torch.compile(step) if name == "and torch.compile" else step)(x.requires_grad_()).backward()
    batches, mean = int(norm.num_batches_tracked), round(float(norm.running_mean[0]), 2)
    print(f"{name + ':':<19} {batches} batch{'es' * (batches > 1)} counted, running mean {mean:.2f}")
    found.append((batches, mean))
    gradients.append(norm.weight.grad)
assert found == [(1, 0.1), (2, 0.19), (1, 0.1)], found
assert all(torch.allclose(gradients[0], other, atol=1e-4) for other in gradients)
PROGRAM
