"""Trees are torch's: the same leaves in the same order, the same containers, whatever walks them."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from remat import remat
from remat.transforms import pytree as compat
from remat.transforms.pytree import flatten, map_leaves, map_only, paths, shown, tree_leaves, unflatten
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
LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=2), st.just(torch.Size([2, 3])))


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


TREES = st.recursive(LEAVES, containers, max_leaves=12)


@given(TREES, TREES)
@settings(max_examples=100, deadline=None)
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
def test_trees_are_torchs(tree, other):
    leaves, spec = flatten(tree)
    expected, torch_spec = torch_pytree.tree_flatten(tree)
    assert leaves == expected == tree_leaves(tree)
    numbers = list(range(len(leaves)))
    for values in (leaves, numbers):
        got, wanted = unflatten(values, spec), torch_pytree.tree_unflatten(values, torch_spec)
        assert got == wanted and repr(got) == repr(wanted)
    assert spec.num_leaves == torch_spec.num_leaves and spec.is_leaf() == torch_spec.is_leaf()
    assert map_leaves(str, tree) == torch_pytree.tree_map(str, tree)
    assert map_only(int, lambda i: -i, tree) == torch_pytree.tree_map_only(int, lambda i: -i, tree)
    assert len(paths(tree)) == len(leaves)
    # Structures are equal where torch's are: they tell calls apart.
    _, other_spec = flatten(other)
    alike = torch_spec == torch_pytree.tree_flatten(other)[1]
    assert (spec == other_spec) == alike and (hash(spec) == hash(other_spec) or not alike)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda d: collections.defaultdict(list, d)])
def test_keys_keep_their_order(kind):
    tree, turned = kind({"b": 1, "a": 2}), kind({"a": 2, "b": 1})
    assert tree_leaves(tree) == [1, 2] and tree_leaves(turned) == [2, 1]
    assert list(unflatten([1, 2], flatten(tree)[1])) == ["b", "a"]
    assert flatten(tree)[1] != flatten(turned)[1]


def test_dynamo_leaves_the_order_of_keys_alone():
    # While it loads, this sorts keys in torch's own namespace.
    importlib.import_module("torch._dynamo.polyfills.pytree")
    assert tree_leaves({"b": 1, "a": 2}) == [1, 2]


def test_what_is_registered_later_is_a_container_from_then_on():
    class Late:
        def __init__(self, value: Any) -> None:
            self.value = value

    late = Late(3)
    assert tree_leaves([late]) == [late]
    torch_pytree.register_pytree_node(
        Late,
        lambda x: ([x.value], None),
        lambda v, _: Late(v[0]),  # pyright: ignore
        serialized_type_name=f"{__name__}.Late",
    )
    try:
        assert tree_leaves([late]) == [3]
        assert unflatten([4], flatten(late)[1]).value == 4
        # By torch's private function: the class means something else now.
        torch_pytree.SUPPORTED_NODES[Late] = torch_pytree.SUPPORTED_NODES[Late]._replace(
            flatten_fn=lambda x: ([x.value, x.value], None)
        )
        assert tree_leaves([late]) == [3, 3]
    finally:
        torch_pytree._deregister_pytree_node(Late)
    assert tree_leaves([late]) == [late]


def test_structs_of_c_lose_nothing():
    status, now = os.stat("."), time.localtime()
    got = unflatten(*flatten((status, now)))
    assert got[0].st_mtime_ns == status.st_mtime_ns and got[1].tm_zone == now.tm_zone
    top = torch.topk(torch.tensor([1.0, 3.0, 2.0]), 2)
    assert len(tree_leaves(top)) == 2 and type(unflatten(*flatten(top))) is type(top)


def test_paths():
    tree = {"l1": {"w": 1}, "rest": (Pair(2, 3), Point(4, None), [5])}
    assert paths(tree) == [
        "['l1']['w']",
        "['rest'][0].left",
        "['rest'][0].right",
        "['rest'][1].x",
        "['rest'][2][0]",
    ]
    # A class without names for its children.
    assert paths({"a": [1], "b": Bag([2, 3], "p")})[0] == "['a'][0]"
    assert shown(flatten({"a": [1, None]})[1]) == "{'a': [*, *]}"


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


def test_without_torchs_registry_torchs_functions_do_it(monkeypatch):
    monkeypatch.setattr(compat, "_registry", None)
    tree = {"b": [1, None], "a": Point(2)}
    leaves, spec = flatten(tree)
    assert isinstance(spec, torch_pytree.TreeSpec) and leaves == [1, None, 2]
    assert unflatten(leaves, spec) == tree
    assert paths(tree) == ["['b'][0]", "['b'][1]", "['a'].x"]
    # What was flattened by optree before is put together all the same.
    monkeypatch.undo()
    assert unflatten(leaves, flatten(tree)[1]) == tree
