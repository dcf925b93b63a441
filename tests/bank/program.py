"""What a program of the bank is: a function of a model, which has what it reads, and of two tensors."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.bank import library

Fn = Callable[[Any, Tensor, Tensor], Tensor]
BANK: dict[str, Program] = {}


@dataclass(frozen=True)
class Program:
    """Five to eight lines, and what is known of them.

    Attributes:
        kind: where torch can run it without remat, and how often it is drawn (`tests.fuzz.program`).
        tags: what it does; the ways are crossed with them.
        shape: of a row of its two tensors.
        found: ways, each with a policy, in which it always runs: a fault was found so, or no other comes by.
        graphs: policies under which it is compiled on every change.
    """

    name: str
    fn: Fn
    source: str
    kind: str
    tags: frozenset[str]
    shape: tuple[int, ...]
    found: tuple[tuple[str, str], ...]
    graphs: tuple[str, ...]

    @functools.cached_property
    def features(self) -> list[str]:
        """What its model has."""
        return [name for name in library.FEATURES if re.search(rf"\bm\.{name}\b", self.source)]

    @property
    def flags(self) -> list[str]:
        """Flags of its model that it reads: they are turned between calls."""
        return sorted(set(re.findall(r"\bm\.(on\d)\b", self.source)))

    def steps(self, way: str, layout: str = "contiguous", **around: Any) -> list[dict[str, Any]]:
        """Three calls in this way, of which the second has other inputs by its layout and by the flags."""
        step = {"how": way} | around
        turned = step | {"flip": self.flags}
        return [step, turned | {"layout": layout}, turned]

    def statement(self) -> str:
        """Its lines as a statement that makes {o} of {a} and {b}; names that begin with {t} are its own."""
        (function,) = ast.parse(self.source).body
        assert isinstance(function, ast.FunctionDef)
        own = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {arg.arg for n in ast.walk(function) if isinstance(n, ast.Lambda) for arg in n.args.args}
        names = {name: f"t__{name}" for name in own} | {"m": "self", "x": "a__", "y": "b__"}
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                node.id = names.get(node.id, node.id)
            elif isinstance(node, ast.arg):
                node.arg = names.get(node.arg, node.arg)
        *lines, last = [n for n in function.body if not isinstance(n, ast.Expr) or n.value is not None]
        assert isinstance(last, ast.Return) and last.value is not None
        made = [*map(ast.unparse, lines), f"o__ = {ast.unparse(last.value)}"]
        return re.sub(r"\b([abot])__", r"{\1}", "\n".join(made))


def program(
    kind: str,
    tags: str = "",
    *,
    shape: tuple[int, ...] = (4,),
    found: str = "",
    graphs: str = "",
    source: str = "",
) -> Callable[[Fn], Fn]:
    """Put a function into the bank; `found`: ways with a policy each, as "grad/ops hessian/nothing"."""

    def put(fn: Fn) -> Fn:
        name, text = fn.__name__, source or textwrap.dedent(inspect.getsource(fn))
        assert name not in BANK, f"two programs are called {name}"
        pairs = tuple((way, policy) for way, _, policy in (one.partition("/") for one in found.split()))
        marks = frozenset(tags.split())
        BANK[name] = Program(name, fn, text, kind, marks, shape, pairs, tuple(graphs.split()))
        return fn

    return put


def expressions(kind: str, tags: str = "", shape: tuple[int, ...] = (4,), /, **results: str) -> None:
    """Programs of one expression each, by their names; they read what `library` has."""
    for name, result in results.items():
        source = f"def {name}(m, x, y):\n    return {result}\n"
        space = dict(vars(library))
        exec(compile(source, f"<bank {name}>", "exec"), space)
        program(kind, tags, shape=shape, source=source)(space[name])


class Model(library.Base):
    """A program as a model; `forward` calls it as a region where regions are on."""

    def __init__(self, program: Program, policy: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.program, self.policy = program, policy
        space: dict[str, Any] = {name: getattr(library, name) for name in library.__all__}
        for feature in program.features:
            exec(library.FEATURES[feature], space | {"self": self, "DTYPE": dtype})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fn = self.program.fn
        return library.R(lambda x, y: fn(self, x, y), self.policy)(x, y)


@dataclass(frozen=True)
class Subject:
    """What the checker runs: `build` makes the model anew, `text` is the source that it was made from."""

    build: Callable[[], library.Base]
    text: str
    shape: tuple[int, ...] = (4,)
    tolerance: float = 0.0  # 0 for that of the dtype


def subject(program: Program, policy: str) -> Subject:
    """The program as a region under this policy."""
    text = re.sub(r"\bm\.", "self.", program.source) + f'# R(, "{policy}")'
    # Gradients of a weight that is cast for two passes add up in bfloat16, or in the weight's own precision.
    tolerance = 2e-2 if "bfloat16" in text else 0.0
    return Subject(lambda: Model(program, policy), text, program.shape, tolerance)
