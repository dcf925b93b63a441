"""What Dynamo sees of regions, scans and captures."""

from remat._dynamo.gradients import (
    differentiated,  # the value of a function with gradients of its leaves and of its named values
    offset,  # what is added to a named value: a negative zero, which changes no bit
)
from remat._dynamo.intermediates import (
    capture,  # the result of `fn`, the named trees, and all names that it gave
    capture_grads,  # gradients of arguments and of named trees, while Dynamo traces
    tap,  # give a named tree to the open captures
)
from remat._dynamo.region import (
    call_planned,  # `call_region` for policies that look at a whole call
    call_region,  # call the region with the options numbered `at` while Dynamo traces
    naming_inputs,  # a function whose arguments bear the name of those that go to the host
    needs_call,  # whether a policy is another one for every call
    wrap,  # `fn` as a region, while Dynamo traces the very call of `remat`
)
from remat._dynamo.scan import (
    call_scan,  # `scan_remat` while Dynamo traces
    run_compiled,  # `scan_remat(compile=True)` in eager
    runs_in_eager,  # says by what to run the scans that Dynamo gave up
)
