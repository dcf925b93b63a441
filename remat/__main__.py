"""`python -m remat`."""

from remat.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
