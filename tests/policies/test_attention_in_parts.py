"""Attention with dropout is products and a softmax on a CPU: save_attention says that it keeps nothing."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from remat import explain, remat, save_attention, save_matmuls
from tests.inside import diagnose
from tests.policies.inside import _ready

X = torch.randn(2, 8, 16)


@pytest.fixture(autouse=True)
def nothing_said():
    _ready._apart.clear()
    yield
    _ready._apart.clear()


def encoder(dropout):
    return nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=dropout)


def multihead(dropout):
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dropout=dropout)
    return lambda x: layer(x, x, x, need_weights=False)[0]


def function(dropout):
    def attend(x):
        x = x[None]
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout).sin()

    return attend


MAKERS = {"encoder layer": encoder, "multi-head": multihead, "function": function}


def said(region):
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            region(x).sum().backward()
    return [str(w.message) for w in told if "keeps no attention" in str(w.message)]


@pytest.mark.parametrize("policy", [save_attention, save_matmuls | save_attention], ids=["alone", "joined"])
@pytest.mark.parametrize("name", MAKERS)
def test_the_policy_warns_once_and_reports_name_the_line(name, policy):
    region = remat(MAKERS[name](0.1), policy=policy)
    (text,) = said(region)
    assert "dropout" in text
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert any("save_attention keeps nothing" in note for note in explain(region, x).notes)
        assert "attention in parts" in [f.cause for f in diagnose(lambda: region(x).sum()).findings]


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_said_of_fused_attention(name):
    region = remat(MAKERS[name](0.0), policy=save_attention)
    assert not said(region)
    assert not any("save_attention" in note for note in explain(region, X.clone().requires_grad_()).notes)


def test_attention_without_a_dimension_for_heads_is_in_parts_too():
    region = remat(lambda x: F.scaled_dot_product_attention(x, x, x).sin(), policy=save_attention)
    (text,) = said(region)
    assert "four dimensions" in text


def test_nothing_is_said_of_attention_written_by_hand():
    region = remat(lambda x: F.softmax(x @ x.mT, -1) @ x, policy=save_attention)
    assert not said(region)
