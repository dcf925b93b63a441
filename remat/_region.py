"""A region as the user's code calls it: options, static arguments, and the function that `remat` returns."""

from __future__ import annotations

import functools
import inspect
import os
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from remat._dynamo import call_planned, call_region, naming_inputs, needs_call, wrap
from remat._inspect import logger, told, wanted
from remat._overrides import overrides
from remat._per_call import PerCallRegion
from remat._ranks import RANKS
from remat.policies import HostInputs, Policy, PolicySelector, save_everything, save_nothing
from remat.transforms import (
    WrongType,
    WrongValue,
    blank,
    is_tensor,
    names_of,
    register,
    set_class,
    subclass,
    subclasses,
    unannounced,
)
from remat.transforms.compat import unmarked
from remat.transforms.entry import Graph, outermost, run, run_transparently
from remat.transforms.region import Region, checksum, choosing

# How a recomputation is compared with its forward.
Check = Literal["metadata", "exact", "none"]
# Where a region's arguments wait for its backward.
Inputs = Literal["hold", "offload"]


def name_of_region(fn: Any) -> str:
    """What messages call a region of `fn`: a function by its name, a module by its class."""
    if isinstance(fn, functools.partial):
        return name_of_region(fn.func)
    if isinstance(fn, types.MethodType) and fn.__name__ in ("forward", "__call__"):
        return type(fn.__self__).__name__
    name = str(getattr(fn, "__qualname__", None) or type(fn).__name__)
    name = name.rpartition("<locals>.")[2].removesuffix(".forward")
    code = getattr(fn, "__code__", None)
    if name == "<lambda>" and code is not None:
        return f"lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return name


@dataclass(eq=False)
class Options:
    """The arguments of `remat`, checked.

    Code that Dynamo traces has them by a number, or by their class and fields. It asks them for `region` (to
    write out) or `eager` (where the graph broke).
    """

    policy: Policy
    name: str | None = None
    numbers: tuple[int, ...] = ()
    names: frozenset[str] = frozenset()
    random: bool = True
    check: Check = "metadata"
    decisions: bool = True
    inputs: Inputs = "hold"
    once: bool = False  # whether `fn` was marked as what a compiler lowers once for all of its calls

    @property
    def sends(self) -> bool:
        """Whether arguments go to the host."""
        return self.inputs == "offload" or self.policy.sends_inputs

    def label(self, fn: Callable[..., Any]) -> str:
        """What messages call the region."""
        return self.name or name_of_region(fn)

    def region(self, fn: Callable[..., Any], policy: Policy, label: str | None = None) -> Region:
        label = label or self.label(fn)
        if self.sends:
            policy = HostInputs(policy)
        if policy == save_nothing:
            selector, key = None, (None, label, self.decisions)
        else:
            selector = functools.partial(PolicySelector, policy, label)
            # A policy may look at the region's name, and is to complain of names for each region.
            key = None if policy.asks_again else (policy.key, label, self.decisions)
        digest = checksum if self.check == "exact" else None
        shares = policy.shares_constants
        decisions = self.decisions
        checks = self.random, self.check
        learnt = anchor(fn), key, decisions, digest, shares
        return Region(fn, label, selector, *checks, *learnt, ranks=RANKS)

    def __deepcopy__(self, memo: Any) -> Options:
        return self

    def eager(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a region, where Dynamo gave it up."""
        return _wrap(fn, self)

    def under(self, policy: Policy) -> Options:
        """The same with another policy."""
        return replace(self, policy=policy)

    def as_traced(self) -> Options:
        """What holds in a trace: `traced_under` may have another policy for all regions."""
        return self if overrides.traced is None else self.under(overrides.traced)


def with_policy(fn: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """`fn` as a region that has this policy and no other options."""
    return rematerialized(fn, Options(policy))


def _is_module_class(fn: Any) -> bool:
    return isinstance(fn, type) and issubclass(fn, torch.nn.Module)


def _not_a_function(fn: Any) -> str:
    if isinstance(fn, Policy):
        return f"remat({fn!r}) got a policy in place of the function. Write remat(fn, policy={fn!r})."
    if isinstance(fn, type):
        return (
            f"remat({fn.__name__}) got a class of modules, and would make modules in a region. Write "
            f"remat({fn.__name__}(...)) for one module, or remat.apply(model, layers={fn.__name__}) for "
            "all of a model."
        )
    got = f"a {type(fn).__name__}, as remat(fn(x)) gives" if isinstance(fn, torch.Tensor) else repr(fn)
    return f"remat(fn): fn must be callable, got {got}. Write remat(fn)(x), or @remat above the function."


def rematerialized(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """`fn` as a region, also where Dynamo traces the very making of it."""
    return wrap(fn, options) if torch.compiler.is_dynamo_compiling() else _wrap(fn, options)


def _wrap(fn: Callable[..., Any], options: Options) -> Callable[..., Any]:
    if not callable(fn) or isinstance(fn, Policy) or _is_module_class(fn):
        raise WrongType(_not_a_function(fn))
    if (inner := unmarked(fn)) is not None:
        return _wrap(inner, replace(options, once=True))
    _check_runs_at_once(fn)
    _check_static_names(fn, options.names)
    region = options.region(fn, options.policy)
    static = bool(options.numbers or options.names)
    keeps_everything = options.policy == save_everything and not options.sends
    label, number = region.name, register(options)
    naming = options.sends and not hasattr(fn, "names_inputs")
    # Most policies are the same for every call; asking them takes longer than a small op.
    binds = needs_call(options.policy)
    compile_call = call_planned if binds else call_region

    ordinary = not (keeps_everything or static or binds)
    by_call = PerCallRegion(options.region, options.policy, region) if binds and not static else None

    def eager(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if naming:
            return _wrap(naming_inputs(fn, args, kwargs), replace(options, name=label))(*args, **kwargs)
        choose, stand = overrides.choose, overrides.stand
        if stand is not None and (given := stand(fn, options.policy, args, kwargs)) is not None:
            return given[0]
        if ordinary and choose is None:
            return run(region, args, kwargs)
        if choose is not None:
            chosen = choose(label, options.policy, args, kwargs)
            if chosen is not options.policy:
                return _wrap(fn, options.under(chosen))(*args, **kwargs)
        if keeps_everything and outermost():
            with choosing():
                return run_transparently(fn, args, kwargs, everywhere=False)
        if static:
            return _call_static(fn, options, args, kwargs)
        return run(region, args, kwargs) if by_call is None else by_call.run(args, kwargs)

    # Dynamo looks into every cell, so this one closes over strings and functions alone.
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            called = naming_inputs(fn, args, kwargs) if naming else fn
            return compile_call(label, number, called, args, kwargs)
        if logger.level and wanted():
            return told(label, functools.partial(eager, args, kwargs))
        return eager(args, kwargs)

    # Tracebacks name the region, those of torch.compile too; and what Dynamo keeps for a region's code, and
    # how often it compiles it, is then no other region's.
    rematerialized.__code__ = rematerialized.__code__.replace(co_name=f"region {label!r}")
    if isinstance(fn, torch.nn.Module) and not isinstance(fn, torch.jit.ScriptModule):
        return _module_view(fn, options, rematerialized)
    if _holds_others(fn):
        return BoundRegion(fn, options, rematerialized)
    functools.update_wrapper(rematerialized, fn, updated=())
    rematerialized.__wrapped__ = fn  # type: ignore[attr-defined]
    return rematerialized


# What `copy.deepcopy` does not copy.
_AS_THEY_ARE = (types.FunctionType, types.BuiltinFunctionType, type)


def _holds_others(fn: Any) -> bool:
    """Whether `fn` is a bound method, a partial or an object that is called: a copy of it is another one."""
    # Since Python 3.13 a partial has a `__get__`, too.
    if isinstance(fn, (types.MethodType, functools.partial)):
        return True
    return not (isinstance(fn, _AS_THEY_ARE) or hasattr(type(fn), "__get__"))


class BoundRegion:
    """What `remat` makes of a bound method, a partial, an object: a copy of it is a region of the copy."""

    def __init__(self, fn: Callable[..., Any], options: Options, run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._options, self._run = options, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _wrap, (self.__wrapped__, self._options)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"remat({self.__wrapped__!r}, policy={self._options.policy!r})"  # type: ignore[attr-defined]


@unannounced
class ModuleView(torch.nn.Module):
    """Mixed into the class of what `remat` makes of a module: the same module to all but calls.

    It has the module's attributes, parameters and hooks by having its very `__dict__`.
    """

    __slots__ = ()
    _remat: tuple[torch.nn.Module, Options, Callable[..., Any]]

    @property
    def __wrapped__(self) -> torch.nn.Module:
        return self._remat[0]

    @property
    def __class__(self) -> Any:
        # torch.export gives a shared module a stand-in of a subclass, which a slot would forbid. Regions run
        # as they are there.
        return type(self._remat[0]) if torch.compiler.is_exporting() else type(self)

    @__class__.setter
    def __class__(self, cls: Any) -> None:
        set_class(self, cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _wrap, self._remat[:2]

    def __repr__(self) -> str:
        return f"remat({super().__repr__()}, policy={self._remat[1].policy!r})"


def _module_view(module: torch.nn.Module, options: Options, run: Callable[..., Any]) -> torch.nn.Module:
    kind = type(module) if isinstance(module, ModuleView) else _view_class(type(module))
    view = blank(kind)
    object.__setattr__(view, "__dict__", module.__dict__)
    object.__setattr__(view, "_remat", (module, options, run))
    return view


def _view_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    # A class knows its subclasses, and does not hold them.
    for made in subclasses(cls):
        if names_of(made).get("_remat_view_of") is cls:
            return made

    @functools.wraps(cls.forward)
    def forward(self: ModuleView, *args: Any, **kwargs: Any) -> Any:
        return self._remat[2](*args, **kwargs)

    # Hooks run inside of the region, where the module itself is called.
    about = {"__slots__": ("_remat",), "_remat_view_of": cls}
    return subclass(cls, ModuleView, about | dict.fromkeys(("forward", "__call__", "_call_impl"), forward))


# What a call of a function makes that runs later, by the flag of its code.
_LATER = {
    inspect.CO_GENERATOR: "a generator",
    inspect.CO_COROUTINE: "a coroutine",
    inspect.CO_ASYNC_GENERATOR: "an asynchronous generator",
}


def _check_runs_at_once(fn: Any) -> None:
    """Raise for a function whose call runs nothing of it: its ops would be outside of the region."""
    called = fn.func if isinstance(fn, functools.partial) else fn
    if isinstance(called, torch.nn.Module):
        called = called.forward
    elif not hasattr(called, "__code__") and not isinstance(called, (types.MethodType, type)):
        called = type(called).__call__
    code = getattr(inspect.unwrap(called), "__code__", None)
    flags = 0 if code is None else code.co_flags
    for flag, kind in _LATER.items():
        if flags & flag:
            raise WrongType(
                f"remat({name_of_region(fn)}): the function is {kind}, which runs after its call has "
                "returned, outside of the region. Write a function that returns its results, and call that "
                "from yours."
            )


def _check_static_names(fn: Callable[..., Any], names: frozenset[str]) -> None:
    """Raise for a static name that `fn` cannot be called with: it would silently do nothing."""
    if not names:
        # Reading a signature takes longer than the rest, and layers of models make a region in each call.
        return
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    if unknown := sorted(names - set(parameters)):
        label = getattr(fn, "__qualname__", type(fn).__name__)
        raise WrongValue(
            f"remat(static_argnames={unknown[0]!r}): {label} takes no argument of that name; it takes "
            f"{', '.join(parameters) or 'none'}"
        )


def _call_static(
    fn: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call with the static arguments taken out of the pytrees and put back inside."""
    count = len(args)
    for i in options.numbers:
        if not -count <= i < count:
            raise WrongValue(
                f"remat(static_argnums={options.numbers}): this call of {getattr(fn, '__qualname__', fn)} "
                f"has {count} positional arguments, and {i} is not the position of one. Use numbers from "
                f"{-count} to {count - 1}, or static_argnames for keywords."
            )
    fixed = {i % count for i in options.numbers}
    moving = tuple([a for i, a in enumerate(args) if i not in fixed])
    settled = {k: v for k, v in kwargs.items() if k in options.names}
    for value in (*[args[i] for i in fixed], *settled.values()):
        if is_tensor(value):
            raise WrongValue(
                "remat: a static argument is a tensor; static arguments carry no derivative, pass it as an "
                "ordinary one"
            )
    call = _Static(fn, args, fixed, settled)
    by_call = PerCallRegion(options.region, options.policy, options.region(call, options.policy))
    return by_call.run(moving, {k: v for k, v in kwargs.items() if k not in settled})


class _Static:
    """`fn` with some arguments fixed."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], fixed: set[int], settled: dict[str, Any]
    ) -> None:
        self.fn, self.settled = fn, settled
        self.fixed = {i: args[i] for i in fixed}
        self.count = len(args)
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)

    def made_of(self) -> tuple[Any, ...]:
        """What tells one of these, which are made anew at every call, from another."""
        return self.fn, self.fixed, self.count, self.settled

    def __call__(self, *moving: Any, **kwargs: Any) -> Any:
        rest = iter(moving)
        args = [self.fixed[i] if i in self.fixed else next(rest) for i in range(self.count)]
        return self.fn(*args, **self.settled, **kwargs)


class _Method:
    """A method of one module: others of the module may differ in all that calls teach."""


# By modules, and the code of their methods.
_methods: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, _Method]] = weakref.WeakKeyDictionary()


def anchor(fn: Any) -> Any:
    """The object with whose life what was learnt about `fn` ends: a module, its method, a function's code."""
    if isinstance(fn, functools.partial):
        return anchor(fn.func)
    if isinstance(fn, (BoundRegion, ModuleView)):
        return anchor(fn.__wrapped__)  # type: ignore[attr-defined]
    if isinstance(fn, types.MethodType):
        if not isinstance(fn.__self__, torch.nn.Module):
            return anchor(fn.__func__)
        return _methods.setdefault(fn.__self__, {}).setdefault(anchor(fn.__func__), _Method())
    if isinstance(fn, types.FunctionType):
        return anchor(fn.__wrapped__) if hasattr(fn, "__wrapped__") else fn.__code__
    if isinstance(fn, _Static):
        return anchor(fn.fn)
    if isinstance(fn, Graph):
        return fn.module
    return fn if isinstance(fn, torch.nn.Module) else type(fn)
