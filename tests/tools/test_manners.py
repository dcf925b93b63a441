"""Options of other libraries and slips of the pen are told with what to write; names of regions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from remat import RematError, checkpoint_name, explain, jax_names, remat, save_names, saved_residuals
from remat.nn import apply, regions
from tests.helpers import rand

X = rand(4, 4)


def block(x):
    return checkpoint_name(x.sin(), "h").exp()


class Layer(nn.Module):
    def forward(self, x):
        return block(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.named = nn.ModuleDict({"a": Layer()})


# -- layers of models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "write"),
    [
        ("blocks", "layers='blocks.*'"),
        ("*blocks*", "layers='blocks.*'"),
        (nn.ModuleList, "layers='blocks.*'"),
        (["named"], "layers='named.*'"),
        (lambda name, module: name == "blocks", "layers='blocks.*'"),
    ],
)
def test_a_list_of_modules_is_no_layer(layers, write):
    model = Model()
    with pytest.raises(RematError, match="nobody calls") as told:
        apply(model, layers=layers)
    assert write in str(told.value) and not regions(model)
    assert len(regions(apply(model, layers=["blocks.*", "named.*"]))) == 5


# -- functions that run later ------------------------------------------------------------------------------


def generator(x):
    yield x.sin()


async def coroutine(x):
    return x.sin()


async def both(x):
    yield x.sin()


class Later(nn.Module):
    def forward(self, x):
        yield x.sin()


class Callable:
    def __call__(self, x):
        yield x.sin()

    def method(self, x):
        yield x.sin()


@functools.wraps(generator)
def wrapped(x):
    return generator(x)


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (generator, "a generator"),
        (coroutine, "a coroutine"),
        (both, "an asynchronous generator"),
        (functools.partial(generator), "a generator"),
        (Later(), "a generator"),
        (Callable(), "a generator"),
        (Callable().method, "a generator"),
        (wrapped, "a generator"),
    ],
)
def test_what_runs_after_its_call_is_refused(fn, kind):
    with pytest.raises(RematError, match=f"the function is {kind}, which runs after") as told:
        remat(fn)
    assert isinstance(told.value, TypeError)


# -- options of other libraries ----------------------------------------------------------------------------


# -- names of regions --------------------------------------------------------------------------------------


def name_of(fn):
    (region,) = explain(lambda x: fn(x).sum(), X).now.regions
    return region.name


def test_regions_have_the_names_that_users_gave():
    def inner(x):
        return block(x)

    class Local(nn.Module):
        def forward(self, x):
            return block(x)

    line = block.__code__.co_firstlineno
    assert name_of(remat(block)) == "block"
    assert name_of(remat(inner)) == "inner"
    assert name_of(remat(functools.partial(functools.partial(block)))) == "block"
    assert name_of(remat(Layer())) == name_of(remat(Layer().forward)) == "Layer"
    assert name_of(apply(nn.Sequential(Layer()), layers="0")) == "Layer"
    assert name_of(remat(Local().forward)) == "Local"
    assert name_of(remat(lambda x: block(x))).startswith("lambda at test_manners.py:") and line
    assert name_of(remat(block, name="mine")) == "mine"


# -- JAX's names -------------------------------------------------------------------------------------------


def test_rules_of_one_op_are_taken():
    def cached(info):
        return False

    @functools.wraps(cached)
    def decorated(*args, **kwargs):
        return cached(*args, **kwargs)

    class Rule:
        def __call__(self, info, extra=None):
            return False

        def method(self, info):
            return False

    for rule in (lambda info: False, lambda info, k=1: k > 1, decorated, Rule(), Rule().method):
        assert remat(block, policy=rule)(X) is not None


def test_jaxs_classes_and_modules():
    policies = jax_names.checkpoint_policies
    assert policies.SaveOnlyTheseNames("h") == jax_names.SaveOnlyTheseNames("h") == save_names("h")
    siblings = ["SaveAnyNamesButThese", "SaveAnythingExceptTheseNames", "SaveAndOffloadOnlyTheseNames"]
    for name in (*siblings, "SaveFromBothPolicies", "OffloadDotWithNoBatchDims"):
        assert getattr(policies, name) is getattr(jax_names, name)
    fn = jax_names.ad_checkpoint.checkpoint(block, policy=policies.SaveOnlyTheseNames("h"), concrete=False)
    assert [r.name for r in saved_residuals(fn, X) if r.why == "policy"] == ["h"]
    with pytest.raises(RematError, match="static_argnums"):
        jax_names.checkpoint(block, concrete=True)
    assert jax_names.ad_checkpoint.checkpoint_name is jax_names.checkpoint_name
    assert torch.equal(fn(X), block(X))
