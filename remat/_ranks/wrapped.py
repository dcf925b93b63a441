"""Whether ranks keep the same in regions inside of modules that FSDP or DistributedDataParallel has wrapped.

No collective depends on what such a region keeps, so no rank would wait for another; but ranks would take
other memory than was meant. They compare once for a wrapped model, in its first backward, where all must come
anyway: what they keep in the regions of modules that run on several of them. A rank may leave modules out.
One that has no region at all does not come: then the others go on, with a warning.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from remat._ranks.agreement import (
    COMPILING,
    agree,
    agree_traced,
    first_difference,
    loosely,
    meeting_number,
)
from remat._ranks.meeting import meeting_among
from remat._torch import accumulating, gathers, wrapped_in
from remat.transforms import RematError, flatten, node_of, split, untracked
from remat.transforms.compat import outside_all_modes

_SECONDS = 60
# What is not compared yet: wrapped models, and the first step. While there is any, every forward asks.
unmet: list[Any] = []
_met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class WrappedModel:
    """What the regions inside a wrapped model keep.

    Attributes:
        module: what was wrapped, as a weak reference.
        ranks: those that reduce gradients together.
        said: by names of modules and regions, what was said of each.
        hooks: those of parameters, where regions are compiled.
        seconds: how long to wait for the others, who may still be at work on compiled code.
    """

    def __init__(self, module: torch.nn.Module, ranks: list[int]) -> None:
        self.module, self.ranks = weakref.ref(module), ranks
        self.said: dict[str, set[tuple[str, ...]]] = {}
        self.hooks: list[Any] = []
        self.seconds = _SECONDS

    def meet(self, *_: Any) -> None:
        """Compare with the other ranks, once.

        Raises:
            RematError: on every rank, where any two keep other values in a region that both have.
        """
        module, seconds = self.module(), self.seconds
        if module is None:
            return
        try:
            unmet.remove(self)
        except ValueError:  # it has met, perhaps in another thread
            return
        _met.add(module)
        for hook in self.hooks:
            hook.remove()
        meeting = meeting_among(self.ranks, seconds)
        if meeting is None:
            return
        name, text = type(module).__name__, json.dumps([[k, sorted(v)] for k, v in sorted(self.said.items())])
        key = meeting_number(meeting, name)
        same = meeting.end(key, hashlib.sha256(text.encode()).hexdigest(), seconds)
        if same is None:
            warnings.warn(
                f"Not all ranks of {self.ranks} came to the backward of a region in {name} within {seconds} "
                "s, so they did not compare what they keep. Make the same modules regions on every rank.",
                stacklevel=2,
            )
        elif not same:
            self._differ({rank: dict(json.loads(said)) for rank, said in meeting.told(key, text, seconds)})

    def _differ(self, told: dict[int, dict[str, list[list[str]]]]) -> None:
        for (one, here), (other, there) in itertools.combinations(sorted(told.items()), 2):
            for name in (name for name in here if name in there):
                pair = _of_all(here[name]), _of_all(there[name])
                if _ops(pair[0]) != _ops(pair[1]):
                    # They took different ways: what becomes of an op may depend on those around it.
                    pair = pair[0][:1], pair[1][:1]
                if all(pair) and (found := first_difference(*pair, True)) is not None:
                    raise RematError(
                        f"region {name} keeps other values on other ranks: rank {one} has {found[0]}, rank "
                        f"{other} has {found[1]}. Their gradients would be the same, and not their memory. "
                        "Give every rank the same policy, one that does not ask for the rank."
                    )


def _of_all(said: list[list[str]]) -> list[str]:
    """What holds for all calls of a region; nothing where a name is shared by regions that are not alike."""
    policies = {lines[0] for lines in said}
    return said[0] if len(said) == 1 else list(policies) if len(policies) == 1 else []


def _ops(said: list[str]) -> list[str]:
    return [line.rpartition("] ")[0] for line in said[1:]]


class _FirstStep:
    """The forward in which regions with collectives ran first, until a backward comes to one of them.

    Another layer may share what is known of the first one, and have another policy on one rank alone: so in
    this time every call is compared. All ranks are there, since the region's collectives have just run.
    """

    def module(self) -> Any:
        return self

    def end(self, *_: Any) -> None:
        if self in unmet:
            unmet.remove(self)


def _run_again(frame: Any) -> frozenset[int] | None:
    """The ops that the backward runs again; None where the function does."""
    program = frame.program
    if program is None:
        return None
    if frame.residuals is not None:
        return frozenset()
    return frozenset([step.at for step in program.steps if step.call is not None])


def _node_of(results: Any) -> Any:
    nodes = [node_of(leaf) for leaf in split(flatten(results)[0])[0]]
    return next((node for node in nodes if node is not None), None)


def _note(region: Any, recorder: Any, results: Any) -> None:
    """Note what a region keeps; its backward, if it is the first one in its model, compares."""
    found = wrapped_in(_met, untracked)
    if found is not None and (node := _node_of(results)) is not None:
        node.register_prehook(_noted(region, recorder, *found).meet)


def _noted(region: Any, recorder: Any, module: torch.nn.Module, name: str, ranks: list[int]) -> WrappedModel:
    """The wrapped model around a region, with what is said of that."""
    unmet[:] = [model for model in unmet if model.module() is not None]
    model = next((model for model in unmet if model.module() is module), None)
    if model is None:
        unmet.append(model := WrappedModel(module, ranks))
    said = tuple(loosely(recorder, recorder.tape))
    model.said.setdefault(f"{region.name!r} of {name or 'the model'}", set()).add(said)
    return model


class ComparedRanks:
    """What regions call; `unmet` is what ranks have not compared yet."""

    unmet: list[Any] = unmet

    def compare(self, frame: Any, recorder: Any, results: Any) -> None:
        """Compare what a region keeps with the other ranks, where they are to keep the same.

        Args:
            frame: of its forward, settled.

        Raises:
            RematError: as `agree` does.
        """
        region = frame.region
        step = next((there for there in unmet if isinstance(there, _FirstStep)), None)
        known = region.key in region.cache.agreed
        try:
            if not agree(region, recorder, step is not None, _run_again(frame)):
                _note(region, recorder, results)
                return
        except BaseException:
            _ = step and step.end()
            raise
        if step is None and not known:
            unmet.append(step := _FirstStep())
        if step is not None and (node := _node_of(results)) is not None:
            node.register_prehook(step.end)

    def compare_pulled(self, region: Any, recorder: Any) -> Callable[[], None] | None:
        """The same for a region under torch.func: what its pull-back is to call, None for nothing.

        There wrappers reduce no gradients. FSDP gathers all the same, so all ranks come.
        """
        if agree(region, recorder):
            return None
        if (found := wrapped_in(_met, untracked)) is None or not gathers(found[0]):
            return None
        return _noted(region, recorder, *found).meet

    def compare_traced(self, region: Any, record: Any) -> None:
        """The same for a region that is traced. No Python of ours runs in its backward, so the first gradient
        of a parameter compares."""
        if agree_traced(region, record):
            return
        with outside_all_modes():
            if (found := wrapped_in(_met, untracked)) is None:
                return
            model = _noted(region, record, *found)
            model.seconds = COMPILING * _SECONDS
            if not model.hooks:
                model.hooks = [leaf.register_hook(model.meet) for leaf in accumulating(found[0])]


RANKS = ComparedRanks()
