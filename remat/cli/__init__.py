"""The command line: `python -m remat`, also installed as the script `remat`."""

from remat.cli.main import main

__all__ = [
    "main",  # runs one command
]
