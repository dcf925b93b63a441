"""What torch's own tests share."""

import pytest
import torch

REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False])
EARLY_STOP = pytest.mark.parametrize("early_stop", [True, False])


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def grads_of(model):
    return [p.grad for p in model.parameters()]
