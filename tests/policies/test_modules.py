"""Policies by modules: paths, patterns, roles and MaxText's presets."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

import remat
from remat import RematError, UnmatchedName, checkpoint_policy, presets, save_matmuls, save_modules
from tests.helpers import sparse
from tests.policies.inside import ROLES, fits, role_of

ITEM = 4


class Attention(nn.Module):
    """Attention with the names of transformers' Llama."""

    def __init__(self, width, heads, groups, device=None):
        super().__init__()
        make = functools.partial(nn.Linear, bias=False, device=device)
        kv = width // heads * groups
        self.heads, self.groups = heads, groups
        self.q_proj, self.k_proj, self.v_proj = make(width, width), make(width, kv), make(width, kv)
        self.o_proj = make(width, width)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (n, -1)).transpose(1, 2)
            for f, n in ((self.q_proj, self.heads), (self.k_proj, self.groups), (self.v_proj, self.groups))
        )
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Mlp(nn.Module):
    def __init__(self, width, inner, device=None):
        super().__init__()
        make = functools.partial(nn.Linear, bias=False, device=device)
        self.gate_proj, self.up_proj, self.down_proj = (
            make(width, inner),
            make(width, inner),
            make(inner, width),
        )

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width=8, inner=24, heads=2, groups=1, device=None):
        super().__init__()
        self.self_attn, self.mlp = Attention(width, heads, groups, device), Mlp(width, inner, device)

    def forward(self, x):
        x = x + self.self_attn(x.tanh())
        return x + self.mlp(x.tanh())


class Model(nn.Module):
    def __init__(self, count=2, **sizes):
        super().__init__()
        self.layers = nn.ModuleList(Layer(**sizes) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(2, 5, 8)
PRODUCTS = [
    f"layers.{i}.{name}"
    for i in range(2)
    for name in (*(f"self_attn.{k}_proj" for k in "qkvo"), *(f"mlp.{k}_proj" for k in ("gate", "up", "down")))
]


def told():
    """A policy, and the modules of the products that it was asked about."""
    found = []

    @functools.partial(checkpoint_policy, modules=True)
    def rule(info):
        if info.op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and "proj" in info.module:
            found.append(info.module)
        return False

    return rule, found


def kept(policy, model=None, x=X):
    model = remat.apply(model or Model(), policy=policy)
    return [r for r in remat.saved_residuals(model, x) if r.why == "policy"]


def as_functional(model, x):
    return grad(lambda p: functional_call(model, p, (x,)).sum())(dict(model.named_parameters()))


WAYS = {
    "backward": lambda model, x: model(x).sum().backward(),
    "functional_call": as_functional,
    "vmap of grad": lambda model, x: vmap(
        lambda one: as_functional(model, one[None])["layers.0.mlp.up_proj.weight"]
    )(x),
    "grad of grad": lambda model, x: grad(lambda y: grad(lambda z: model(z).sin().sum())(y).sum())(x),
    "compiled": lambda model, x: torch.compile(model, backend="aot_eager")(x).sum().backward(),
    "compiled functional_call": lambda model, x: torch.compile(as_functional, backend="aot_eager")(model, x),
}


@pytest.mark.parametrize("way", [*list(WAYS)[:-1], pytest.param(list(WAYS)[-1], marks=pytest.mark.slow)])
def test_paths(way, monkeypatch):
    if way in ("grad of grad", "compiled functional_call"):  # the kernel has no second derivative
        monkeypatch.setattr(Attention, "attend", lambda self, q, k, v: (q * k).softmax(-1) * v)
    policy, found = told()
    model = remat.apply(Model(), policy=policy)
    WAYS[way](model, X)
    assert found[: len(PRODUCTS)] == PRODUCTS
    assert set(found) == set(PRODUCTS)


def test_path_in_a_model_around_and_of_a_view():
    policy, found = told()
    around = nn.Module()
    around.model = model = Model(1)
    model.layers[0] = remat.remat(model.layers[0], policy=policy)
    around.forward = lambda x: model(x)
    around(X).sum().backward()
    assert found == [f"model.{path}" for path in PRODUCTS[:7]]


def test_rules_of_modules_are_asked_once_by_layer():
    policy, found = told()
    model = remat.apply(Model(), policy=policy)
    for _ in range(3):
        model(X).sum().backward()
    assert found == PRODUCTS


def test_a_module_is_looked_up_for_who_asks_alone(monkeypatch):
    monkeypatch.setattr("remat.policies._selector.module_path", lambda: pytest.fail("nobody asked"))
    for policy in (save_matmuls, checkpoint_policy(lambda info: info.bytes < 9), remat.save_nothing):
        remat.apply(Model(), policy=policy)(X).sum().backward()


def test_a_rule_that_did_not_ask():
    model = remat.apply(Model(), policy=checkpoint_policy(lambda info: info.module == "mlp"))
    with pytest.raises(RematError, match=r"checkpoint_policy\(rule, modules=True\)"):
        model(X)


# -- patterns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "shapes"),
    [
        (save_modules("layers.*.o_proj"), [8, 8]),
        (save_modules("layers.1.*.o_proj", "layers.0.*.k_proj"), [4, 8]),
        (save_modules("*.mlp") & save_matmuls, [24, 24] * 2),
        (save_modules("layers.*.self_attn.q_proj :: aten.mm.default"), [8, 8]),
        (
            save_modules("*.self_attn :: aten.mm, aten.bmm") & ~save_modules("*.q_proj", "*.o_proj"),
            [4, 4] * 2,
        ),
        (
            checkpoint_policy(
                lambda i: i.module.endswith("1.self_attn.v_proj") and i.flops > 0, modules=True
            ),
            [4],
        ),
    ],
)
def test_save_modules(policy, shapes):
    for _ in range(2):  # a second layer and a second call follow a trace
        model = remat.apply(Model(), policy=policy)
        for _ in range(2):
            found = remat.saved_residuals(model, X)
            assert [r.shape[-1] for r in found if r.why == "policy"] == shapes


@pytest.mark.parametrize("compiled", sparse([False, True]))
def test_equal_layers_under_a_pattern_for_one(compiled):
    plain, model = Model(4), Model(4)
    model.load_state_dict(plain.state_dict())
    remat.apply(model, policy=save_modules("layers.2.mlp.up_proj"))
    fn = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        plain(X).sum().backward()
        fn(X).sum().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert [r.bytes for r in kept(save_modules("layers.2.mlp.up_proj"), model)] == [X.numel() * 3 * ITEM]


def test_one_function_that_calls_several_modules():
    attention = Attention(8, 2, 2)
    attention.requires_grad_(False)
    policy = save_modules("q_proj")

    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj = attention.q_proj, attention.k_proj

        def forward(self, x):
            return self.one(self.q_proj, x) + self.one(self.k_proj, x)

        def one(self, proj, x):
            return remat.remat(lambda y: proj(y).sin(), policy=policy)(x)

    model = Apart()
    with pytest.warns(
        UnmatchedName, match="'q_proj', which runs nothing in it: the modules that do are 'k_proj'"
    ):
        for _ in range(2):
            found = remat.saved_residuals(model, X.clone().requires_grad_())
            assert [r.why for r in found].count("policy") == 1


def test_values():
    policy = save_modules("*.o_proj", "*.mlp")
    assert pickle.loads(pickle.dumps(policy)) == policy == save_modules("*.o_proj", "*.mlp")
    assert repr(policy | save_matmuls) == "save_modules('*.o_proj', '*.mlp') | save_matmuls"
    assert repr(save_modules("*.q", strict=True)) == "save_modules('*.q', strict=True)"
    assert pickle.loads(pickle.dumps(presets.minimal)) == presets.minimal
    whole, part = (
        presets.custom({"query_proj": "remat", "mlpwi": "device"}),
        presets.custom({"mlpwi": "device"}),
    )
    assert vars(whole)["rules"] == vars(part)["rules"]


def test_offloaded_modules():
    found = remat.saved_residuals(remat.apply(Model(), policy=remat.offload(save_modules("*.o_proj"))), X)
    assert found.host_bytes == 2 * X.numel() * ITEM


# -- roles and presets --------------------------------------------------------------------------------

WIDTHS = {"width": 4096, "inner": 14336, "heads": 32, "groups": 8}
QKV, MLP = 4096 + 2 * 1024, 2 * 14336
# What a layer of Llama-3-8B keeps of a token, in numbers, on the device and on the host. The last product of
# a layer is read by nobody. Fused attention makes a number more for each head.
LLAMA_3_8B = {
    "full": (0, 0),
    "minimal": (QKV + 4096 + MLP, 0),
    "minimal_with_context": (QKV + 4096 + MLP + 4096 + 32, 0),
    "minimal_offloaded": (0, QKV + 4096 + MLP),
    "save_dot_except_mlp": (QKV + 4096, 0),
    "save_dot_except_mlpwi": (QKV + 4096, 0),
    "save_dot_with_context_except_mlp": (QKV + 4096 + 4096 + 32, 0),
    "save_qkv_proj": (QKV, 0),
    "qkv_proj_offloaded": (0, QKV),
    "save_out_proj": (4096, 0),
}


@pytest.mark.parametrize("preset", LLAMA_3_8B)
def test_presets_for_llama_3_8b(preset):
    with FakeTensorMode():
        x = torch.empty(1, 3, 4096, requires_grad=True)
        found = remat.saved_residuals(remat.remat(Layer(**WIDTHS), policy=getattr(presets, preset)), x)
    kept = sum(r.bytes for r in found if r.why == "policy" and not r.host)
    assert (kept / 3 / ITEM, found.host_bytes / 3 / ITEM) == LLAMA_3_8B[preset]


def test_every_preset_is_in_the_table():
    assert {*LLAMA_3_8B, "custom"} == set(presets.__all__)


GATED = {"query_proj", "key_proj", "value_proj", "out_proj", "mlp_gate", "mlp_up", "mlp_down"}
FUSED = {"qkv_proj", "out_proj", "mlp_up", "mlp_down"}
APART = GATED - {"mlp_gate"}
# Gate and up of experts in transformers are one product: `moe_up`, as a fused one of an MLP is `mlp_up`.
EXPERTS = GATED - {"mlp_gate", "mlp_up", "mlp_down"} | {"moe_router", "moe_up", "moe_down"}
LATENT = (GATED | EXPERTS) - {"key_proj", "value_proj"} | {"qkv_proj"}
# The roles that an architecture of transformers has, and how many of its products in layers have none.
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "granite"), GATED),
    **dict.fromkeys(("stablelm", "cohere"), GATED),
    **dict.fromkeys(("gpt2", "gpt_neox", "bloom", "falcon", "gpt_bigcode", "mpt", "phi3"), FUSED),
    **dict.fromkeys(("phi", "opt", "starcoder2", "xglm", "biogpt", "gpt_neo", "bert", "roberta"), APART),
    **dict.fromkeys(("ctrl",), APART),
    **dict.fromkeys(
        ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe", "flex_olmo"), EXPERTS
    ),
    **dict.fromkeys(("cohere2_moe", "minimax_m2"), EXPERTS),
    # Their shared experts, or first layers, are MLPs.
    **dict.fromkeys(("qwen2_moe", "glm4_moe", "ernie4_5_moe", "exaone_moe", "afmoe"), GATED | EXPERTS),
    **dict.fromkeys(("hunyuan_v1_moe",), GATED | EXPERTS),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
}


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("layers.0.attention.wq", "query_proj"),  # torchtitan
        ("layers.0.attention.wo", "out_proj"),
        ("layers.0.attention.wkv_b", "qkv_proj"),
        ("layers.0.feed_forward.w1", "mlp_gate"),
        ("layers.0.feed_forward.w3", "mlp_up"),
        ("layers.0.feed_forward.w2", "mlp_down"),
        ("layers.0.moe.router.gate", "moe_router"),
        ("layers.0.moe.experts.w1", "moe_gate"),
        ("layers.0.moe.experts.w3", "moe_up"),
        ("layers.0.moe.experts.w2", "moe_down"),
        ("layers.0.moe.experts", "moe_experts"),
        ("layers.0.mlp.experts.gate_up_proj", "moe_up"),  # transformers
        ("layers.0.mlp.experts.7.down_proj", "moe_down"),
        ("layers.0.moe.shared_experts.w2", "mlp_down"),
        ("model.layers.10.self_attn.q_b_proj", "query_proj"),  # DeepSeek
        ("model.layers.10.self_attn.kv_b_proj", "qkv_proj"),
        ("encoder.block.0.layer.0.SelfAttention.o", "out_proj"),  # T5
        ("encoder.layer.11.attention.output.dense", "out_proj"),  # BERT
        ("encoder.layer.11.output.dense", "mlp_down"),
        ("output.dense", "mlp_down"),  # of a block alone
        ("backbone.layers.0.mamba.out_proj", None),
        ("lm_head", None),
    ],
)
def test_roles(path, role):
    assert role_of(path) == role


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_roles_of_transformers(kind):
    """Every product in a layer has the one role that it should have, as `info.module` has its path."""
    pytest.importorskip("transformers")
    from benchmarks.architectures import apply, build

    @functools.partial(checkpoint_policy, modules=True)
    def rule(info):
        if info.flops and "attention" not in str(info.op):
            met[info.module] = role_of(info.module)
        return False

    met: dict[str, str | None] = {}
    model = build(kind)
    apply(model, rule)
    model(input_ids=torch.tensor([[1, 4, 2, 7, 3, 9, 11, 5]])).logits.sum().backward()
    found = {path: role for path, role in met.items() if role is not None}
    assert set(found.values()) == ARCHITECTURES[kind]
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name in met}
    # The first of a low-rank pair is none: what is read is made by the second.
    assert {name.rpartition(".")[2] for name in linears - set(found)} <= {"q_a_proj", "kv_a_proj_with_mqa"}
    of = {
        path: [role for role, some in ROLES.items() if any(fits(one, path) for one in some)] for path in found
    }
    assert not [path for path, roles in of.items() if len(roles) > 1 and not roles[0].startswith("moe_")]


class Experts(nn.Module):
    """Three experts that own their matrices; each token goes to one. They read these as they are, one after
    another, rows of them that they gather, or casts."""

    READS = {
        "all": lambda w: w,
        "rows": lambda w: w[torch.tensor([2, 0, 1])],
        "cast": lambda w: w.double(),
    }

    def __init__(self, how, names):
        super().__init__()
        self.how, self.names = how, names
        for name in names:
            shape = {"w2": (24, 8), "down_proj": (24, 8), "gate_up_proj": (8, 48)}.get(name, (8, 24))
            self.register_parameter(name, nn.Parameter(torch.randn(3, *shape) / 4))

    def forward(self, x):
        ws = [getattr(self, name) for name in self.names]
        if self.how == "each":
            return torch.stack([self.of(*[t[i] for t in (x, *ws)]) for i in range(3)])
        return self.of(*map(self.READS[self.how], (x, *ws)))

    def of(self, x, *ws):
        *gates, down = ws
        gate, up = [x @ w for w in gates] if len(gates) == 2 else (x @ gates[0]).chunk(2, -1)
        return (gate.sin() * up) @ down


APART_NAMES, FUSED_NAMES = ("w1", "w3", "w2"), ("gate_up_proj", "down_proj")


@pytest.mark.parametrize(
    ("how", "names", "roles"),
    [
        *[(how, APART_NAMES, ["moe_gate", "moe_up", "moe_down"]) for how in ("all", "each")],
        *[(how, FUSED_NAMES, ["moe_up", "moe_down"]) for how in ("all", "each", "rows", "cast")],
        # Copies of matrices whose sides are alike cannot be told apart.
        *[(how, APART_NAMES, ["moe_experts"]) for how in ("rows", "cast")],
    ],
)
@pytest.mark.parametrize("way", ["backward", "vmap of grad", "compiled"])
def test_roles_of_experts_that_own_their_matrices(how, names, roles, way):
    found: dict[str | None, None] = {}

    @functools.partial(checkpoint_policy, modules=True)
    def rule(info):
        if info.op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            found[role_of(info.module)] = None
        return False

    block = nn.ModuleDict({"experts": Experts(how, names)})
    block.forward = lambda x: block["experts"](x)
    region, x = remat.remat(block, policy=rule), torch.randn(3, 5, 8)
    loss = lambda x: region(x).square().sum()  # noqa: E731
    if way == "compiled":
        torch._dynamo.reset()
        torch.compile(loss, backend="aot_eager")(x).backward()
        roles = ["moe_gate", "moe_up", "moe_down"][3 - len(names) :]  # Dynamo knows the names
    elif way == "backward":
        loss(x).backward()
    else:
        vmap(grad(loss))(torch.stack([x, x]))
        roles = roles if len(names) == 2 or how == "each" else ["moe_experts"]  # a batch copies them
    assert list(found) == roles


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: save_modules(), r"save_modules got no pattern: write patterns for paths"),
        (
            lambda: save_modules(nn.Linear),  # type: ignore[arg-type]
            "save_modules got <class",
        ),
        (lambda: save_modules("*.wo :: aten.nm.default"), "there is no op 'aten.nm.default'"),
        (lambda: presets.custom({"query": "device"}), r"'query', which is no role: there are .*\"\*.query\""),
        (lambda: presets.custom({"query_proj": "gpu"}), '"remat", "device" or "offload"'),
        (lambda: presets.custom({"mlpwi": "device", "mlp_up": "offload"}), "SAVE and OFFLOAD for mlp_up"),
    ],
)
def test_refused(make, message):
    with pytest.raises(TypeError, match=message) as error:
        make()
    assert isinstance(error.value, RematError)


def test_overlapping_settings():
    policy = presets.custom({"mlp_up": "device", "layers.1.mlp.*": "offload"})
    model = remat.apply(Model(), policy=policy)
    with pytest.raises(RematError, match="'mlp_up' says SAVE, 'layers.1.mlp.\\*' says OFFLOAD"):
        model(X)
    # Nothing is left of it.
    remat.apply(model, policy=presets.custom({"mlp_up": "device", "*.self_attn.*": "offload"}))
    model(X).sum().backward()


def test_a_preset_without_its_roles():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with pytest.raises(RematError, match="one of the roles query_proj, key_proj.* modules that do are '0'"):
        remat.remat(model, policy=presets.save_qkv_proj)(X)
    mlp = nn.Sequential()
    mlp.add_module("mlp", Mlp(8, 8))
    with pytest.warns(UnmatchedName, match="asks for one of the roles out_proj"):
        remat.remat(mlp, policy=presets.save_out_proj)(X)
    with pytest.raises(RematError, match="asks for one of the roles out_proj"):
        remat.remat(mlp, policy=presets.custom({"out_proj": "device"}, strict=True))(X)


def test_a_pattern_without_modules():
    with pytest.warns(
        UnmatchedName, match=r"asks for '\*.wo', which runs nothing in it: .*'layers.0.self_attn"
    ):
        remat.apply(Model(1), policy=save_modules("*.wo"))(X)
    with pytest.raises(RematError, match=r"asks for '\*.wo'"):
        remat.apply(Model(1), policy=save_modules("*.wo", strict=True))(X)
