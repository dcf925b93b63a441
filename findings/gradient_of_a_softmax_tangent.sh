#!/usr/bin/env bash
# The gradient of a tangent of softmax, log_softmax or logsumexp raises "modified by an inplace operation".
#
# Seen on torch 2.13.0, CPU: reverse over forward, by a plain forward_ad.dual_level. The user writes nothing in place: the
# formulas for forward mode write into an exponential that autograd has saved for the backward. The same numbers by exp
# and log are differentiated, and so are these ops where forward mode goes over reverse.
#
# Output seen:
#     x - log(sum(exp(x))): [-0.1966, 0.1966]
#     x - logsumexp(x): modified by an inplace operation
#     log_softmax: modified by an inplace operation
#     softmax: modified by an inplace operation
#     log_softmax, forward over reverse: [-0.1966, 0.1966]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp

assert torch.__version__.startswith("2.13.0"), torch.__version__
at, direction = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)


def gradient_of_tangent(f):
    x = at.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, direction))[0]).tangent
        return torch.autograd.grad(tangent, x)[0]


def told(found):
    return [round(value, 4) for value in found.tolist()]


def said(f):
    try:
        return str(told(gradient_of_tangent(f)))
    except RuntimeError as error:
        known = "modified by an inplace operation"
        return known if known in str(error) else str(error)


by_hand, summed = said(lambda x: x - x.exp().sum(0).log()), said(lambda x: x - x.logsumexp(0))
print("x - log(sum(exp(x))):", by_hand)
print("x - logsumexp(x):", summed)
one, other = said(lambda x: x.log_softmax(0)), said(lambda x: x.softmax(0))
print("log_softmax:", one)
print("softmax:", other)
over = told(jvp(grad(lambda x: x.log_softmax(0)[0]), (at,), (direction,))[1])
print("log_softmax, forward over reverse:", over)
assert summed == one == other == "modified by an inplace operation", (summed, one, other)
assert by_hand == str(over) == "[-0.1966, 0.1966]", (by_hand, over)
PROGRAM
