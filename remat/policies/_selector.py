"""Selective-checkpoint contexts: a policy's verdicts, op by op, while a region is recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat._core import Call, Decision, OpInfo, TensorMeta, describe, warn_user
from remat._torch import module_path
from remat.policies._base import Policy, check_verdict
from remat.transforms import BoundedCache, RematError, tensors_in, traits
from remat.transforms.compat import is_batched_below
from remat.transforms.intermediates import current
from remat.transforms.offload import INPUT
from remat.transforms.tape import KeptValues, Node, Tape

_aten = torch.ops.aten
# Products with a bias, of which torch.vmap makes a product and a sum, by the names of their functions.
_FUSED = {"linear": _aten.addmm.default, "addmm": _aten.addmm.default, "baddbmm": _aten.baddbmm.default}


class Calls(TorchFunctionMode):
    """Remembers the torch function that the user is calling; it runs above functorch, so sizes are per
    example."""

    def __init__(self) -> None:
        super().__init__()
        # What the function itself calls runs with the mode off: the outermost call is the user's.
        self.latest: tuple[Any, Any, Any] | None = None
        self.fused: Any = None  # the op that it is without vmap, where vmap makes several of it

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        self.latest = (func, args, kwargs)
        op = _FUSED.get(getattr(func, "__name__", ""))
        if op is not None and _has_bias(args, kwargs) and any(map(is_batched_below, tensors_in(args))):
            self.fused = op
        try:
            return func(*args, **kwargs)
        finally:
            self.latest = self.fused = None

    def current(self) -> Call | None:
        if self.latest is None:
            return None
        func, args, kwargs = self.latest
        return Call(func, describe(args), describe(kwargs))


def _has_bias(args: Any, kwargs: Any) -> bool:
    return kwargs.get("bias") is not None or (len(args) > 2 and args[2] is not None)


def _as_operands(op: Any, left: TensorMeta, right: TensorMeta) -> tuple[TensorMeta, TensorMeta]:
    """What stands for the operands of `addmm` where the product was one of batches: as many FLOPs."""
    if op is not _aten.addmm.default or len(left.shape) == 2:
        return left, right
    rows, columns = left.shape[0] * left.shape[1], left.shape[2]
    flat = dataclasses.replace(left, shape=(rows, columns), stride=(columns, 1))
    return flat, dataclasses.replace(right, shape=right.shape[1:], stride=right.stride[1:])


def bind(policy: Policy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
    """`policy` for one call of a region."""
    bound = policy.bind(fn, args, kwargs)
    return bound.interleaved() if current() else bound  # what captures put in are further ops


class PolicySelector:
    """Puts a policy's verdicts before the engine; one for every forward of a region."""

    def __init__(self, policy: Policy, region: str) -> None:
        # One that counts starts afresh: a region's forward may be run more than once before it counts.
        self.policy = policy.fresh()
        self.region = region
        self.calls = Calls() if policy.needs_calls else None
        self.named: dict[str, bool] = {}
        self.modules: dict[str, None] = {}  # those that ran what the policy was asked about
        self.product: Any = None  # operands of the product of a call that is several ops
        # What was said of unnamed ops, which a name given to their result later may change.
        self.said: dict[int, tuple[OpInfo, Decision]] = {}
        # Values that are not to be kept for their name, and looks at them: a look would keep the whole.
        self.barred: set[int] = set()

    def decide(self, at: int, node: Node, args: Any, kwargs: Any, out: Any) -> int:
        """The verdict for an op.

        Raises:
            RematError: where the policy raised a TypeError, which the operators `@ + *` would take for a hint
                to try the other operand.
        """
        try:
            return self._decide(at, node, args, kwargs, out)
        except TypeError as error:
            said = f"The policy {self.policy!r} raised {error!r} for {node.op} in region {self.region!r}."
            raise RematError(str(error) if isinstance(error, RematError) else said) from error

    def _decide(self, at: int, node: Node, args: Any, kwargs: Any, out: Any) -> int:
        if self.barred and self._looks_at_barred(at, node):
            return Decision.RECOMPUTE.value
        op = node.op
        if self.calls is not None and self.calls.fused is not None:
            # The sum has the verdict of the one op that the call is without vmap, and the product goes.
            if op in (_aten.mm.default, _aten.bmm.default):
                self.product = describe(args[:2])
            if op is not _aten.add.Tensor:
                return Decision.RECOMPUTE.value
            if self.product is not None:  # in inference mode torch makes other ops of it
                op = self.calls.fused
                args, kwargs = (describe(args[0]), *_as_operands(op, *self.product)), {}
        verdict = self.policy.decide_by_op(op)
        if verdict is not None:
            return verdict.value
        return self._ask(at, node, args, kwargs, out, op)

    def _ask(self, at: int, node: Node, args: Any, kwargs: Any, out: Any, op: Any = None) -> int:
        outs = out if isinstance(out, (tuple, list)) else (out,)
        call = self.calls.current() if self.calls and self.policy.needs_calls else None
        info = OpInfo(
            op or node.op,
            describe(args),
            describe(kwargs),
            describe(tuple(outs)),
            node.name,
            at,
            self.region,
            call,
            self._module(args),
        )
        verdict = check_verdict(self.policy, info, self.policy(info))
        if node.name is None:
            self.said[at] = info, verdict
        return verdict.value

    def _module(self, args: Any) -> str | None:
        if not self.policy.needs_modules:
            return None
        self.modules[path := module_path(read=list(tensors_in(args)))] = None
        return path

    def name(self, record: KeptValues, at: int, value: torch.Tensor, name: str) -> None:
        """Judge a value once more, now that it has a name."""
        node = record.tape.nodes[at]
        owner = record.owner(node, value)
        if owner is None:
            verdict = self._ask(at, node, (value,), {}, value)
            record.judge(at, verdict, value)
        else:
            verdict = self._name_owner(record, owner, value, name)
        place = at if owner is None else owner
        if verdict != Decision.RECOMPUTE.value:
            self.barred -= {at, place}
        elif place in self.said and self.said[place][1] is not Decision.RECOMPUTE:
            # It is the name that bars it.
            self.barred |= {at, place}
        self.named[name] = self.named.get(name, False) or verdict != Decision.RECOMPUTE.value

    def _looks_at_barred(self, at: int, node: Node) -> bool:
        found = traits(node.op).view and not self.barred.isdisjoint((node.root, *node.deps[:1]))
        if found:
            self.barred.add(at)
        return found

    def _name_owner(self, record: KeptValues, owner: int, value: torch.Tensor, name: str) -> int:
        """Judge the op that made a value: what autograd reads there, and what others read, is one memory."""
        node = record.tape.nodes[owner]
        # Reports say the name whoever keeps the value.
        node.name = node.name or name
        if owner not in self.said:
            # The policy needs no more than the op: a name changes nothing.
            return node.verdict
        info, before = self.said[owner]
        info = dataclasses.replace(info, name=name)
        verdict = check_verdict(self.policy, info, self.policy(info))
        # Of several names of one value, the one counts that makes a difference.
        if verdict is not before:
            record.judge_again(owner, verdict.value, value)
            node.name = name
        return verdict.value

    def watching(self, levels: bool = False) -> AbstractContextManager[Any]:
        if levels and self.calls is None:
            self.calls = Calls()
        return self.calls if self.calls is not None else contextlib.nullcontext()

    def finished(self, tape: Tape) -> None:
        """The forward is over."""
        self.policy.finished(tape)
        self.named.pop(INPUT, None)
        report_unmatched(self.policy, self.region, self.named)
        if self.policy.needs_modules:
            _report(self.region, dict(self.policy.unmet(self.modules)), self._unmet)

    def _unmet(self, missing: Iterable[str]) -> str:
        seen = ", ".join(map(repr, list(filter(None, self.modules))[:8]))
        return (
            f"Policy {self.policy!r} of region {self.region!r} asks for {', '.join(missing)}, which runs "
            f"nothing in it: the modules that do are {seen or 'none'}."
        )


# Regions and names that were warned of: a model calls its regions thousands of times.
_warned: BoundedCache[tuple[str, str], None] = BoundedCache(4096)


class UnmatchedName(UserWarning):
    """A name in a policy that no `checkpoint_name` of the region gives. Told once for a region.

    Example:
        >>> import warnings
        >>> import torch
        >>> from remat import remat, save_names
        >>> block = remat(torch.sin, policy=save_names("hiden"))
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     out = block(torch.ones(2, requires_grad=True))
        >>> [w.category.__name__ for w in told]
        ['UnmatchedName']
    """


def report_unmatched(policy: Policy, region: str, seen: Iterable[str]) -> None:
    """Warn, once for a region, of names that `policy` asks for and that did not occur in the forward.

    Raises:
        RematError: a policy with `strict=True` asks for the name.
    """
    missing = {name: strict for name, strict in policy.names() if name not in seen}

    def said(missing: Iterable[str]) -> str:
        return f"Policy {policy!r} of region {region!r} asks for {_listed(missing, seen)}"

    _report(region, missing, said)


def _report(region: str, missing: dict[str, bool], said: Callable[[Iterable[str]], str]) -> None:
    """Raise where something is missing that must be there, else warn of what is, once for a region."""
    if any(missing.values()):
        raise RematError(said(missing))
    new = {(region, name): None for name in missing if (region, name) not in _warned}
    _warned.update(new)
    if new:
        warn_user(f"{said(missing)} (Said once; strict=True makes it an error.)", UnmatchedName)


def _listed(missing: Iterable[str], seen: Iterable[str]) -> str:
    occurred = ", ".join(map(repr, sorted(seen)))
    found = f"the names that do are {occurred}" if occurred else "no checkpoint_name was called in it"
    guesses = {name: difflib.get_close_matches(name, seen, 1, 0.5) for name in missing}
    hints = [f" Did you mean {guess[0]!r} for {name!r}?" for name, guess in guesses.items() if guess]
    asked = ", ".join(map(repr, guesses))
    return f"{asked}, which names no value of it: {found}.{''.join(hints)}"
