"""Regions under functorch levels and in traced graphs: the function-valued primitive and its rules."""

from remat.transforms.functorch import nodes as _nodes  # noqa: F401  (adds the rule below all levels)
from remat.transforms.functorch import rules as _rules  # noqa: F401  (adds the rules of grad, vmap and jvp)
from remat.transforms.functorch.aliasing import Look as Look  # how a result lies in the memory of another
from remat.transforms.functorch.aliasing import leaving as leaving  # the results that leave a node
from remat.transforms.functorch.aliasing import looks as looks  # which results lie in which
from remat.transforms.functorch.aliasing import seen as seen  # all results, made of those that left
from remat.transforms.functorch.flat_call import FlatCall as FlatCall  # an eager region's call
from remat.transforms.functorch.flat_call import WatchingRefused as WatchingRefused  # run the forward afresh
from remat.transforms.functorch.primitive import Family as Family  # what the primitives of one call share
from remat.transforms.functorch.primitive import Prim as Prim  # a function of tensors, for any levels
from remat.transforms.functorch.primitive import World as World  # where primitives run, if not in eager
from remat.transforms.functorch.primitive import call as call  # run one under the levels at hand
from remat.transforms.functorch.pullback import PullBack as PullBack  # the body of a recomputation
from remat.transforms.functorch.pullback import replaying as replaying  # hand a forward's values out in it
