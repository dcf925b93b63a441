"""Trees by torch's registry, walked by optree.

torch.func knows torch's registry only, and what a user registered with `torch.utils._pytree` must be a
container here too. optree walks a tree in C++, several times faster. It has registries of its own, one for
every namespace. So torch's registry is copied into the namespace "remat" whenever it grew.
(`torch.utils._cxx_pytree` does much the same in the namespace "torch". It hands tuples to functions that
torch hands lists, takes registered named tuples apart in another way, and Dynamo sorts its keys for a while.)

Where Dynamo traces, and on a torch whose registry lies elsewhere, torch's own functions do the same, slower.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from remat.transforms.caches import BoundedCache
from remat.transforms.compat import torch_pytree
from remat.transforms.errors import RematError
from remat.transforms.objects import attributes, container_of, is_tensor, items, mro, names_of, rebuilt

Spec = optree.PyTreeSpec | torch_pytree.TreeSpec

_SPACE = "remat"
# Keys in the order in which they were put in, as torch has it; optree sorts them. In force for good: the
# object must live on, since its end puts the old order back.
_ordered = optree.dict_insertion_ordered(True, namespace=_SPACE)
_ordered.__enter__()

# class -> its functions, or None on a torch that keeps them elsewhere
_registry: dict[Any, Any] | None = getattr(torch_pytree, "SUPPORTED_NODES", None)
_lock = threading.Lock()
_copied: set[Any] = set()
_last: tuple[int, Any] = (0, None)


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Leaves and structure of `tree`; None is a leaf, and so is a container that leads to itself."""
    if _registry is None or torch.compiler.is_dynamo_compiling():
        return torch_pytree.tree_flatten(tree)
    if (len(_registry), next(reversed(_registry))) != _last:
        _copy()
    try:
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=_SPACE)
    except RecursionError:
        leaves, spec = _flatten_endless(tree)
    inner = spec.num_nodes - spec.num_leaves
    if inner and not (_is_call(tree) if inner == 3 else inner == 1 and type(tree) in _BUILT_IN):
        return flatten(tree) if _constructs(spec) else (leaves, spec)
    return leaves, spec


def _is_call(tree: Any) -> bool:
    """Whether it is a tuple of arguments and a dict of keywords, which are three containers."""
    return type(tree) is tuple and len(tree) == 2 and type(tree[0]) is tuple and type(tree[1]) is dict


def unflatten(leaves: Iterable[Any], spec: Spec) -> Any:
    """The tree of structure `spec` with these leaves."""
    if isinstance(spec, optree.PyTreeSpec):
        return spec.unflatten(leaves)
    return torch_pytree.tree_unflatten(leaves, spec)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of `tree`."""
    return flatten(tree)[0]


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree with `function` of every leaf, and of those that others of this structure have there."""
    leaves, spec = flatten(tree)
    return unflatten(map(function, leaves, *[flatten(other)[0] for other in others]), spec)


def map_only(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` of every leaf that is a `kind`; other leaves stay as they are."""
    return map_leaves(lambda leaf: function(leaf) if issubclass(type(leaf), kind) else leaf, tree)


def shown(spec: Spec) -> str:
    """A structure as messages show it: its containers and keys, every leaf a star."""
    return str(spec).removeprefix("PyTreeSpec(").partition(", NoneIsLeaf")[0]


def paths(tree: Any) -> list[str]:
    """For every leaf its key path, such as `['layers'][0]['w']`; keys that are objects go by their class."""
    leaves, spec = flatten(tree)
    users = not isinstance(spec, optree.PyTreeSpec) or _has_users(spec)
    try:
        # A class may be registered with names for its children, which only torch's functions know.
        named = torch_pytree.tree_flatten_with_path(tree)[0] if users else []
    except (ValueError, RecursionError):
        named = []  # one is registered without
    if users and len(named) == len(leaves):
        return ["".join([_step(key, torch_pytree.keystr, (key,)) for key in path]) for path, _ in named]
    found = spec.accessors() if isinstance(spec, optree.PyTreeSpec) else []
    return ["".join([_step(step, step.codify, "") for step in path]) for path in found]


def _step(step: Any, shown: Callable[[Any], str], given: Any) -> str:
    # A key may be any object: a weight, whose text is all of its numbers, if it has any at the moment.
    key = getattr(step, "key", getattr(step, "entry", None))
    return shown(given) if is_plain(key) else f"[{type(key).__name__}]"


_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype)


def is_plain(key: Any) -> bool:
    """Whether the text of a key runs no code of the user's."""
    if type(key) is tuple:
        return all(map(is_plain, key))
    return type(key) in _PLAIN


def split(leaves: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """The tensors among `leaves`, and their positions."""
    at = [i for i, leaf in enumerate(leaves) if issubclass(type(leaf), torch.Tensor)]
    return [leaves[i] for i in at], at


def smooth(leaf: Any) -> bool:
    """Whether `leaf` is a tensor that can carry a derivative."""
    return is_tensor(leaf) and (leaf.is_floating_point() or leaf.is_complex())


def merge(leaves: Sequence[Any], at: Sequence[int], tensors: Iterable[Any]) -> list[Any]:
    """`leaves` with the tensors at positions `at` replaced."""
    merged = list(leaves)
    for i, tensor in zip(at, tensors, strict=True):
        merged[i] = tensor
    return merged


def check_results(tree: Any, region: str) -> None:
    """Raise when a result holds tensors in a container that is not a pytree, which torch.func would lose."""
    for at, leaf in enumerate(tree_leaves(tree)):
        if is_tensor(leaf) or issubclass(type(leaf), (int, float, complex, str, type(None))):
            continue
        if held := [k for k, v in (attributes(leaf) or {}).items() if is_tensor(v)]:
            raise RematError(
                f"region {region!r} returns at `result{paths(tree)[at]}` a {type(leaf).__name__}, which is "
                f"no pytree but holds tensors ({', '.join(held)}). Under torch.func their gradients would "
                "be lost. Register the class with torch.utils._pytree.register_pytree_node (or "
                "register_dataclass), or return the tensors themselves."
            )


# -- optree, kept up to torch's registry ---------------------------------------------------------------


def _copy() -> None:
    """Bring the namespace up to torch's registry: what came, and what is gone."""
    global _last
    assert _registry is not None
    with _lock:
        now = dict(_registry)
        for kind in _copied - now.keys():
            optree.unregister_pytree_node(kind, namespace=_SPACE)
            _copied.discard(kind)
        for kind in now.keys() - _copied:
            if _is_optrees_own(kind):
                continue
            optree.register_pytree_node(
                kind,
                functools.partial(_take_apart, kind),
                functools.partial(_put_together, kind),
                namespace=_SPACE,
            )
            _copied.add(kind)
        _last = len(now), next(reversed(now))


def _is_optrees_own(kind: Any) -> bool:
    """Whether optree knows a class without being told."""
    # That of a named tuple is one that torch does not look at.
    builtin = kind in getattr(torch_pytree, "BUILTIN_TYPES", ()) or not isinstance(kind, type)
    return builtin or optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind)


# Registrations may be replaced: the functions are looked up when they are used.


def _take_apart(kind: Any, node: Any) -> tuple[Any, Any]:
    children, context = _registry[kind].flatten_fn(node)  # type: ignore[index]
    return children, context


def _put_together(kind: Any, context: Any, children: Iterable[Any]) -> Any:
    return _registry[kind].unflatten_fn(list(children), context)  # type: ignore[index]


# -- containers that optree would build by their constructors, and those without an end ----------------

_BUILT_IN = frozenset((tuple, list, dict))
# Structures of built-in containers alone.
_plain: BoundedCache[Spec, None] = BoundedCache(512)
_NAMES = (str, int)
# Classes of named tuples that are taken apart here.
_tuples: set[Any] = set()
# So deep a container is a chain of nodes; optree gives up at twice that.
_DEEP = 400


def _constructs(spec: optree.PyTreeSpec) -> bool:
    """Whether a structure has a tuple of a class that optree would call; from now on it is taken apart here.

    Named tuples may have a constructor that takes other things than their fields, and attributes.
    """
    try:
        if spec in _plain:
            return False
    except TypeError:
        pass  # what a class was registered with has no hash
    found, plain = False, True
    stack = [spec]
    for node in stack:
        stack += node.children()
        kind = node.type
        if kind is dict:
            plain = plain and all(type(key) in _NAMES for key in node.entries())
        elif kind is not None and kind not in _BUILT_IN:
            plain = False
            if kind not in _tuples and optree.is_namedtuple_class(kind) and not _is_bare(kind):
                _register_tuple(kind)
                found = True
    if plain:
        _plain[spec] = None
    return found


def _is_bare(kind: type) -> bool:
    """Whether `collections.namedtuple` has made a class as it is: to call it is to fill it."""
    make = names_of(kind).get("__new__")
    known = getattr(make, "__globals__", {}).get("__name__", "")
    return len(mro(kind)) == 3 and str(known).startswith("namedtuple_")


class _Attributes:
    """What a tuple has beside its items, as a part of a structure: compared by identity."""

    __slots__ = ("table",)

    def __init__(self, table: dict[str, Any] | None) -> None:
        self.table = dict(table or {})

    def __hash__(self) -> int:
        return hash(tuple(self.table))

    def __eq__(self, other: object) -> bool:
        if type(other) is not _Attributes or self.table.keys() != other.table.keys():
            return False
        return all(value is other.table[name] for name, value in self.table.items())

    def __repr__(self) -> str:
        return f"<{', '.join(self.table)}>"


def _register_tuple(kind: Any) -> None:
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError):  # another thread has done so
            apart: Any = lambda node: (items(node), _Attributes(attributes(node)))  # noqa: E731
            together: Any = lambda kept, parts: rebuilt(kind, parts, kept.table)  # noqa: E731
            optree.register_pytree_node(kind, apart, together, namespace=_SPACE)
        _tuples.add(kind)


def _has_users(spec: optree.PyTreeSpec) -> bool:
    """Whether a structure has containers of classes that a user has registered."""
    stack = [spec]
    for node in stack:
        stack += node.children()
        if node.type in _copied:
            return True
    return False


def _flatten_endless(tree: Any) -> tuple[list[Any], Any]:
    whole, first = _endless(tree), {id(tree), *map(id, items(tree))}
    for is_leaf in (lambda node: id(node) in whole, lambda node: id(node) not in first):
        # (The second for a class that a user has registered, and that leads to itself.)
        with contextlib.suppress(RecursionError):
            return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=_SPACE)  # type: ignore
    raise RematError("An argument or a result is a container that holds itself in its own first items.")


def _endless(tree: Any) -> set[int]:
    """The containers that lead to themselves, or too deep, by their ids."""
    found: set[int] = set()
    done: set[int] = set()
    way: dict[int, Any] = {id(tree): iter(_children(tree))}
    while way:
        last = next(reversed(way))
        child = next(way[last], None)
        if child is None:
            way.popitem()
            done.add(last)
        elif id(child[0]) in way or len(way) > _DEEP:
            found.add(id(child[0]))
        elif id(child[0]) not in done:
            way[id(child[0])] = iter(_children(child[0]))
    return found


def _children(node: Any) -> list[tuple[Any]]:
    """The containers in a container."""
    return [(child,) for child in items(node) if container_of(child) is not None]


def _keep_whole() -> None:
    """Make C's structs that hold more than their items containers of nothing.

    To torch such a struct is a leaf. To optree it is a container, and is put together without the rest.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in (time.struct_time, os.stat_result):
            apart: Any = lambda whole: ((), whole)  # noqa: E731
            together: Any = lambda whole, _: whole  # noqa: E731
            optree.register_pytree_node(kind, apart, together, namespace=_SPACE)


_keep_whole()


def constants_alike(want: Any, value: Any) -> bool:
    """Whether two values in the arguments of an op, tensors aside, are the same to the op."""
    kind = type(want)
    if kind is not type(value):
        return False
    if kind is torch.Generator:
        # A function may make its own in each run. Ops that draw are given the state of their forward.
        return want.device == value.device
    if kind is float:
        # 0.0 == -0.0, and nan differs from itself.
        same_sign = math.copysign(1.0, want) == math.copysign(1.0, value)
        return (want == value and same_sign) or (want != want and value != value)
    if kind is complex:
        return constants_alike(want.real, value.real) and constants_alike(want.imag, value.imag)
    if kind is list or kind is tuple:
        return len(want) == len(value) and all(map(constants_alike, want, value))
    if kind is dict:
        return want.keys() == value.keys() and all(constants_alike(want[k], value[k]) for k in want)
    try:
        return bool(want == value)
    except NotImplementedError:  # a TorchScript object: every call wraps it anew, its hash is its own
        return hash(want) == hash(value)
