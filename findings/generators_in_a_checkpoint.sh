#!/usr/bin/env bash
# A checkpoint whose function draws from a torch.Generator of its own: silently wrong gradients.
#
# Seen on torch 2.13.0, CPU. preserve_rng_state=True, the default, restores the global streams alone. The
# recomputation draws the next numbers of the generator: the shapes agree, so determinism_check="default" passes. The
# same program with the global stream is right. The generator has also moved twice as far as without a checkpoint.
#
# Output seen:
#     global stream: gradient off by 0.00
#     generator:     gradient off by 1.21, and it has given 200 numbers for 100
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch
from torch.utils.checkpoint import checkpoint

assert torch.__version__.startswith("2.13.0"), torch.__version__
torch.manual_seed(0)
off, drawn = [], []
for generator in (None, torch.Generator().manual_seed(0)):
    noise = []

    def block(x):
        noise.append(torch.rand(100, generator=generator))
        return (x.sin() * noise[-1]).exp()

    x = torch.randn(100, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)
    y.sum().backward()
    right = (y * noise[0] * x.cos()).detach()
    off.append(float((x.grad - right).abs().max()))
fresh = torch.Generator().manual_seed(0)
torch.rand(200, generator=fresh)
twice = torch.equal(fresh.get_state(), generator.get_state())
print(f"global stream: gradient off by {off[0]:.2f}")
print(f"generator:     gradient off by {off[1]:.2f}, and it has given {200 if twice else 'other than 200'} numbers for 100")
assert off[0] < 1e-5 and off[1] > 0.1 and twice
PROGRAM
