#!/usr/bin/env bash
# Forward mode over the backward of torch.linalg.solve is right with create_graph=True, and silently wrong without.
#
# Seen on torch 2.13.0, CPU. A Hessian-vector product by forward over reverse needs no graph of the backward. But
# where grad mode is off in a backward, solve's formula takes the factors of its forward, of which forward mode pushes
# no tangent, and in place of an error a part of the product is missing. torch.func.jvp of torch.func.grad, whose
# backward is always recorded, agrees with differences of gradients.
#
# Output seen:
#     torch.func:         right: True
#     create_graph=True:  right: True
#     create_graph=False: right: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp

assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
matrix = torch.randn(4, 4, dtype=torch.float64) + 5 * torch.eye(4, dtype=torch.float64)
right_side = torch.randn(4, dtype=torch.float64)
direction = torch.randn(4, 4, dtype=torch.float64)


def loss(a):
    return torch.linalg.solve(a, right_side).sum()


def product(create_graph):
    with forward_ad.dual_level():
        a = forward_ad.make_dual(matrix.clone().requires_grad_(), direction)
        (found,) = torch.autograd.grad(loss(a), a, create_graph=create_graph)
        return forward_ad.unpack_dual(found).tangent


step = 1e-6 * direction
wanted = (grad(loss)(matrix + step) - grad(loss)(matrix - step)) / 2e-6
products = jvp(grad(loss), (matrix,), (direction,))[1], product(True), product(False)
right = [torch.allclose(found, wanted, 1e-5, 1e-8) for found in products]
for name, one in zip(("torch.func:        ", "create_graph=True: ", "create_graph=False:"), right):
    print(name, "right:", one)
assert right == [True, True, False]
PROGRAM
