"""The names that users import: where they are found, and that none of torch's is taken."""

# The function has names that no type checker knows.
# pyright: reportFunctionMemberAccess=false

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import remat as library
from remat import RematError, remat

X = torch.ones(4, requires_grad=True)


def test_checkpoint_is_remat() -> None:
    assert library.checkpoint is remat
    assert torch.equal(library.checkpoint(torch.sin)(X), X.sin())


@pytest.mark.parametrize(
    "name", ["apply", "regions", "save_matmuls", "offload", "checkpoint", "policies", "nn"]
)
def test_the_function_has_the_packages_names(name: str) -> None:
    assert getattr(remat, name) is getattr(library, name)


def test_the_function_has_every_public_name() -> None:
    assert not [name for name in library.__all__ if not hasattr(remat, name)]


def test_names_that_are_loaded_later_work_from_the_function() -> None:
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)]
    )
    assert remat.fit(model, torch.ones(2, 4), peak="1MiB").applied == ()
    assert remat.explain(remat(torch.sin), X).kept_bytes == 0
    assert remat.plan.Layout is library.plan.Layout
    assert inspect.signature(remat.fit) == inspect.signature(library.fit)
    with pytest.raises(AttributeError, match="no_such"):
        remat.plan.no_such  # noqa: B018


def test_regions_at_the_top_are_those_of_nn() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    assert remat.regions(remat.apply(model, layers=torch.nn.Linear)) == ["0"]
    assert library.regions(library.remove(model)) == []


def test_a_star_takes_no_name_of_torch() -> None:
    names: dict[str, Any] = {}
    exec("import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n", names)
    before = dict(names)
    exec("from remat import *", names)
    assert {name for name in before if names[name] is not before[name]} == set()
    assert names["apply"] is library.apply
    assert issubclass(names["RematError"], RematError)


# Each name of the version before, what uses it, and what the warning says to write.
OLD = {
    "remat.save_unbatched_matmuls": ("found is remat.save_weight_matmuls", "remat.save_weight_matmuls"),
    "remat.policies.save_unbatched_matmuls": (
        "found is remat.save_weight_matmuls",
        "remat.save_weight_matmuls",
    ),
    "remat.policies.save_every": (
        "repr(found(2, remat.save_matmuls))[:17] == 'save_every_nth(2,'",
        "remat.save_every_nth",
    ),
    "remat.policies.save_cheaper_than": ("found is remat.save_costlier_than", "remat.save_costlier_than"),
    "remat.policies.register_costly_op": ("found('x::y', 'bmm') is None", "remat.register_op(op, kind=...)"),
    "remat.plan.register_cost": ("found('x::y', lambda *a: 1) is None", "remat.register_op(op, flops=...)"),
    "remat.layers.stack_params": ("found is remat.stack_params", "remat.stack_params"),
    "remat.scan.scan_remat": ("found is remat.scan_remat", "remat.scan_remat"),
    "remat.offload_matmuls": ("repr(found) == 'offload_matmuls'", "remat.offload(remat.save_matmuls)"),
    "remat.offload_names": (
        "repr(found('q')) == \"offload_names('q')\"",
        "remat.offload(remat.save_names(...))",
    ),
    "remat.print_saved_residuals": (
        "found is remat.jax_names.print_saved_residuals",
        "print(remat.saved_residuals(fn, *args))",
    ),
    "remat.compare": (
        "[each.recomputed.ops for _, each in found(lambda x: x.sin().exp(), torch.ones(4)).rows]"
        " == [2, 2, 2, 2, 2, 0]",
        "remat.explain(fn, *args, policies=...)",
    ),
    "remat.pareto": ("found is remat.plan.pareto", "remat.plan.pareto"),
    "remat.plan_model": (
        "found(PLANNED, X, budget=0.6)(X).requires_grad",
        "remat.fit(fn, *args, budget=...)",
    ),
    "remat.plan.plan_model": (
        "len(found(PLANNED, X, budget=0.6).regions) == 2",
        "remat.fit(fn, *args, budget=...)",
    ),
    "remat.plan.plan_chain": (
        "found([torch.sin, torch.exp], X, peak='2KiB')(X).shape == X.shape",
        "remat.fit([stage1, stage2], x, peak=...)",
    ),
    "remat.interop.diffusers.enable": (
        "callable(found)",
        "model.enable_gradient_checkpointing("
        "gradient_checkpointing_func=remat.interop.CheckpointFunction(policy))",
    ),
    "remat.register_ambient": ("found is remat.register_state", "remat.register_state"),
    "remat.ambient.register_ambient": ("found is remat.register_state", "remat.register_state"),
}
# Names warn once in a process: this one has nothing else in it.
WORKS = """
import json, sys, warnings
import torch
import remat
X = torch.eye(4, requires_grad=True)
BLOCK = remat.remat(lambda x: torch.tanh(x @ x).exp(), policy=remat.checkpoint_policy(budget=0.5))
PLANNED = lambda x: BLOCK(BLOCK(x)).sum()
for path, works in json.loads(sys.argv[1]).items():
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        exec(compile(f"from {module} import {name} as found", __file__, "exec"), globals())
        found = getattr(sys.modules[module], name)
        right = bool(eval(works))
    told = [(str(w.message), w.category.__name__, w.filename == __file__) for w in seen]
    print(json.dumps([path, right, told]))
"""


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bool, list[Any]]]:
    script = tmp_path_factory.mktemp("old") / "script.py"
    script.write_text(WORKS)
    old = json.dumps({path: works for path, (works, _) in OLD.items()})
    done = subprocess.run([sys.executable, str(script), old], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {path: (right, warnings) for path, right, warnings in lines}


@pytest.mark.parametrize("path", OLD)
def test_an_old_name_works_and_warns_once(path: str, worked: dict[str, tuple[bool, list[Any]]]) -> None:
    right, warnings = worked[path]
    assert right
    assert warnings == [[f"{path} is deprecated: write {OLD[path][1]}.", "DeprecationWarning", True]]


def test_old_names_are_in_no_list() -> None:
    for path in OLD:
        module, _, name = path.rpartition(".")
        assert name not in getattr(importlib.import_module(module), "__all__", ())
