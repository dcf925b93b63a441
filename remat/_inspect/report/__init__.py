"""Looking at what a function keeps and recomputes: `explain`, `compare`."""

from remat._inspect.report.compare import Comparison as Comparison
from remat._inspect.report.compare import compare as compare
from remat._inspect.report.explain import Explanation as Explanation
from remat._inspect.report.explain import explain as explain
