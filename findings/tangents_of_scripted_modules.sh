#!/usr/bin/env bash
# torch.func.jvp of a TorchScript module is right in its first call and 0 from the second on, without a message.
#
# Seen on torch 2.13.0, CPU. TorchScript runs the first call as it is written, to profile it. From the second on, parts
# that need gradients are graphs with derivative rules of their own, which know no forward mode: tangents end there.
# torch.func.grad of torch.func.grad is 0 from the second call on as well, because those graphs hide their backward
# from the outer level. Without parameters that require gradients both stay right.
#
# Output seen (sums of absolute values, right ones first):
#     jvp:        7.45, calls: 7.45 0.00 0.00
#     grad(grad): 18.13, calls: 18.13 0.00 0.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
# TorchScript reads the source from a file.
cat > program.py <<'PROGRAM'
import torch
from torch import nn
from torch.func import grad, jvp


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        return torch.tanh(x @ self.w)


def forward_mode(fn):
    return jvp(fn, (x,), (direction,))[1]


def twice(fn):
    return grad(lambda x: grad(lambda x: fn(x).sum())(x).sum())(x)


assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
layer, x, direction = Layer(), torch.randn(4, 3), torch.randn(4, 3)
for name, derivative in {"jvp": forward_mode, "grad(grad)": twice}.items():
    scripted = torch.jit.script(layer)
    right = derivative(layer)
    calls = [derivative(scripted) for _ in range(3)]
    said = " ".join(f"{float(found.abs().sum()):.2f}" for found in calls)
    print(f"{name + ':':<11} {float(right.abs().sum()):.2f}, calls: {said}")
    assert torch.allclose(calls[0], right) and float(right.abs().sum()) > 1
    assert not calls[1].any() and not calls[2].any()
PROGRAM
OMP_NUM_THREADS=1 env/bin/python -W ignore program.py
