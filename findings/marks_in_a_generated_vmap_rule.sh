#!/usr/bin/env bash
# ctx.mark_non_differentiable has no effect under vmap where the autograd.Function has generate_vmap_rule=True.
#
# Seen on torch 2.13.0, CPU, and the same on 2.11.0 and 2.14.1. The generated rule runs setup_context inside the vmap,
# where the results are batched tensors. Autograd looks for the marks on the tensors below, and finds none. So a marked
# result of floating point requires a gradient, and neither None nor zeros in the jvp rule serve both ways: None for
# the marked result fails an internal assertion under vmap, and zeros, with which vmap runs, are refused without it.
# Marks count again where a vmap rule is written by hand.
#
# Output seen (without vmap, under vmap, under vmap with a rule by hand):
#     results require gradients: [True, False] [True, True] [True, False]
#     jvp, the rule returns None:  runs | INTERNAL ASSERT FAILED | runs
#     jvp, the rule returns zeros: You should return None | runs
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import torch
from torch.func import jvp, vmap


def function(second, by_hand=False):
    class SinAndRound(torch.autograd.Function):
        generate_vmap_rule = not by_hand

        @staticmethod
        def forward(x):
            return x.sin(), x.round()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx, gradient, _):
            return gradient * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * ctx.saved_tensors[0].cos(), second(tangent)

        if by_hand:

            @staticmethod
            def vmap(info, in_dims, x):
                return SinAndRound.apply(x), in_dims * 2

    return SinAndRound.apply


def said(f):
    try:
        jvp(f, (x.detach(),), (torch.ones(3),))
        return "runs"
    except RuntimeError as error:
        known = ("INTERNAL ASSERT FAILED", "You should return None")
        return next((part for part in known if part in str(error)), str(error))


def nothing(tangent):
    return None


assert torch.__version__.startswith("2.13.0"), torch.__version__
x = torch.tensor([0.4, 1.0, 2.6], requires_grad=True)
f, written = function(nothing), function(nothing, by_hand=True)
requires = [[t.requires_grad for t in g(x)] for g in (f, vmap(f), vmap(written))]
print("results require gradients:", *requires)
none = [said(g) for g in (f, vmap(f), vmap(written))]
print("jvp, the rule returns None: ", " | ".join(none))
zeros = [said(g) for g in (function(torch.zeros_like), vmap(function(torch.zeros_like)))]
print("jvp, the rule returns zeros:", " | ".join(zeros))
assert requires == [[True, False], [True, True], [True, False]], requires
assert none == ["runs", "INTERNAL ASSERT FAILED", "runs"], none
assert zeros == ["You should return None", "runs"], zeros
PROGRAM
