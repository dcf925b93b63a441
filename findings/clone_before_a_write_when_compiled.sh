#!/usr/bin/env bash
# torch.compile takes a clone of a buffer to be the buffer, which is written to meanwhile: silently wrong gradients.
#
# Seen on torch 2.13.0, CPU. A function clones a buffer, as one has to before it writes to it, multiplies by the clone
# and adds 1 to the buffer. The min-cut partitioner saves the buffer, which costs nothing, and clones it again in the
# backward. By then the buffer holds what was written at the end of the forward. Without torch.compile and with the
# default partitioner the gradient is right. `buffer + 0` in place of the clone does the same.
#
# Output seen:
#     eager:             [20.0, 40.0, 60.0]
#     default partition: [20.0, 40.0, 60.0]
#     torch.compile:     [22.0, 42.0, 62.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
TORCHINDUCTOR_CACHE_DIR="$folder/cache" OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch._dynamo.backends.common import aot_autograd


def as_it_is(graph, inputs):
    return graph


def step(x, buffer):
    before = buffer.clone()
    buffer.add_(1)
    return (x * before * 2).sum()


assert torch.__version__.startswith("2.13.0"), torch.__version__
ways = {
    "eager": step,
    "default partition": torch.compile(step, backend=aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is)),
    "torch.compile": torch.compile(step),
}
found = {}
for name, way in ways.items():
    torch._dynamo.reset()
    x, buffer = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([10.0, 20.0, 30.0])
    way(x, buffer).backward()
    found[name] = x.grad.tolist()
    print(f"{name + ':':<18} {found[name]}")
    assert buffer.tolist() == [11.0, 21.0, 31.0]
right = [20.0, 40.0, 60.0]
assert found == {"eager": right, "default partition": right, "torch.compile": [22.0, 42.0, 62.0]}
PROGRAM
