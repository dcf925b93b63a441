"""The frame of a call that is expected to run the ops of an earlier, traced one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from remat.transforms import _blanks, _ops, _torch, _trace
from remat.transforms._errors import RematError
from remat.transforms._frame import Selective
from remat.transforms._held import Held
from remat.transforms._inputs import Inputs
from remat.transforms._learned import Plan
from remat.transforms._trace import KEPT, RUN, Stop


class Following(Selective):
    """Compares each op with the one expected and keeps what the plan keeps.

    A forward that leaves the known path is recomputed whole, and the path is forgotten.
    """

    __slots__ = ("follow", "kept", "lost", "plan", "versions")

    def __init__(self, inputs: Inputs, plan: Plan) -> None:
        super().__init__(inputs)
        self.plan = plan
        self.versions = inputs.near_versions(plan.read)
        self.kept: dict[int, Any] = {}
        self.lost = False
        self.follow: Follow | None = None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.follow = follow = Follow(self.plan)
        _torch.push_hooks(self.pack_following, self.get)
        try:
            with follow:
                out = self.region.run(args, kwargs)
        finally:
            _torch.pop_hooks()
            self.settled, self.follow = True, None
        self.lost = self.early or not follow.followed or len(self.metas) != len(self.plan.makers)
        if not self.lost:
            self.kept = follow.kept
            for i in self.plan.absent:
                self.inputs.drop(i)
        return out

    def pack_following(self, tensor: torch.Tensor) -> int:
        at = self.pack(tensor)
        if at in self.plan.direct:
            with _torch.no_dispatch():
                self.direct[at] = Held(tensor, None)
        elif self.follow is not None:
            self.follow.saves(at, tensor)
        return at

    def check_unwritten(self) -> None:
        self.inputs.check_near(self.plan.read, self.versions)

    def add_modes(self, contexts: list[AbstractContextManager[Any]], args: Any, kwargs: Any) -> None:
        if self.lost:
            self.check_readable()
        elif self.settled:
            check = self.region.determinism_check != "none"
            kept, spend = self.kept, self.spends()
            if spend:
                self.spent = self.lost = True
                self.kept = {}
            contexts.append(Retrace(self.plan, kept, self.differs, check, spend))

    def repack(self, tensor: torch.Tensor) -> torch.Tensor:
        at = self.next_packed()
        if at in self.direct:
            with _torch.no_dispatch():
                return tensor.detach()
        if (tensor.shape, tensor.dtype, tensor.device, tensor._version) != self.metas[at]:
            self.check(at, tensor, tensor._version)
        # An op's own result, packed as it is, would hold on to the op: nothing frees that cycle.
        with _torch.no_dispatch():
            self.values[at] = alias = tensor.detach()
        if at + 1 == len(self.metas) and not (self.inner and self.settled):
            raise Stop
        return alias


class Follow(_torch.DispatchMode):
    """Watches a forward that is expected to be the one of `plan`, and keeps what the plan keeps."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.ops, self.outs, self.actions = plan.ops, plan.outs, plan.actions
        self.saved, self.makers = plan.saved, plan.makers
        self.count = len(plan.ops)
        self.at = 0
        self.kept: dict[int, Any] = {}
        self.owners: dict[int, int] = {}  # storage -> the op that made it, of those whose results are saved
        self.lost = False

    def saves(self, at: int, tensor: torch.Tensor) -> None:
        """Autograd saves `tensor` as the value number `at`.

        The same ops may leave other values to be saved: a function with a rule of its own chooses.
        """
        expected = self.makers[at] if at < len(self.makers) else None
        if expected is not None and self.owners.get(_trace.storage(tensor)) != expected:
            self.lost = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        at = self.at
        if at < self.count and self.ops[at] is func:
            self.at = at + 1
            if at in self.saved:
                for tensor in (out,) if isinstance(out, torch.Tensor) else _trace.tensors_in(out):
                    self.owners[_trace.storage(tensor)] = at
            expected = self.outs[at]
            if type(expected) is _blanks.Meta:
                if out.shape != expected[0] or out.dtype != expected[2]:
                    self.lost = True
                elif self.actions[at] == KEPT:
                    self.kept[at] = out.detach()
            elif self.actions[at] == KEPT:
                self.kept[at] = _trace.map_tensors(torch.Tensor.detach, out)
        elif not (_ops.traits(func).ignored or _ops.is_shape_arithmetic(args)):
            self.lost = True
        return out

    @property
    def followed(self) -> bool:
        return not self.lost and self.at == self.count


class Retrace(_torch.DispatchMode):
    """The recomputation of a forward that followed `plan`: like `Replay`, and leaner."""

    def __init__(self, plan: Plan, kept: dict[int, Any], differs: Any, check: bool, spend: bool) -> None:
        super().__init__()
        self.kept, self.differs, self.check, self.spend = kept, differs, check, spend
        self.ops, self.outs, self.actions, self.end = plan.ops, plan.outs, plan.actions, plan.end
        self.blanks = _blanks.Shared()
        self.at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = self.at
        if at < self.end and self.ops[at] is func:
            self.at = at + 1
            action = self.actions[at]
            if action == KEPT:
                kept = self.kept.pop(at) if self.spend else self.kept[at]
                detach = torch.Tensor.detach
                return detach(kept) if isinstance(kept, torch.Tensor) else _trace.map_tensors(detach, kept)
            if action != RUN:
                return _trace.quiet(self.blanks, self.outs[at])
            out = func(*args, **kwargs) if kwargs else func(*args)
            if self.check:
                self._check(at, func, out)
            return out
        if _ops.traits(func).ignored or _ops.is_shape_arithmetic(args):
            return func(*args, **(kwargs or {}))
        if at >= self.end:
            raise Stop
        raise RematError(
            self.differs(f"at op {at}, the forward ran {self.ops[at]}, the recomputation runs {func}")
        )

    def _check(self, at: int, func: Any, out: Any) -> None:
        expected = self.outs[at]
        if type(expected) is _blanks.Meta:
            if out.shape == expected[0] and out.dtype is expected[2] and out.device == expected[3]:
                return
        elif _blanks.alike(_blanks.metadata(out), expected):
            return
        raise RematError(
            self.differs(f"at op {at}, {func} made {expected} in the forward and now {_blanks.metadata(out)}")
        )
