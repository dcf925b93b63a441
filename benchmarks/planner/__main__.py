"""`python -m benchmarks.planner`."""

from benchmarks.planner.gaps import main

if __name__ == "__main__":
    main()
