"""Calls shaped like torch.utils.checkpoint's, torch's policies, layers of models that are there already."""

import copy
import functools
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from remat import Decision, OpInfo, RematError, nn as remat_nn, save_matmuls, save_nothing
from remat.interop import CheckpointFunction, checkpoint, checkpoint_sequential, from_torch_policy
from remat.policies import save_names, save_ops
from tests.helpers import LiveBytes, OpCounter, leaves_of, rand

aten = torch.ops.aten
X, W = rand(3, 4), rand(4, 4)


def block(x, w, *, scale=1.0):
    return torch.tanh(torch.sin(x @ w) @ w) * scale


def recomputed(fn, *args, **kwargs):
    """The ops of the backward, and the gradients."""
    leaves = leaves_of(args)
    out = fn(*leaves, **kwargs)
    with OpCounter() as ops:
        gradients = torch.autograd.grad(out.sum(), leaves)
    return ops, gradients


# -- checkpoint ---------------------------------------------------------------------------------------


def test_checkpoint_refuses_what_nobody_knows():
    with pytest.raises(ValueError, match="determinism_check='strict'"):
        checkpoint(block, X, W, determinism_check="strict")  # pyright: ignore
    with pytest.raises(ValueError, match="both context_fn and policy"):
        checkpoint(block, X, W, policy=save_matmuls, context_fn=lambda: (None, None))
    with pytest.raises(ValueError, match="two context managers"):
        checkpoint(block, X, W, context_fn=lambda: 3)  # type: ignore[arg-type,return-value]


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


def matmuls(ctx, op, *args, **kwargs):
    assert not ctx.is_recompute
    mine = op is aten.mm.default and args[1].shape == (4, 4) and ctx.op_output.shape == (3, 4)
    if mine:
        # As such functions ask real tensors.
        left = args[0]
        assert (left.size(), left.size(-1), left.dim(), left.ndim, left.numel()) == ((3, 4), 4, 2, 2, 12)
    return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [matmuls, [aten.mm.default]], ids=["function", "list"])
def test_selective_contexts(policy):
    region = functools.partial(checkpoint, block, use_reentrant=False, context_fn=selective(policy))
    ops, got = recomputed(region, X, W)
    torch.testing.assert_close(got, recomputed(block, X, W)[1])
    assert ops.dots == 4 and ops["sin"] == 1
    # What torch's refuses: two backwards, double backward, torch.func.
    leaves = leaves_of((X, W))
    out = region(*leaves).sum()
    out.backward(retain_graph=True)
    out.backward()
    torch.testing.assert_close(leaves[0].grad, 2 * got[0])
    torch.testing.assert_close(grad(lambda x: region(x, W).sum())(X), got[0])
    torch.autograd.gradgradcheck(region, leaves_of((X, W)))


def every_second():
    count = 0

    def policy(ctx, op, *args, **kwargs):
        nonlocal count
        count += op is aten.mm.default
        return op is aten.mm.default and count % 2 == 1

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("mode", ["backward", "grad"])
def test_policies_that_count_start_afresh_in_every_forward(mode):
    """torchtitan's every second matmul: the counter lives in what context_fn makes."""

    def three(x, w):
        return torch.sin(torch.sin(torch.sin(x @ w) @ w) @ w)

    region = functools.partial(checkpoint, three, context_fn=every_second)
    for _ in range(2):
        if mode == "backward":
            dots = recomputed(region, X, W)[0].dots
        else:
            with OpCounter() as ops:
                grad(lambda x: region(x, W).sum())(X)
            dots = ops.dots - 3
        # torch.func.grad over x alone: two derivatives of each product less those of the weight.
        assert dots == (6 if mode == "backward" else 3) + 1


# -- from_torch_policy --------------------------------------------------------------------------------


def info(op=aten.mm.default):
    return OpInfo(op, (), {}, ())


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        (CheckpointPolicy.MUST_SAVE, Decision.SAVE),
        (CheckpointPolicy.PREFER_SAVE, Decision.SAVE),
        (CheckpointPolicy.MUST_RECOMPUTE, Decision.RECOMPUTE),
        (CheckpointPolicy.PREFER_RECOMPUTE, Decision.RECOMPUTE),
        (CheckpointPolicy.MUST_CPU_OFFLOAD, Decision.OFFLOAD),
        (CheckpointPolicy.PREFER_CPU_OFFLOAD, Decision.OFFLOAD),
        (True, Decision.SAVE),
        (False, Decision.RECOMPUTE),
    ],
)
def test_torchs_answers(answer, decision):
    assert from_torch_policy(lambda ctx, op: answer)(info()) is decision


@pytest.mark.parametrize("answer", [None, "yes"])
def test_answers_that_torch_takes_for_recompute_raise(answer):
    with pytest.raises(RematError, match=f"answered {answer!r}"):
        from_torch_policy(lambda ctx, op: answer)(info())


def test_from_torch_policy_makes_values():
    policy = from_torch_policy(matmuls)
    assert policy == from_torch_policy(matmuls) and pickle.loads(pickle.dumps(policy)) == policy
    assert repr(policy | save_matmuls) == "from_torch_policy(matmuls) | save_matmuls"
    assert from_torch_policy([aten.mm.default]) == save_ops(aten.mm.default)
    for wrong in (3, None, save_matmuls):
        with pytest.raises(TypeError, match="from_torch_policy got"):
            from_torch_policy(wrong)


# -- checkpoint_sequential ----------------------------------------------------------------------------


def stack(count=5):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("segments", [0, 6])
def test_checkpoint_sequential_says_how_many_segments_there_may_be(segments):
    with pytest.raises(ValueError, match="from 1 to 5"):
        checkpoint_sequential(stack(), segments, X)


# -- remat.nn -----------------------------------------------------------------------------------------


class Layer(nn.Module):
    inner: Any

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])})

    def forward(self, x, *, scale=1.0):
        return x + torch.tanh(self.inner["layers"][0](torch.sin(self.proj(x)))) * scale


class Model(nn.Module):
    layers: Any

    def __init__(self, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


def model() -> Any:
    return Model().double()


NAMES = [f"layers.{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("layers", "every", "expected"),
    [
        ("*.layers.*", 1, NAMES),
        ("*.layers.*", 2, ["layers.0", "layers.2"]),
        ("layers.[13]", 1, ["layers.1", "layers.3"]),
        (["*.0", "head"], 1, ["layers.0", "layers.1.inner.layers.0", "layers.2.inner.layers.0"]),
        (Layer, 1, NAMES),
        ((Layer, nn.Linear), 1, [*NAMES, "head"]),
        (lambda name, module: name.endswith("proj"), 1, [f"{name}.proj" for name in NAMES]),
    ],
    ids=["default", "every", "pattern", "patterns", "class", "classes", "function"],
)
def test_apply_finds_layers(layers, every, expected):
    found = remat_nn.regions(remat_nn.apply(model(), layers=layers, every=every))
    if layers == ["*.0", "head"]:
        expected = [*expected, "layers.3.inner.layers.0", "head"]
    assert found == expected


def test_apply_says_what_there_is():
    with pytest.raises(ValueError, match=r"'layers\.\*', 'layers\.\*\.inner\.layers\.\*'"):
        remat_nn.apply(model(), layers="*.blocks.*")
    with pytest.raises(ValueError, match="no list of modules"):
        remat_nn.apply(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="policy got"):
        remat_nn.apply(model(), policy="save_matmuls")  # pyright: ignore
    with pytest.raises(ValueError, match="determinism_check"):
        remat_nn.apply(model(), determinism_check="strict")


def gradients(m, x=X):
    m.zero_grad()
    m(x).sum().backward()
    return [p.grad.clone() for p in m.parameters()]


def test_applied_models_compute_the_same_and_keep_less():
    plain, applied = model(), remat_nn.apply(model(), policy=save_matmuls)
    torch.testing.assert_close(applied(X), plain(X), rtol=0, atol=0)
    torch.testing.assert_close(gradients(applied), gradients(plain))
    params = dict(plain.named_parameters())

    def loss(m):
        return lambda p, x: functional_call(m, p, (x,)).sum()

    per_sample = vmap(grad(loss(applied)), (None, 0))(params, X[:, None])
    torch.testing.assert_close(per_sample, vmap(grad(loss(plain)), (None, 0))(params, X[:, None]))

    def kept(m):
        with LiveBytes() as live:
            out = m(X.clone().requires_grad_())
            return live.bytes - out.nbytes

    assert kept(applied) < kept(plain)


def test_applied_models_stay_what_they_were():
    m: Any = remat_nn.apply(model(), policy=save_matmuls)
    assert list(m.state_dict()) == list(model().state_dict())
    assert isinstance(m.layers[0], Layer)
    assert "policy=save_matmuls" in repr(m)
    assert repr(remat_nn.remove(m)) == repr(model())
    m.load_state_dict(model().state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_run_their_own_forward(how):
    m: Any = remat_nn.apply(model(), policy=save_matmuls | save_names("q"))
    if how == "deepcopy":
        again = copy.deepcopy(m)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(m))
    else:
        torch.save(m, file := io.BytesIO())
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert remat_nn.regions(again) == NAMES
    with torch.no_grad(), warnings.catch_warnings():
        for p in again.parameters():
            p.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not torch.equal(m(X), again(X)) and torch.equal(again(X), torch.zeros(3, 2).double())


def test_applying_again_replaces_and_remove_undoes():
    m: Any = remat_nn.apply(remat_nn.apply(model(), policy=save_nothing), policy=save_matmuls)
    assert recomputed_sines(m) == 4 and type(m.layers[0]).__mro__.count(remat_nn.Region) == 1
    remat_nn.remove(m)
    assert remat_nn.regions(m) == [] and type(m.layers[0]) is Layer
    assert recomputed_sines(m) == 0


def recomputed_sines(m):
    loss = m(X).sum()
    with OpCounter() as ops:
        loss.backward()
    return ops["sin"]


def test_hooks_of_applied_layers_run_once():
    m: Any = remat_nn.apply(model())
    seen: list[str] = []
    m.layers[1].register_forward_pre_hook(lambda *_: seen.append("pre"))
    m.layers[1].register_forward_hook(lambda *_: seen.append("post"))
    m.layers[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    gradients(m, X.clone().requires_grad_())
    assert seen == ["pre", "post", "backward"]


# -- hooks of model libraries -------------------------------------------------------------------------


def test_checkpoint_function_swallows_torchs_options():
    run = CheckpointFunction(save_matmuls)
    ops, got = recomputed(functools.partial(run, block), X, W, use_reentrant=False, preserve_rng_state=True)
    torch.testing.assert_close(got, recomputed(block, X, W)[1])
    assert ops.dots == 4
    assert pickle.loads(pickle.dumps(run)) == run and copy.deepcopy(run) == run
