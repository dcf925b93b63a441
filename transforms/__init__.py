"""Policy-free machinery: transforms from function to function over torch and optree.

Import name `remat.transforms` (the folder is linked into the package).
"""

from remat.transforms.context import recordings
from remat.transforms.errors import RematError
from remat.transforms.grad import (
    argument_positions,
    check_scalar,
    checked_tensor,
    fresh_leaf,
    grad,
    gradients_of,
    named_like,
    reaches_other_leaves,
    replace_arguments,
    value_and_grad,
)
from remat.transforms.ops import draws, is_user_frame, traits, user_line, user_place
from remat.transforms.pytree import (
    flatten,
    map_leaves,
    map_only,
    merge,
    paths,
    shown,
    smooth,
    split,
    tree_leaves,
    unflatten,
)
from remat.transforms.registry import intern, register, registered

__all__ = [
    "recordings",  # the recordings in progress on this thread, outermost first
    "RematError",  # raised when a region cannot be rematerialized correctly
    "argument_positions",  # `argnums` checked against a call and made positive
    "check_scalar",  # raise for a value that has no gradient: not a scalar tensor
    "checked_tensor",  # raise for a leaf to differentiate that is no tensor
    "fresh_leaf",  # a detached tensor that requires gradients
    "grad",  # the gradient of a scalar function
    "gradients_of",  # gradients by plain autograd, zeros where there are none
    "named_like",  # give a wrapper the name and docstring of what it wraps
    "reaches_other_leaves",  # whether a graph ends in leaves other than the given ones
    "replace_arguments",  # the arguments with those to differentiate exchanged
    "value_and_grad",  # the value and the gradient of a scalar function, value first
    "draws",  # whether this call of a random op really draws numbers
    "is_user_frame",  # whether a stack frame runs code of neither torch nor this library
    "traits",  # the traits of `op`, from a table filled as ops are met
    "user_line",  # `user_place` for messages
    "user_place",  # `file:line (function)` of the user's innermost frame
    "flatten",  # leaves and structure of `tree` by torch's registry
    "map_leaves",  # the tree with a function of every leaf
    "map_only",  # the tree with a function of every leaf of a kind
    "merge",  # `leaves` with the tensors at positions `at` replaced
    "paths",  # for every leaf its key path, such as `['layers'][0]['w']`
    "shown",  # a structure as messages show it
    "smooth",  # whether `leaf` is a tensor that can carry a derivative
    "split",  # the tensors among `leaves`, and their positions
    "tree_leaves",  # the leaves of `tree`
    "unflatten",  # the tree of structure `spec` with these leaves
    "intern",  # the number of everything equal to `thing`, for good
    "registered",  # the objects that `register` gave numbers, by these
    "register",  # a number by which `thing` can be found as long as it lives
]
