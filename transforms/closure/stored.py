"""Tensors that a function stores where it does not return them: on modules, in containers, in variables.

Under torch.func they belong to the levels below the region, and would be constants to who reads them later.
So they leave the region as further results, which take their places.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from remat.transforms.closure.bindings import Bindings, hold, parts_of, places, reached, slots_of
from remat.transforms.compat import (
    functions_as_they_are,
    has_tangent,
    in_forward_mode,
    is_batched,
    is_wrapped,
    unwrap_once,
)
from remat.transforms.context import untracked
from remat.transforms.errors import RematError
from remat.transforms.objects import attributes, is_a, is_tensor, items, rebuilt
from remat.transforms.pytree import flatten

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Size)
_LAZY = (types.GeneratorType, types.CoroutineType, map, zip, filter, enumerate, reversed)

# A holder, a key in it, and what is there: a tensor, or a tuple with tensors in it.
Place = tuple[Any, Any, Any]


def places_of(roots: Any, ids: Iterable[int]) -> list[Place]:
    """Where functions and objects, or what they lead to, hold the tensors with these ids."""
    wanted = dict.fromkeys(ids)
    with functions_as_they_are():
        reach = reached(roots)
        parts = parts_of(reach)
        every = [(table, key, table[key]) for table, key in zip(*slots_of(parts), strict=True)]
        for holder, keys, values in places(reach, parts):
            every += [(holder, key, value) for key, value in zip([*keys], [*values], strict=True)]
        return [place for place in every if _with_others(place[2], wanted) is not place[2]]


def anew(reach: Iterable[Any], known: Container[int]) -> list[torch.Tensor]:
    """Tensors in reach beside the known ones, if they carry a derivative or a batch."""
    return [t for t in reach if is_tensor(t) and id(t) not in known and _carries(t)]


def refuse_given(name: str, containers: Any, given: Iterable[torch.Tensor], out: Any) -> None:
    """Raise where a function has stored a result in a container among its arguments, and does not return it;
    `given` are its arguments."""
    known = {*map(id, given), *map(id, flatten(out)[0])}
    new = [t for t in flatten(containers)[0] if is_tensor(t) and id(t) not in known]
    if any(_carries(t) for t in new):
        raise RematError(
            f"region {name!r} stores a result in a dict or list among its arguments. Under torch.func it has "
            "a copy of those, as in JAX, and the result would be lost. Return it; or copy the container "
            "first, if the region alone reads it."
        )


def results_of(name: str, out: Any) -> list[Any]:
    """What a function has returned that is no pytree and may hold tensors."""
    if is_tensor(out):
        return []
    objects = [leaf for leaf in flatten(out)[0] if not is_a(leaf, (torch.Tensor, *_ATOMS))]
    for leaf in objects:
        if is_a(leaf, _LAZY):
            raise RematError(
                f"region {name!r} returns a {type(leaf).__name__}, which computes once the region is over. "
                "Under torch.func its gradients would be lost. Return a list or a tuple."
            )
    return objects


def made_for(
    objects: list[Any], known: Container[int], inside: Callable[[torch.Tensor], bool]
) -> list[torch.Tensor]:
    """The tensors that such results hold, of those that the region was given or has made."""
    if not objects:
        return []
    held = [v for v in reached(*objects) if is_tensor(v) and id(v) not in known]
    with functions_as_they_are():
        return [tensor for tensor in held if inside(tensor)]


def stored_first(name: str, roots: Any, new: list[torch.Tensor]) -> tuple[list[torch.Tensor], Stored | None]:
    """What a first run of a region has stored, of the tensors that it has brought in reach."""
    found = [t for t in new if _carries(t)]
    # What nothing differentiates, a table or a state, is a constant; its levels will be gone.
    rest = {id(t): _without_grads(t) for t in new if is_wrapped(t) and not _carries(t)}
    if rest:
        hold([(*at, _with_others(value, rest)) for *at, value in places_of(roots, rest)])
    return found, Stored(name, roots, found) if found else None


def _without_grads(tensor: torch.Tensor) -> torch.Tensor:
    with functions_as_they_are():
        while is_wrapped(tensor) and not is_batched(tensor):
            tensor = unwrap_once(tensor)
    return tensor


def broken_off(who: str, roots: Any, left: Iterable[torch.Tensor], anchors: Iterable[torch.Tensor]) -> None:
    """Have tensors that a function leaves in an exception, or has stored until then, refuse derivatives."""
    said = (
        f"{who} has ended by an exception. What it had made until then, and left in the exception or "
        "elsewhere, has no derivatives here. Return it instead, or catch the exception inside."
    )
    refuse_derivatives(roots, left, anchors, said)


def refuse_derivatives(
    roots: Any, stored: Iterable[torch.Tensor], anchors: Iterable[torch.Tensor], said: str
) -> None:
    """Have tensors that a function has stored refuse the derivatives that `anchors` have."""
    # (Batched by a level that is gone; or tangents would be asked now.)
    others: dict[int, Any] = {
        id(tensor): Lost(said)
        if is_batched(plain := _without_grads(tensor)) or in_forward_mode()
        else untracked(Refusing.apply, plain, said, *anchors)
        for tensor in stored
    }
    places = places_of(roots, others)
    if _unplaced(others, places):
        raise RematError(said)
    hold([(*at, _with_others(value, others)) for *at, value in places])


def _unplaced(ids: Iterable[int], places: list[Place]) -> bool:
    """Whether one of these tensors is where nothing can take its place."""
    return any(all(_with_others(value, {at: None}) is value for *_, value in places) for at in ids)


class Lost:
    """Stands for a tensor of a level that is gone."""

    def __init__(self, said: str) -> None:
        self.said = said

    def __getattr__(self, name: str) -> Any:
        raise (AttributeError(name) if name.startswith("__") else RematError(self.said))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RematError(self.said)

    __torch_function__ = __getitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __array__ = (
        _refuse
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _refuse
    )


class Refusing(torch.autograd.Function):
    """A value whose derivatives are not known."""

    generate_vmap_rule = True
    refuses = True

    @staticmethod
    def forward(value: torch.Tensor, said: str, *anchors: torch.Tensor) -> torch.Tensor:
        """The value."""
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the message."""
        ctx.said = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Raise, if there is anything to pull back."""
        if cotangents[0] is not None:
            raise RematError(ctx.said)
        return (None,) * len(ctx.needs_input_grad)


class Stored:
    """What one call of a region has stored, in all runs of its function.

    Args:
        name: the region.
        roots: its function, and the objects that it is given.
        tensors: what its first run has stored.
    """

    def __init__(self, name: str, roots: Any, tensors: list[torch.Tensor]) -> None:
        self.name = name
        self.ids = [id(t) for t in tensors]
        self.like = [(tuple(t.shape), t.dtype, t.device) for t in tensors]
        self.graded = [_is_graded(t) for t in tensors]
        self.before, self.bindings = dict[int, Any](), Bindings(())
        self.places = places_of(roots, self.ids)
        if _unplaced(self.ids, self.places):
            raise RematError(
                f"region {name!r} stores or returns a tensor where nothing can take its place (a set, an "
                "object of C). Under torch.func its gradient would be lost. Return the tensor itself."
            )

    def put(self, made: list[torch.Tensor]) -> None:
        """Store the region's results in the places of what its first run has stored."""
        cut = [t if graded else untracked(t.detach) for t, graded in zip(made, self.graded, strict=True)]
        others = dict(zip(self.ids, cut, strict=True))
        hold([(*at, _with_others(value, others)) for *at, value in self.places])
        # Their graph holds this, and Python's garbage collector does not see through graphs.
        self.places = []

    def begins_again(self, roots: Any) -> None:
        """The function is about to run again."""
        reach = reached(roots)
        self.before = {id(v): v for v in reach if is_tensor(v)}
        self.bindings = Bindings(reach, states=True)

    def found_again(
        self, roots: Any, returned: list[torch.Tensor], present: Any, specs: Any, count: int
    ) -> list[torch.Tensor]:
        """What a further run has stored, one for one.

        Args:
            roots: as they are in this run.
            returned: what its results hold.
            present: which of the region's `count` results have a cotangent, None for all.
            specs: of results that are made of others, None where all leave the node.
        """
        found = anew(reached(roots), self.before)
        found += [t for t in returned if _carries(t) and all(t is not other for other in found)]
        self.bindings.restore_state()
        self.before, self.bindings = {}, Bindings(())
        if [tuple(t.shape) for t in found] == [shape for shape, _, _ in self.like]:
            return found
        first = count - len(self.ids)
        if present is None or specs is not None or any(i >= first for i in present):
            raise RematError(
                f"region {self.name!r}: its forward stored {len(self.like)} tensors on modules or in "
                f"containers, and its recomputation {len(found)}. The derivatives of those that were used "
                "would be lost. Return them, or store them in both runs."
            )
        return [untracked(_zeros, *like) for like in self.like]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _with_others(value: Any, others: Mapping[int, Any]) -> Any:
    """`value` with others in the places of tensors with these ids, in tuples too."""
    if is_tensor(value):
        return others.get(id(value), value)
    if not is_a(value, tuple):
        return value
    parts = [_with_others(part, others) for part in items(value)]
    if all(one is other for one, other in zip(parts, items(value), strict=True)):
        return value
    return rebuilt(type(value), parts, attributes(value))


def _carries(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a derivative or a batch: others are constants, as tables are."""
    return _is_graded(tensor) or is_batched(_without_grads(tensor))


def _is_graded(tensor: torch.Tensor) -> bool:
    """Whether any level differentiates a tensor."""
    with functions_as_they_are():
        while True:
            if tensor.requires_grad or (in_forward_mode() and untracked(has_tangent, tensor)):
                return True
            if not is_wrapped(tensor):
                return False
            tensor = unwrap_once(tensor)
