"""Looking at what a function keeps and recomputes: `explain`, `compare`."""

from remat.explanation._compare import Comparison as Comparison
from remat.explanation._compare import compare as compare
from remat.explanation._explain import Explanation as Explanation
from remat.explanation._explain import explain as explain
