"""The command line: `python -m remat`, also installed as the script `remat`."""

from remat.cli.main import main  # runs one command
