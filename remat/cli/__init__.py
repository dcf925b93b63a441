"""The command line: `python -m remat`, also installed as the script `remat`."""
