#!/usr/bin/env bash
# torch.nn.functional.grouped_mm multiplies float32 matrices on a CPU; its kernel without data knows bfloat16 alone.
#
# Seen on torch 2.13.0, CPU. Experts of a mixture are one grouped product. In eager code it takes float32 and bfloat16.
# On the meta device, with fake tensors, and so under torch.compile, float32 is refused: a model in full precision that
# trains in eager code (Mixtral of transformers with its default experts does) cannot be compiled, exported or traced.
#
# Output seen:
#     float32: eager (8, 32), meta: Expected inputs of BF16 type but got mat_a.dtype=torch.float32
#     bfloat16: eager (8, 32), meta (8, 32)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__


def product(dtype, device):
    rows = torch.ones(8, 16, dtype=dtype, device=device)
    weights = torch.ones(2, 16, 32, dtype=dtype, device=device)
    ends = torch.tensor([3, 8], dtype=torch.int32).to(device)
    try:
        return f" {tuple(torch.nn.functional.grouped_mm(rows, weights, offs=ends).shape)}"
    except RuntimeError as error:
        return f": {str(error).partition(' and ')[0]}"


full = product(torch.float32, "cpu"), product(torch.float32, "meta")
half = product(torch.bfloat16, "cpu"), product(torch.bfloat16, "meta")
print(f"float32: eager{full[0]}, meta{full[1]}")
print(f"bfloat16: eager{half[0]}, meta{half[1]}")
assert full == (" (8, 32)", ": Expected inputs of BF16 type but got mat_a.dtype=torch.float32"), full
assert half == (" (8, 32)", " (8, 32)"), half
PROGRAM
