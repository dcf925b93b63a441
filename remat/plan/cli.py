"""`python -m remat plan MODULE:FN --budget ...`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from remat.plan.pareto import pareto
from remat.plan.policy import BudgetPolicy
from remat.transforms._errors import RematError


def main_plan(argv: Sequence[str] | None = None) -> int:
    """Plan a function from the command line; returns the exit code (2 for what cannot be understood)."""
    options = _parser().parse_args(argv)
    try:
        fn, args = load(options.target, options.input, options.dtype)
        if options.budget is not None:
            plan = BudgetPolicy(_budget(options.budget), options.cost, options.device).plan(fn, *args)
            print(plan)
            if options.json:
                options.json.write_text(plan.to_json())
            return 0
        frontier = pareto(fn, *args, cost=options.cost, device=options.device, points=options.points)
        print(frontier)
        if options.csv:
            frontier.to_csv(options.csv)
        if options.png:
            frontier.plot(options.png)
        return 0
    except RematError as error:
        print(f"remat plan: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="remat plan",
        description="Plan what a function keeps for its backward. Without --budget: the whole frontier.",
    )
    parser.add_argument(
        "target",
        help="MODULE:FN, FN a function or module of tensors, or one of no arguments that returns (fn, *args)",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="a tensor argument, as 4x128x256; once for each",
    )
    parser.add_argument("--dtype", default="float32", help="of the inputs (default float32)")
    parser.add_argument("--budget", help='0.4 (a share), 2GiB or 1000000 (bytes), or "free"')
    parser.add_argument("--cost", default="roofline", choices=["flops", "roofline", "measured"])
    parser.add_argument("--device", help="what the cost model is of, such as h100 or cpu")
    parser.add_argument("--points", type=int, default=10, help="budgets on the frontier (default 10)")
    parser.add_argument("--json", type=Path, help="write the plan there")
    parser.add_argument("--csv", type=Path, help="write the frontier there")
    parser.add_argument("--png", type=Path, help="draw the frontier there")
    return parser


def _budget(text: str) -> float | int | str:
    """A number with a point is a share, one without is bytes."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return text


def load(
    target: str, shapes: Sequence[str], dtype: str = "float32"
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that `MODULE:FN` names, and its arguments.

    Raises:
        RematError: there is no such module, function, or shape.
    """
    module, _, name = target.partition(":")
    if not name:
        raise RematError(f"{target!r} names no function: write MODULE:FN, as in mypackage.model:block.")
    sys.path.insert(0, "")
    try:
        fn: Any = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
    except (ImportError, AttributeError) as error:
        raise RematError(f"{target!r} cannot be loaded: {error}.") from error
    finally:
        sys.path.remove("")
    if shapes:
        return fn, tuple(_tensor(shape, dtype) for shape in shapes)
    required = [
        p
        for p in inspect.signature(fn).parameters.values()
        if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if required or isinstance(fn, torch.nn.Module):
        raise RematError(
            f"{target} takes arguments: give each as --input 4x128x256, or name a function of none "
            "that returns (fn, *args)."
        )
    fn, *args = fn()
    return fn, tuple(args)


def _tensor(shape: str, dtype: str) -> torch.Tensor:
    try:
        sizes = [int(size) for size in shape.lower().split("x")]
        kind = getattr(torch, dtype)
        return torch.empty(sizes, dtype=kind, device="meta", requires_grad=kind.is_floating_point)
    except (ValueError, AttributeError, RuntimeError) as error:
        raise RematError(
            f"--input {shape} --dtype {dtype} is no tensor: {error}. Write sizes as 4x128x256."
        ) from error
