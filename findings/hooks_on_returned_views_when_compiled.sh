#!/usr/bin/env bash
# A hook on a view of an argument that a compiled function returns is lost: torch.compile gives another gradient.
#
# Seen on torch 2.13.0, CPU, backend aot_eager (2.14.1 prints the same; 2.11.0 prints 2.0 in both). A result that is no
# view keeps its hook. Nothing is said, also with fullgraph=True.
#
# Output seen:
#     a view: eager 2.0, compiled 1.0
#     a copy: eager 2.0, compiled 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
OMP_NUM_THREADS=1 env/bin/python - <<'PROGRAM'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__


def doubled(make):
    def function(x):
        y = make(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y

    return function


def slope(function):
    x = torch.ones(3, 4, requires_grad=True)
    function(x).sum().backward()
    return x.grad[0, 0].item()


found = {}
for name, make in {"a view": lambda x: x.view(-1), "a copy": torch.clone}.items():
    torch._dynamo.reset()
    function = doubled(make)
    found[name] = slope(function), slope(torch.compile(function, backend="aot_eager", fullgraph=True))
    print(f"{name}: eager {found[name][0]}, compiled {found[name][1]}")
assert found == {"a view": (2.0, 1.0), "a copy": (2.0, 2.0)}, found
PROGRAM
