"""Policies: values that decide, op by op, what a region keeps between forward and backward."""

import functools

from remat._deprecated import old
from remat.policies._base import Combined as Combined
from remat.policies._base import FromCallable as FromCallable
from remat.policies._base import Numbered as Numbered
from remat.policies._base import Policy as Policy
from remat.policies._base import PolicyError as PolicyError
from remat.policies._base import PolicyLike as PolicyLike
from remat.policies._base import as_policy as as_policy
from remat.policies._base import check_verdict as check_verdict
from remat.policies._catalogue import kind_of as kind_of
from remat.policies._catalogue import register_op as register_op
from remat.policies._makers import makes_policies as makes_policies
from remat.policies._makers import place_of as place_of
from remat.policies._makers import policy_given as policy_given
from remat.policies._makers import several_given as several_given
from remat.policies._modules import ROLES as ROLES
from remat.policies._modules import RuleOfModules as RuleOfModules
from remat.policies._modules import by_role as by_role
from remat.policies._modules import role_of as role_of
from remat.policies._modules import save_modules as save_modules
from remat.policies._ready import save_all_but_names as save_all_but_names
from remat.policies._ready import save_attention as save_attention
from remat.policies._ready import save_collectives as save_collectives
from remat.policies._ready import save_everything as save_everything
from remat.policies._ready import save_matmuls as save_matmuls
from remat.policies._ready import save_names as save_names
from remat.policies._ready import save_nothing as save_nothing
from remat.policies._ready import save_ops as save_ops
from remat.policies._selective import HostInputs as HostInputs
from remat.policies._selective import offload as offload
from remat.policies._selective import save_costlier_than as save_costlier_than
from remat.policies._selective import save_every_nth as save_every_nth
from remat.policies._selective import save_larger_than as save_larger_than
from remat.policies._selective import where as where
from remat.policies._selector import PolicySelector as PolicySelector
from remat.policies._selector import UnmatchedName as UnmatchedName
from remat.policies._selector import bind as bind
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
