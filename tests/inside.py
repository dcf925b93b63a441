"""What several tests read of the library's inside, behind one door: a restructure changes this file alone."""

from remat._core import parse_bytes  # "1.5 GiB" as a number
from remat._core.opinfo import describe  # what a policy is told of an op
from remat._inspect.report import diagnose  # the notes under a report
from remat.cli.main import main  # the command line, in this process
from remat.cli.measure import trace_memory  # a step's bytes, as the command line measures them
from remat.transforms.compat import is_fake  # whether a tensor has no data

__all__ = ["describe", "diagnose", "is_fake", "main", "parse_bytes", "trace_memory"]
