#!/usr/bin/env bash
# torch.compile drops writes in place to a tensor of no dimension in float64, silently.
#
# Seen on torch 2.13.0, CPU. A counter `steps = torch.zeros((), dtype=torch.float64)`, counted up by `steps.add_(1)` and
# then read: three calls give 1, 2, 3 in eager code and with the backend "eager", and 0, 0, 0 with "aot_eager" and
# "inductor", and the counter stays 0. It is the same whether the tensor is an argument, is captured, or is a buffer
# of a module, and for `copy_` and `mul_`. `steps += 1` is right on a buffer of a module. In float32 and int64, or with
# one dimension, it is right. So in a model after `.double()`, a step counter or a running scale is frozen by compiling.
#
# Output seen:
#     backend eager:     add_ [1.0, 2.0, 3.0] copy_ [1.0, 2.0, 3.0] in float32 [1.0, 2.0, 3.0] of shape (1,) [1.0, 2.0, 3.0]
#     backend aot_eager: add_ [0.0, 0.0, 0.0] copy_ [0.0, 0.0, 0.0] in float32 [1.0, 2.0, 3.0] of shape (1,) [1.0, 2.0, 3.0]
#     backend inductor:  add_ [0.0, 0.0, 0.0] copy_ [0.0, 0.0, 0.0] in float32 [1.0, 2.0, 3.0] of shape (1,) [1.0, 2.0, 3.0]
#     a buffer, backend aot_eager: add_ [0.0, 0.0, 0.0] += [1.0, 2.0, 3.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch
from torch import nn


def count(x, steps):
    steps.add_(1)
    return x * steps


def copied(x, steps):
    steps.copy_(steps + 1)
    return x * steps


class Counter(nn.Module):
    def __init__(self, augmented):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.augmented = augmented

    def forward(self, x):
        if self.augmented:
            self.steps += 1
        else:
            self.steps.add_(1)
        return x * self.steps


def three(f, *tensors):
    return [f(torch.ones(()), *tensors).item() for _ in range(3)]


def compiled(f, backend):
    torch._dynamo.reset()
    return torch.compile(f, backend=backend)


assert torch.__version__.startswith("2.13.0"), torch.__version__
right, frozen = [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]
for backend, expected in (("eager", right), ("aot_eager", frozen), ("inductor", frozen)):
    seen = [
        three(compiled(count, backend), torch.zeros((), dtype=torch.float64)),
        three(compiled(copied, backend), torch.zeros((), dtype=torch.float64)),
        three(compiled(count, backend), torch.zeros((), dtype=torch.float32)),
        three(compiled(count, backend), torch.zeros((1,), dtype=torch.float64)),
    ]
    print(f"backend {backend + ':':<10} add_ {seen[0]} copy_ {seen[1]} in float32 {seen[2]} of shape (1,) {seen[3]}")
    assert seen == [expected, expected, right, right], seen
buffers = [three(compiled(Counter(augmented), "aot_eager")) for augmented in (False, True)]
print("a buffer, backend aot_eager: add_", buffers[0], "+=", buffers[1])
assert buffers == [frozen, right], buffers
PROGRAM
