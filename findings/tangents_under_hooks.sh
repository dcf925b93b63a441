#!/usr/bin/env bash
# Saved-tensor hooks that return what they are given change the tangent of a gradient, silently.
#
# Seen on torch 2.13.0, CPU. Under a plain forward_ad.dual_level, the gradient of a result's tangent has a tangent of its
# own, which for tanh, sigmoid and rsqrt is the right third derivative. Under identity saved-tensor hooks, and so under
# torch.utils.checkpoint, it is another number: the formula that makes the tangent saves the result before that has its
# tangent, and hooks note tangents when a value is saved, where autograd without hooks reads them when it is used.
#
# Output seen:
#     tanh at 0.5: third derivative -0.5652, without hooks -0.5652, under identity hooks 0.6718, in a checkpoint 0.6718
#     sigmoid at 0.5: third derivative -0.0964, without hooks -0.0964, under identity hooks 0.0141, in a checkpoint 0.0141
#     rsqrt at 0.5: third derivative -21.2132, without hooks -21.2132, under identity hooks -12.7279, in a checkpoint -12.7279
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad
from torch.utils.checkpoint import checkpoint

assert torch.__version__.startswith("2.13.0"), torch.__version__


def hooked(f):
    def call(x):
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return f(x)

    return call


def tangent_of_gradient(f):
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        (gradient,) = torch.autograd.grad(tangent, x)
        return forward_ad.unpack_dual(gradient).tangent.item()


seen = {}
for f in (torch.tanh, torch.sigmoid, torch.rsqrt):
    third = grad(grad(grad(f)))(torch.tensor(0.5, dtype=torch.float64)).item()
    plain, hooks = tangent_of_gradient(f), tangent_of_gradient(hooked(f))
    inside = tangent_of_gradient(lambda x: checkpoint(f, x, use_reentrant=False))
    seen[f.__name__] = [round(value, 4) for value in (third, plain, hooks, inside)]
    print(
        f"{f.__name__} at 0.5: third derivative {third:.4f}, without hooks {plain:.4f}, "
        f"under identity hooks {hooks:.4f}, in a checkpoint {inside:.4f}"
    )
assert seen == {
    "tanh": [-0.5652, -0.5652, 0.6718, 0.6718],
    "sigmoid": [-0.0964, -0.0964, 0.0141, 0.0141],
    "rsqrt": [-21.2132, -21.2132, -12.7279, -12.7279],
}, seen
PROGRAM
