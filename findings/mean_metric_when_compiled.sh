#!/usr/bin/env bash
# torchmetrics.MeanMetric of a value that requires a gradient is 1 where torch.compile traces it by AOTAutograd.
#
# Seen on torch 2.13.0 and torchmetrics 1.9.0, CPU. A mean is logged inside of a compiled function, of a value with a
# gradient. Dynamo breaks its graph where the metric asks for NaNs, then hands on the value and its weights as they are.
# With the backend "eager" the mean is right. With "aot_eager" the metric has added up the weights in place of the
# value (`metric.mean_value` is their number), so the mean is 1. Without a gradient both are right.
#
# Output seen:
#     without compile: 2.0
#     eager:           2.0
#     aot_eager:       1.0
#     no gradient:     2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 torchmetrics==1.9.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torchmetrics import MeanMetric

assert torch.__version__.startswith("2.13.0"), torch.__version__


def mean(backend=None, grad=True):
    torch._dynamo.reset()
    metric, x = MeanMetric(), torch.tensor([1.0, 2.0, 3.0], requires_grad=grad)
    step = lambda x: metric(x * 1.0)
    return (step if backend is None else torch.compile(step, backend=backend))(x).item()


found = [mean(), mean("eager"), mean("aot_eager"), mean("aot_eager", grad=False)]
for name, value in zip(["without compile:", "eager:", "aot_eager:", "no gradient:"], found):
    print(f"{name:<16} {value}")
assert found == [2.0, 2.0, 1.0, 2.0]
PROGRAM
