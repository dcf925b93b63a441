"""Policy-free machinery: transforms from function to function over torch and optree.

Import name `remat.transforms` (the folder is linked into the package).
"""

from remat.transforms.caches import (
    BoundedCache,  # a dict of at most so many entries: what was not asked for longest goes
    Identity,  # a key that stands for one object and does not hold it
    Key,  # a tuple whose hash is reckoned once
    intern,  # the number of everything equal to `thing`
    register,  # a number by which `thing` can be found as long as it lives
    registered,  # the objects that `register` gave numbers, by these
)
from remat.transforms.context import (
    ADDRESSES,  # torch functions that go to memory by its address
    active,  # what is going on in this thread
    beyond_regions,  # run what is no op of the regions around, in the forward or later
    node_of,  # the autograd node of a tensor, asked of no torch-function mode
    of_a_look,  # mark the second of two saved-tensor hooks by which a look at a function sees what is saved
    on_wrappers,  # whether an op is one on wrappers of local tensors
    ranks_met,  # whether this process is one of a group's
    recordings,  # the recordings in progress on this thread, outermost first
    untracked,  # run an op of the engine's own, which no recording counts
)
from remat.transforms.errors import (
    RematError,  # raised when a region cannot be rematerialized correctly
    WrongType,  # a `RematError` and `TypeError`: an argument of another type than meant
    WrongValue,  # a `RematError` and `ValueError`: an argument with a value that cannot work
    changing,  # the message for a function that reads another captured tensor whenever it starts over
    is_user_frame,  # whether a stack frame runs code of neither torch nor this library
    user_line,  # `user_place` for messages
    user_place,  # `file:line (function)` of the user's innermost frame
)
from remat.transforms.grad import (
    argument_positions,  # `argnums` checked against a call and made positive
    check_scalar,  # raise for a value that has no gradient: not a scalar tensor
    checked_tensor,  # raise for a leaf to differentiate that is no tensor
    fresh_leaf,  # a leaf with the numbers of a value, to differentiate by
    grad,  # the gradient of a scalar function
    gradients_of,  # the gradients of a value, zeros where it does not depend on a leaf
    leaves_behind,  # the tensors in which the graph behind some ends
    named_like,  # give a wrapper the name and docstring of what it wraps
    reaches_other_leaves,  # whether a graph ends in others than these leaves
    replace_arguments,  # the arguments with those to differentiate exchanged
    value_and_grad,  # the value and the gradient of a scalar function, value first
)
from remat.transforms.objects import (
    MISSING,  # what a slot holds that holds nothing
    ON_HEAP,  # the flag of a class that a `class` statement has made
    attributes,  # the attributes that an object has of its own
    blank,  # an instance that no constructor has seen
    container_of,  # the built-in container that an object's class is, or derives from
    held,  # all that an object holds
    in_slot,  # what a slot of an object holds
    is_a,  # `isinstance` by the class that an object has, not by the one that it shows
    is_module,  # whether an object is a module
    is_tensor,  # whether an object is a tensor
    items,  # what a container holds, of a dict the values
    laid_out_as,  # a mixin whose subclasses have the memory layout of a class
    length,  # how many items a container has, whatever its class says
    modules_in,  # modules and those in them
    name_of,  # the qualified name of a class, past its metaclass
    names_of,  # what a class itself defines, past its metaclass
    set_class,  # give an object another class
    slots,  # the slots of an object's class
    subclass,  # a subclass that no registry or metaclass hears of
    subclasses,  # the classes that derive from one
    tables_of,  # a module's parameters, buffers and modules by name
    unannounced,  # make a mixin whose subclasses users' classes do not hear of
)
from remat.transforms.ops import (
    Decisions,  # follows the ops of a forward, and tells which of them decide
    draws,  # whether this call of a random op really draws numbers
    is_cast_of_leaf,  # whether an op is a cast that autocast may have in its cache
    lies,  # what of a tensor's strides decides which ops run, and how their results lie
    memory_of,  # the storage object of a tensor, which lives as long as its memory
    metadata,  # the results of an op with their tensors replaced by their metadata
    metas,  # the metadata of the tensors among an op's results
    shape_of,  # the sizes of a tensor; of a nested one those that its parts have in common
    span,  # how many elements of memory lie between the first and the last one of a tensor
    targets,  # the tensors that a call writes to
    tensors_in,  # the tensors among the arguments or results of an op
    traits,  # the traits of `op`, from a table filled as ops are met
    version_of,  # the version counter of a tensor; inference tensors keep none
)
from remat.transforms.placeholders import (
    Meta,  # shape, strides, dtype and device of a tensor
)
from remat.transforms.pytree import (
    flatten,  # leaves and structure of `tree` by torch's registry
    map_leaves,  # the tree with a function of every leaf
    map_only,  # the tree with a function of every leaf of a kind
    merge,  # `leaves` with the tensors at positions `at` replaced
    paths,  # for every leaf its key path, such as `['layers'][0]['w']`
    smooth,  # whether `leaf` is a tensor that can carry a derivative
    split,  # the tensors among `leaves`, and their positions
    tree_leaves,  # the leaves of `tree`
    unflatten,  # the tree of structure `spec` with these leaves
)
from remat.transforms.sharded import (
    Wrapper,  # what a wrapper of local tensors is, without these
    local_tensors,  # the tensors of this process behind some, wrappers taken apart
    placements_of,  # how a tensor lies on its mesh
    wraps,  # whether a tensor wraps local tensors: those of torch.distributed, jagged ones
)
