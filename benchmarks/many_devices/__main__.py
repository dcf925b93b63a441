"""`python -m benchmarks.many_devices`."""

from benchmarks.many_devices.layouts import main

if __name__ == "__main__":
    main()
