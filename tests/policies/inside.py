"""What tests of policies read of the inside, behind one door: what an op is, lanes of copies, catalogues."""

from remat._core import fits  # whether a pattern means a module
from remat._core.flops import known_flops  # FLOPs of an op
from remat._core.opinfo import Call, Decision, OpInfo, TensorMeta, describe  # what a policy is told of an op
from remat.policies import (  # the catalogue of ops, names that were warned of, roles of modules
    ROLES,
    _catalogue,
    _ready,
    _selector,
    role_of,
)
from remat.policies._selector import UnmatchedName  # how regions ask
from remat.transforms.compat import functions_as_they_are  # functions past the modes in force
from remat.transforms.offload import transfer  # lanes, and what is fetched ahead
from remat.transforms.tape import kept_values  # what is held, by verdicts
