"""Selective-checkpoint contexts: a policy's verdicts, op by op, while a region is recorded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from remat.opinfo import Call, Decision, OpInfo, describe
from remat.policies import Policy, check_verdict
from remat.policies._unmatched import report_unmatched
from remat.transforms import _record, _taps
from remat.transforms._trace import Node, Trace


class Calls(TorchFunctionMode):
    """Remembers the torch function that the user is calling; it runs above functorch, so sizes are per
    example."""

    def __init__(self) -> None:
        super().__init__()
        # What the function itself calls runs with the mode off: the outermost call is the user's.
        self.latest: tuple[Any, Any, Any] | None = None

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.latest = (func, args, kwargs or {})
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.latest = None

    def current(self) -> Call | None:
        if self.latest is None:
            return None
        func, args, kwargs = self.latest
        return Call(func, describe(args), describe(kwargs))


def bind(policy: Policy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Policy:
    """`policy` for one call of a region. Captures around it see nothing of what it runs to find out."""
    if not _taps.current():
        return policy.bind(fn, args, kwargs)
    with _taps.only(()):
        bound = policy.bind(fn, args, kwargs)
    return bound.amid()  # what captures put in are further ops


class PolicySelector:
    """Puts a policy's verdicts before the engine; one for every forward of a region."""

    def __init__(self, policy: Policy, region: str) -> None:
        # One that counts starts afresh: a region's forward may be run more than once before it counts.
        self.policy = policy.fresh()
        self.region = region
        self.calls = Calls() if policy.needs_calls else None
        self.named: dict[str, bool] = {}
        # What was said of unnamed ops, which a name given to their result later may change.
        self.said: dict[int, tuple[OpInfo, Decision]] = {}

    def decide(self, at: int, node: Node, args: Any, kwargs: Any, out: Any) -> int:
        quick = self.policy.quick(node.op)
        if quick is not None:
            return quick.value
        return self._ask(at, node, args, kwargs, out)

    def _ask(self, at: int, node: Node, args: Any, kwargs: Any, out: Any) -> int:
        outs = out if isinstance(out, (tuple, list)) else (out,)
        call = self.calls.current() if self.calls else None
        info = OpInfo(
            node.op, describe(args), describe(kwargs), describe(tuple(outs)), node.name, at, self.region, call
        )
        verdict = check_verdict(self.policy, info, self.policy(info))
        if node.name is None:
            self.said[at] = info, verdict
        return verdict.value

    def name(self, record: _record.Record, at: int, value: torch.Tensor, name: str) -> None:
        """Judge a value once more, now that it has a name."""
        node = record.trace.nodes[at]
        owner = record.owner(node, value)
        if owner is None:
            verdict = self._ask(at, node, (value,), {}, value)
            record.judge(node, verdict, value)
        else:
            verdict = self._name_owner(record, owner, value, name)
        self.named[name] = self.named.get(name, False) or verdict != Decision.RECOMPUTE.value

    def _name_owner(self, record: _record.Record, owner: int, value: torch.Tensor, name: str) -> int:
        """Judge the op that made a value: what autograd reads there, and what others read, is one memory."""
        node = record.trace.nodes[owner]
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

    def watching(self) -> AbstractContextManager[Any]:
        return self.calls if self.calls is not None else contextlib.nullcontext()

    def finished(self, trace: Trace) -> None:
        """The forward is over."""
        report_unmatched(self.policy, self.region, self.named)
