"""Looking at what a function keeps and recomputes: `explain`."""

from remat._inspect.report.compare import compare  # `explain` under several policies, deprecated
from remat._inspect.report.doctor import (
    Diagnosis,  # what `diagnose` found
    diagnose,  # run one step with its regions and without, and say what defeats them
)
from remat._inspect.report.each import BUILT_IN  # the policies that are compared unless others are given
from remat._inspect.report.explain import (
    Explanation,  # what `explain` found
    explain,  # what `fn(*args, **kwargs)` keeps for its backward, what it recomputes, and what that costs
)
from remat._inspect.report.measure import followed  # one forward and backward under a `Watch`
from remat._inspect.report.watch import Watch  # what ran, in which pass, and what lived meanwhile
