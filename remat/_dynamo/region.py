"""`remat` in code that `torch.compile` traces: what Dynamo sees of a region.

Dynamo hands plain constants on to trace time, no objects. A region that was made before is known there by a
number; one that is made inside the compiled function, by a description of its policy in plain values.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from remat._dynamo.intermediates import sessions, through
from remat._torch import bypassing_wrapper, is_inner, libraries_ready, made_here, share_floats
from remat.policies import Policy, bind, save_everything
from remat.transforms import RematError, flatten, map_only, registered
from remat.transforms.compiled import named
from remat.transforms.entry import Given, Graph, outermost_traced, run_graph, run_transparently
from remat.transforms.offload import INPUT

# `bypass(enter, fn, *args)` calls `enter(graph of fn)(*operands)` at trace time. Dynamo takes for `enter` a
# module-level function, or a partial of one with plain constants. Where it refuses what a region does, its
# message shows the lines that call `bypass`: their comments say what to write instead.
bypass = bypassing_wrapper()


def call_region(label: str, at: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the region with the options numbered `at` while Dynamo traces."""
    libraries_ready()
    run = functools.partial(enter, label, at)
    return _called(run, fn, args, kwargs)


def call_planned(label: str, at: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`call_region` for policies that look at a whole call: it matters to them what is an argument."""
    libraries_ready()
    run = functools.partial(enter, label, at, given=given(args, kwargs))
    return _called(run, fn, args, kwargs)


def _called(run: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    opened = sessions()
    share_floats()
    if is_inner():
        fn = _returning_its_own(fn)
    if opened:
        return through(run, fn, args, kwargs)
    return bypass(run, fn, *args, **kwargs)  # write torch.where for if, return values, draw and print outside


def _returning_its_own(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose results are no operands. Where a region in another's function returns what it is given,
    Dynamo takes the operand for a value of the inner graph from there on, and fails."""

    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        return map_only(torch.Tensor, made_here, fn(*args, **kwargs))

    return rematerialized


def naming_inputs(fn: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any]:
    """`fn` for a call with such arguments: those that go to the host bear a name.

    They are what an op has made with a history. Others, such as weights and tables, somebody else has, and
    nothing would be freed. (This is asked outside of the region: a recomputation sees other histories.)
    """
    leaves = flatten((args, kwargs))[0]
    made = [t.requires_grad and not t.is_leaf for t in leaves if isinstance(t, torch.Tensor)]

    def with_names(*args: Any, **kwargs: Any) -> Any:
        left = iter(made)
        args, kwargs = map_only(
            torch.Tensor, lambda tensor: named(tensor, INPUT) if next(left) else tensor, (args, kwargs)
        )
        return fn(*args, **kwargs)

    if not torch.compiler.is_dynamo_compiling():
        functools.update_wrapper(with_names, fn, updated=())
        with_names.names_inputs = True  # type: ignore[attr-defined]
    return with_names


def given(args: Any, kwargs: Any) -> tuple[int, bool]:
    """The fields of a `entry.compiled.Given`; Dynamo traces this."""
    tensors, containers = 0, False
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.nn.Parameter):
            pass
        elif isinstance(value, torch.Tensor):
            tensors += 1
        elif not isinstance(value, (int, float, str, type(None), torch.nn.Module)):
            containers = True
    return tensors, containers


def wrap(fn: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """`fn` as a region, while Dynamo traces the very call of `remat`."""
    label = options.name or getattr(fn, "__name__", "module")
    spec = (
        type(options),
        describe(options.policy),
        options.random,
        options.check,
        options.decisions,
        options.inputs,
    )
    binds, sends = needs_call(options.policy), options.sends

    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        libraries_ready()
        run = functools.partial(enter_described, label, spec, given=given(args, kwargs) if binds else None)
        return _called(run, naming_inputs(fn, args, kwargs) if sends else fn, args, kwargs)

    return rematerialized


def needs_call(policy: Policy) -> bool:
    """Whether a policy is another one for some calls."""
    kind = type(policy)
    return kind.bind is not Policy.bind or kind.interleaved is not Policy.interleaved


def enter(label: str, at: str, graph: Any, given: Any = None) -> Callable[..., Any]:
    """The function of flat operands that runs a region's graph."""
    return functools.partial(_run, registered[at], label, graph, given)


def enter_described(label: str, spec: Any, graph: Any, given: Any = None) -> Callable[..., Any]:
    """`enter` for a region that the compiled function itself made."""
    kind, policy, *rest = spec
    options = kind(rebuild(policy), label, (), frozenset(), *rest)
    return functools.partial(_run, options, label, graph, given)


def _run(options: Any, label: str, graph: Any, given: Any, *operands: Any, **kwargs: Any) -> Any:
    if not isinstance(graph, torch.fx.GraphModule):
        # Dynamo gave the region up for a graph break and now calls it with what it was given, in eager.
        return options.eager(graph)(*operands, **kwargs)
    options = options.as_traced()
    body = Graph(graph, Given(*given) if given else None, options.once)
    if options.policy == save_everything and not options.sends and outermost_traced():
        return run_transparently(body, operands, {})
    policy: Policy = options.policy
    if needs_call(policy):
        policy = bind(policy, body.bare(), tuple(body.without_data(operands)), {})
        if getattr(policy, "left_to_compiler", False) and not body.named and outermost_traced():
            # A compiler keeps less where it fuses: a mask in place of a float.
            return run_transparently(body, operands, {})
    if body.named:
        policy = policy.interleaved()
    return run_graph(options.region(body, policy, label), body, operands)


def describe(policy: Policy) -> Any:
    """A policy in values that Dynamo takes for constants: its number if it has one, or class and fields."""
    at = getattr(policy, "number", None)
    if at is not None:
        return at
    kind: Any = type(policy)
    return kind, tuple([(name, _plain(getattr(policy, name))) for name in kind.__match_args__])


def _plain(value: Any) -> Any:
    if isinstance(value, Policy):
        return "policy", describe(value)
    if callable(value) and not isinstance(value, (types.FunctionType, functools.partial)):
        raise RematError(
            "remat(policy=...) inside a compiled function got a rule that is not a function; make the "
            "policy outside, policy = checkpoint_policy(rule), and write remat(fn, policy=policy)."
        )
    return "value", value


def rebuild(description: Any) -> Policy:
    """The policy that `describe` described."""
    if isinstance(description, str):
        return registered[description]
    kind, fields = description
    return kind(**{n: rebuild(value) if is_ == "policy" else value for n, (is_, value) in fields})
