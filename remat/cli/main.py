"""Picks a command and hands it the rest of the line."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import gc
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from remat._core import first_line, to_install
from remat.cli.errors import UsageError
from remat.transforms import RematError, is_user_frame

# Name -> (attribute of the module of that name in `remat.cli.commands`, one line). The attribute is a
# dataclass for tyro: its call returns the exit code or raises a UsageError or RematError. Only the module
# named is imported.
COMMANDS = {
    "sweep": ("Sweep", "train a transformer under each policy: what it saves and costs"),
    "explain": ("Explain", "what a function keeps and recomputes, what that costs, and what defeats it"),
    "gpu": ("Gpu", "compile a step for a GPU that need not be there: peak and roofline time"),
    "plan": ("Plan", "the best a function can keep within a budget, or at every budget"),
    "init": ("Init", "write a script that trains a Hugging Face model with recomputation"),
    "run": ("Run", "run a trainer's program (TRL, Axolotl, ...) with regions in its model"),
    "schedule": ("Draw", "draw which carries a scan keeps"),
    "env": ("Env", "what this machine can do"),
}
# For the version before: what to write, and whether a line has it already.
OLDER = {"compare": ("--policy", "all"), "doctor": ("--check",)}
COMPLETES = "completion of the shell: remat --tyro-print-completion bash, or zsh"
COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (2 for a line that cannot be understood)."""
    # An ending process looks for garbage several times, for a second in all where transformers is loaded.
    atexit.register(gc.freeze)
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"remat {sys.modules['remat'].__version__}, torch {torch.__version__}")
        return 0
    if args[0] in COMPLETION:
        return completion(args)
    if args[0] in OLDER:
        more = OLDER[args[0]]
        more = () if more[0] in args else more
        print(
            f"remat {args[0]} is deprecated: write remat explain {' '.join(OLDER[args[0]])}.", file=sys.stderr
        )
        args = ["explain", *args[1:], *more]
    if args[0] not in COMMANDS:
        print(unknown(args[0]), file=sys.stderr)
        return 2
    return run(args[0], args[1:])


def run(name: str, args: list[str]) -> Any:
    """Run the command with the rest of the line; returns its exit code."""
    target = command_of(name)
    if target is None:
        return 2
    import tyro

    # What follows a program's name belongs to the program.
    args, program = target.split(args) if hasattr(target, "split") else (args, ())
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command: Any = tyro.cli(target, prog=f"remat {name}", args=args)
    except SystemExit as left:
        if left.code:
            print(f"remat {name}: {in_one_line(said.getvalue())}", file=sys.stderr)
        raise
    if program:
        command.program = program
    try:
        done = command()
        print(end="", flush=True)
        return done
    except BrokenPipeError:
        # Whoever reads has seen enough, such as `| head`; nothing is left to be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UsageError, RematError) as error:
        print(f"remat {name}: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        # An error of the user's function: where, and what. Whoever looks for one of ours asks for all of it.
        if os.environ.get("REMAT_TRACEBACK"):
            raise
        print(f"remat {name}: {told(error)}", file=sys.stderr)
        return 1


def command_of(name: str) -> Any:
    """The dataclass of a command; None, and a line on stderr, where a package is missing."""
    extras = ["cli"]
    try:
        importlib.import_module("tyro")
        extras.append("plan")
        return getattr(importlib.import_module(f"remat.cli.commands.{name}"), COMMANDS[name][0])
    except ImportError as missing:
        print(f"`remat {name}` needs {missing.name}: {to_install(*extras)}", file=sys.stderr)
        return None


def completion(args: list[str]) -> int:
    """Print the completion of all commands for a shell, or write it to a file."""
    commands = {name: command_of(name) for name in COMMANDS}
    if None in commands.values():
        return 2
    import tyro

    tyro.extras.subcommand_cli_from_dict(commands, prog="remat", args=args)
    return 0


def in_one_line(box: str) -> str:
    """What tyro says in a box, of lines or of plain characters, without the box."""
    inside = [line.strip(" |\u2502") for line in box.splitlines() if line[:1] not in "+\u256d\u2570"]
    sections = re.split(r"-{8,}|\u2500+", " ".join(inside))
    return ". ".join(" ".join(part.split()).rstrip(".") for part in sections if part.strip())


def told(error: Exception) -> str:
    """An error in one line, with the user's line that raised it."""
    at = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_user_frame(frame):
            code = frame.f_code
            at = f" at {os.path.basename(code.co_filename)}:{number} ({code.co_name})"
    return f"{type(error).__name__}{at}: {first_line(error)}. REMAT_TRACEBACK=1 shows the whole traceback."


def usage() -> str:
    """What `remat --help` prints."""
    lines = [f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m remat COMMAND [--help], or --version", "", *lines, "", COMPLETES])


def unknown(name: str) -> str:
    """One line about a command that there is not, with the nearest one."""
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(COMMANDS)}."
    return f"remat: there is no command {name!r}; {hint} remat --help tells what they do."
