"""A scan's body between the user's pytrees and flat lists, and what can be wrong with what a user gives.

The checks are read by Dynamo too, which traces them where `scan_remat` is compiled: a mistake has one text.
So they keep to what Dynamo knows (2.11's `zip` has no `strict`), and ask for key paths only when they fail.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from remat.transforms.closure import ClosureConversion, StrayWatch, made_inside, refuse_strays, swapping
from remat.transforms.compat import function_modes, functions_as_they_are, is_wrapped, unwrapped
from remat.transforms.context import active
from remat.transforms.errors import RematError, WrongType, WrongValue
from remat.transforms.intermediates import Refusal, current, only
from remat.transforms.objects import is_tensor
from remat.transforms.pytree import Spec, flatten, merge, paths, unflatten
from remat.transforms.scan.spec import Leaves, ScanSpec, Structure, Tensors, kind_of
from remat.transforms.state import Called, note, under_levels

_AS_IT_IS = contextlib.nullcontext()


class Body:
    """`body(carry, x) -> (carry, y)` as a step over flat lists: `step(consts, carry, x) -> (carry, ys)`.

    `consts` stand for the captured tensors. Where they are the captured tensors themselves the body runs as
    it is; elsewhere (below functorch levels, in a pull-back that differentiates them) they are put in their
    place.

    Args:
        function: the user's body.
        spec: what the scan is.
        captured: the captured tensors that carry a derivative or a batch dimension.
        trusted: whether what it captures is known to be all, so that even the first step is not watched.

    Attributes:
        ys: the structure of y, known after the first step.
        at_once: how the function computes all its steps without one waiting for another, if it can: of the
            leaves of carry and xs, the carries before each step and after the last, as rows, and stacked ys.
        in_scripts: `Bindings.in_scripts` where it leads to TorchScript, which no substitution reaches.
        unread: which captured tensors no step of a forward has read, of those that it is asked about.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        spec: ScanSpec,
        captured: Sequence[torch.Tensor] = (),
        trusted: bool = False,
    ) -> None:
        self.function, self.spec, self.captured, self.trusted = function, spec, captured, trusted
        self.call = Called(function, under_levels())
        self.x_at = [i for i, kind in enumerate(spec.xs.kinds) if kind is not type(None)]
        self.x_blank: Leaves = [None] * len(spec.xs.kinds)
        # The common shapes go without the pytree machinery, which costs more than a small op.
        self.carry_is_leaf, self.x_is_leaf = spec.carry.spec.is_leaf(), spec.xs.spec.is_leaf()
        self.ys: Structure | None = None
        self.watched = False
        self.unread: set[int] = set()
        self.in_scripts: Any = None
        self.at_once: Any = getattr(function, "at_once", None)

    def __call__(self, consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        if active.sessions and (sessions := current()):
            with only([Refusal(session.wanted, self.spec.name) for session in sessions]):
                return self._step(consts, carry, x)
        return self._step(consts, carry, x)

    def _step(self, consts: Tensors, carry: Leaves, x: Tensors) -> tuple[Leaves, list[torch.Tensor]]:
        if swapping():
            # A rule that wraps operands anew makes no torch call that the region around would have seen.
            fresh = [new for old, new in zip(self.captured, consts, strict=True) if new is not old]
            made_inside([t for t in (*fresh, *carry, *x) if is_tensor(t)])
        row = self._row(x)
        if self.trusted and not self.unread and (not consts or all(map(operator.is_, consts, self.captured))):
            if self.carry_is_leaf and self.ys is not None and len(self.ys.kinds) == 1:
                return self._lean(carry, row)
            versions, out = self._evaluated(carry, row)
            note(None)
            return self._checked(out, carry, versions)
        # In the first step, and in the first that is differentiated: what is read past the substitution?
        fresh = not self.trusted or self.unread or (torch.is_grad_enabled() and not self.watched)
        self.watched = self.watched or torch.is_grad_enabled()
        watching = StrayWatch([*consts, *carry, *x]) if fresh else _AS_IT_IS
        with watching as watch, self.swapped(consts, [*carry, *x]) as conversion:
            versions, out = self._evaluated(carry, row)
        note(conversion)
        if watch is not None:
            refuse_strays(self.spec.name, self.function, conversion, watch.outside)
        self.trusted = True
        leaves, ys = self._checked(out, carry, versions)
        # What the body captured and returns untouched was in no torch call.
        leaves, ys = [*map(conversion.result, leaves)], [*map(conversion.result, ys)]
        if self.unread and watch is not None:
            read = watch.met.union(map(id, (*leaves, *ys)))
            self.unread = {i for i in self.unread if id(consts[i]) not in read}
        return leaves, ys

    def _row(self, x: Tensors) -> Any:
        if self.x_is_leaf:
            return x[0] if x else None
        return unflatten(merge(self.x_blank, self.x_at, x), self.spec.xs.spec)

    def _evaluated(self, carry: Leaves, row: Any) -> tuple[list[int], Any]:
        versions = [version(leaf) for leaf in carry]
        state = carry[0] if self.carry_is_leaf else unflatten(carry, self.spec.carry.spec)
        return versions, self.call(state, row)

    def _lean(self, carry: Leaves, row: Any) -> tuple[Leaves, list[torch.Tensor]]:
        """A later step whose carry and y are single leaves: checked by hand, as small steps take longer to
        check than to run. (Without this a step of an RNN takes 17 % longer.)"""
        (state,) = carry
        before = version(state)
        out = self.call(state, row)
        note(None)
        if type(out) is tuple and len(out) == 2 and version(state) == before and self.ys is not None:
            new, y = out
            if type(new) is torch.Tensor and (new.shape, new.dtype) == self.spec.carry.kinds[0]:
                if y is None and self.ys.kinds[0] is type(None):
                    return [new], []
                if type(y) is torch.Tensor and (y.shape, y.dtype) == self.ys.kinds[0]:
                    return [new], [y]
        return self._checked(out, carry, [before])

    def swapped(self, consts: Tensors, operands: Leaves) -> Any:
        """The context in which a function of the user's reads `consts` for what it captured."""
        if self.trusted and not self.unread and all(map(operator.is_, consts, self.captured)):
            return _AS_IT_IS
        table = {id(old): new for old, new in zip(self.captured, consts, strict=True)}
        tensors = [leaf for leaf in operands if is_tensor(leaf)]
        conversion = ClosureConversion(table, tensors, self.captured)
        return conversion if self.in_scripts is None else self._scripted(conversion)

    @contextlib.contextmanager
    def _scripted(self, conversion: ClosureConversion) -> Iterator[ClosureConversion]:
        with self.in_scripts(conversion.table), conversion:
            yield conversion

    def _checked(self, out: Any, carry: Leaves, versions: list[int]) -> tuple[Leaves, list[torch.Tensor]]:
        name, given = self.spec.name, self.spec.carry
        state, y = pair_of(name, out)
        for i, before in enumerate(versions):
            if version(carry[i]) != before:
                raise wrote(name, f"its carry{_paths(given)[i]}")
        leaves, ys = carry_of(name, state, given), ys_of(name, y)
        found = Structure(ys[1], tuple([kind_of(leaf) for leaf in ys[0]]))
        if self.ys is None:
            self.ys = found
        if found != self.ys:
            raise WrongType(
                f"{name}: y is {[_say(kind) for kind in found.kinds]} in this step and was "
                f"{[_say(kind) for kind in self.ys.kinds]} in the first; ys are stacked and must not change."
            )
        return leaves, [leaf for leaf in ys[0] if leaf is not None]

    def stacked(self, ys: Sequence[torch.Tensor]) -> Any:
        """The tree of ys, None where the body returned None."""
        assert self.ys is not None
        rest = iter(ys)
        leaves = [None if kind is type(None) else next(rest) for kind in self.ys.kinds]
        return unflatten(leaves, self.ys.spec)


def version(leaf: Any) -> int:
    """The number of writes into a tensor so far; 0 for what does not count them."""
    # Nearly always, and asked twice a step.
    if type(leaf) is torch.Tensor and not function_modes() and not is_wrapped(leaf):
        return 0 if leaf.is_inference() else leaf._version
    if not is_tensor(leaf):
        return 0
    # The wrapper that vmap makes does not count.
    plain = unwrapped(leaf) if is_wrapped(leaf) else leaf
    with functions_as_they_are():  # a region around would take it for a call of the function's
        return 0 if plain.is_inference() else plain._version


# -- what is checked, eager or traced ----------------------------------------------------------------------


def name_of(what: str, function: Any) -> str:
    """How messages call a scan."""
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):  # Dynamo finds a descriptor in functions of a module
        code = getattr(function, "__code__", None)
        name = type(function).__name__ if code is None else code.co_qualname
    return f"{what}({name})"


def check_count(name: str, what: str, count: Any) -> None:
    """A number of steps as a user writes it."""
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
        raise WrongValue(f"{name}: got {what}={count!r}; a number of steps is an int of at least 0.")


def check_budget(name: str, checkpoints: Any, budget: Any) -> None:
    """A budget goes with "auto", and "auto" with a budget."""
    if isinstance(checkpoints, str) and checkpoints == "auto":
        if budget is None:
            raise WrongValue(f"{name}: checkpoints='auto' needs a budget in bytes: write budget='64MiB'.")
    elif budget is not None:
        raise WrongValue(f"{name}: budget={budget!r} goes with checkpoints='auto', not {checkpoints!r}.")


def rows_of(name: str, xs: Any, length: int | None) -> tuple[list[torch.Tensor], Any]:
    """The tensors of xs and the number of steps."""
    check_count(name, "length", length)
    rows: list[torch.Tensor] = []
    leaves = flatten(xs)[0]
    for i in range(len(leaves)):
        row = leaves[i]
        if is_tensor(row) and row.dim() > 0:
            rows.append(row)
        elif row is not None:
            got = "a tensor without dimensions" if is_tensor(row) else type(row).__name__
            raise WrongType(
                f"{name}: xs{paths(xs)[i]} is {got}; xs are tensors of shape [length, ...]. A constant "
                "belongs in the carry or in a closure."
            )
    sizes = [row.shape[0] for row in rows]
    if length is not None:
        sizes.append(length)
    if not sizes:
        raise WrongValue(f"{name}: xs has no tensor; write length=...")
    for size in sizes:
        if size != sizes[0]:
            names = [f"xs{path}" for path, leaf in zip(paths(xs), leaves) if leaf is not None]  # noqa: B905
            said = ", ".join([f"{n} has {s}" for n, s in zip([*names, "length"], sizes)])  # noqa: B905
            raise WrongValue(f"{name}: the numbers of steps differ: {said}; all must be the same.")
    return rows, sizes[0]


def pair_of(name: str, out: Any) -> tuple[Any, Any]:
    """What a body returned, if it is a pair."""
    if isinstance(out, tuple) and len(out) == 2:
        return out
    got = f"a tuple of length {len(out)}" if isinstance(out, tuple) else type(out).__name__
    raise WrongType(
        f"{name}: the body returned {got}; it must return a pair (carry, y), y None where nothing is to be "
        "stacked."
    )


def carry_of(name: str, tree: Any, given: Structure) -> Leaves:
    """The leaves of a carry that a body returned, if it is as the one that came in."""
    leaves, spec = flatten(tree)
    if spec != given.spec:
        raise WrongType(
            f"{name}: the body returned a carry of structure {_outline(spec, len(leaves))}, but the carry "
            f"that came in has {_outline(given.spec, len(given.kinds))}. They must be equal."
        )
    for i in range(len(leaves)):
        kind = kind_of(leaves[i])
        if kind != given.kinds[i]:
            raise WrongType(
                f"{name}: carry{_paths(given)[i]} came in as {_say(given.kinds[i])} and was returned as "
                f"{_say(kind)}. A carry must have the same shape, dtype and Python type at every step. "
                "Cast or reshape the initial value, or what the body returns."
            )
    return leaves


def ys_of(name: str, tree: Any) -> tuple[Leaves, Spec]:
    """The leaves and the structure of a y that a body returned, if it can be stacked."""
    leaves, spec = flatten(tree)
    for i in range(len(leaves)):
        if leaves[i] is not None and not is_tensor(leaves[i]):
            raise WrongType(
                f"{name}: y{paths(tree)[i]} is {_say(type(leaves[i]))}; the ys are stacked, so they must be "
                "tensors (or None for nothing): write torch.as_tensor(...)."
            )
    return leaves, spec


def wrote(name: str, where: str) -> RematError:
    """The error for a body that writes into what it is given."""
    return RematError(
        f"{name}: the body wrote into {where} in place. The recomputation would start from what was written; "
        "make a new tensor (`carry = carry + ...`) instead."
    )


@contextlib.contextmanager
def unwritten(
    name: str,
    keys: Sequence[str] = (),
    carry: Sequence[Any] = (),
    x: Sequence[Any] = (),
    captured: Sequence[Any] = (),
) -> Iterator[None]:
    """Raise if what runs within writes into a step's operands; `keys` are those of the carry."""
    operands = [*carry, *x, *captured]
    before = [version(t) for t in operands]
    yield
    for i, (tensor, old) in enumerate(zip(operands, before, strict=True)):
        if version(tensor) == old:
            continue
        if i < len(carry):
            raise wrote(name, f"its carry{keys[i] if i < len(keys) else ''}")
        raise wrote(name, "xs") if i < len(carry) + len(x) else _wrote_outside(name, tensor)


def _wrote_outside(name: str, tensor: torch.Tensor) -> RematError:
    """The error for a body that writes into a tensor that it captured."""
    return RematError(
        f"{name}: the body wrote into a captured tensor ({tuple(tensor.shape)}, {tensor.dtype}) in place, "
        "such as a running statistic. The backward evaluates steps again, and would write again. Put the "
        "tensor into the carry and return its next value, or (where there is no carry, in tiles) return what "
        "a step adds and add it up outside; for batch norm write eval() or track_running_stats=False."
    )


def _paths(given: Structure) -> list[str]:
    return paths(unflatten([0] * len(given.kinds), given.spec))


def _outline(spec: Spec, count: int) -> str:
    """A structure with a star for every leaf."""
    return f"{unflatten(['*'] * count, spec)}".replace("'*'", "*")


def _say(kind: Any) -> str:
    if isinstance(kind, type):
        return kind.__name__
    return f"{kind[1]}{list(kind[0])}".removeprefix("torch.")
