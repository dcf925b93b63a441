"""Options of torch.utils.checkpoint.checkpoint: all are taken, and do what they say."""

import functools

import pytest
import torch
import torch.nn.functional as F

from remat import RematError
from remat.interop import checkpoint
from tests.helpers import unseen
from tests.interop.test_checkpoint import W, X, block, recomputed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_reentrant": True},
        {"use_reentrant": None, "preserve_rng_state": False, "early_stop": False, "debug": True},
        {"determinism_check": "none"},
        {"determinism_check": "exact"},
    ],
    ids=str,
)
def test_checkpoint_takes_torchs_options(options):
    ops, got = recomputed(functools.partial(checkpoint, block, **options), X, W, scale=2.0)
    _, expected = recomputed(block, X, W, scale=2.0)
    torch.testing.assert_close(got, expected)
    assert ops.dots == 4 + 2 and ops["sin"] == 1  # tanh reads its own value
    with torch.no_grad():
        torch.testing.assert_close(checkpoint(block, X, W, **options), block(X, W), rtol=0, atol=0)


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_are_drawn_again_unless_preserved(preserve):
    torch.manual_seed(0)
    x = torch.zeros(64, requires_grad=True)
    out = checkpoint(lambda x: F.dropout(x.exp(), 0.5).sin(), x, preserve_rng_state=preserve)
    torch.rand(1)
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, out != 0) is preserve


@pytest.mark.parametrize("check", ["default", "none", "exact"])
@pytest.mark.parametrize("differ", ["shape", "value"])
def test_determinism_checks_look_at_what_they_say(check, differ):
    """Where the function runs again, for a kernel that went unseen."""
    runs = []

    def region(x):
        runs.append(None)
        h = (x + unseen(x, float(len(runs)) if differ == "value" else 0.0)).exp()
        return (torch.cat([h, h]) if differ == "shape" and len(runs) > 1 else h).sin().sum()

    out = checkpoint(region, X.clone().requires_grad_(), determinism_check=check)
    # Other ops are told under every check: nothing of the tape would be theirs.
    if differ == "shape" or check == "exact":
        with pytest.raises(RematError, match="does not repeat its forward"):
            out.backward()
    else:
        out.backward()
