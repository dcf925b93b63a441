"""`python -m remat run PROGRAM ...`: a training program of somebody else's, with regions in its model."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import tyro

from remat import nn
from remat._core import to_install
from remat.cli.errors import UsageError
from remat.cli.rows import parse
from remat.interop import huggingface
from remat.policies import Policy


@dataclass
class Run:
    """Run a program that trains with transformers' Trainer, with the layers of its model as regions.

    For who has a configuration file only: Trainer's own programs, TRL's, Axolotl's. Every Trainer that the
    program makes gets a callback, which makes the regions before the model is wrapped or moved.
    The program is a module or a file.py, followed by its own arguments, as for `python`.
    """

    policy: str = "save_matmuls | save_attention"
    """What each layer keeps: a policy as in Python, budget=0.4, names=q,k, or MODULE:RULE."""
    layers: str = ""
    """A pattern of module names, such as *.layers.*; left out, the layers that transformers checkpoints."""
    program: Annotated[tuple[str, ...], tyro.conf.Suppress] = field(default=())

    @staticmethod
    def split(args: list[str]) -> tuple[list[str], tuple[str, ...]]:
        """The options, and the program with its arguments: what begins with the first word of its own."""
        at = 0
        while at < len(args) and args[at].startswith("-"):
            at += 1 if "=" in args[at] or args[at] in ("-h", "--help") else 2
        return args[:at], tuple(args[at:])

    def __call__(self) -> int:
        if not self.program:
            raise UsageError(
                "a program is missing. Write remat run --policy save_matmuls trl.scripts.sft ..."
            )
        try:
            from transformers import trainer, trainer_callback
        except ImportError as missing:
            needed = f"{to_install('hf')} accelerate"
            raise UsageError(f"remat run needs transformers' Trainer: {needed}. ({missing})") from missing
        policy, done = parse(self.policy), []
        layers, callbacks = self.layers, cast("list[Any]", trainer.DEFAULT_CALLBACKS)

        class RegionsCallback(trainer_callback.TrainerCallback):
            def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                done.append(make_regions(given["model"], layers, policy))
                # The trainer would put torch's checkpoint around or in the place of the regions.
                args.gradient_checkpointing = False
                print(f"remat: {done[-1]} under {policy}", file=sys.stderr)

        callbacks.append(RegionsCallback)
        try:
            run(self.program)
        finally:
            callbacks.remove(RegionsCallback)
        if not done:
            raise UsageError(f"{self.program[0]} made no transformers.Trainer, so there were no regions.")
        return 0


def make_regions(model: Any, layers: str, policy: Policy) -> str:
    """Make regions of a model's layers; what was made, in words."""
    name = type(model).__name__
    if not layers:
        huggingface.enable(model, policy)
        return f"{name}, where it checkpoints,"
    for turned_off in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):
        if hasattr(model, turned_off):
            getattr(model, turned_off)()
            break
    before = len(nn.regions(model))
    nn.apply(model, layers=layers, policy=policy)
    return f"{len(nn.regions(model)) - before} regions in {name}"


def run(program: tuple[str, ...]) -> None:
    """Run a module or a file as `python` does, with its arguments."""
    name, before = program[0], sys.argv
    sys.argv = [*program]
    try:
        if name.endswith(".py"):
            if not Path(name).is_file():
                raise UsageError(f"there is no file {name}. Write a file.py or a module, as for python.")
            sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
        else:
            if not exists(name):
                raise UsageError(f"there is no module {name}. Write a file.py or a module, as for python.")
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before


def exists(name: str) -> bool:
    """Whether there is a module of this name; its packages are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as missing:
        # A package of the name is missing, or one that such a package needs.
        if missing.name and f"{name}.".startswith(f"{missing.name}."):
            return False
        raise
