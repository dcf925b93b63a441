"""The protocol between policies and the engine, and the algebra of policies."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import torch

from remat._core import Decision, OpInfo
from remat.transforms import Identity, Key, RematError, intern, register, registered, traits
from remat.transforms.compat import HigherOrderOperator, OpOverload, OpOverloadPacket

if TYPE_CHECKING:
    from remat.transforms.tape import Tape


class PolicyError(RematError, TypeError):
    """A value that is not a policy, or an answer that is not a `Decision` or bool (also a `TypeError`).

    Example:
        >>> from remat.policies import PolicyError
        >>> issubclass(PolicyError, TypeError)
        True
    """


class Policy:
    """Decides, op by op, what a region keeps. Subclass it as a frozen dataclass.

    `decide_by_op` gives the verdict from the op alone, where that is enough. A later forward with the same
    ops, shapes and names gets the verdicts of the first without asking.

    Attributes:
        needs_calls: whether `__call__` reads `info.call`.
        needs_modules: whether `__call__` reads `info.module`.
        counts: whether a verdict depends on how many values were judged before. Each forward counts anew.
        asks_again: whether verdicts change from call to call, so that every forward asks.
        shares_constants: whether what depends on nothing that a region is given, such as a rotary table, may
            be computed once for several regions of a graph.
        sends_inputs: whether the region's arguments go to the host, as by `remat(fn, inputs="offload")`.

    Example:
        >>> from dataclasses import dataclass
        >>> from remat import Policy, save_matmuls
        >>> @dataclass(frozen=True)
        ... class SaveBelow(Policy):
        ...     bytes: int
        ...     def __call__(self, info): return info.bytes < self.bytes
        >>> save_matmuls | SaveBelow(1024)
        save_matmuls | SaveBelow(bytes=1024)
    """

    needs_calls: bool = False
    needs_modules: bool = False
    counts: bool = False
    asks_again: bool = False
    shares_constants: bool = True
    sends_inputs: bool = False

    @functools.cached_property
    def key(self) -> Hashable:
        """What policies of the same verdicts have in common, for caches. A rule counts as itself."""
        if not dataclasses.is_dataclass(self):
            return Identity(self)
        fields = [field for field in dataclasses.fields(self) if field.compare]
        return Key(type(self), *[key_of(getattr(self, field.name)) for field in fields])

    def __getstate__(self) -> dict[str, Any]:
        # The key is good in this process alone.
        return {name: value for name, value in self.__dict__.items() if name != "key"}

    def __call__(self, info: OpInfo) -> Decision | bool:
        raise NotImplementedError

    def decide_by_op(self, op: Any) -> Decision | None:
        """The verdict for every use of `op`, or None when it depends on the `OpInfo`."""
        return None

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        """The policy for one call `fn(*args, **kwargs)` of a region; asked before its forward."""
        return self

    def interleaved(self) -> Policy:
        """The policy for a function with more ops around those that it was bound to."""
        return self

    def fresh(self) -> Policy:
        """The policy for one forward: one that counts answers with a copy whose count is zero."""
        return self

    def finished(self, tape: Tape) -> None:
        """The forward that this policy was asked about is over."""

    def names(self) -> Iterator[tuple[str, bool]]:
        """The `checkpoint_name`s that it asks for, and whether one that never occurs is an error."""
        return iter(())

    def unmet(self, modules: Collection[str]) -> Iterator[tuple[str, bool]]:
        """What it asks for and none of these modules is, the only ones that ran; whether that is an error."""
        return iter(())

    def __or__(self, other: Any) -> Policy:
        return Either(self, as_policy(other))

    def __ror__(self, other: Any) -> Policy:
        return Either(as_policy(other), self)

    def __and__(self, other: Any) -> Policy:
        return Both(self, as_policy(other))

    def __rand__(self, other: Any) -> Policy:
        return Both(as_policy(other), self)

    def __invert__(self) -> Policy:
        return Not(self)

    def __add__(self, other: Any) -> Policy:
        raise PolicyError(f"{self!r} + {other!r}: write a | b to save what either policy saves.")

    def __sub__(self, other: Any) -> Policy:
        raise PolicyError(f"{self!r} - {other!r}: write a & ~b to save what a saves and b does not.")

    def __bool__(self) -> bool:
        raise PolicyError(
            f"{self!r} is neither true nor false: write a | b to save what either policy saves, a & b for "
            "what both save, ~a for the rest, and `policy is None` to ask for one."
        )


def key_of(value: Any) -> Hashable:
    """What a field of a policy is in its key."""
    if isinstance(value, Policy):
        return value.key
    if isinstance(value, (bool, int, float)):
        # 1, 1.0 and True are equal and may mean different things.
        return type(value), value
    if value is None or isinstance(value, _BY_VALUE):
        return cast(Hashable, value)
    if isinstance(value, (tuple, frozenset)):
        parts = cast("Collection[Any]", value)
        return frozenset(map(key_of, parts)) if isinstance(value, frozenset) else tuple(map(key_of, parts))
    if isinstance(value, types.MethodType):
        # Made anew wherever it is looked up.
        return key_of(value.__self__), key_of(value.__func__)
    try:
        return Identity(value)
    except TypeError:
        # Nobody else's: the policy's key is made once.
        return Key(object())


_BY_VALUE = (str, bytes, Decision, OpOverload, HigherOrderOperator, type, torch.device, torch.dtype)


@dataclass(frozen=True)
class Named(Policy):
    """A policy that prints as the name it is imported by."""

    label: str

    def __call__(self, info: OpInfo | None = None) -> Decision | bool:
        if info is None:
            raise PolicyError(
                f"{self.label}() asks a policy about no op. {self.label} is a policy already: write "
                f"policy={self.label}, without parentheses."
            )
        return self.asked(info)

    def asked(self, info: OpInfo) -> Decision | bool:
        """The verdict for one op."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.label


@dataclass(frozen=True, repr=False)
class Constant(Named):
    """The same verdict for every op."""

    decision: Decision

    def asked(self, info: OpInfo) -> Decision:
        return self.decision

    def decide_by_op(self, op: Any) -> Decision:
        return self.decision


class Numbered(Policy):
    """A policy that torch.compile must not look into: Dynamo makes a float that changes a symbol.

    Code that is traced finds it by its number, which those equal to it share.
    """

    numbering = staticmethod(intern)
    number: str

    def __post_init__(self) -> None:
        # What is made in code that is traced has no number.
        if not torch.compiler.is_dynamo_compiling():
            object.__setattr__(self, "number", self.numbering(self))
            if (first := registered[self.number]) is not self:
                object.__setattr__(self, "first", first)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return type(self), tuple([getattr(self, field.name) for field in fields])


@dataclass(frozen=True, repr=False)
class FromCallable(Numbered):
    """The verdicts of a user's function of an `OpInfo`."""

    rule: Callable[[OpInfo], Decision | bool]
    stateful: bool = False
    # What the function reads cannot be known, so it is given all there is.
    needs_calls = True
    # One of its own each, so that what the function closes over does not live for good.
    numbering = staticmethod(register)

    @property
    def asks_again(self) -> bool:  # type: ignore[override]
        return self.stateful

    def __call__(self, info: OpInfo) -> Decision:
        return check_verdict(self, info, self.rule(info))

    def __repr__(self) -> str:
        rule = getattr(self.rule, "__qualname__", None) or repr(self.rule)
        return f"checkpoint_policy({rule}{', stateful=True' if self.stateful else ''})"


def _of_some(name: str) -> Any:
    """An attribute of a policy that is made of others: true where it is of one of them."""
    return property(lambda self: any(getattr(part, name) for part in self.parts().values()))


class Combined(Policy):
    """Made of other policies, which are its fields of that type; what concerns all policies reaches them."""

    def parts(self) -> dict[str, Policy]:
        """The policies it is made of, by field."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field.name: getattr(self, field.name) for field in fields}
        return {name: value for name, value in values.items() if isinstance(value, Policy)}

    needs_calls = _of_some("needs_calls")
    needs_modules = _of_some("needs_modules")
    counts = _of_some("counts")
    asks_again = _of_some("asks_again")
    sends_inputs = _of_some("sends_inputs")

    @property
    def shares_constants(self) -> bool:  # type: ignore[override]
        return all(part.shares_constants for part in self.parts().values())

    def bind(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
        return self._with({name: part.bind(fn, args, kwargs) for name, part in self.parts().items()})

    def interleaved(self) -> Policy:
        return self._with({name: part.interleaved() for name, part in self.parts().items()})

    def fresh(self) -> Policy:
        return (
            self._with({name: part.fresh() for name, part in self.parts().items()}) if self.counts else self
        )

    def finished(self, tape: Tape) -> None:
        for part in self.parts().values():
            part.finished(tape)

    def names(self) -> Iterator[tuple[str, bool]]:
        for part in self.parts().values():
            yield from part.names()

    def unmet(self, modules: Collection[str]) -> Iterator[tuple[str, bool]]:
        for part in self.parts().values():
            yield from part.unmet(modules)

    def _with(self, new: dict[str, Policy]) -> Policy:
        same = all(new[name] is part for name, part in self.parts().items())
        return self if same else dataclasses.replace(self, **new)  # type: ignore[type-var]


@dataclass(frozen=True, repr=False)
class _Pair(Combined):
    left: Policy
    right: Policy

    # How two verdicts make one, and the verdict that one of them alone settles.
    symbol: ClassVar[str]
    joined: ClassVar[Callable[[Decision, Decision], Decision]]
    settles: ClassVar[Decision]

    def __call__(self, info: OpInfo) -> Decision:
        return self.joined(*[check_verdict(p, info, p(info)) for p in (self.left, self.right)])

    def decide_by_op(self, op: Any) -> Decision | None:
        left, right = self.left.decide_by_op(op), self.right.decide_by_op(op)
        passes_over = (left is None and self.left.counts) or (right is None and self.right.counts)
        if self.settles in (left, right) and not passes_over:
            return self.settles
        return None if left is None or right is None else self.joined(left, right)

    def __repr__(self) -> str:
        return f"{_operand(self.left, type(self))} {self.symbol} {_operand(self.right)}"


@dataclass(frozen=True, repr=False)
class Either(_Pair):
    """`a | b`: the stronger of two verdicts, SAVE > OFFLOAD > RECOMPUTE."""

    symbol, joined, settles = "|", staticmethod(Decision.__or__), Decision.SAVE


@dataclass(frozen=True, repr=False)
class Both(_Pair):
    """`a & b`: the weaker of two verdicts."""

    symbol, joined, settles = "&", staticmethod(Decision.__and__), Decision.RECOMPUTE


@dataclass(frozen=True, repr=False)
class Not(Combined):
    """`~a`: save what `a` recomputes, recompute what it saves or offloads.

    Views stay recomputed: what they look into is judged. (`~save_matmuls` keeps no view of a product.)
    """

    inner: Policy

    def __call__(self, info: OpInfo) -> Decision:
        verdict = check_verdict(self.inner, info, self.inner(info))
        return verdict if self._passes(verdict, info.op) else self._flip(verdict)

    def decide_by_op(self, op: Any) -> Decision | None:
        verdict = self.inner.decide_by_op(op)
        return verdict if verdict is None or self._passes(verdict, op) else self._flip(verdict)

    @staticmethod
    def _passes(verdict: Decision, op: Any) -> bool:
        return verdict is Decision.RECOMPUTE and traits(op).view

    @staticmethod
    def _flip(decision: Decision) -> Decision:
        return Decision.SAVE if decision is Decision.RECOMPUTE else Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"~{_operand(self.inner)}"


def _operand(policy: Policy, same: type[Policy] | None = None) -> str:
    # `a | b | c` reads left to right without parentheses; anything else that is compound gets them.
    compound = isinstance(policy, _Pair) and type(policy) is not same
    return f"({policy!r})" if compound else repr(policy)


def check_verdict(policy: Any, info: OpInfo, value: Any) -> Decision:
    """`value` as a `Decision`.

    Raises:
        RematError: a policy answered with something other than a `Decision` or a bool.
    """
    if isinstance(value, Decision):
        return value
    if isinstance(value, bool):
        return Decision.SAVE if value else Decision.RECOMPUTE
    where = f" in region {info.region!r}" if info.region else ""
    raise PolicyError(
        f"The policy {policy!r} answered {value!r} of type {_type_name(value)} for {info.op}{where}. A "
        f"policy answers Decision.SAVE, Decision.RECOMPUTE or Decision.OFFLOAD (or True for SAVE, False for "
        f"RECOMPUTE).{_hint(value)}"
    )


def _hint(value: Any) -> str:
    if value is None:
        return " None is what a function without a return statement answers."
    if isinstance(value, Policy):
        return (
            f" The rule made a policy instead of asking it: write policy={value!r}, or call it on the OpInfo."
        )
    if _type_name(value) == "CheckpointPolicy":
        return " torch's CheckpointPolicy belongs to torch.utils.checkpoint: return remat.Decision instead."
    return ""


def _type_name(value: Any) -> str:
    return type(value).__name__


def as_policy(value: Any) -> Policy:
    """`value` as a policy: a policy as it is, a rule, one op, or a collection of ops and `checkpoint_name`s.

    Raises:
        RematError: it is none of these (also a TypeError).

    Example:
        >>> from remat.policies import as_policy
        >>> as_policy(["hidden"])
        save_names('hidden')
    """
    return value if isinstance(value, Policy) else _converters[-1](value)


# `_makers` turns other values into policies, and puts its function here when it is imported.
_converters: list[Callable[[Any], Policy]] = []


def converts(convert: Callable[[Any], Policy]) -> Callable[[Any], Policy]:
    """Let `as_policy` turn other values into policies by `convert`."""
    _converters.append(convert)
    return convert


_CustomOp: TypeAlias = "torch.library.CustomOpDef"  # pyright: ignore[reportPrivateImportUsage]
_Op: TypeAlias = "OpOverload[..., Any] | OpOverloadPacket[..., Any] | HigherOrderOperator | _CustomOp"
_Several: TypeAlias = "list[Any] | tuple[_Op | str, ...] | Set[_Op | str]"
PolicyLike: TypeAlias = "Policy | Callable[[OpInfo], Decision | bool] | _Op | _Several"
"""What `remat(policy=...)` accepts: a policy, a rule, one op, or several ops and `checkpoint_name`s.

Example:
    >>> from remat import checkpoint_policy
    >>> checkpoint_policy(["hidden", "q"])
    save_names('hidden', 'q')
"""
