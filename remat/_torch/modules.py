"""Which modules run, read off the stack of Python's frames and off the nodes that Dynamo wrote.

Private names of torch: `_call_impl` and `_wrapped_call_impl`, which every call of a module runs, tell its
frame from others. No hook is put anywhere, so nothing costs anything where nobody asks. The first part was
tried on 2.11.0, 2.13.0 and 2.15.0, what reads Dynamo's nodes on 2.13.0 (CPU).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from remat.transforms.compat import storage_key, unwrapped

# Every call of a module runs these; while a compiler traces it only the first one has a frame.
CALLED, CALL = torch.nn.Module._wrapped_call_impl.__code__, torch.nn.Module._call_impl.__code__
_NODE = torch.fx.Interpreter.run_node.__code__


def running(code: Any) -> list[torch.nn.Module]:
    """The modules that run, the innermost one first."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


def module_path(inside: torch.nn.Module | None = None, read: Sequence[torch.Tensor] = ()) -> str:
    """The path of the module that runs, from the outermost one around it that holds it; "" for none.

    Args:
        inside: a module that is about to run.
        read: what an op reads. If that is a matrix of the module's own that is not called `weight`, as
            grouped experts have several, the path ends with its name.
    """
    modules, frame, below = [] if inside is None else [inside], sys._getframe(1), ""
    while frame is not None:
        if frame.f_code is CALLED and not isinstance(frame.f_locals["self"], torch.fx.GraphModule):
            modules.append(frame.f_locals["self"])
        elif (
            not below and frame.f_code is _NODE and (stack := frame.f_locals["n"].meta.get("nn_module_stack"))
        ):
            # What Dynamo traced runs node by node, and each knows where it comes from.
            modules, (here, below) = [], _path_in(stack)
            below = ".".join([below, *_matrix_in(frame.f_locals["n"], below)])
            if not here:
                return below
        frame = frame.f_back
    path = [below] if below else _matrix_of(modules[0], read) if modules and read else []
    for inner, outer in zip(modules, modules[1:], strict=False):
        # A view of a module, as `remat(module)` is one, has its very attributes.
        if vars(inner) is not vars(outer):
            if (name := _name_in(outer, inner)) is None:
                break
            path.append(name)
    return ".".join([part for part in reversed(path) if part != "_orig_mod"])


def _matrix_of(module: torch.nn.Module, read: Sequence[torch.Tensor]) -> list[str]:
    """The name of the matrix of a module's own that an op reads: by shape, which rows and casts of it have,
    too; of several by memory."""
    own = {n: unwrapped(p) for n, p in module._parameters.items() if p is not None and n != "weight"}
    for t in reversed(read) if own else ():  # of a product the right operand first
        sides = sorted(t.shape[-2:])
        names = [n for n, p in own.items() if p.dim() > 1 and sorted(p.shape[-2:]) == sides]
        if len(names) > 1:
            names = [n for n in names if storage_key(own[n]) == storage_key(t)]
        if len(names) == 1:
            return names
    return []


def _matrix_in(node: torch.fx.Node, path: str) -> list[str]:
    """The same of a node that Dynamo wrote in the module at this path: by the name it gave a parameter."""
    for read in node.args:
        while isinstance(read, torch.fx.Node) and read.args:
            read = next(iter(read.all_input_nodes), None)
        last = re.escape(path.rpartition(".")[2])
        own = re.search(rf"_{last}_parameters_(\w+?)_*$", getattr(read, "name", ""))
        if own is not None and own[1] != "weight":
            return [own[1]]
    return []


def _name_in(outer: torch.nn.Module, inner: torch.nn.Module) -> str | None:
    """The shortest name that a module has in another one, None for none."""
    level, met = [("", outer)], {id(outer)}
    for prefix, module in level:  # which grows meanwhile
        for name, child in module._modules.items():
            if child is not None and id(child) not in met:
                if vars(child) is vars(inner):
                    return prefix + name
                met.add(id(child))
                level.append((f"{prefix}{name}.", child))
    return None


def _path_in(stack: dict[str, tuple[str, Any]]) -> tuple[bool, str]:
    """The path that Dynamo noted with a node, and whether it begins at the module whose forward it traced;
    else at the outermost module of its graph."""
    # As paths: `L['self'].layers.0` for `getattr(L['self'].layers, '0')`.
    parts = re.compile(r", '([^']*)'\)|\._modules\['([^']*)'\]")
    names = [parts.sub(r".\1\2", source.replace("getattr(", "")) for source, _ in stack.values()]
    here = names[0].startswith("L['self']")
    return here, names[-1].removeprefix("L['self']" if here else names[0]).lstrip(".")


def paths_of(graph: torch.fx.GraphModule) -> Iterable[str]:
    """The paths of all modules that the nodes of a graph come from, as far as the graph knows them."""
    stacks = (node.meta.get("nn_module_stack") for node in graph.graph.nodes)
    return {_path_in(stack)[1]: None for stack in stacks if stack}
