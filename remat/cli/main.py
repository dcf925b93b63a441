"""Picks a command and hands it the rest of the line."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from remat.cli.errors import UsageError
from remat.transforms import RematError

# Name -> (module, attribute, one line). The attribute is for tyro: a dataclass, whose instance is called,
# or a function; either returns the exit code or raises a UsageError or RematError. Only the module named is
# imported.
COMMANDS = {
    "sweep": (
        "remat.cli.sweep",
        "Sweep",
        "train a transformer under each policy: what it saves and costs",
    ),
    "explain": (
        "remat.cli.explain",
        "Explain",
        "what a function keeps and recomputes, and what that costs; or several policies side by side",
    ),
    "plan": ("remat.cli.plan", "Plan", "the best a function can keep within a budget, or at every budget"),
    "schedule": ("remat.cli.schedule", "Draw", "draw which carries a scan keeps"),
    "env": ("remat.cli.env", "Env", "what this machine can do"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (2 for a line that cannot be understood)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] not in COMMANDS:
        print(unknown(args[0]), file=sys.stderr)
        return 2
    return run(args[0], args[1:])


def run(name: str, args: list[str]) -> Any:
    try:
        import tyro
    except ImportError as missing:
        print(f"`remat {name}` needs {missing.name}: pip install 'remat[cli]'", file=sys.stderr)
        return 2
    module, attribute, _ = COMMANDS[name]
    target: Any = getattr(importlib.import_module(module), attribute)
    command: Any = tyro.cli(target, prog=f"remat {name}", args=args)
    try:
        return command() if callable(command) else command
    except (UsageError, RematError) as error:
        print(f"remat {name}: {error}", file=sys.stderr)
        return 2


def usage() -> str:
    lines = [f"  {name:<10}{text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m remat COMMAND [--help]", "", *lines])


def unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"remat: there is no command {name!r}{hint}\n\n{usage()}"
