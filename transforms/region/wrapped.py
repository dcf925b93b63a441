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
from typing import Any

import torch

from remat.transforms.compat import meeting_among, wrapped_in
from remat.transforms.context import quiet
from remat.transforms.errors import RematError
from remat.transforms.pytree import flatten
from remat.transforms.region.agreement import first_difference, loosely, meeting_number

_SECONDS = 60
# Wrapped models, from the first forward of a region in them until they are compared.
unmet: list[WrappedModel] = []
_met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class WrappedModel:
    """What the regions inside a wrapped model keep.

    Attributes:
        module: what was wrapped, as a weak reference.
        ranks: those that reduce gradients together.
        said: by names of modules and regions, what was said of each.
    """

    def __init__(self, module: torch.nn.Module, ranks: list[int]) -> None:
        self.module, self.ranks = weakref.ref(module), ranks
        self.said: dict[str, set[tuple[str, ...]]] = {}

    def meet(self, *_: Any) -> None:
        """Compare with the other ranks, once.

        Raises:
            RematError: on every rank, where any two keep other values in a region that both have.
        """
        module = self.module()
        if self not in unmet or module is None:
            return
        unmet.remove(self)
        _met.add(module)
        meeting = meeting_among(self.ranks, _SECONDS)
        if meeting is None:
            return
        name, text = type(module).__name__, json.dumps([[k, sorted(v)] for k, v in sorted(self.said.items())])
        key = meeting_number(meeting, name)
        same = meeting.end(key, hashlib.sha256(text.encode()).hexdigest(), _SECONDS)
        if same is None:
            warnings.warn(
                f"Not all ranks of {self.ranks} came to the backward of a region in {name} within {_SECONDS} "
                "s, so they did not compare what they keep. Make the same modules regions on every rank.",
                stacklevel=2,
            )
        elif not same:
            self._differ({rank: dict(json.loads(said)) for rank, said in meeting.told(key, text, _SECONDS)})

    def _differ(self, told: dict[int, dict[str, list[list[str]]]]) -> None:
        for (one, here), (other, there) in itertools.combinations(sorted(told.items()), 2):
            # A name that several regions share on one of the ranks may be of other ones on the other.
            for name in (n for n, said in here.items() if n in there and len(said) == len(there[n]) == 1):
                if (found := first_difference(here[name][0], there[name][0], True)) is not None:
                    raise RematError(
                        f"region {name} keeps other values on other ranks: rank {one} has {found[0]}, rank "
                        f"{other} has {found[1]}. Their gradients would be the same, and not their memory. "
                        "Give every rank the same policy, one that does not ask for the rank."
                    )


def note(region: Any, recorder: Any, results: Any) -> None:
    """Note what a region keeps; its backward, if it is the first one in its model, compares."""
    found = wrapped_in(_met, quiet)
    if found is None:
        return
    module, name, ranks = found
    tensors = [leaf for leaf in flatten(results)[0] if isinstance(leaf, torch.Tensor)]
    node: Any = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
    if node is None:
        return
    unmet[:] = [model for model in unmet if model.module() is not None]
    model = next((model for model in unmet if model.module() is module), None)
    if model is None:
        unmet.append(model := WrappedModel(module, ranks))
    said = tuple(loosely(recorder, recorder.tape))
    model.said.setdefault(f"{region.name!r} of {name or 'the model'}", set()).add(said)
    node.register_prehook(model.meet)
