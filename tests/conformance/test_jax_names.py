"""`remat.interop.jax` against the installed JAX: every public name is there, and takes JAX's arguments."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from remat.interop import jax as the_jax
from remat.policies import Policy

jax: Any = pytest.importorskip("jax")
ad_checkpoint: Any = pytest.importorskip("jax.ad_checkpoint")


def public(module: Any) -> set[str]:
    return {name for name in vars(module) if not name.startswith("_")}


def test_every_policy_of_jax_is_there() -> None:
    theirs, ours = public(jax.checkpoint_policies), public(the_jax.checkpoint_policies)
    # Newer versions have classes in the place of functions that make policies; ours has both.
    makers = {name for name in theirs if name.split("_")[0] in ("save", "offload")}
    assert len(theirs) >= 12 and ours == theirs | {name.title().replace("_", "") for name in makers}
    for name in theirs:
        made = getattr(the_jax.checkpoint_policies, name)
        takes = inspect.signature(getattr(jax.checkpoint_policies, name)).parameters
        if {"prim", "_"} & set(takes):
            # A policy itself; the others make one.
            assert isinstance(made, Policy), name
        else:
            assert [p.kind for p in inspect.signature(made).parameters.values()] == [
                p.kind for p in takes.values()
            ], name
            if not any(p.kind is p.VAR_POSITIONAL for p in takes.values()):
                assert list(inspect.signature(made).parameters) == list(takes), name


def test_every_name_beside_the_policies_is_there() -> None:
    assert public(ad_checkpoint) <= public(the_jax)
    assert isinstance(the_jax.checkpoint_policies, SimpleNamespace)
    assert the_jax.remat is the_jax.checkpoint


def test_checkpoint_takes_jaxs_arguments() -> None:
    # `concrete` is on its way out of JAX, and is there to say so.
    theirs, ours = [
        [name for name in inspect.signature(module.checkpoint).parameters if name != "concrete"]
        for module in (jax, the_jax)
    ]
    assert ours == theirs


def test_a_name_that_is_missing_would_be_found() -> None:
    assert not public(SimpleNamespace(new_policy=1)) <= public(the_jax.checkpoint_policies)
