#!/usr/bin/env bash
# torch.set_default_device holds in the forward of an autograd.Function and not in its backward.
#
# Seen on torch 2.13.0, CPU. The default device is a torch-function mode, and .backward() and torch.autograd.grad are
# torch functions: while they run, the modes are off. A tensor that a backward makes without device= is on the CPU.
# A checkpoint's recomputation, in the same backward, has the device again, because the checkpoint enters it anew.
#
# Output seen:
#     forward: meta, backward: cpu
#     checkpoint's forward: meta, its recomputation: meta
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch.utils.checkpoint import checkpoint

places = []


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        places.append(torch.ones(1).device.type)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        places.append(torch.ones(1).device.type)
        return gradient * 2


def block(x):
    places.append(torch.ones(1).device.type)
    return x.sin().exp()


assert torch.__version__.startswith("2.13.0"), torch.__version__
x = torch.randn(3, requires_grad=True)
torch.set_default_device("meta")
Scale.apply(x).sum().backward()
checkpoint(block, x, use_reentrant=False).sum().backward()
torch.set_default_device(None)
print(f"forward: {places[0]}, backward: {places[1]}")
print(f"checkpoint's forward: {places[2]}, its recomputation: {places[3]}")
assert places == ["meta", "cpu", "meta", "meta"], places
PROGRAM
