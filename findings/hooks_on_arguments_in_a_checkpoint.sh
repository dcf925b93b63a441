#!/usr/bin/env bash
# A hook that a function registers on its argument runs twice inside of torch.utils.checkpoint: the gradient is wrong.
#
# Seen on torch 2.13.0, CPU (2.14.1 prints the same; compiled by 2.11.0 it ends in an error). A function that scales or
# turns round the gradient of what it is given, by `x.register_hook`, registers the hook again when the checkpoint runs
# it again, on the same tensor and before its gradient is there. Without the checkpoint, and with the checkpoint under
# torch.compile, it runs once.
#
# Output seen:
#     plain: -0.335
#     checkpoint: 0.335
#     checkpoint, compiled: -0.335
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch.utils.checkpoint import checkpoint

assert torch.__version__.startswith("2.13.0"), torch.__version__


def reversed_gradient(x):
    x.register_hook(torch.neg)
    return x + 2 * x.sin()


def slope(call):
    w = torch.tensor([1.0], requires_grad=True)
    return round(torch.autograd.grad(call(2 * w).sum(), w)[0].item(), 3)


def checkpointed(x):
    return checkpoint(reversed_gradient, x, use_reentrant=False)


compiled = torch.compile(lambda w: checkpointed(2 * w), backend="aot_eager")
found = {
    "plain": slope(reversed_gradient),
    "checkpoint": slope(checkpointed),
    "checkpoint, compiled": slope(lambda x: compiled(x / 2)),
}
for name, value in found.items():
    print(f"{name}: {value}")
assert found == {"plain": -0.335, "checkpoint": 0.335, "checkpoint, compiled": -0.335}, found
PROGRAM
