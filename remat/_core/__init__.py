"""What all of the product knows of ops: their facts for a policy, their price, amounts of bytes."""

from remat._core.charts import (
    Series,  # points of one colour
    Spot,  # one of them, with its label
    bars,  # the SVG of one bar a row
    chart,  # the SVG of points and lines
)
from remat._core.devices import (
    DEVICES,  # name -> `Device`
    Device,  # what a device attains, and holds
    processor,  # the processor's name
)
from remat._core.flops import (
    causal_share,  # the share of an attention op's FLOPs that a causal mask leaves
    forget_when_priced,  # call something when an op gets another price
    has_formula_of_ours,  # whether an op is a factorization, an FFT, a distance: no product of matrices
    is_light,  # whether an op's price is the bytes that it moves
    known_flops,  # FLOPs of `op(*args, **kwargs)`, or None for an op that nobody gave a formula for
    op_name,  # `aten::mm` for every overload and for the packet
    set_price,  # let a custom op cost what a function says
)
from remat._core.garbage import collecting_rarely  # while many objects are made that live
from remat._core.isolated import (
    Isolated,  # gradients and storages as a look met them
    isolated,  # leave gradients and storages as they are, whatever runs inside
)
from remat._core.keywords import (
    KeywordError,  # a keyword that may be meant for two functions
    check_callable,  # raise where a report is given a result in place of a function
    joined_keywords,  # all keywords of a function, those in `kwargs=` included
    keywords_apart,  # refuse options that may be meant for the function looked at
)
from remat._core.meter import (
    Mark,  # what a step calls where its forward ends
    Memory,  # bytes of one step
    trace_cpu,  # the same on a CPU, where no cycle is in the way
    trace_memory,  # run a step once and follow its allocations
)
from remat._core.opinfo import (
    Call,  # the torch function the user called, above functorch
    Decision,  # what becomes of an op's outputs between forward and backward
    OpInfo,  # one op of a region, as a policy sees it
    TensorMeta,  # a tensor without its data
    describe,  # `tree` with every tensor replaced by its `TensorMeta`
)
from remat._core.patterns import (
    fits,  # whether a pattern means the module of a name
    starred,  # a name as a pattern for all of its kind
)
from remat._core.progress import (
    Telling,  # within, a plan is made
    did,  # how far a plan is, said where it takes long
)
from remat._core.reach import (
    Reach,  # what a function can reach, as it was before a look at it
    is_library,  # whether what is of a module of this name holds no state of the user's
    isolating,  # leave modules in reach, random streams and switches as they are
)
from remat._core.shown import (
    described,  # a value as messages call it
    first_line,  # what an error says in its first line
    name_of,  # what the user calls a function, or a module by its class
    to_install,  # how to install what some extras of this package list
)
from remat._core.tables import (
    Page,  # a headline, tables, and notes
    Shown,  # what prints as its page, and is one in notebooks
    Table,  # a title, columns, and rows of text
    as_text,  # a page as plain text
    save_html,  # a page as a file
)
from remat._core.units import (
    OPTIMIZERS,  # numbers that an optimizer holds for each parameter
    format_bytes,  # bytes for people, rounded
    format_shape,  # a dtype and sizes in one word, `f32[4,8]`
    parse_bytes,  # bytes from "2GiB", "512 MB", "1e9"
)
from remat._core.warn import warn_user  # warn at the line of the user's
