"""What is set around a region, and its random numbers, put back for its recomputation."""

from remat.transforms.state.ambient import (
    Ambient,  # a snapshot of switches, autocast and default device
    Called,  # a function of the user's, whose torch functions ask modes as where it was called
    Fingerprint,  # what is compared of a float tensor
    GeneratorState,  # the state of a generator: of one object, or of the one that a device has by default
    RandomState,  # generator states of the CPU and of every device among the arguments
    alike,  # whether two runs had the same results, as far as prints tell
    device_kinds,  # the kinds of device among `tensors`, the CPU always first
    drawing_again,  # around a run of a function again: generators as at its start
    fingerprints_of,  # what is compared of float tensors that have numbers
    first_draw,  # run an op that draws: the state that it has drawn from, and its result
    generators_again,  # let generators begin where they were, and leave them as they are
    held_states,  # what generator states take, for reports
    in_backward,  # that substitution again, for the backward
    note,  # a function has run under this substitution, or as it is
    noting,  # what a function returns, and the substitution of captured tensors that it ran under
    refuse_traced_draws,  # raise where make_fx writes down a recomputation that draws
    registered,  # what users want captured before a forward and put back around its recomputation
    same_numbers,  # whether two tensors have the same numbers
    state_before,  # the state of the generator that an op is about to draw from
    switches_put_back,  # leave switches as they are, whatever is turned inside
    under_levels,  # whether the user's code at hand was called at a level of torch.func
    users_aside,  # the engine works, and asks none of them
)
from remat.transforms.state.functional_rng import (
    can_seed,  # whether `draw` knows this op
    draw,  # what `func(*args, **kwargs)` would draw, as a function of `seed`
    new_seed,  # a seed from the default generator of the device that the call draws on
    refuse_generator,  # raise for a draw from a generator of the user's
)
