"""What remat exchanges in torch is what `transforms/compat/patches.py` lists, each with its reason."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest
import torch

from remat.transforms.compat.patches import AT_FIRST_USE, AT_IMPORT, FOR_A_WHILE, PATCHES, exchange
from tests.repo.house import ROOT

# In a process of its own: what torch's own parts exchange, and when, depends on what has run.
_SCRIPT = """
import json, sys, types
import torch, torch._dynamo, torch._inductor.output_code, torch.distributed.tensor, torch.nn.parallel
import torch.distributed.fsdp, torch.distributed._composable.replicate

def seen():
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch") or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{inner}": one for inner, one in list(vars(value).items())})
    return found

def ours(value):
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    parts = "/transforms/", "/remat/"
    return isinstance(code, types.CodeType) and any(part in code.co_filename for part in parts)

def changed():
    found = {}
    for key, value in seen().items():
        if before.get(key) is not value and ours(value):
            # A module may have imported by name what stands in another.
            found.setdefault(id(value), []).append(key)
    return list(found.values())

before = seen()
from remat import checkpoint_policy, explain, remat
told = [changed()]
f, x = remat(lambda x: x.sin().exp()), torch.rand(3, requires_grad=True)
f(x).sum().backward()
torch.func.grad(torch.func.grad(lambda x: f(x).sum()))(x.detach()[0])
compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
remat(lambda x: compiled(x).exp())(x).sum().backward()
torch.func.grad(lambda x: remat(lambda x: compiled(x).exp())(x).sum())(x.detach())
remat(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)))(x).sum().backward()
remat(f, policy=checkpoint_policy(budget=0.9))(x).sum().backward()
explain(lambda x: f(x), x)
told.append(changed())
print(json.dumps(told))
"""


def unlisted(found: list[list[str]], patches: dict[str, str]) -> list[list[str]]:
    return [names for names in found if not any({n, n.rpartition(".")[0]} & patches.keys() for n in names)]


@pytest.mark.slow
def test_torch_has_only_the_listed_changes() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    imported, used = json.loads(done.stdout.splitlines()[-1])
    assert imported and not unlisted(imported, AT_IMPORT)
    assert len(used) > len(imported) and not unlisted(used, {**AT_IMPORT, **AT_FIRST_USE})


_COMPILED_BEFORE = """
import torch
torch.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
import remat
f = torch.vmap(torch.func.grad(lambda w, x: (x * w).sin().sum()), (None, 0))
w, x = torch.rand(3), torch.rand(2, 3)
jvp = lambda w, x: torch.func.jvp(lambda w: f(w, x), (w,), (w.cos(),))[1]
for fn in (f, jvp):
    torch.testing.assert_close(torch.compile(fn, backend="eager", fullgraph=True)(w, x), fn(w, x))
"""


def test_compiled_code_is_so_whichever_came_first() -> None:
    """Dynamo knows torch's functions by what they were when it was loaded: `torch.func` broke the graph."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", _COMPILED_BEFORE], cwd=ROOT, check=True)


def test_nothing_else_is_exchanged() -> None:
    with pytest.raises(KeyError, match="torch.nn.functional.gelu"):
        exchange(torch.nn.functional, "gelu", None)
    assert all(reason for reason in PATCHES.values()) and not AT_IMPORT.keys() & FOR_A_WHILE.keys()


@pytest.mark.slow
def test_the_engine_sets_attributes_of_modules_by_the_one_function() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "transforms").rglob("*.py")
        if path.name != "patches.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
    ]
    assert not found
