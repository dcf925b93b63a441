"""A plan of a whole model, and how its regions come by their parts of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from remat._core import format_bytes, warn_user
from remat._overrides import overrides
from remat.plan.plans.plan import Plan
from remat.plan.solve import Proven
from remat.transforms import RematError
from remat.transforms.compat import in_transform, is_tracing
from remat.transforms.entry import under_hooks

# Tells a budget policy that meets a region whether it has a plan for it, and which.
Handler = Callable[..., tuple[bool, "Plan | None"]]
# None is to plan each region on its own.
_meeting: ContextVar[Handler | None] = ContextVar("remat_plan_meeting", default=None)


def meet(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Plan | None]:
    """Whether a plan of the whole model is being made or carried out, and its plan for this region if so."""
    handler = _meeting.get()
    return (False, None) if handler is None else handler(fn, args, kwargs)


def met() -> bool:
    """Whether a plan of the whole model is being made or carried out."""
    return _meeting.get() is not None


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Within, regions with budgets get what `handler` has for them."""
    token = _meeting.set(handler)
    try:
        yield
    finally:
        _meeting.reset(token)


@dataclass(frozen=True)
class ModelPlan(Proven):
    """A function with a plan for each of its regions, in the order in which they are called.

    Calling it calls the function with those plans in force.

    Attributes:
        fn: the function planned.
        regions: the plans; equal regions may have different ones.
        budget, kept_bytes, default_bytes: bytes of all regions together.
        peak_bytes: the most live at once in a step through the regions, simulated.
        cost, unit, lower_bound: as for a `Plan`, of all regions together.
        seconds: time the search took.

    Example:
        >>> import torch
        >>> from remat import checkpoint_policy, fit, remat
        >>> block = remat(lambda x: torch.tanh(x @ x).exp(), policy=checkpoint_policy(budget=0.5))
        >>> x = torch.eye(4, requires_grad=True)
        >>> planned = fit(lambda x: block(block(x)).sum(), x, budget=0.6)
        >>> len(planned.regions), planned.kept_bytes <= planned.budget
        (2, True)
    """

    fn: Callable[..., Any] = field(repr=False, compare=False)
    regions: tuple[Plan, ...]
    budget: int
    kept_bytes: int
    default_bytes: int
    peak_bytes: int
    cost: float
    unit: str
    lower_bound: float
    seconds: float = field(default=0.0, compare=False, repr=False)
    # Whether a compiler has asked for plans: what it made asks for none.
    _traced: list[bool] = field(default_factory=lambda: [False], init=False, compare=False, repr=False)
    no_policy: ClassVar[str] = (
        "call it in the place of its function, planned(*args), or give a region one of planned.regions."
    )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`, each region under its plan.

        Raises:
            RematError: where the regions met are not those planned for.
        """
        waiting = iter(self.regions)

        def hand_out(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Plan | None]:
            nonlocal waiting
            if under_hooks():
                # Such as torch's checkpoint run it again, perhaps after this call: by its own budget.
                return False, None
            plan = next(waiting, None)
            self._traced[0] |= is_tracing()
            if plan is None and is_tracing():
                # A compiler looks at a graph more than once.
                waiting = iter(self.regions)
                plan = next(waiting, None)
            if plan is None:
                raise RematError(
                    f"A region beyond the {len(self.regions)} planned ones is called: plan the model anew."
                )
            return True, plan

        with handling(hand_out):
            out = self.fn(*args, **kwargs)
        met = len(self.regions) - len([*waiting])
        # Without gradients nothing is kept, and a compiler asks for the plans when it traces.
        if met == len(self.regions) or not torch.is_grad_enabled() or is_tracing():
            return out
        if met:
            raise RematError(
                f"{met} of the {len(self.regions)} planned regions were called. Which, a plan cannot tell: "
                "others than those planned for may have kept their values. Plan the model anew for this "
                "call, or call the function itself, whose regions have budgets of their own."
            )
        if (
            not self._traced[0]
            and not in_transform()
            and overrides.choose is None
            and overrides.stand is None
        ):
            warn_user(
                f"None of the {len(self.regions)} planned regions was called, so the plan did "
                "nothing. Plan the model anew for this call."
            )
        return out

    def __str__(self) -> str:
        flops = sum(plan.recomputed_flops for plan in self.regions)
        head = (
            f"{len(self.regions)} regions keep {format_bytes(self.kept_bytes)} of "
            f"{format_bytes(self.default_bytes)} (budget {format_bytes(self.budget)}), peak at "
            f"{format_bytes(self.peak_bytes)} (simulated), recompute {flops:.4g} FLOPs; cost {self.cost:.4g} "
            f"{self.unit}, gap {self.gap:.2%}"
        )
        if sent := sum(plan.sent_bytes for plan in self.regions):
            head += f", {format_bytes(sent)} on the host"
        rows = [
            f"  {k:>3} {p.region}: {format_bytes(p.kept_bytes)}, {p.recomputed_flops:.4g} FLOPs"
            for k, p in enumerate(self.regions)
        ]
        return "\n".join([head, *rows])
