#!/usr/bin/env bash
# A torch.library.custom_op computes in bfloat16 under autocast, and in float32 as soon as a FLOP counter looks on.
#
# Seen on torch 2.13.0, CPU. A kernel of a custom op that uses torch functions runs under the caller's autocast. Under
# a TorchDispatchMode it runs below the dispatcher's Python key, where autocast is off. So counting the FLOPs of a
# step, or selective checkpointing of it, changes its numbers.
#
# Output seen:
#     alone:                 the product inside is torch.bfloat16
#     under FlopCounterMode: the product inside is torch.float32, results differ by up to 0.12
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch.utils.flop_counter import FlopCounterMode

inside = []


@torch.library.custom_op("findings::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = x @ w
    inside.append(made.dtype)
    return made.float()


assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
x, w = torch.randn(64, 64), torch.randn(64, 64)
with torch.autocast("cpu", torch.bfloat16):
    alone = product(x, w)
    with FlopCounterMode(display=False):
        counted = product(x, w)
apart = float((alone - counted).abs().max())
print(f"alone:                 the product inside is {inside[0]}")
print(f"under FlopCounterMode: the product inside is {inside[1]}, results differ by up to {apart:.2f}")
assert inside == [torch.bfloat16, torch.float32] and apart > 0.01
PROGRAM
