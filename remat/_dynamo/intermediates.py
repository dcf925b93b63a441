"""`capture` and `capture_grads` in code that `torch.compile` traces.

Dynamo lets no value out of a region but its results. So while a capture is open, the values that it wants
are further results of each region that Dynamo traces (`through`). They are handed on outside. With
`capture` that is all. `capture_grads` is one call of the operator that regions use. Dynamo learns which
gradients there are from stand-ins of their shapes. At trace time the function's graph is differentiated as in
eager, offsets included, since there its names are nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat._dynamo.gradients import differentiated, offset
from remat._torch import (
    BROKEN,
    bypassing_wrapper,
    is_near,
    levels_of,
    pop,
    push,
    ready,
    remove_batch_dim,
    top as dynamo_top,
    traced_depth,
    traced_unwrap,
)
from remat.transforms import (
    RematError,
    check_scalar,
    checked_tensor,
    flatten,
    replace_arguments,
    smooth,
    split,
    unflatten,
)
from remat.transforms.compat import (
    is_tracing,
)
from remat.transforms.compiled import CAPTURED, VARIABLE
from remat.transforms.entry import Graph
from remat.transforms.intermediates import Perturbations, opened as taps_opened

bypass = bypassing_wrapper()

# -- what Dynamo traces -------------------------------------------------------------------------------


class Names:
    """A capture that is open while Dynamo traces, or what stands for those outside of a region in it.

    Attributes:
        wanted: the names it asks for.
        depth: the functorch level at which it was opened.
        refusal: why nothing can come out, where that is so.
        found: named trees, at that level.
        seen: every name that was given.
    """

    def __init__(self, wanted: tuple[str, ...], refusal: str = "") -> None:
        self.wanted, self.refusal = wanted, refusal
        self.depth = traced_depth()
        self.found: list[tuple[str, Any]] = []
        self.seen: list[str] = []


def sessions() -> tuple[Names, ...]:
    """What is open around the code at hand, outermost first."""
    ready()
    top = dynamo_top()
    if top is None or is_near():
        return top or ()
    return (Names(_wanted(top), _FOREIGN),)


_FOREIGN = (
    "an operator of torch's that lets no value out but its results (torch.utils.checkpoint, torch.cond and "
    "the like). Return the value from the function, or use remat for a region."
)


def _wanted(around: tuple[Names, ...]) -> tuple[str, ...]:
    return tuple([name for session in around for name in session.wanted])


def tap(name: str, tree: Any) -> None:
    """Give a named tree to the open captures."""
    for session in sessions():
        _give(session, name, tree)


def _give(session: Names, name: str, tree: Any) -> None:
    if name in session.wanted and session.refusal:
        # Before anything is noted: Dynamo would speak of that instead, 2.11's.
        raise RematError(f"capture: the name {name!r} is given inside {session.refusal}")
    if name not in session.seen:
        session.seen.append(name)
    if name in session.wanted:
        leaves, spec = flatten(tree)
        lifted = [_lifted(leaf, session.depth) for leaf in leaves]
        session.found.append((name, unflatten(lifted, spec)))


def _lifted(leaf: Any, depth: int) -> Any:
    """A tensor without the levels deeper than `depth`; the batch of a vmap comes to the front."""
    if isinstance(leaf, Tensor):
        for batched, level, size in levels_of(leaf, depth):
            if batched:
                leaf = remove_batch_dim(leaf, level, size, 0)
            else:
                leaf = traced_unwrap(leaf, level)
    return leaf


def through(run: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`bypass(run, fn, *args, **kwargs)` for a region inside a capture."""
    around = sessions()

    def tapped(*args: Any, **kwargs: Any) -> Any:
        own = Names(_wanted(around))
        out = _opened((own,), fn, args, kwargs)
        return out, _handed_out(own), own.seen

    made = bypass(run, tapped, *args, **kwargs)  # write torch.where for if, return values, draw outside
    out, found, seen = made
    _hand_on(around, found, seen)
    return out


def _opened(opened: tuple[Names, ...], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    push(opened)
    try:
        return fn(*args, **kwargs)
    finally:
        pop()


def _handed_out(own: Names) -> list[tuple[str, Any]]:
    """What was found, as results of their own of the graph at hand."""
    found = []
    for name, tree in own.found:
        leaves, spec = flatten(tree)
        marked = [CAPTURED(leaf, name) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        found.append((name, unflatten(marked, spec)))
    return found


def _hand_on(around: tuple[Names, ...], found: list[tuple[str, Any]], seen: list[str]) -> None:
    for session in around:
        for name in seen:
            if name not in session.seen:
                session.seen.append(name)
        for name, tree in found:
            if name in session.wanted:
                _give(session, name, tree)


def refusing(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The body of the scan `name`, out of which no named value can come."""

    wanted = _wanted(sessions())
    text = (
        f"{name}, whose steps cannot be looked into from outside. Return the value among the ys of the body."
    )

    def refused(*args: Any) -> Any:
        return _opened((Names(wanted, text),), fn, args, {})

    return refused


def capture(
    fn: Callable[..., Any], wanted: tuple[str, ...], args: Any, kwargs: Any
) -> tuple[Any, list[tuple[str, Any]], list[str]]:
    """The result of `fn`, the named trees, and all names that it gave."""
    around = sessions()
    own = Names(wanted)
    out = _opened((*around, own), fn, args, kwargs)
    return out, own.found, own.seen


def capture_grads(
    fn: Callable[..., Any], wanted: tuple[str, ...], positions: Any, args: Any, kwargs: Any
) -> tuple[Tensor, Any, list[tuple[str, Any]], list[str]]:
    """The value of `fn`, gradients of the arguments, those for named trees, and all names that it gave."""
    around = sessions()

    def stood_in(*args: Any, **kwargs: Any) -> Any:
        chosen = args[positions] if isinstance(positions, int) else tuple([args[i] for i in positions])
        flat, spec = flatten(chosen)
        variables = [VARIABLE(_checked(leaf)) for leaf in flat]
        own = Names(wanted)
        outer = Names(_wanted(around))
        moved = replace_arguments(args, positions, unflatten(variables, spec))
        value = _opened((outer, own) if around else (own,), fn, moved, kwargs)
        check_scalar(value)
        value = CAPTURED(value, "")
        found = _handed_out(outer)
        # From here on Dynamo's graph is not run: all that counts are shapes, and what depends on what.
        grads = [_stand_in(leaf, value) for leaf in variables]
        named = []
        for name, tree in own.found:
            leaves, shape = flatten(tree)
            named.append((name, unflatten([_stand_in(leaf, value) for leaf in leaves], shape)))
        return value, found, unflatten(grads, spec), named, own.seen

    run = functools.partial(enter, wanted)
    value, found, grads, named, seen = bypass(run, stood_in, *args, **kwargs)  # take graph breaks out
    _hand_on(around, found, seen)
    return value, grads, named, seen


def _checked(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor) and not smooth(leaf):
        raise RuntimeError(
            f"only Tensors of floating point and complex dtype can require gradients; got {leaf.dtype}"
        )
    return checked_tensor(leaf)


def _stand_in(leaf: Any, value: Tensor) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf * value.to(leaf.device, leaf.dtype) if smooth(leaf) else None


# -- at trace time ------------------------------------------------------------------------------------


def enter(wanted: tuple[str, ...], graph: Any) -> Callable[..., Any]:
    """The function of flat operands that differentiates `graph`."""
    if not isinstance(graph, torch.fx.GraphModule):
        raise RematError(BROKEN)
    return functools.partial(_differentiate, wanted, graph)


def _differentiate(wanted: tuple[str, ...], graph: torch.fx.GraphModule, *operands: Any) -> tuple[Any, ...]:
    module, at = _of_variables(graph)
    body = Graph(module)

    def run(leaves: list[Tensor]) -> tuple[Tensor, Perturbations, list[Tensor]]:
        make = functools.partial(offset, leaves[0])
        session = Perturbations(frozenset(wanted), make, graph=True)
        with taps_opened(session):
            value, *found = body(*operands, *leaves[1:])
        return value, session, found

    value, grads, session, named, found = differentiated(
        run, [operands[i] for i in at], at_a_level=is_tracing()
    )
    tensors, _ = split(flatten([tree for _, tree in named])[0])
    return (value, *found, *grads, *tensors)


def _of_variables(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[int]]:
    """The graph without what stands in for gradients; what it is differentiated by are further operands.

    Also which of its operands those are.
    """
    short = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    at: list[int] = []
    operands = graph.graph.find_nodes(op="placeholder")
    results: Any = graph.graph.output_node().args[0]
    ends = [node for node in results if node.target is CAPTURED]
    for node in graph.graph.nodes:
        if node.target is VARIABLE:
            at.append(operands.index(node.args[0]))
            copies[node] = short.placeholder(f"variable_{len(at)}")
        else:
            copies[node] = short.node_copy(node, copies.__getitem__)
        if all(end in copies for end in ends):
            break
    short.output(tuple([copies[end] for end in ends]))
    return torch.fx.GraphModule(graph, short), at
