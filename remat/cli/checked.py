"""Options that name a device or a file, checked before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from remat.cli.errors import UsageError

_WRITE = "Write --device cpu, cuda, cuda:1 or mps."


def device_of(text: str) -> torch.device:
    """The device that `--device` names.

    Raises:
        UsageError: there is no such device on this machine.

    Example:
        >>> from remat.cli.checked import device_of
        >>> device_of("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"--device {text!r} is no device. {_WRITE}") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            have = f"{count} CUDA devices" if count else "no CUDA device"
            raise UsageError(f"--device {text}: this machine has {have}. {_other(count)}")
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise UsageError(f"--device {text}: this machine has no MPS device. {_other(0)}")
    elif device.type != "cpu":
        raise UsageError(f"--device {text}: nothing can run there. {_WRITE}")
    return device


def _other(count: int) -> str:
    return f"Write --device cuda:{count - 1}, or cpu." if count else "Write --device cpu."


def writable(option: str, path: Path | None) -> None:
    """Raise where a file cannot be written, before the work for it is done."""
    if path is None:
        return
    parent = path.parent
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: write the name of a file in it.")
    if not parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {parent}. Make it first: mkdir -p {parent}")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written: name a file in a folder of your own.")


def writable_folder(option: str, path: Path) -> None:
    """Make the folder, or raise."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be made: {error.strerror}. Name a folder of your own."
        ) from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written to: name a folder of your own.")
