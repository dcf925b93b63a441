#!/usr/bin/env bash
# Torch's rules for tensors without data give gradients other strides than its kernels do: layer norm and losses.
#
# Seen on torch 2.13.0, CPU. The kernels of these backwards write a contiguous gradient. On fake and meta tensors it
# has the strides of the operand, turned where that was turned (a layer norm over permuted channels, permuted back; a
# loss of turned results). Whoever plans memory or layouts from a trace without data counts copies that no run makes,
# and misses those that it makes: a view of such a gradient is free in one and a copy in the other.
#
# Output seen:
#     layer_norm: eager (192, 8, 1), without data (192, 1, 24)
#     mse_loss: eager (192, 8, 1), without data (192, 1, 24)
#     smooth_l1_loss: eager (192, 8, 1), without data (192, 1, 24)
#     huber_loss: eager (192, 8, 1), without data (192, 1, 24)
#     gelu: eager (192, 8, 1), without data (192, 8, 1)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM' 2>/dev/null
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

assert torch.__version__.startswith("2.13.0"), torch.__version__
FUNCTIONS = {
    "layer_norm": lambda x: F.layer_norm(x, (8,), torch.ones(8)).transpose(1, 2),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(2, 24, 8)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros(2, 24, 8)),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros(2, 24, 8)),
    "gelu": F.gelu,
}


def strides(function):
    x = torch.ones(2, 8, 24).transpose(1, 2).requires_grad_()
    y = function(x)
    return torch.autograd.grad(y, x, torch.ones(y.shape))[0].stride()


for name, function in FUNCTIONS.items():
    eager = strides(function)
    with FakeTensorMode():
        fake = strides(function)
    print(f"{name}: eager {eager}, without data {fake}")
    expected = (192, 8, 1) if name == "gelu" else (192, 1, 24)
    assert (eager, fake) == ((192, 8, 1), expected), (name, eager, fake)
PROGRAM
