"""Regions take and give trees as torch's: the same leaves in the same order, the same containers."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings, strategies as st

from remat import remat
from tests.helpers import rand, same


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@dataclasses.dataclass
class Bag:
    # A list must stay one: torch hands lists to what puts a container together.
    items: list[Any]
    name: str


torch_pytree.register_dataclass(Point)
torch_pytree.register_pytree_node(
    Bag,
    lambda bag: (bag.items, bag.name),
    lambda items, name: Bag(items, name),  # pyright: ignore
)
KEYS = st.sampled_from(["b", "a", "c", 2, 1])
LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just(torch.Size([2, 3])), st.just(...))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # Dicts by their pairs: the order of the keys is drawn, too.
    pairs = st.lists(st.tuples(KEYS, inner), max_size=3, unique_by=lambda pair: pair[0])
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: collections.deque(items, maxlen=5)),
        pairs.map(dict),
        pairs.map(collections.OrderedDict),
        pairs.map(lambda found: collections.defaultdict(list, found)),
        st.builds(Pair, inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Bag, st.lists(inner, max_size=2), st.sampled_from("pq")),
    )


def handed_through(tree: Any, by: Any = torch.func.grad) -> Any:
    """The tree as a region's function is given it, and as the region returns it."""
    seen: list[Any] = []

    def fn(x: torch.Tensor, tree: Any) -> Any:
        seen.append(tree)
        return x.sin(), tree

    def loss(x: torch.Tensor) -> torch.Tensor:
        out, given = remat(fn)(x, tree)
        seen.append(given)
        return out.sum()

    by(loss)(torch.ones(2))
    return seen


def second(loss: Any) -> Any:
    """The second derivative."""
    return torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())


@pytest.mark.slow
@given(st.recursive(LEAVES, containers, max_leaves=12))
@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_a_region_is_given_and_returns_what_it_is_given(tree):
    x = torch.ones(2)
    tree = torch_pytree.tree_map(lambda leaf: x if leaf is ... else leaf, tree)
    for by in (torch.func.grad, second):
        for got in handed_through(tree, by):
            leaves, spec = torch_pytree.tree_flatten(got)
            expected, torch_spec = torch_pytree.tree_flatten(tree)
            assert spec == torch_spec and type(got) is type(tree)
            for one, other in zip(leaves, expected, strict=True):
                # (A tensor may be of a level that is gone.)
                assert type(one) is type(other) and (isinstance(one, torch.Tensor) or one == other)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda d: collections.defaultdict(list, d)])
@pytest.mark.parametrize("dynamo", [False, True])
def test_keys_keep_their_order(kind, dynamo):
    if dynamo:  # While it loads, this sorts keys in torch's own namespace.
        importlib.import_module("torch._dynamo.polyfills.pytree")
    for given_ in handed_through(kind({"b": 1, "a": 2})):
        assert list(given_.items()) == [("b", 1), ("a", 2)]


def test_what_is_registered_later_is_a_container_from_then_on():
    class Late:
        def __init__(self, value: Any) -> None:
            self.value = value

    x = rand(3).requires_grad_()
    region = remat(lambda late: Late(late.value.sin()))
    same(torch.autograd.grad(region(Late(x)).value.sum(), x)[0], x.cos())
    torch_pytree.register_pytree_node(
        Late,
        lambda x: ([x.value], None),
        lambda v, _: Late(v[0]),  # pyright: ignore
        serialized_type_name=f"{__name__}.Late",
    )
    try:
        late = Late(x.detach())
        assert all(found is not late for found in handed_through(late, second))
        same(torch.autograd.grad(region(Late(x)).value.sum(), x)[0], x.cos())
    finally:
        torch_pytree._deregister_pytree_node(Late)
    assert all(found is late for found in handed_through(late, second))


def test_structs_of_c_lose_nothing():
    status, now = os.stat("."), time.localtime()
    for got in handed_through((status, now)):
        assert got[0].st_mtime_ns == status.st_mtime_ns and got[1].tm_zone == now.tm_zone
    top = torch.topk(torch.tensor([1.0, 3.0, 2.0]), 2)
    assert all(type(got) is type(top) and len(got) == 2 for got in handed_through(top))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_region_takes_and_gives_trees(compiled):
    def fn(tree: Any) -> Any:
        point, pair = tree["b"], tree["a"]
        return collections.OrderedDict(z=Point(torch.sin(point.x) @ pair.left), y=Bag([pair.right * 2], "q"))

    def loss(fn: Any, x: Any) -> Any:
        out = fn({"b": Point(x), "a": Pair(x + 1, x * 3)})
        assert list(out) == ["z", "y"] and type(out["y"].items) is list and out["z"].y is None
        return out["z"].x.sum() + out["y"].items[0].square().sum()

    x = rand(3, 3).requires_grad_()
    expected = torch.autograd.grad(loss(fn, x), x)
    region = remat(fn)
    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    for _ in range(2):
        same(torch.autograd.grad(run(region, x), x), expected, 0.0)
