#!/usr/bin/env bash
# The linear map that torch.func.linearize returns draws a new dropout mask in every call.
#
# Seen on torch 2.13.0, CPU. linearize runs the function and traces its forward-mode derivative into a graph. The op
# that draws the mask depends on no tangent, and is not folded into the graph's constants: it stays in the graph and
# draws again. So the map belongs to another function than the value that came with it, and is not linear from one
# call to the next. torch.func.jvp of the same function has one mask for both.
#
# Output seen:
#     jvp:       value and tangent have the same zeros: True
#     linearize: value and tangent have the same zeros: False, two calls of the map: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch
from torch.nn.functional import dropout


def layer(x):
    return dropout(x, 0.5)


assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
x = ones = torch.ones(64)
value, tangent = torch.func.jvp(layer, (x,), (ones,))
together = torch.equal(value == 0, tangent == 0)
print("jvp:       value and tangent have the same zeros:", together)
value, linear = torch.func.linearize(layer, x)
one, two = linear(ones), linear(ones)
apart, again = torch.equal(value == 0, one == 0), torch.equal(one, two)
print(f"linearize: value and tangent have the same zeros: {apart}, two calls of the map: {again}")
assert together and not apart and not again
PROGRAM
