"""A step of a model that is cut into blocks in one way, and the cheapest choices within a limit."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from remat import nn
from remat._blocks import no_blocks
from remat._core import Mark, trace_memory
from remat._fit.policy import Fitted, Made
from remat._inspect import looked_at
from remat.plan import (
    BUILT_IN_POLICIES,
    BudgetPolicy,
    Choice,
    Chosen,
    CostModel,
    Graph,
    Plan,
    Portfolio,
    WholeStep,
    check_budget,
    plans_by_budget,
    ran_step_of,
    step_of,
)
from remat.plan.joint import NotOnFakes
from remat.policies import Policy, policy_given, save_everything, save_nothing, several_given
from remat.transforms import RematError, tree_leaves


@dataclass(frozen=True)
class ModelStep:
    """A training step: what is called, with what, and what of its result is differentiated.

    Attributes:
        measure: whether it may be run with data, where it does not run without.
        ran: whether it was.
        drew: whether each run drew numbers of Python's random.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Any] | None
    device: Any
    accumulating: bool
    shards: int
    measure: bool = False
    ran: list[bool] = field(default_factory=list)
    drew: list[bool] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model with what is differentiated in front; the caller holds the rest of its result."""
        before = random.getstate()
        out = self.model(*args, **kwargs)
        self.drew.append(random.getstate() != before)
        found = getattr(out, "loss", None) if self.loss is None else self.loss(out)
        if self.loss is not None:
            _check_loss(found, out)
        if found is None:
            return out
        rest = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t is not found]
        return found, [t.detach() for t in rest]

    def measured(self) -> int:
        """The most bytes that a step allocates over what lives before: after one that fills caches."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]

        def step(mark: Mark) -> Any:
            out = self(*self.args, **self.kwargs)
            mark()
            active = [t for t in tree_leaves(out) if _has_gradient(t)]
            torch.autograd.backward(active, [torch.ones_like(t) for t in active])
            return out

        device = parameters[0].device if parameters else torch.device("cpu")
        roots, adding = (self.model, self.args, self.kwargs), parameters if self.accumulating else ()
        with looked_at(*roots, ops=False, adding=adding), torch.enable_grad():
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter) if self.accumulating else None
            step(lambda: None)
            if not self.accumulating:
                for parameter in parameters:
                    parameter.grad = None
            peak = trace_memory(step, device).peak
            for parameter in parameters:
                parameter.grad = None
        return peak

    @property
    def function(self) -> Callable[..., Any]:
        """The step as a function that is named as the model is."""

        def step(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        step.__name__ = type(self.model).__name__
        return step

    def planned(self) -> WholeStep:
        """The step without data, its regions left out; with data where it needs them, and may be run.

        Raises:
            NotOnFakes: it needs data.
        """
        options: dict[str, Any] = {
            "wanted": plans_by_budget,
            "device": self.device,
            "accumulating": self.accumulating,
            "shards": self.shards,
        }
        if not self.ran:
            try:
                return step_of(self.function, self.args, self.kwargs, **options)
            except NotOnFakes as error:
                if not self.measure:
                    raise NotOnFakes(f"{_first(error)} {_MEASURE}") from error
        found: list[WholeStep] = []
        for turn in (1, 2):
            # The first one may fill caches; what they do may depend on what is drawn.
            print(f"remat.fit: step {turn} of 2 runs with data", file=sys.stderr, flush=True)
            found.append(ran_step_of(self.function, self.args, self.kwargs, **options))
        self.ran.append(True)
        return max(found, key=lambda step: sum(graph.kept_by_default for graph in step.graphs))


# The attribute by which layers of transformers are told to have a checkpoint.
_SWITCH = "gradient_checkpointing"

# One part in so many of a step is left free, for what is not counted: the states that generators have before
# draws that run again, numbers that autograd holds. Of steps that depend on data two runs were seen.
_PARTS, _PARTS_OF_DATA = 100, 25


class Way:
    """A model that is cut into blocks, and a choice for each; `chosen` is None if none keeps to the limit.

    Without a limit `budget` says what the blocks may keep.

    Attributes:
        again: whether the blocks run their decisions again, such as routes: the last resort.
    """

    def __init__(
        self,
        source: ModelStep,
        names: list[str],
        limit: int | None,
        model: CostModel,
        ready: dict[str, Policy],
        budget: Any = None,
        step: WholeStep | None = None,
    ) -> None:
        self.source, self.names, self.again = source, names, step is not None
        self._options = limit, model, ready, budget
        self.modules = {name: source.model.get_submodule(name) for name in names}
        # Regions of the user's come back whatever happens.
        with nullcontext() if step else _regions(list(self.modules.values())), _uncompiled():
            self.step = step or source.planned()
        _check_differentiated(source.model, self.step)
        self.portfolio = Portfolio(self.step, model, ready)
        self.plain = self.portfolio.plain()
        self._parts = _PARTS_OF_DATA if self.step.ran else _PARTS
        self.budget = 0
        if limit is None and not names:
            raise no_blocks(source.model)
        if limit is None:
            self.budget, chosen = self.portfolio.keeping(check_budget(budget))
            self.chosen: Chosen | None = chosen if chosen.cost else self.plain
            return
        allowed = limit * self._parts // (self._parts + 1)
        self.chosen = self.plain
        if self.plain.peak > allowed:
            self.chosen = self.portfolio.within(allowed) if names else None

    def deciding_again(self) -> Way | None:
        """The same cut where decisions run again, None where there are none."""
        step = self.step.deciding_again()
        return step and Way(self.source, self.names, *self._options, step=step)

    def limit_of(self, chosen: Chosen) -> int:
        """The lowest limit, over what lives throughout, that a choice is taken for."""
        return -(-chosen.peak * (self._parts + 1) // self._parts)

    @property
    def price(self) -> float:
        """What the choice costs."""
        return math.inf if self.chosen is None else self.chosen.cost

    @property
    def called(self) -> list[str]:
        """The name of the block of each call."""
        names = {id(module): name for name, module in self.modules.items()}
        pairs = zip(self.step.owners, self.step.names, strict=True)
        return [names.get(id(owner), name) for owner, name in pairs]

    @property
    def theirs(self) -> str:
        """Which blocks run where others decide what is kept; empty where none does."""
        if not (hooked := len(self.modules) - len(self._free)):
            return ""
        return (
            f"{hooked} of {len(self.modules)} blocks run under saved-tensor hooks, such as torch's "
            "checkpoint has, which decide what is kept: they stay as they are. Turn that off "
            "(model.gradient_checkpointing_disable()) to have remat.fit choose."
        )

    @property
    def _checkpointing(self) -> set[str]:
        """Blocks that are told to have torch's checkpoint; layers of transformers leave it out where they are
        regions, as they are while a plan is made."""
        switches = {name: module.__dict__.get(_SWITCH) for name, module in self._free.items()}
        return {name for name, on in switches.items() if on is True}

    @property
    def _free(self) -> dict[str, torch.nn.Module]:
        """The blocks whose regions decide what they keep."""
        theirs = set(map(id, self.step.theirs))
        return {name: module for name, module in self.modules.items() if id(module) not in theirs}

    def notes(self) -> Iterator[str]:
        """What is to be said of the plan."""
        if self.step.ran:
            yield (
                "Two real steps were run, as the model needs data: hooks and other effects of its Python "
                "happened. Tensors, gradients, random streams and attributes of modules were put back. Steps "
                "that run other ops may have other peaks."
            )
        if self.again:
            yield (
                "The blocks run their decisions again (keep_decisions=False), such as the routes of experts: "
                "no plan that keeps these fits. Kernels that give other bits in a second run may decide "
                "otherwise."
            )
        if told := self.theirs:
            yield told
        if on := len(self._checkpointing):
            yield (
                f"{on} of {len(self.modules)} blocks have gradient_checkpointing on, which regions take the "
                "place of: they are regions even where all is kept."
            )
        if idle := len(self._free) - len(set(self.called) & set(self.modules)):
            yield (
                f"{idle} of {len(self._free)} blocks did not run in this step: the plan is of the one path "
                "that was drawn (layer drop). They get what a block of their class has that keeps least. A "
                "step in which more of them run has a higher peak."
            )
        elif any(self.source.drew):
            yield "The model draws numbers of Python's random: the plan is of the one path that was drawn."

    def settled(self) -> dict[str, Policy | None]:
        """Carry the choice out: the policies of the blocks, by their names."""
        assert self.chosen is not None
        made = _policies(self.portfolio, self.chosen)
        found: dict[str, Policy | None] = {}
        for name, module in self._free.items():
            if module in made or self.chosen is self.plain:
                found[name] = made.get(module)
            else:
                found[name] = self._of_its_class(module, made, self.chosen)
            if found[name] is None and name in self._checkpointing:
                found[name] = save_everything
        for name, module in self._free.items():
            settings = nn.settings_of(module) or {}
            nn.remove_from(module)
            if (policy := found[name]) is not None:
                if self.again or "keep_decisions" in settings:
                    settings["keep_decisions"] = not self.again
                nn.apply_to(module, **{**settings, "policy": policy})
        return found

    def _of_its_class(
        self, module: torch.nn.Module, made: dict[Any, Policy | None], chosen: Chosen
    ) -> Policy | None:
        """The leanest policy of a class of blocks, for one that did not run."""
        owners = self.step.owners
        calls = [at for at, owner in enumerate(owners) if type(owner) is type(module)]
        if not calls:
            return save_nothing
        return made[owners[min(calls, key=lambda at: chosen.choices[at].kept)]]


def _uncompiled() -> Any:
    """Compiled modules run as they are written: a plan is of ops."""
    return torch.compiler.set_stance("force_eager")


def as_region(module: torch.nn.Module) -> None:
    """Make a block a region that is met and planned."""
    nn.apply_to(module, policy=BudgetPolicy(1.0))


@contextmanager
def _regions(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Blocks as regions that can be met; what was there before comes back."""
    before = [(module, nn.settings_of(module)) for module in modules]
    try:
        for module in modules:
            as_region(module)
        yield
    finally:
        for module, settings in before:
            nn.remove_from(module)
            if settings is not None:
                nn.apply_to(module, **settings)


def _policies(portfolio: Portfolio, chosen: Chosen) -> dict[Any, Policy | None]:
    """The policy of each block that ran. One that ran other ops in other calls has a plan for each."""
    step = portfolio.step
    calls: dict[Any, dict[Any, tuple[Graph, Choice, str]]] = {}
    for name, graph, owner, choice in zip(step.names, step.graphs, step.owners, chosen.choices, strict=True):
        calls.setdefault(owner, {})[graph.names, graph.joint.sizes] = graph, choice, name
    made: dict[Any, Policy | None] = {}
    found: dict[Any, Policy | None] = {}
    for owner, several in calls.items():
        key = tuple([(id(graph), choice) for graph, choice, _ in several.values()])
        if key not in made:
            made[key] = _policy(portfolio, list(several.values()))
        found[owner] = made[key]
    return found


def _policy(portfolio: Portfolio, calls: list[tuple[Graph, Choice, str]]) -> Policy | None:
    """What carries out the choices for the calls of one block."""
    ways = [portfolio.carrier(*call) for call in calls]
    first = ways[0]
    if not isinstance(first, Plan) and all(way is first for way in ways):
        return first
    plans = [
        way if isinstance(way, Plan) else portfolio.planned(*call)
        for way, call in zip(ways, calls, strict=True)
    ]
    share = min(min(1.0, plan.kept_bytes / max(plan.default_bytes, 1)) for plan in plans)
    pairs = zip(plans, calls, strict=True)
    made = tuple([Made(plan, graph.joint.sizes) for plan, (graph, _, _) in pairs])
    return Fitted(share, portfolio.model, made=made)


def ready_policies(policies: Mapping[str, Policy] | Sequence[Policy]) -> dict[str, Policy]:
    """The ready policies, and the user's, by name."""
    if isinstance(policies, Mapping):
        return {**BUILT_IN_POLICIES, **{name: policy_given(policy) for name, policy in policies.items()}}
    return {
        **BUILT_IN_POLICIES,
        **{name_of(policy): policy for policy in several_given("remat.fit", policies)},
    }


def name_of(policy: Policy) -> str:
    """A policy as reports name it."""
    if isinstance(policy, Fitted) and policy.made:
        plans = [made.plan for made in policy.made]
        return f"a plan, {' and '.join(f'{len(p.saved)} of {len(p.ops)}' for p in plans)} ops kept"
    return next((name for name, ready in BUILT_IN_POLICIES.items() if ready is policy), repr(policy))


def _check_differentiated(model: torch.nn.Module, step: WholeStep) -> None:
    if step.outside.differentiated or any(graph.joint.differentiated for graph in step.graphs):
        return
    raise RematError(
        f"Nothing in this step of {type(model).__name__} has a gradient: no parameter and no argument "
        "requires one, or gradients are off. Write model.requires_grad_() or x.requires_grad_(), outside of "
        "torch.inference_mode()."
    )


def _check_loss(found: Any, out: Any) -> None:
    if not any(map(_has_gradient, tree_leaves(found))) and any(map(_has_gradient, tree_leaves(out))):
        kind = "a tensor without a gradient" if isinstance(found, torch.Tensor) else type(found).__name__
        raise RematError(
            f"remat.fit: loss gave {kind}, so nothing in the step would be differentiated. Let it return a "
            "tensor that is computed from the model's result, such as lambda out: out.square().mean()."
        )


_MEASURE = (
    "Write remat.fit(..., measure=True): two real steps are run, and planned from what they did; parameters, "
    "buffers, gradients, random streams and attributes of modules are put back. Or name blocks that run on "
    "shapes alone (layers=...), or give custom ops a fake kernel (torch.library.register_fake)."
)


def _first(error: Exception) -> str:
    """What does not run on fakes, without the advice for regions."""
    return str(error).partition(" A plan needs shapes only.")[0]


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
