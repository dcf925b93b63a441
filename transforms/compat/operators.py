"""Classes of operators, as torch.ops hands them out.

torch has no public names for them; `isinstance` tells an overload from a packet of overloads and from an
operator on functions. Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite.
"""

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]
