"""The frame of a call that is expected to run the ops of an earlier, traced one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from remat.transforms.compat import DispatchMode, pop_hooks, push_hooks, set_grad_enabled, unseen
from remat.transforms.eager.frame import Selective, entered, passing
from remat.transforms.eager.inputs import Inputs
from remat.transforms.eager.saved import Held
from remat.transforms.ops import is_shape_arithmetic, traits
from remat.transforms.region import Plan, recomputing
from remat.transforms.tape import Program, Ref, Stop, Values, map_tensors


class Following(Selective):
    """Compares each op with the one expected, keeps what the plan keeps, and recomputes by its program.

    A forward that leaves the known path is recomputed whole, and the path is forgotten.
    """

    __slots__ = ("follow", "kept", "lost", "plan", "program", "versions")

    def __init__(self, inputs: Inputs, plan: Plan) -> None:
        super().__init__(inputs)
        assert plan.program is not None
        self.plan, self.program = plan, plan.program
        self.versions = inputs.near_versions(plan.read)
        self.kept: dict[int, Any] = {}
        self.lost = False
        self.follow: Follow | None = None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = self.inputs
        self.follow = follow = Follow(self.program, [*inputs.tensors, *inputs.bindings.near])
        push_hooks(self.pack_following, self.get)
        try:
            with follow:
                out = self.region.run(args, kwargs)
        finally:
            pop_hooks()
            self.settled, self.follow = True, None
        self.lost = self.early or not follow.followed or len(self.metas) != len(self.program.packed)
        if not self.lost:
            self.kept = follow.kept
            for i in self.plan.absent:
                inputs.drop(i)
        return out

    def pack_following(self, tensor: torch.Tensor) -> int:
        at = self.pack(tensor)
        if at in self.program.direct:
            with unseen(tensor):
                self.direct[at] = Held(tensor, None)
        elif self.follow is not None:
            self.follow.saves(at, tensor)
        return at

    def check_unwritten(self) -> None:
        self.inputs.check_near(self.plan.read, self.versions)

    def _recompute(self, task: int) -> None:
        if self.lost or not self.settled:
            self.check_readable()
            return super()._recompute(task)
        self.task = task
        self.check_unwritten()
        passing.add(self, task)
        inputs, program, take = self.inputs, self.program, self.kept.__getitem__
        arguments = {i: inputs.held[i].get(inputs, i) for i in program.reads}
        if self.spends():
            self.spent = self.lost = True
            take, self.kept = self.kept.pop, {}
        contexts = inputs.ambient_contexts()
        if program.draws and inputs.random is not None:
            contexts.append(inputs.random.replayed())
        graded = torch.is_grad_enabled()
        set_grad_enabled(False)
        end = recomputing(self.region.name)
        try:
            with entered(contexts):
                self.values = program.recompute(arguments, inputs.bindings.near, take)
        finally:
            end()
            set_grad_enabled(graded)

    def repack(self, tensor: torch.Tensor) -> torch.Tensor:
        at = self.next_packed()
        if at in self.direct:
            with unseen(tensor):
                return tensor.detach()
        self.check(at, tensor, tensor._version)
        # An op's own result, packed as it is, would hold on to the op: nothing frees that cycle.
        with unseen(tensor):
            self.values[at] = alias = tensor.detach()
        if at + 1 == len(self.metas) and not (self.inner and self.settled):
            raise Stop
        return alias


class Follow(DispatchMode):
    """Watches a forward that is expected to be the one of `program`, and keeps what that keeps.

    Args:
        outside: the tensors from outside, as the program numbers them.
    """

    def __init__(self, program: Program, outside: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.program, self.ops, self.keeps = program, program.ops, program.keeps
        self.count = len(program.ops)
        self.at = 0
        self.values = Values(outside)
        self.kept: dict[int, Any] = {}
        self.lost = False

    def saves(self, at: int, tensor: torch.Tensor) -> None:
        """Autograd saves `tensor` as the value number `at`.

        The same ops may leave other values to be saved: a function with a rule of its own chooses.
        """
        packed = self.program.packed
        if at >= len(packed) or self.values.find(tensor) != packed[at]:
            self.lost = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = self.at
        expected = (
            not self.lost and at < self.count and self.ops[at] is func and self._matches(at, args, kwargs)
        )
        out = func(*args, **kwargs) if kwargs else func(*args)
        if expected:
            self.at = at + 1
            self.values.add(out)
            if at in self.keeps:
                self.kept[at] = map_tensors(torch.Tensor.detach, out)
        elif traits(func).ignored:
            self.values.same(func, args, out)
        elif not is_shape_arithmetic(args):
            self.lost = True
            self.kept = {}
        return out

    def _matches(self, at: int, args: Any, kwargs: Any) -> bool:
        """Whether the op at this position is called as expected."""
        wanted = self.program.made[at]
        if len(args) != len(wanted[0]) or bool(kwargs) != bool(wanted[1]):
            return False
        for want, value in zip(wanted[0], args, strict=True):
            if not self._alike(want, value):
                return False
        return not kwargs or self._alike(wanted[1], kwargs)

    def _alike(self, want: Any, value: Any) -> bool:
        kind = type(want)
        if kind is Ref:
            return isinstance(value, torch.Tensor) and self.values.find(value) == want
        if kind is not type(value):
            return False
        if kind is list or kind is tuple:
            return len(want) == len(value) and all(map(self._alike, want, value))
        if kind is dict:
            return want.keys() == value.keys() and all(self._alike(want[k], value[k]) for k in want)
        return want == value

    @property
    def followed(self) -> bool:
        return not self.lost and self.at == self.count
