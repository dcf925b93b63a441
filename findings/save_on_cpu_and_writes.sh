#!/usr/bin/env bash
# torch.autograd.graph.save_on_cpu on a CPU keeps the tensor itself, and nothing checks whether it is written to.
#
# Seen on torch 2.13.0, CPU. A function multiplies by a row of a buffer and then overwrites the buffer. As it is, torch
# refuses the backward: the row was modified in place. Within save_on_cpu, whose pack hook copies to the CPU, a tensor
# that is there already is saved without a copy, and saved values that went through hooks have no version to compare.
# So the gradient is made of what the buffer holds by then.
#
# Output seen:
#     as it is:    one of the variables needed for gradient computation has been modified by an inplace operation
#     save_on_cpu: [7.0, 7.0, 7.0] for [1.0, 1.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import contextlib

import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__


def gradient(around):
    x, buffer = torch.ones(3, requires_grad=True), torch.ones(2, 3)
    with around:
        out = x * buffer[0]
        buffer.fill_(7)
    try:
        return torch.autograd.grad(out.sum(), x)[0].tolist()
    except RuntimeError as error:
        return str(error).split(":")[0]


plain, saved = gradient(contextlib.nullcontext()), gradient(torch.autograd.graph.save_on_cpu())
print("as it is:   ", plain)
print("save_on_cpu:", saved, "for [1.0, 1.0, 1.0]")
assert plain == "one of the variables needed for gradient computation has been modified by an inplace operation"
assert saved == [7.0, 7.0, 7.0]
PROGRAM
