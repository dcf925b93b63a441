"""Saved-tensor hooks of regions, which torch.func refuses: they stand back for its transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from remat.transforms.compat import pop_hooks, push_hooks, refusing_hooks, replace_refusal, top_hooks
from remat.transforms.eager.saved import Hooks, belongs_to_region


@contextlib.contextmanager
def _hooks_aside(message: str) -> Iterator[None]:
    """A transform of torch.func begins, which refuses saved-tensor hooks: those of regions are off meanwhile.

    Autograd holds what it saves there. Later calls of these regions take the primitive, which knows levels.
    """
    taken = []
    while (pair := top_hooks()) is not None and belongs_to_region(pair[0]):
        pop_hooks()
        taken.append(pair)
        pair[0].__self__.inputs.region.cache.uses_func = True  # type: ignore[attr-defined]
    try:
        with refusing_hooks(message):
            yield
    finally:
        for pair in reversed(taken):
            push_hooks(*pair)


def hook(pair: Hooks) -> None:
    """Push the hooks of a region, which stand back for transforms of torch.func."""
    replace_refusal(_hooks_aside)
    push_hooks(*pair)


def unhook(around: Hooks | None) -> None:
    """Pop them; `around`: the hooks around the region."""
    pop_hooks()
    if around is None or not belongs_to_region(around[0]):
        replace_refusal(None)
