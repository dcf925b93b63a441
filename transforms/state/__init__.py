"""What is set around a region, and its random numbers, put back for its recomputation."""

from remat.transforms.state.ambient import (
    Ambient,
    Called,
    GeneratorState,
    Print,
    RandomState,
    alike,
    device_kinds,
    drawing_again,
    first_draw,
    generators_again,
    held_states,
    in_backward,
    note,
    noting,
    prints_here,
    prints_of,
    refuse_traced_draws,
    registered,
    same_numbers,
    state_before,
    switches_put_back,
    under_levels,
    users_aside,
)
from remat.transforms.state.functional_rng import (
    can_seed,  # whether `draw` knows this op
    draw,  # what `func(*args, **kwargs)` would draw, as a function of `seed`
    new_seed,  # a seed from the default generator of the device that the call draws on
    refuse_generator,  # raise for a draw from a generator of the user's
)
