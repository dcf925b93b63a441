"""Trees by torch's registry, walked by optree.

torch.func knows torch's registry only, and what a user registered with `torch.utils._pytree` must be a
container here too. optree walks a tree in C++, several times faster. It has registries of its own, one for
every namespace. So torch's registry is copied into the namespace "remat" whenever it grew.
(`torch.utils._cxx_pytree` does much the same in the namespace "torch". It hands tuples to functions that
torch hands lists, takes registered named tuples apart in another way, and Dynamo sorts its keys for a while.)

Where Dynamo traces, and on a torch whose registry lies elsewhere, torch's own functions do the same, slower.
"""

from __future__ import annotations

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

from remat.transforms.compat import torch_pytree
from remat.transforms.errors import RematError

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
    """Leaves and structure of `tree`; None is a leaf."""
    if _registry is None or torch.compiler.is_dynamo_compiling():
        return torch_pytree.tree_flatten(tree)
    if (len(_registry), next(reversed(_registry))) != _last:
        _copy()
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=_SPACE)  # type: ignore[return-value]


def unflatten(leaves: Iterable[Any], spec: Spec) -> Any:
    """The tree of structure `spec` with these leaves."""
    if isinstance(spec, optree.PyTreeSpec):
        return spec.unflatten(leaves)
    return torch_pytree.tree_unflatten(leaves, spec)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of `tree`."""
    return flatten(tree)[0]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` of every leaf."""
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], spec)


def map_only(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` of every leaf that is a `kind`; other leaves stay as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, tree)


def shown(spec: Spec) -> str:
    """A structure as messages show it: its containers and keys, every leaf a star."""
    return str(spec).removeprefix("PyTreeSpec(").partition(", NoneIsLeaf")[0]


def paths(tree: Any) -> list[str]:
    """For every leaf its key path, such as `['layers'][0]['w']`; keys that are objects go by their class."""
    count = len(tree_leaves(tree))
    try:
        # A class may be registered with names for its children, which only torch's functions know.
        named = torch_pytree.tree_flatten_with_path(tree)[0]
    except ValueError:
        named = []  # one is registered without
    if len(named) == count:
        return ["".join([_step(key, torch_pytree.keystr, (key,)) for key in path]) for path, _ in named]
    found = optree.tree_accessors(tree, none_is_leaf=True, namespace=_SPACE)
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
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return [leaves[i] for i in at], at


def smooth(leaf: Any) -> bool:
    """Whether `leaf` is a tensor that can carry a derivative."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def merge(leaves: Sequence[Any], at: Sequence[int], tensors: Iterable[Any]) -> list[Any]:
    """`leaves` with the tensors at positions `at` replaced."""
    merged = list(leaves)
    for i, tensor in zip(at, tensors, strict=True):
        merged[i] = tensor
    return merged


def check_results(tree: Any, region: str) -> None:
    """Raise when a result holds tensors in a container that is not a pytree, which torch.func would lose."""
    for at, leaf in enumerate(tree_leaves(tree)):
        if isinstance(leaf, torch.Tensor) or isinstance(leaf, (int, float, complex, str, bool, type(None))):
            continue
        if held := [k for k, v in getattr(leaf, "__dict__", {}).items() if isinstance(v, torch.Tensor)]:
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
