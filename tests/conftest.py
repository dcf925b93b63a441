"""Before every test nothing is learnt of any region; after it, whatever it did, torch is as it was."""

import gc

import pytest
import torch

from remat.transforms.compat.autograd import hooks_disabled, in_transform, top_hooks
from tests.helpers import forget


def ambient():
    return {
        "functorch level": in_transform(),
        "saved-tensor hooks refused": hooks_disabled(),
        "saved-tensor hooks": top_hooks(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "forward-mode level": torch.autograd.forward_ad._current_level,
        "default dtype": torch.get_default_dtype(),
    }


CLEAN = ambient()


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """What earlier modules left behind is not searched again by every collection that a test asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks():
    forget()
    yield
    assert ambient() == CLEAN
