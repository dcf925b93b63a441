#!/usr/bin/env bash
# torch's scan and map run under .backward() and end in an AssertionError under torch.func.grad.
#
# Seen on torch 2.13.0, CPU. In eager code both trace their step by Dynamo, with fake tensors. What a level of
# torch.func hands them is a wrapper around the tensor, and the fake mode asserts that it has been given a fake one.
# The message names neither torch.func nor what to write, and torch.compile around the gradient does not help.
#
# Output seen:
#     scan: .backward() [1.0, 1.0], torch.func.grad AssertionError: Expected FakeTensor
#     map:  .backward() [1.0, 1.0], torch.func.grad AssertionError: Expected FakeTensor
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python -W ignore - <<'PROGRAM'
import logging

import torch
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan

logging.disable(logging.CRITICAL)


def scanned(x):
    carry, _ = scan(lambda carry, row: (carry * row, carry.sin()), x, torch.ones(3, 2))
    return carry.sum()


def mapped(x):
    return torch_map(lambda row: row.sin(), x).sum()


assert torch.__version__.startswith("2.13.0"), torch.__version__
for name, fn, x in (("scan", scanned, torch.rand(2)), ("map", mapped, torch.zeros(2, 1))):
    leaf = x.clone().requires_grad_()
    fn(leaf).backward()
    plain = leaf.grad.flatten().tolist()
    try:
        functional = torch.func.grad(fn)(x).flatten().tolist()
    except Exception as error:
        functional = f"{type(error).__name__}: {str(error).split(',')[0]}"
    print(f"{name + ':':<5} .backward() {plain}, torch.func.grad {functional}")
    assert (plain, functional) == ([1.0, 1.0], "AssertionError: Expected FakeTensor")
    torch._dynamo.reset()
    try:
        torch.compile(torch.func.grad(fn), backend="aot_eager")(x)
    except Exception:
        continue
    raise AssertionError("torch.compile(torch.func.grad(fn)) works")
PROGRAM
