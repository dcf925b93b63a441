"""Later forwards of a region, which are held against the first: what is kept is what the first kept."""

import warnings

import pytest
import torch

from remat import (
    checkpoint_name,
    checkpoint_policy,
    offload,
    remat,
    save_all_but_names,
    save_matmuls,
    save_names,
    save_weight_matmuls,
)
from remat.policies import save_every_nth, save_everything, where
from tests.helpers import OpCounter

X = torch.randn(8, 8, dtype=torch.double, requires_grad=True)
W = torch.randn(8, 8, dtype=torch.double, requires_grad=True)
ASKED: list[str] = []


def layer(x, w):
    h = checkpoint_name(torch.tanh(x @ w), "h")
    highest = checkpoint_name(torch.max(h.sin() @ w, 1)[0], "highest")
    a, b = checkpoint_name(h.exp() @ w, "e").chunk(2)
    return highest.sum() * a.cos().sum() + b.sin().sum()


def named_h(info):
    ASKED.append(str(info.op))
    return info.name == "h"


POLICIES = {
    "offload": offload(save_matmuls),
    "offload names": offload(save_names("h", "e")),
    "names": save_names("h"),
    "one of two results": save_names("highest"),
    "barred": save_all_but_names("h"),
    "counting": save_every_nth(2, save_everything),
    "rule": checkpoint_policy(named_h),
    "where": where(lambda info: info.bytes > 64),
    "unbatched": save_weight_matmuls,
    "budget": checkpoint_policy(budget=0.5),
    "plan": checkpoint_policy(budget=0.4).plan(layer, X, W),
}


def sent(monkeypatch):
    """How many tensors were sent to the host."""
    from tests.policies.inside import kept_values

    found, send = [], kept_values.send
    monkeypatch.setattr(kept_values, "send", lambda t, *more: found.append(t) or send(t, *more))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_later_forwards_keep_what_the_first_kept(policy, monkeypatch):
    expected = torch.autograd.grad(layer(X, W), (X, W))
    region, away, seen = remat(layer, policy=POLICIES[policy], name=policy), sent(monkeypatch), []
    for _ in range(3):
        away.clear()
        out = region(X, W)
        with OpCounter() as ops:
            torch.testing.assert_close(torch.autograd.grad(out, (X, W)), expected)
        seen.append((len(away), {op: ops[op] for op in ("mm", "tanh", "sin", "exp", "cos", "max")}))
    assert seen[0] == seen[1] == seen[2]
    assert bool(seen[0][0]) == policy.startswith("offload")


def test_a_rule_is_asked_in_the_first_forward_alone_unless_it_says_otherwise():
    for policy, again in (
        (checkpoint_policy(named_h), False),
        (checkpoint_policy(named_h, stateful=True), True),
    ):
        region = remat(layer, policy=policy, name="asked")
        counts = []
        for _ in range(3):
            ASKED.clear()
            region(X, W).backward()
            counts.append(len(ASKED))
        assert counts[0] and counts == [counts[0]] * 3 if again else counts[1:] == [0, 0]


def test_a_rule_is_asked_no_more_once_a_forward_turned_off_for_good():
    turned, counts = False, []
    region = remat(lambda x: (x.cos().exp() if turned else x.sin()).tanh(), policy=checkpoint_policy(named_h))
    for turned in (False, False, True, True, True, True):  # noqa: B007 (the region reads it)
        ASKED.clear()
        region(X).sum().backward()
        counts.append(len(ASKED) > 0)
    # The first that turned off is recorded from there on, the second from its start.
    assert counts == [True, False, True, True, False, False]


def test_a_rule_that_looks_at_the_region_is_asked_for_each():
    policy = checkpoint_policy(lambda info: info.region == "keeps" and "tanh" in str(info.op))
    for name in ("keeps", "keeps", "drops", "keeps"):
        out = remat(layer, policy=policy, name=name)(X, W)
        with OpCounter() as ops:
            out.backward()
        assert ops["tanh"] == (name == "drops")


def test_names_before_the_ops_that_differ_are_not_forgotten():
    """A strict name is found, and looks at a barred value are not kept for it, where a forward turns off."""
    turned = False

    def fn(x):
        h = checkpoint_name(torch.sub(x.sin(), -3), "barred")
        return (h.t().log1p() if turned else h.log1p()).sum()

    for policy in (save_all_but_names("barred"), save_names("barred", strict=True)):
        turned, counts = False, []
        region = remat(fn, policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for turned in (False, False, True, True, True, False):  # noqa: B007 (`fn` reads it)
                out = region(X)
                with OpCounter() as ops:
                    (got,) = torch.autograd.grad(out, X)
                torch.testing.assert_close(got, X.cos() / (4 + X.sin()))
                counts.append(ops["sub"])
        assert len(set(counts)) == 1
