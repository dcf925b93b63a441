"""Which modules of a model are its blocks: those that it has many of, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from remat.nn import LayerError, regions


def blocks_of(model: torch.nn.Module) -> list[str]:
    """Qualified names of a model's blocks.

    Blocks are what a list of modules of one class holds, where they have parameters: the outermost such
    lists. A list of lists is looked into, and so are the parts of a list of several classes. Regions that
    are there already are the blocks.

    Raises:
        LayerError: there are none; the message lists the classes that the model has several of.

    Example:
        >>> import torch
        >>> from remat._fit import blocks_of
        >>> blocks_of(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), 2))
        ['layers.0', 'layers.1']
    """
    found = regions(model) or list(_found(model, ""))
    if not found:
        raise LayerError(_none(model))
    return found


def _found(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    listed = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    children = list(module.named_children())
    if listed and _alike([child for _, child in children]):
        yield from (f"{prefix}{name}" for name, _ in children)
        return
    for name, child in children:
        yield from _found(child, f"{prefix}{name}.")


def _alike(modules: list[torch.nn.Module]) -> bool:
    """Whether these are the blocks of a model: several of one class, each of several modules."""
    kinds = {type(module) for module in modules}
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    if len(modules) < 2 or len(kinds) > 1 or issubclass(next(iter(kinds)), lists):
        return False
    return all(any(True for _ in m.parameters()) and any(True for _ in m.children()) for m in modules)


def _none(model: torch.nn.Module) -> str:
    counts: dict[type, int] = {}
    for module in itertools.islice(model.modules(), 1, None):
        counts[type(module)] = counts.get(type(module), 0) + 1
    several = [f"{kind.__name__} ({n})" for kind, n in counts.items() if n > 1]
    has = f"it has several {', '.join(several[:8])}" if several else "it has no class of modules twice"
    return (
        f"remat.fit found no blocks in {type(model).__name__}: no list holds several modules of one class, "
        f'with modules inside; {has}. Write layers=BlockClass, or a pattern as layers="*.stages.*".'
    )
