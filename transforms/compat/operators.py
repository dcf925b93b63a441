"""Classes of operators, as torch.ops hands them out, and two operators that torch gets wrong.

torch has no public names for them; `isinstance` tells an overload from a packet of overloads and from an
operator on functions. Tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite.
"""

import warnings
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload", "OpOverloadPacket"]

# A forward-mode derivative known to be zero is a tensor without memory. Two ops take one as far as dispatch
# modes, and their kernels, called from there, read that memory: torch ends with a segmentation fault (2.13,
# any mode, `torch.func.jvp` of `torch.add(x, c, alpha=0.3)`). So they get kernels that run above the modes.
_aten = torch.library.Library("aten", "IMPL")


def _scaled_zero(zero: torch.Tensor, factor: Any) -> torch.Tensor:
    kind = torch.result_type(zero, factor)
    return torch._efficientzerotensor(zero.shape, dtype=kind, device=zero.device)


def _shifted_zero(zero: torch.Tensor, other: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.zeros(zero.shape, dtype=zero.dtype, device=zero.device).add(other, alpha=alpha)


with warnings.catch_warnings():
    # torch warns that these come in the place of what passes such tensors on.
    warnings.simplefilter("ignore")
    _aten.impl("mul.Scalar", _scaled_zero, "ZeroTensor")
    _aten.impl("add.Scalar", _shifted_zero, "ZeroTensor")
