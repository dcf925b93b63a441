"""The hooks of model libraries, with the real packages where they are installed, and random weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.func import functional_call, grad, vmap

from remat import RematError, nn as remat_nn, save_attention, save_matmuls, save_nothing
from tests.helpers import LiveBytes, OpCounter

# -- transformers -------------------------------------------------------------------------------------

CONFIGS = {
    "llama": {"num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 11, "hidden_size": 8},
    "gpt2": {"n_embd": 8, "n_inner": 16, "vocab_size": 11, "resid_pdrop": 0.1},
}


def causal_lm(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8, **CONFIGS[kind]
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


TOKENS = torch.tensor([[1, 4, 2, 7, 3], [5, 5, 0, 9, 10]])


def step(model, tokens=TOKENS):
    """Loss and gradients, what was kept between forward and backward, and the ops of the backward."""
    torch.manual_seed(1)
    model.zero_grad()
    with LiveBytes() as live:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        kept = live.bytes
    with OpCounter() as ops:
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], kept, ops


@pytest.mark.filterwarnings("ignore:Policy save_attention keeps no attention")  # of models with dropout
@pytest.mark.parametrize(
    ("kind", "policy", "way"),
    [
        ("llama", save_nothing, "hook"),
        ("llama", save_matmuls | save_attention, "nn.apply"),
        ("gpt2", save_nothing, "nn.apply"),
        ("gpt2", save_matmuls | save_attention, "hook"),
    ],
)
def test_transformers(kind, policy, way):
    from remat.interop import huggingface

    loss, gradients, kept, ops = step(causal_lm(kind))
    model = causal_lm(kind)
    if way == "hook":
        model = huggingface.enable(model, policy)
    else:
        remat_nn.apply(model, policy=policy, layers="*.h.*" if kind == "gpt2" else "*.layers.*")
    again = step(model)
    torch.testing.assert_close(again[0], loss, rtol=0, atol=0)
    torch.testing.assert_close(again[1], gradients)
    assert again[2] < kept
    dots = again[3].dots - ops.dots
    assert dots == 0 if policy != save_nothing else dots > 0


@pytest.mark.slow
def test_transformers_under_torch_func():
    """Per-sample gradients of a checkpointed model, which torch's checkpoint refuses."""
    from remat.interop import huggingface

    plain, model = causal_lm("llama"), huggingface.enable(causal_lm("llama"), save_matmuls)
    params = {name: p.detach() for name, p in plain.named_parameters()}

    def loss(model):
        def of(params, row):
            inputs = {"input_ids": row[None], "labels": row[None], "use_cache": False}
            return functional_call(model, params, (), inputs).loss

        return of

    got, expected = (
        {name: torch.stack([grad(loss(m))(params, row)[name] for row in TOKENS]) for name in params}
        for m in (model, plain)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("turn_on", "copied"),
    [("activation_checkpointing_enable", True), ("gradient_checkpointing_enable", False), ("Trainer", False)],
)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_checkpointing_that_is_turned_on_again_leaves_the_policy(turn_on, copied, tmp_path):
    """It put torch's function back without a word: the layers kept less, and ran their products again."""
    transformers = pytest.importorskip("transformers")
    from remat.interop import CheckpointFunction, huggingface

    model = huggingface.enable(causal_lm("llama"), save_matmuls)
    if copied:
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    kept = step(model)[2]
    if turn_on == "Trainer":
        pytest.importorskip("accelerate")
    elif not hasattr(model, turn_on):
        pytest.skip("another transformers")
    with pytest.warns(UserWarning, match="policy=save_matmuls stays"):
        if turn_on == "Trainer":
            given = transformers.TrainingArguments(
                output_dir=str(tmp_path), max_steps=1, gradient_checkpointing=True, use_cpu=True,
                report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
            )  # fmt: skip
            rows = [{"input_ids": row, "labels": row} for row in TOKENS]
            transformers.Trainer(model=model, args=given, train_dataset=rows).train()
        else:
            getattr(model, turn_on)()
    assert step(model)[2] == kept
    model.gradient_checkpointing_disable()
    assert step(model)[2] > kept
    model.gradient_checkpointing_enable()
    layers = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
    assert not any(isinstance(m._gradient_checkpointing_func, CheckpointFunction) for m in layers)
    huggingface.enable(model, save_nothing)
    assert step(model)[2] < kept


def test_transformers_models_that_cannot():
    from remat.interop import huggingface

    with pytest.raises(TypeError, match=r"not a transformers model that can checkpoint; use remat\.apply"):
        huggingface.enable(torch.nn.Linear(2, 2))


# -- diffusers ----------------------------------------------------------------------------------------


def unet():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).train()


@pytest.mark.slow
def test_diffusers():
    from remat.interop import CheckpointFunction

    def step(model):
        with LiveBytes() as live:
            out = model(torch.linspace(-1, 1, 64).view(1, 1, 8, 8), 3).sample
            kept = live.bytes
        out.square().mean().backward()
        return out.detach(), [p.grad for p in model.parameters()], kept

    enabled = unet()
    enabled.enable_gradient_checkpointing(gradient_checkpointing_func=CheckpointFunction(save_matmuls))
    plain, again = step(unet()), step(enabled)
    torch.testing.assert_close(again[0], plain[0], rtol=0, atol=0)
    torch.testing.assert_close(again[1], plain[1])
    assert again[2] < plain[2]


# -- torchtitan ---------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return x + self.second(torch.nn.functional.silu(self.first(x)))


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict({str(i): Block() for i in range(3)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"policy": "save_nothing"}, 6),
        ({"policy": "save_matmuls | save_attention"}, 0),
        ({"budget": 0.5}, None),
    ],
    ids=["nothing", "matmuls", "budget"],
)
def test_torchtitan(settings, again):
    pytest.importorskip("torchtitan.distributed.activation_checkpoint")
    from remat.interop.torchtitan import PolicyAC

    plain, model, x = Decoder(), Decoder(), torch.ones(2, 4)
    PolicyAC(PolicyAC.Config(**settings)).apply(model)
    assert remat_nn.regions(model) == [f"layers.{i}" for i in range(3)]
    assert list(model.state_dict()) == list(plain.state_dict())

    def ops(model):
        loss = model(x).sum()
        with OpCounter() as counter:
            loss.backward()
        return counter.dots, [p.grad for p in model.parameters()]

    (dots, expected), (more, got) = ops(plain), ops(model)
    torch.testing.assert_close(got, expected)
    assert again is None or more - dots <= again


def test_torchtitan_names_the_policies_there_are():
    pytest.importorskip("torchtitan.distributed.activation_checkpoint")
    from remat.interop.torchtitan import PolicyAC

    with pytest.raises(RematError, match="no such policy; there are .*save_matmuls"):
        PolicyAC(PolicyAC.Config(policy="save_matmul")).apply(Decoder())


# -- einops, functorch --------------------------------------------------------------------------------


def test_einops_layers_in_regions():
    einops = pytest.importorskip("einops")
    from einops.layers.torch import EinMix, Rearrange

    from remat import remat

    torch.manual_seed(0)
    mix = EinMix("b t (h d) -> b h t e", weight_shape="h d e", h=2, d=3, e=3)
    merge = torch.nn.Sequential(Rearrange("b h t e -> b t (h e)"), torch.nn.Tanh())

    def block(x):
        heads = torch.sin(mix(x))
        scores = torch.einsum("bhte,bhse->bhts", heads, heads).softmax(-1)
        return merge(scores @ heads) + einops.repeat(x.mean(-1), "b t -> b t d", d=6)

    x = torch.rand(2, 4, 6)
    region = remat(block, policy=save_matmuls)
    torch.testing.assert_close(region(x), block(x), rtol=0, atol=0)
    for run in (
        lambda f: grad(lambda x: f(x).sum())(x),
        lambda f: vmap(grad(lambda x: f(x[None]).sum()))(x),
        lambda f: torch.autograd.grad(f(x.clone().requires_grad_()).sum(), mix.weight)[0],
    ):
        torch.testing.assert_close(run(region), run(block))


@pytest.mark.slow
def test_einops_in_compiled_regions():
    einops = pytest.importorskip("einops")
    from einops.layers.torch import EinMix, Rearrange, Reduce

    from remat import remat
    from remat.debug import assert_recomputed

    torch.manual_seed(0)
    split, pool = Rearrange("b t (h d) -> b h t d", h=2), Reduce("b h t d -> b t (h d)", "mean", h=2)
    # The bias is added in place, to a view.
    mix = EinMix("b t (h c) -> b t (h d)", weight_shape="h c d", bias_shape="h d", h=2, c=3, d=3)
    project = torch.nn.Linear(6, 6)

    def block(x):
        heads = split(torch.sin(mix(x)))
        scores = einops.einsum(heads, heads, "b h t d, b h s d -> b h t s").softmax(-1)
        mixed, size = einops.pack([pool(torch.tanh(scores @ heads)), x], "b t *")
        pooled, kept = einops.unpack(mixed, size, "b t *")
        means = einops.reduce(torch.tanh(x), "b t d -> b d", "max")
        return (
            project(pooled) + einops.repeat(means, "b d -> b t d", t=4) + einops.rearrange(kept, "... -> ...")
        )

    region, x = remat(block, policy=save_matmuls), torch.rand(2, 4, 6)
    weights = [*mix.parameters(), *project.parameters()]

    def backward(f, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x).square().sum(), [x, *weights])

    def value(f):
        return lambda x: f(x).square().sum()

    compiled = torch.compile(region, backend="aot_eager", fullgraph=True)
    for got, expected in zip(backward(compiled, x), backward(block, x), strict=True):
        torch.testing.assert_close(got, expected)
    compiled = torch.compile(lambda x: grad(value(region))(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), grad(value(block))(x))
    xs = x[:, None]
    compiled = torch.compile(lambda x: vmap(grad(value(region)))(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(xs), vmap(grad(value(block)))(xs))
    assert_recomputed(lambda x: grad(value(region))(x), x)


def test_einops_is_first_called_in_a_compiled_region(monkeypatch):
    einops = pytest.importorskip("einops")
    from remat import remat

    # What it knows of types of tensors it writes down when it meets the first one.
    monkeypatch.setattr("einops._backends._type2backend", {})
    monkeypatch.setattr("einops._backends._loaded_backends", {})
    region = remat(lambda x: einops.rearrange(x.sin(), "a b -> b a"))
    x = torch.rand(2, 3)
    assert torch.equal(torch.compile(region, backend="eager", fullgraph=True)(x), x.sin().T)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functorch_namespace():
    """The names that torch still ships beside torch.func, on regions."""
    functorch = pytest.importorskip("functorch")
    from remat import remat

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh()).eval()
    function, params, buffers = functorch.make_functional_with_buffers(model)
    region = remat(function, policy=save_matmuls)
    x = torch.rand(4, 3)

    def loss(f):
        return lambda params, x: f(params, buffers, x).sum()

    for run in (
        lambda f: functorch.grad(loss(f))(params, x),
        lambda f: functorch.vmap(functorch.grad(loss(f)), (None, 0))(params, x[:, None]),
        lambda f: functorch.jacrev(lambda x: f(params, buffers, x))(x),
        lambda f: functorch.jacfwd(lambda x: f(params, buffers, x))(x),
        lambda f: functorch.hessian(lambda x: loss(f)(params, x))(x),
        lambda f: functorch.grad_and_value(loss(f))(params, x),
        lambda f: functorch.vjp(lambda x: f(params, buffers, x), x)[0],
        lambda f: functorch.jvp(lambda x: f(params, buffers, x), (x,), (x,)),
    ):
        torch.testing.assert_close(run(region), run(function))
