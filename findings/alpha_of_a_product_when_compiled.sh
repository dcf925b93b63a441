#!/usr/bin/env bash
# Inductor drops `alpha` where a matrix product is added, silently.
#
# Seen on torch 2.13.0, CPU. `torch.add(e, a @ x, alpha=0.1)` of a buffer, as in the moving average of a codebook
# (`e.mul_(0.9).add_(a @ x, alpha=0.1)`), is `e + 0.1 * (a @ x)` in eager code and with the backends "eager" and
# "aot_eager", and `e + a @ x` with "inductor", in float32 and float64, out of place and in place. `torch.sub` with
# `alpha` is right, and so is `e + 0.1 * (a @ x)`. So the codebook of a compiled VQ-VAE moves ten times too far.
#
# Output seen:
#     backend eager:     add [1.1, 1.1] add_ [1.1, 1.1] sub [0.9, 0.9] written out [1.1, 1.1]
#     backend aot_eager: add [1.1, 1.1] add_ [1.1, 1.1] sub [0.9, 0.9] written out [1.1, 1.1]
#     backend inductor:  add [2.0, 2.0] add_ [2.0, 2.0] sub [0.9, 0.9] written out [1.1, 1.1]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch


def add(e, a, x):
    return torch.add(e, a @ x, alpha=0.1)


def add_(e, a, x):
    return e.mul_(1).add_(a @ x, alpha=0.1)


def sub(e, a, x):
    return torch.sub(e, a @ x, alpha=0.1)


def written_out(e, a, x):
    return e + 0.1 * (a @ x)


assert torch.__version__.startswith("2.13.0"), torch.__version__
functions = (add, add_, sub, written_out)
right, seen_of = [1.1, 1.1, 0.9, 1.1], {}
for backend, expected in (("eager", right), ("aot_eager", right), ("inductor", [2.0, 2.0, 0.9, 1.1])):
    shown = []
    for function in functions:
        values = []
        for dtype in (torch.float32, torch.float64):
            torch._dynamo.reset()
            given = torch.ones(8, 16, dtype=dtype), torch.full((8, 4), 0.25, dtype=dtype), torch.ones(4, 16, dtype=dtype)
            values.append(round(torch.compile(function, backend=backend)(*given)[0, 0].item(), 4))
        shown.append(values)
    names = ("add", "add_", "sub", "written out")
    print(f"backend {backend + ':':<10}", *(f"{name} {values}" for name, values in zip(names, shown)))
    assert shown == [[value, value] for value in expected], shown
PROGRAM
