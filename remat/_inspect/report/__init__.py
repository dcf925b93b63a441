"""Looking at what a function keeps and recomputes: `explain`, `compare`."""

from remat._inspect.report.compare import (
    Comparison,  # a function under several policies
    compare,  # `fn(*args, **kwargs)` under each of several policies
)
from remat._inspect.report.doctor import (
    Diagnosis,  # what `diagnose` found
    diagnose,  # run one step with its regions and without, and say what defeats them
)
from remat._inspect.report.each import frontier_of  # a function under the policies of a page's slider
from remat._inspect.report.explain import (
    Explanation,  # what `explain` found
    explain,  # what `fn(*args, **kwargs)` keeps for its backward, what it recomputes, and what that costs
)
