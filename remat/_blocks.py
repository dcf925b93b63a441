"""Which modules of a model are its blocks: those that a description means, and those that nobody described.

`remat.apply`, `remat.fit` and `Layout` find blocks here, by one language of patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from remat._core import described, fits, starred
from remat.transforms import RematError

Layers = (
    str | Iterable[Any] | type | tuple[type, ...] | torch.nn.Module | Callable[[str, torch.nn.Module], bool]
)

# One module may be reached by several paths; so many of them are known.
_PATHS = 8
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
_SHOWN = 8


class LayerError(RematError, ValueError):
    """A description of layers that fits no module of the model.

    It is a `RematError` and a `ValueError`.

    Example:
        >>> import torch
        >>> from remat import nn
        >>> try:
        ...     nn.apply(torch.nn.Sequential(torch.nn.Linear(2, 2)), layers="*.h.*")
        ... except nn.LayerError as error:
        ...     print("lists of modules in it: '*'" in str(error))
        True
    """


class Asked:
    """A description as a test of modules; a generator is read once."""

    def __init__(self, layers: Layers, who: str) -> None:
        shown = repr(layers) if isinstance(layers, (str, type, tuple, list)) else described(layers)
        self.who = f"{who}(layers={shown})"
        self._rule: Callable[[str, torch.nn.Module], Any] | None = None
        self._modules: dict[int, torch.nn.Module] = {}
        self._others: list[str | type] = []
        if isinstance(layers, (str, type, torch.nn.Module)):
            self._add([layers])
        elif callable(layers):
            self._rule = layers
        elif isinstance(layers, Iterable):
            parts = list(layers)
            if len(parts) > _SHOWN or any(isinstance(part, torch.nn.Module) for part in parts):
                self.who = f"{who}(layers=[... {len(parts)} of them])"
            self._add(parts)
        else:
            raise self._wrong(layers)

    def _add(self, parts: Iterable[Any]) -> None:
        for part in parts:
            if isinstance(part, torch.nn.Module):
                # A list stands for what it holds.
                self._modules |= {id(module): module for _, module in _called({"": part})}
            elif isinstance(part, (str, type)):
                self._others.append(part)
            else:
                raise self._wrong(part)

    def _wrong(self, part: Any) -> LayerError:
        return LayerError(
            f"{self.who} got {described(part)}. Write a pattern for qualified names as "
            'layers="layers.*", a class of modules, a module, several of these, or a function of name and '
            "module."
        )

    def __call__(self, name: str, module: torch.nn.Module) -> bool:
        if id(module) in self._modules:
            return True
        if self._rule is not None:
            return bool(name) and bool(self._rule(name, module))
        return any(_fits(one, name, module) for one in self._others)

    def check_here(self, there: set[int], model: torch.nn.Module) -> None:
        """Raise where a module was given that the model has not."""
        for key, module in self._modules.items():
            if key not in there:
                kind = type(module).__name__
                raise LayerError(
                    f"{self.who} got a {kind} that is no part of the {type(model).__name__}. Write "
                    f"layers={kind}, its class, or take modules from model.named_modules()."
                )


def _fits(one: str | type, name: str, module: torch.nn.Module) -> bool:
    if isinstance(one, type):
        return isinstance(module, one)
    return fits(one, name)


def fitting(model: torch.nn.Module, layers: Layers, who: str = "remat.apply") -> list[str]:
    """Qualified names of the outermost submodules that `layers` means, each module once.

    Args:
        layers: a pattern (or several) for qualified names, in which `*` stands for anything. Or a class or
            classes, a module or modules, or a function of name and module.
        who: whose argument it is.

    Raises:
        LayerError: there are none, or one is a list that nobody calls. The message says what there is.
    """
    asked = Asked(layers, who)
    names: dict[int, str] = {}
    hit: dict[int, torch.nn.Module] = {}
    within: set[int] = set()
    for name, module, above in _walk(model):
        if id(module) in hit or asked(name, module):
            hit[id(module)] = module
            names.setdefault(id(module), name)
            if any(one in hit for one in above):
                within.add(id(module))
    asked.check_here({id(module) for _, module, _ in _walk(model)}, model)
    chosen = {names[key]: module for key, module in hit.items() if key not in within}
    if not chosen:
        raise LayerError(_no_layer(model, asked))
    if lists := [name for name, module in chosen.items() if not _is_called(module)]:
        raise LayerError(_only_a_list(model, lists, chosen[lists[0]], asked))
    return list(chosen)


def regions(model: torch.nn.Module) -> list[str]:
    """Qualified names of the submodules that are regions."""
    return [name for name, module in model.named_modules() if is_region(module)]


def is_region(module: torch.nn.Module) -> bool:
    """Whether a module's class is one that `remat.apply` made."""
    return hasattr(type(module), "_remat_class")


def _walk(
    module: torch.nn.Module, name: str = "", above: tuple[int, ...] = (), met: dict[int, int] | None = None
) -> Iterator[tuple[str, torch.nn.Module, tuple[int, ...]]]:
    """Modules with their names and those around them, by every path; parents come first."""
    met = {} if met is None else met
    met[id(module)] = met.get(id(module), 0) + 1
    yield name, module, above
    for part, child in module._modules.items():
        if child is not None and id(child) not in (*above, id(module)) and met.get(id(child), 0) < _PATHS:
            inner = f"{name}.{part}" if name else part
            yield from _walk(child, inner, (*above, id(module)), met)


def _is_called(module: torch.nn.Module) -> bool:
    """Whether a module has a forward: lists only hold others, and are never called."""
    return type(module).forward is not torch.nn.Module.forward


# -- blocks that nobody described ------------------------------------------------------------------------


def listed(model: torch.nn.Module) -> Iterator[list[str]]:
    """Ways to cut a model into blocks, the likeliest first; each is a list of qualified names.

    Regions that are there already are the only way. Else blocks are what a list of modules of one class
    holds, the outermost such lists first, then the lists inside of their blocks. A list of lists, such as
    pairs of attention and feed-forward, is looked into, and so are the parts of a list of several classes.

    Example:
        >>> import torch
        >>> from remat._blocks import listed
        >>> list(listed(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), 2)))
        [['layers.0', 'layers.1']]
    """
    if there := regions(model):
        yield there
        return
    before: list[str] = []
    names = _unique(model, [name for name, _ in _outermost_lists(model, "")])
    while names and names != before:
        yield names
        before, names = names, _unique(model, [inner for name in names for inner in _inside(model, name)])


def no_blocks(model: torch.nn.Module) -> LayerError:
    """What is said of a model in which no blocks are found."""
    counts: dict[type, int] = {}
    for name, module in model.named_modules():
        if name:
            counts[type(module)] = counts.get(type(module), 0) + 1
    several = [f"{kind.__name__} ({n})" for kind, n in counts.items() if n > 1]
    has = f"it has several {', '.join(several[:_SHOWN])}" if several else "it has no class of modules twice"
    return LayerError(
        f"remat.fit found no blocks in {type(model).__name__}: a block is a module with other modules "
        f"inside, or several matrices, of a class that there are several of; {has}. Write "
        'layers=BlockClass, or a pattern as layers="*.stages.*".'
    )


def _unique(model: torch.nn.Module, names: list[str]) -> list[str]:
    """The names without those of modules that another one names."""
    return list({id(model.get_submodule(name)): name for name in reversed(names)}.values())[::-1]


def _inside(model: torch.nn.Module, name: str) -> list[str]:
    """The blocks inside of a block; itself where there are none."""
    block = model.get_submodule(name)
    return [inner for inner, _ in _outermost_lists(block, f"{name}.")] or [name]


def _outermost_lists(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for children in _groups(module):
        named = {f"{prefix}{name}": child for name, child in children}
        parts = dict(_called(named))
        if any(map(_is_called, named.values())):
            blocks = parts if all(map(_is_block, parts.values())) else {}
        else:
            # What stands beside blocks in a list, such as norms, is no block.
            blocks = {part: block for part, block in parts.items() if _is_block(block)}
        if len(children) > 1 and len(blocks) > 1:
            yield from blocks.items()
        else:
            for name, child in named.items():
                yield from _outermost_lists(child, f"{name}.")


def _groups(module: torch.nn.Module) -> list[list[tuple[str, torch.nn.Module]]]:
    """The children of a module; of a list those that may be blocks apart from what stands between them."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if not isinstance(module, _CONTAINERS):
        return [[one] for one in children]
    by_class: dict[type, list[tuple[str, torch.nn.Module]]] = {}
    for name, child in children:
        by_class.setdefault(type(child), []).append((name, child))
    return list(by_class.values())


def _called(named: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that are called: lists stand for what they hold."""
    for name, module in named.items():
        if _is_called(module):
            yield name, module
        else:
            inner = {f"{name}.{part}": child for part, child in module._modules.items() if child is not None}
            yield from _called(inner)


def _is_block(module: torch.nn.Module) -> bool:
    """Whether a module is of several modules, with parameters, or has several matrices, as an LSTM does."""
    own = sum(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    return own > 1 or (any(True for _ in module.parameters()) and any(True for _ in module.children()))


def largest_class(model: torch.nn.Module) -> list[str]:
    """The modules of the class that has most parameters and of which there are several, none in another."""
    by_class: dict[type, dict[int, str]] = {}
    for name, module in model.named_modules():
        if name and _is_called(module) and _is_block(module):
            by_class.setdefault(type(module), {})[id(module)] = name
    found: list[str] = []
    most = 0
    for members in by_class.values():
        names = [n for n in members.values() if not any(n.startswith(f"{o}.") for o in members.values())]
        held = {id(p): p.numel() for name in names for p in model.get_submodule(name).parameters()}
        if len(names) > 1 and sum(held.values()) > most:
            found, most = names, sum(held.values())
    return found


# -- what is said where nothing fits ---------------------------------------------------------------------


def _patterns(model: torch.nn.Module, lists: Iterable[str]) -> list[str]:
    """Patterns for what lists hold that is called."""
    found: dict[str, None] = {}
    for name in lists:
        for part, child in model.get_submodule(name)._modules.items():
            inner = f"{name}.{part}" if name else part
            if child is not None and _is_called(child):
                found[f"{starred(name)}.*" if name else "*"] = None
            elif child is not None:
                found |= dict.fromkeys(_patterns(model, [inner]))
    return list(found)


def _as_layers(model: torch.nn.Module, patterns: list[str]) -> Any:
    """Patterns as one argument, or the classes that they mean where a pattern would hit a list as well."""
    whole: Any = patterns[0] if len(patterns) == 1 else patterns
    walk = list(_walk(model))
    if not any(_fits(p, name, m) and not _is_called(m) for p in patterns for name, m, _ in walk):
        return repr(whole)
    hit = (m for p in patterns for n, m, _ in walk if _fits(p, n, m))
    kinds = {type(m).__name__: None for m in hit if _is_called(m) and _is_block(m)}
    return f"({', '.join(kinds)})" if len(kinds) > 1 else next(iter(kinds), repr(whole))


def _only_a_list(model: torch.nn.Module, names: list[str], module: torch.nn.Module, asked: Asked) -> str:
    patterns = _patterns(model, names)
    advice = (
        f"Write layers={_as_layers(model, patterns)} for what is in it." if patterns else "Nothing is in it."
    )
    return (
        f"{asked.who} hits {names[0] or 'the model itself'}, a {type(module).__name__}, which nobody calls: "
        f"a region of it would do nothing. {advice}"
    )


def _no_layer(model: torch.nn.Module, asked: Asked) -> str:
    lists = [name for name, module, _ in _walk(model) if isinstance(module, _CONTAINERS)]
    patterns = _patterns(model, lists)
    hint = (
        f"lists of modules in it: {', '.join(map(repr, patterns[:_SHOWN]))}"
        if patterns
        else "it has no list of modules"
    )
    return (
        f"{asked.who}: no submodule of {type(model).__name__} fits; {hint}. Write a "
        "pattern for qualified names, a class of modules, or a function of name and module."
    )
