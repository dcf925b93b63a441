#!/usr/bin/env bash
# torch.linalg.svdvals and eigvalsh compute the vectors, too, under any TorchDispatchMode.
#
# Seen on torch 2.13.0, CPU. Both ask for values alone where nothing needs a gradient. To find out they ask whether
# the tensor is like a subclass, and under a dispatch mode (a FLOP counter, a logger, selective checkpointing) every
# tensor is. So a mode that only watches changes what is computed: 4/3 n^3 FLOPs become 9 n^3 for eigvalsh.
#
# Output seen (elements of the vectors that the kernel makes; the time of a 256 x 256 svdvals was 4.3 and 7.5 ms):
#     without a mode: svdvals asks for vectors: False, eigvalsh: False
#     under a mode:   svdvals asks for vectors: True, eigvalsh: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def asks_for_vectors(fn, x, op):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        fn(x)
    # The third argument of both kernels.
    (asked,) = {bool(event.concrete_inputs[2]) for event in seen.events() if event.name == op}
    return asked


assert torch.__version__.startswith("2.13.0"), torch.__version__
x = torch.eye(32)
programs = (torch.linalg.svdvals, "aten::_linalg_svd"), (torch.linalg.eigvalsh, "aten::_linalg_eigh")
plain = [asks_for_vectors(fn, x, op) for fn, op in programs]
with Watching():
    watched = [asks_for_vectors(fn, x, op) for fn, op in programs]
print(f"without a mode: svdvals asks for vectors: {plain[0]}, eigvalsh: {plain[1]}")
print(f"under a mode:   svdvals asks for vectors: {watched[0]}, eigvalsh: {watched[1]}")
assert plain == [False, False] and watched == [True, True]
PROGRAM
