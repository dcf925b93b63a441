"""remat.debug: what the compiled graphs keep and recompute, and that a lost recomputation is told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from remat import RematError, explain, remat, save_everything, save_matmuls
from remat.debug import assert_recomputed, recomputed
from tests.helpers import rand
from tests.tools.inside import lowering


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def block(w, x):
    return x + torch.sin(torch.tanh(x @ w) @ w)


def loss_with(policy, depth=2):
    region = remat(block, policy=policy, name="block")

    def loss(w, x):
        for _ in range(depth):
            x = region(w, x)
        return x.sum()

    return loss


def shared():
    return rand(4, 4).requires_grad_(), rand(2, 4)


def remat_nothing(info):
    return False


def test_what_a_policy_saves_is_kept_and_its_maker_named():
    w, x = shared()
    first, _ = recomputed(loss_with(save_matmuls), w, x)
    assert first.ops == {"tanh": 1}
    assert [(taken.shape, taken.op) for taken in first.kept if taken.op == "aten.mm.default"] == [
        ((2, 4), "aten.mm.default"),
        ((2, 4), "aten.mm.default"),
    ]
    assert "recomputes 1 tanh" in str(first)


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f), (None, 0))], ids=["grad", "vmap_grad"])
def test_under_transforms(transform):
    w, x = shared()
    loss = transform(loss_with(remat_nothing))
    regions = recomputed(loss, w.detach(), x[:, None] if transform is not grad else x)
    assert [r.survived for r in regions] == [True, True]
    assert all(region.ops["tanh"] == 1 for region in regions)


def test_of_a_compiled_function_and_of_a_module():
    w, x = shared()
    assert len(recomputed(torch.compile(loss_with(remat_nothing)), w, x)) == 2
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    assert recomputed(model, x.float()) == []


def test_explain_tells_what_the_compiled_graphs_recompute():
    w, x = shared()
    got = explain(torch.compile(loss_with(remat_nothing)), w, x)
    assert sum(note.startswith("compiled, block: keeps 192 bytes") for note in got.notes) == 2
    assert not any(note.startswith("compiled") for note in explain(loss_with(remat_nothing), w, x).notes)


def test_a_seed_is_among_what_is_kept():
    w, x = shared()
    region = remat(lambda w, x: torch.sin(F.dropout(torch.tanh(x @ w))))
    (got,) = recomputed(lambda w, x: region(w, x).sum(), w, x)
    assert [taken.bytes for taken in got.kept if taken.dtype is torch.int64] == [8]


def test_dynamic_shapes_report_the_examples_bytes():
    w, x = shared()
    torch._dynamo.mark_dynamic(x, 0)
    got = recomputed(loss_with(remat_nothing), w, x)
    assert [region.bytes for region in got] == [8 * (8 + 16)] * 2


@pytest.mark.slow
def test_assert_recomputed():
    w, x = shared()
    assert len(assert_recomputed(loss_with(remat_nothing), w, x, ops=["mm", "tanh"])) == 2
    with pytest.raises(RematError, match="expected sigmoid to be recomputed; recomputed are mm, tanh"):
        assert_recomputed(loss_with(remat_nothing), w, x, ops=["sigmoid"])
    with pytest.raises(AssertionError, match="recomputed are no ops"):
        assert_recomputed(loss_with(save_everything), w, x)


def test_a_region_that_lost_its_recomputation_warns_and_raises(monkeypatch):
    monkeypatch.setattr(lowering, "fence", lambda value, after: value)
    w, x = shared()
    with pytest.warns(
        UserWarning, match="region 'block' lost its recomputation to the compiler: the results of mm"
    ):
        # 2.15 merges less than 2.13: one of the two regions survives there.
        first = next(region for region in recomputed(loss_with(remat_nothing), w, x) if region.lost)
    assert not first.survived and first.lost["mm"] == 2 and "LOST" in str(first)
    torch._dynamo.reset()
    with pytest.raises(RematError, match="lost its recomputation"):
        assert_recomputed(loss_with(remat_nothing), w, x)


def test_nothing_that_was_compiled_before_is_compiled_again():
    w, x = shared()
    compilations = 0

    def backend(module, inputs):
        nonlocal compilations
        compilations += 1
        return module

    run = torch.compile(loss_with(remat_nothing), backend=backend)
    run(w, x)
    recomputed(run, w, x)
    run(w, x)
    assert compilations == 1
