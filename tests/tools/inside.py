"""What tests of reports and of the command line read of the inside, behind one door."""

from remat._core import format_bytes  # bytes as reports write them
from remat._core.units import parse_bytes  # amounts of bytes
from remat._inspect.report.each import BUILT_IN  # policies that a frontier tries
from remat._inspect.report.timeline import CATEGORIES  # kinds of live bytes
from remat._inspect.report.watch import KINDS, kind  # classes of ops
from remat.cli import (  # the command line, in this process
    checked,
    main,
    rows as cli_rows,  # functions that a sweep runs, exchanged
)
from remat.cli.bench import Result  # a row of a sweep
from remat.cli.commands.env import Env, machine  # what a machine can do
from remat.cli.commands.report import progress  # progress, on a pipe
from remat.cli.errors import UsageError  # mistakes on the command line
from remat.cli.main import COMMANDS, command_of  # the command line, in this process
from remat.cli.measure import Work, trace_memory  # what a sweep measures
from remat.cli.models import Sizes, batches, build  # models of a sweep
from remat.cli.rows import parse, rows  # policies of a line
from remat.cli.steps import difference, make_step, tensors, unmarked  # steps of a sweep
from remat.plan.budget import check_budget, check_peak  # budgets and peaks as text
from remat.transforms.compiled import lowering  # fences, switched off
