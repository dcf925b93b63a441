#!/usr/bin/env bash
# The map of torch.func.linearize forgets what was written to a tensor by index, and repeats h += x in every call.
#
# Seen on torch 2.13.0, CPU, and the same on 2.11.0 and 2.14.1. The parts of the graph that depend on no tangent are
# folded into constants at the first call. In-place ops are not folded: they stay and write to the constants, in every
# call anew. A view is folded into a constant of its own, a copy, so a write to it no longer reaches the tensor that it
# was a view of. No message tells of either, and the value that comes with the map is right. torch.func.jvp of these
# functions is right, and so is linearize of torch.func.functionalize of them.
#
# Output seen (the tangent by jvp, then three calls of one map with one direction):
#     filled:   [3.00, 5.00], calls: [0.00, 0.00] [0.00, 0.00] [0.00, 0.00]
#     residual: [2.75, 2.13], calls: [2.75, 2.13] [2.57, 1.68] [2.36, 1.26]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch
from torch.func import functionalize, jvp, linearize


def filled(x):
    scale = torch.zeros(2)
    scale[0], scale[1] = 3.0, 5.0
    return scale * x


def residual(x):
    h = x * 2
    h += x
    return h.tanh()


def calls(f):
    linear = linearize(f, x)[1]
    return [linear(direction) for _ in range(3)]


def said(found):
    return " ".join("[{:.2f}, {:.2f}]".format(*tangent.tolist()) for tangent in found)


assert torch.__version__.startswith("2.13.0"), torch.__version__
x, direction = torch.tensor([0.1, 0.2]), torch.ones(2)
agree = {}
for f in (filled, residual):
    right, found = jvp(f, (x,), (direction,))[1], calls(f)
    print(f"{f.__name__ + ':':<9} {said([right])}, calls: {said(found)}")
    assert torch.equal(linearize(f, x)[0], f(x))
    agree[f] = [torch.allclose(tangent, right) for tangent in found]
    assert all(torch.allclose(tangent, right) for tangent in calls(functionalize(f)))
assert agree[filled] == [False] * 3 and not any(tangent.any() for tangent in calls(filled))
assert agree[residual] == [True, False, False]
PROGRAM
