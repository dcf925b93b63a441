"""The names that users import: where they are found, and that none of torch's is taken."""

# The function has names that no type checker knows.
# pyright: reportFunctionMemberAccess=false

from __future__ import annotations

import inspect
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
