"""Which kernel attention has in code for a card, on shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.inside import attention_of_gpus

HOPPER, AMPERE = (9, 0), (8, 0)
# What torch 2.11.0 with cuDNN 9.19 took on an H100, in training, by what differs from the plain case.
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("cudnn", {}),
    "causal": ("cudnn", {"causal": True}),
    "single precision": ("efficient", {"dtype": torch.float32}),
    "a mask of bools": ("cudnn", {"mask": torch.bool}),
    "a mask of numbers": ("cudnn", {"mask": torch.bfloat16}),
    "a mask that is learnt": ("efficient", {"mask": torch.bfloat16, "learnt": True}),
    "shared keys": ("cudnn", {"shared": 2}),
    "shared keys and a mask": ("cudnn", {"shared": 2, "mask": torch.bool}),
    "shared keys in single precision": ("math", {"shared": 2, "dtype": torch.float32}),
    "a width of 60": ("flash", {"wide": 60}),
    "a width of 60 and a mask": ("math", {"wide": 60, "mask": torch.bool}),
    "a width of 256": ("cudnn", {"wide": 256}),
    "a width of 320": ("efficient", {"wide": 320}),
    "narrower values": ("cudnn", {"wide": 192, "values": 128}),
    "one key": ("flash", {"keys": 1}),
    "one query and dropout": ("flash", {"rows": 1, "drop": 0.125}),
    "dropout": ("cudnn", {"drop": 0.125}),
    "rows that are no multiple": ("cudnn", {"rows": 255, "keys": 255, "mask": torch.bool}),
}


def kernel(capability: tuple[int, int], **given: Any) -> str:
    wide, rows, keys = given.get("wide", 64), given.get("rows", 256), given.get("keys", 256)
    heads, shared, dtype = 8, given.get("shared", 8), given.get("dtype", torch.bfloat16)
    with FakeTensorMode(), attention_of_gpus(capability):
        q = torch.empty(2, heads, rows, wide, dtype=dtype, requires_grad=True)
        k = torch.empty(2, shared, keys, wide, dtype=dtype, requires_grad=True)
        v = torch.empty(2, shared, keys, given.get("values", wide), dtype=dtype, requires_grad=True)
        mask = given.get("mask")
        if mask is not None:
            learnt = given.get("learnt", False)
            mask = torch.empty(1, heads if learnt else 1, rows, keys, dtype=mask, requires_grad=learnt)
        options: Any = {"is_causal": given.get("causal", False), "enable_gqa": shared != heads}

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask, given.get("drop", 0.0), **options)

        names = " ".join(str(node.target) for node in make_fx(attend)(q, k, v).graph.nodes)
    kinds = [kind for kind in ("cudnn", "flash", "efficient") if f"_product_{kind}_attention" in names]
    return kinds[0] if kinds else "math"


@pytest.mark.parametrize("case", TAKEN)
def test_a_hopper_takes_what_was_seen_there(case):
    expected, given = TAKEN[case]
    assert kernel(HOPPER, **given) == expected


def test_other_cards_and_users_choices():
    assert kernel(AMPERE) == "flash"
    assert kernel(AMPERE, mask=torch.bool) == "efficient"
    assert kernel((10, 0)) == "cudnn"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert kernel(HOPPER) == "flash"


def test_a_mask_is_not_spread_over_the_heads():
    """The memory-efficient kernel had it for every head, and Hugging Face's Llama 20 % more at its peak."""
    given = torch.empty(2, 1, 8, 16, dtype=torch.bool)
    with FakeTensorMode() as mode, attention_of_gpus(HOPPER):
        q, k, v = (torch.empty(2, 4, rows, 32, dtype=torch.bfloat16) for rows in (8, 16, 16))
        mask = mode.from_tensor(given)
        graph = make_fx(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask))(q, k, v)
    (node,) = [node for node in graph.graph.nodes if "cudnn_attention" in str(node.target)]
    bias: Any = node.args[3]
    assert bias.meta["val"].shape == given.shape and bias.meta["val"].dtype == torch.bfloat16
