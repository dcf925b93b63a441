"""Policies: values that decide, op by op, what a region keeps between forward and backward."""

import functools

from remat._deprecated import old
from remat.policies._base import (
    Combined as Combined,
    FromCallable as FromCallable,
    Numbered as Numbered,
    Policy as Policy,
    PolicyError as PolicyError,
    PolicyLike as PolicyLike,
    as_policy as as_policy,
    check_verdict as check_verdict,
)
from remat.policies._catalogue import kind_of as kind_of, register_op as register_op
from remat.policies._makers import (
    makes_policies as makes_policies,
    place_of as place_of,
    policy_given as policy_given,
    several_given as several_given,
)
from remat.policies._modules import (
    ROLES as ROLES,
    RuleOfModules as RuleOfModules,
    by_role as by_role,
    role_of as role_of,
    save_modules as save_modules,
)
from remat.policies._ready import (
    save_all_but_names as save_all_but_names,
    save_attention as save_attention,
    save_collectives as save_collectives,
    save_everything as save_everything,
    save_matmuls as save_matmuls,
    save_names as save_names,
    save_nothing as save_nothing,
    save_ops as save_ops,
)
from remat.policies._selective import (
    HostInputs as HostInputs,
    offload as offload,
    save_costlier_than as save_costlier_than,
    save_every_nth as save_every_nth,
    save_larger_than as save_larger_than,
    where as where,
)
from remat.policies._selector import (
    PolicySelector as PolicySelector,
    UnmatchedName as UnmatchedName,
    bind as bind,
)
from remat.policies._unbatched import save_weight_matmuls as save_weight_matmuls

__all__ = [
    "Policy",
    "PolicyLike",
    "UnmatchedName",
    "offload",
    "register_op",
    "save_all_but_names",
    "save_attention",
    "save_collectives",
    "save_costlier_than",
    "save_every_nth",
    "save_everything",
    "save_larger_than",
    "save_matmuls",
    "save_modules",
    "save_names",
    "save_nothing",
    "save_ops",
    "save_weight_matmuls",
]

__getattr__ = functools.partial(old, __name__)
