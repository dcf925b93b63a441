#!/usr/bin/env bash
# torch.func.linearize takes torch.cond for a constant: tangents through it are zero, silently.
#
# Seen on torch 2.13.0, CPU, in eager code. `linearize(f, x)` of an `f` that calls `torch.cond(x.sum() > 0, torch.sin,
# torch.cos, (x,))` returns the right value, and its linear part gives zero where it should give cos(x) * v. Where
# something stands beside the cond, as in `torch.cond(...) * x`, the other terms of the derivative are there and the
# one through the cond is missing. `jvp` and `vjp` of the same functions raise, and `.backward()` is right.
#
# Output seen:
#     sin:      linearize [0.5403, 0.5403] backward [0.5403, 0.5403] jvp [0.5403, 0.5403]
#     cond:     linearize [0.0, 0.0] backward [0.5403, 0.5403] jvp raises
#     cond * x: linearize [0.8415, 0.8415] backward [1.3818, 1.3818] jvp raises
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch
from torch.func import jvp, linearize


def branch(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def rounded(tensor):
    return [round(n, 4) for n in tensor.detach().tolist()]


def pushed(f, x, v):
    try:
        return rounded(jvp(f, (x,), (v,))[1])
    except Exception:
        return "raises"


assert torch.__version__.startswith("2.13.0"), torch.__version__
FUNCTIONS = {"sin": torch.sin, "cond": branch, "cond * x": lambda x: branch(x) * x}
EXPECTED = {
    "sin": ([0.5403, 0.5403], [0.5403, 0.5403], [0.5403, 0.5403]),
    "cond": ([0.0, 0.0], [0.5403, 0.5403], "raises"),
    "cond * x": ([0.8415, 0.8415], [1.3818, 1.3818], "raises"),
}
for name, f in FUNCTIONS.items():
    x, v = torch.ones(2), torch.ones(2)
    linear = rounded(linearize(f, x)[1](v))
    leaf = x.clone().requires_grad_()
    f(leaf).sum().backward()
    found = linear, rounded(leaf.grad), pushed(f, x, v)
    print(f"{name + ':':<9} linearize {found[0]} backward {found[1]} jvp {found[2]}")
    assert found == EXPECTED[name], found
PROGRAM
