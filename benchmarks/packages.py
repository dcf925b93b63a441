"""Public model packages as tiny models: with remat what they are without.

    python -m benchmarks.packages [--site FOLDER] [package ...]

Installs pinned packages without their dependencies into a folder (a temporary one unless `--site` names one),
so that torch is the one at hand, and runs each in a process of its own. Three training steps with every way
of making regions are compared with the same steps without: loss, gradients, parameters, buffers and the
random state. Then `torch.func.grad` over `functional_call` with parameters and buffers. There is a row for
each package and way in `benchmarks/results/packages.csv`, and a table in `docs/measured/trust.md`.
"""

# The packages are installed when it runs, in a folder of its own.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false, reportArgumentType=false

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.metadata
import multiprocessing
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import functional_call, grad

from benchmarks.common.records import RESULTS
from benchmarks.suite.report import rewrite
from remat import checkpoint_policy, nn as remat_nn, remat, save_matmuls, save_nothing

CSV, PAGE = RESULTS / "packages.csv", Path("docs/measured/trust.md")
FIELDS = ("package", "version", "torch", "way", "result", "what")
SECONDS = 600  # for one package
STEPS = 3
NOTHING = 1e-9  # numbers below are zeros with a rounding error, as gradients of biases before a norm
# Packages and the small ones that they import. Nothing here brings a torch of its own.
PINNED = """
timm==1.0.31 torchvision==0.28.0 vit-pytorch==1.26.11 x-transformers==2.31.10 einx==0.4.3 loguru==0.7.3
frozendict==2.5.1 monai==1.6.1 kornia==0.9.0 kornia_rs==0.2.0 torch_geometric==2.8.1 aiohttp==3.14.5
aiosignal==1.4.0 aiohappyeyeballs==2.7.1 attrs==26.1.0 frozenlist==1.8.0 multidict==7.2.1 propcache==0.5.4
yarl==1.25.1 psutil==7.2.2 xxhash==4.1.0 e3nn==0.6.0 opt_einsum==3.4.0 opt_einsum_fx==0.1.4 mace-torch==0.3.16
ase==3.29.0 matscipy==1.3.1 torch-ema==0.3 prettytable==3.18.0 wcwidth==0.9.4 torchmetrics==1.9.0
lightning-utilities==0.15.3 h5py==3.16.0 lmdb==3.0.0 configargparse==1.9.0 GitPython==3.2.1
neuraloperator==2.0.0 tensorly==0.10.0 tensorly-torch==0.5.0 torch-harmonics==0.9.3 configmypy==0.2.0
ruamel.yaml==0.19.1 torchsde==0.2.6 trampoline==0.1.2 gpytorch==1.15.2 linear_operator==0.6.1
jaxtyping==0.3.11 wadler-lindig==0.1.8 scikit-learn==1.9.1 joblib==1.6.0 threadpoolctl==3.8.0
botorch==0.18.1 pyro-ppl==1.9.2 pyro-api==0.1.2 pyre-extensions==0.0.32 multipledispatch==1.0.0
typing_inspect==0.9.0 mypy_extensions==1.2.0 zuko==1.6.0 opacus==1.6.0 torchjd==0.18.0 quadprog==0.1.14
qpsolvers==4.13.0 performer-pytorch==1.1.4 axial-positional-embedding==0.3.12 local-attention==1.11.2
hyper-connections==0.4.11 torch-einops-utils==0.2.0 egnn-pytorch==0.2.8 torchdiffeq==0.2.5
segmentation-models-pytorch==0.6.0 nflows==0.14 UMNN==1.71 linear_attention_transformer==0.19.1
product_key_memory==0.3.0 linformer==0.2.3 colt5_attention==0.11.2 ema-pytorch==0.8.3 einops-exts==0.0.4
rotary-embedding-torch==0.9.1 reformer_pytorch==1.4.4 perceiver-pytorch==0.11.0
vector-quantize-pytorch==1.32.0 siren-pytorch==0.1.7 torchcde==0.2.5 geoopt==0.5.1 normflows==1.7.3
snntorch==1.0.0 einops==0.8.2 pandas==3.1.1 orjson==3.13.0
""".split()
POLICIES = {
    "save_nothing": save_nothing,
    "save_matmuls": save_matmuls,
    "budget": checkpoint_policy(budget=0.5, cost="flops"),
}


@dataclass
class Tiny:
    """A tiny model, what it is called with, and which of its modules become regions.

    Attributes:
        layers: as `remat.nn.apply` takes them; None for the whole model as one region.
        other_masks: whether it drops transposed tensors, for which `torch.func` without remat draws another
            mask than eager code and regions do (docs/limits.md). There it is compared without dropout.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    layers: Any = None
    other_masks: bool = False


class Composed(nn.Module):
    """A module whose forward is a function of others."""

    def __init__(self, fn: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.fn(self, *inputs)


def images(size: int = 32, channels: int = 3) -> tuple[Tensor]:
    return (torch.randn(2, channels, size, size),)


def words(count: int = 16) -> tuple[Tensor]:
    return (torch.randint(0, 32, (2, count)),)


# -- the packages ------------------------------------------------------------------------------------------


def timm() -> Tiny:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, drop_path_rate=0.2, proj_drop_rate=0.1
    )
    return Tiny(model, images(), "blocks.*")


def timm_convnext() -> Tiny:
    import timm

    model = timm.create_model("convnext_atto", num_classes=5, drop_path_rate=0.2)
    return Tiny(model, images(64), "stages.*.blocks.*")


def timm_resnet() -> Tiny:
    import timm

    return Tiny(
        timm.create_model("resnet10t", num_classes=5), images(64), ["layer1.*", "layer2.*", "layer3.*"]
    )


def vit_pytorch() -> Tiny:
    from vit_pytorch import ViT

    model = ViT(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=64, dropout=0.1)
    return Tiny(model, images(), "transformer.layers.*.*")


def x_transformers() -> Tiny:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dropout=0.1, ff_dropout=0.1, rotary_pos_emb=True)
    model = TransformerWrapper(num_tokens=32, max_seq_len=32, attn_layers=layers)
    return Tiny(model, words(), "attn_layers.layers.*.1")


def monai_unet() -> Tiny:
    from monai.networks.nets import UNet

    model = UNet(2, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, dropout=0.1)
    return Tiny(model, images(32, 1), lambda name, module: type(module).__name__ == "ResidualUnit")


def monai_swin() -> Tiny:
    from monai.networks.nets import SwinUNETR

    model = SwinUNETR(1, 2, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2))
    return Tiny(model, images(64, 1), lambda n, m: type(m).__name__ == "SwinTransformerBlock")


def kornia() -> Tiny:
    import kornia

    conv = nn.Conv2d(3, 3, 3, padding=1)

    def run(m: Any, x: Tensor) -> Tensor:
        x = kornia.filters.gaussian_blur2d(m.conv(x), (3, 3), (1.0, 1.0))
        return kornia.color.rgb_to_hsv(x.sigmoid()) + kornia.filters.sobel(x)

    return Tiny(Composed(run, conv=conv), images(16))


def graph() -> tuple[Tensor, Tensor]:
    return torch.randn(10, 8), torch.randint(0, 10, (2, 30))


def torch_geometric() -> Tiny:
    from torch_geometric.nn import GAT

    return Tiny(GAT(8, 16, 2, heads=2, dropout=0.1, norm="batch_norm"), graph(), "convs.*")


def torch_geometric_gin() -> Tiny:
    from torch_geometric.nn import GIN

    return Tiny(GIN(8, 16, 2, dropout=0.1), graph(), "convs.*")


def e3nn() -> Tiny:
    from e3nn import o3
    from e3nn.nn import BatchNorm, Gate

    irreps = o3.Irreps("4x0e + 2x1o")
    gate = Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
    product = o3.FullyConnectedTensorProduct(irreps, irreps, gate.irreps_in)

    def run(m: Any, x: Tensor) -> Tensor:
        return m.norm(m.gate(m.product(x, x)))

    return Tiny(
        Composed(run, product=product, gate=gate, norm=BatchNorm(gate.irreps_out)),
        (torch.randn(6, irreps.dim),),
        ["product", "gate"],
    )


def mace() -> Tiny:
    import numpy as np
    from e3nn import o3
    from mace import data, modules, tools
    from mace.tools import torch_geometric as pyg

    table = tools.AtomicNumberTable([1, 8])
    model = modules.ScaleShiftMACE(
        r_max=4.0, num_bessel=4, num_polynomial_cutoff=5, max_ell=2,
        interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
        num_interactions=2, num_elements=2, hidden_irreps=o3.Irreps("4x0e + 4x1o"),
        MLP_irreps=o3.Irreps("4x0e"),
        gate=torch.nn.functional.silu, atomic_energies=np.array([-1.0, -3.0]), avg_num_neighbors=2,
        atomic_numbers=table.zs, correlation=2, atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )  # fmt: skip
    atoms = data.Configuration(
        atomic_numbers=np.array([8, 1, 1]),
        positions=np.array([[0.0, -2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        properties={"energy": -1.5, "forces": np.ones((3, 3))},
        property_weights={"energy": 1.0, "forces": 1.0},
    )
    item = data.AtomicData.from_config(atoms, z_table=table, cutoff=3.0)
    batch = next(iter(pyg.dataloader.DataLoader([item, item], batch_size=2))).to_dict()

    def run(m: Any, scale: Tensor) -> Any:
        out = m.mace(dict(batch) | {"positions": batch["positions"] * scale}, training=True)
        return out["energy"], out["forces"]

    return Tiny(Composed(run, mace=model), (torch.ones(()),), ["mace.interactions.*", "mace.products.*"])


def neuraloperator() -> Tiny:
    from neuralop.models import FNO

    model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
    return Tiny(model, images(16, 1), "fno_blocks.channel_mlp.*")


def neuraloperator_whole() -> Tiny:
    from neuralop.models import FNO

    model = FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
    return Tiny(model, images(16, 1))


def torchsde() -> Tiny:
    import torchsde

    class Sde(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, t: Tensor, y: Tensor) -> Tensor:
            return self.drift(y).tanh()

        def g(self, t: Tensor, y: Tensor) -> Tensor:
            return self.spread(y).sigmoid()

    def run(m: Any, y: Tensor) -> Tensor:
        ts = torch.linspace(0, 0.3, 3)
        noise = torchsde.BrownianInterval(0.0, 0.3, size=(4, 3), entropy=7)
        return torchsde.sdeint(m.sde, y, ts, dt=0.1, method="euler", bm=noise)

    return Tiny(Composed(run, sde=Sde()), (torch.randn(4, 3),), ["sde.drift", "sde.spread"])


def gpytorch() -> Tiny:
    import gpytorch

    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
    features = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def run(m: Any, x: Tensor) -> Tensor:
        matrix = m.kernel(m.features(x)).to_dense() + 0.1 * torch.eye(len(x))
        return torch.linalg.cholesky(matrix)

    return Tiny(Composed(run, kernel=kernel, features=features), (torch.randn(8, 3),))


def gpytorch_marginal() -> Tiny:
    import gpytorch

    class Gp(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x = torch.linspace(0, 1, 8)[:, None]
    y = x[:, 0].sin()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    gp = Gp(x, y, likelihood)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    return Tiny(Composed(lambda m, x: m.marginal(m.marginal.model(x), y), marginal=marginal), (x,))


def botorch() -> Tiny:
    from botorch.acquisition import qExpectedImprovement
    from botorch.models import SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler

    x = torch.rand(8, 2, dtype=torch.float64)
    gp = SingleTaskGP(x, (x.sin().sum(-1, keepdim=True)))
    gp.eval()
    sampler = SobolQMCNormalSampler(torch.Size([8]), seed=1)
    improvement = qExpectedImprovement(gp, best_f=0.5, sampler=sampler)
    points = torch.rand(3, 2, 2, dtype=torch.float64).requires_grad_()
    return Tiny(Composed(lambda m, x: m.improvement(x), improvement=improvement), (points,))


def botorch_noisy() -> Tiny:
    from botorch.acquisition.logei import qLogNoisyExpectedImprovement
    from botorch.models import SingleTaskGP
    from botorch.sampling import SobolQMCNormalSampler

    x = torch.rand(8, 2, dtype=torch.float64)
    gp = SingleTaskGP(x, (x.sin().sum(-1, keepdim=True)))
    gp.eval()
    sampler = SobolQMCNormalSampler(torch.Size([8]), seed=1)
    improvement = qLogNoisyExpectedImprovement(gp, X_baseline=x, sampler=sampler, prune_baseline=False)
    points = torch.rand(3, 2, 2, dtype=torch.float64).requires_grad_()
    return Tiny(Composed(lambda m, x: m.improvement(x), improvement=improvement), (points,))


def zuko() -> Tiny:
    import zuko

    flow = zuko.flows.NSF(3, 2, transforms=2, hidden_features=(16, 16))
    run = lambda m, x, c: m.flow(c).log_prob(x)  # noqa: E731
    return Tiny(
        Composed(run, flow=flow), (torch.randn(6, 3), torch.randn(6, 2)), "flow.transform.transforms.*"
    )


def opacus() -> Tiny:
    from opacus.layers import DPLSTM, DPMultiheadAttention

    def run(m: Any, x: Tensor) -> Tensor:
        out, _ = m.lstm(x)
        return m.attention(out, out, out)[0]

    model = Composed(run, lstm=DPLSTM(4, 8), attention=DPMultiheadAttention(8, 2))
    return Tiny(model, (torch.randn(5, 3, 4),), ["lstm", "attention"])


def opacus_grad_samples() -> Tiny:
    from opacus import GradSampleModule

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return Tiny(GradSampleModule(model), (torch.randn(5, 4),))


def torchjd() -> Tiny:
    from torchjd.aggregation import UPGrad
    from torchjd.autojac import jac

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def run(m: Any, x: Tensor) -> Tensor:
        losses = [m.model(x).square().mean(), m.model(x).sin().mean()]
        matrices = jac(losses, list(m.model.parameters()), retain_graph=True)
        joined = torch.cat([g.reshape(2, -1) for g in matrices], 1)
        return losses[0] + losses[1] + UPGrad()(joined.detach()).sum()

    return Tiny(Composed(run, model=model), (torch.randn(5, 4),), "model.*")


def jaxtyping() -> Tiny:
    from jaxtyping import Float, jaxtyped

    rows, square = Float[Tensor, "batch d"], Float[Tensor, "d d"]

    def run(m: Any, x: Tensor) -> Tensor:
        with jaxtyped("context"):
            assert isinstance(x, rows) and isinstance(m.model.weight, square)
            out = torch.tanh(m.model(x))
            assert isinstance(out, rows)
        return out

    return Tiny(Composed(run, model=nn.Linear(4, 4)), (torch.randn(3, 4),))


def performer_pytorch() -> Tiny:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=32, max_seq_len=16, dim=16, depth=2, heads=2, causal=False, dim_head=8)
    return Tiny(model, words(), "performer.net.layers.*.*")


def egnn_pytorch() -> Tiny:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=8, dim=16, depth=2, num_nearest_neighbors=3)
    return Tiny(model, (torch.randint(0, 8, (1, 8)), torch.randn(1, 8, 3)), "layers.*.1")


def torchdiffeq() -> Tiny:
    from torchdiffeq import odeint

    field = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    run = lambda m, y: odeint(lambda t, y: m.field(y), y, torch.linspace(0, 1, 3), method="dopri5")  # noqa: E731
    return Tiny(Composed(run, field=field), (torch.randn(4, 3),), "field")


def segmentation_models_pytorch() -> Tiny:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=2)
    return Tiny(model, images(32), ["encoder.layer*.*", "decoder.blocks.*"])


def nflows() -> Tiny:
    from nflows.transforms import MaskedAffineAutoregressiveTransform

    make = lambda: MaskedAffineAutoregressiveTransform(3, 16, use_batch_norm=True)  # noqa: E731
    model = nn.Sequential(*[Composed(lambda m, x: m.t(x)[0], t=make()) for _ in range(2)])
    return Tiny(model, (torch.randn(6, 3),), "*.t")


def linear_attention_transformer() -> Tiny:
    from linear_attention_transformer import LinearAttentionTransformerLM

    model = LinearAttentionTransformerLM(num_tokens=32, dim=16, heads=2, depth=2, max_seq_len=16)
    return Tiny(model, words())


def ema_pytorch() -> Tiny:
    from ema_pytorch import EMA

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def run(m: Any, x: Tensor) -> Tensor:
        m.ema.update()
        return m.model(x) - m.ema(x).detach()

    ema = EMA(model, beta=0.9, update_after_step=0, update_every=1)
    return Tiny(Composed(run, model=model, ema=ema), (torch.randn(3, 4),), "model")


def einops_exts() -> Tiny:
    from einops_exts import rearrange_many

    model = nn.Linear(8, 24)

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = rearrange_many(m.model(x).chunk(3, -1), "b n (h d) -> b h n d", h=2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return Tiny(Composed(run, model=model), (torch.randn(2, 5, 8),))


def rotary_embedding_torch() -> Tiny:
    from rotary_embedding_torch import RotaryEmbedding

    rotary = RotaryEmbedding(dim=8, learned_freq=True)
    run = lambda m, q: m.rotary.rotate_queries_or_keys(m.model(q)).sin()  # noqa: E731
    return Tiny(Composed(run, rotary=rotary, model=nn.Linear(8, 8)), (torch.randn(1, 2, 6, 8),))


def reformer_pytorch() -> Tiny:
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=32, dim=16, depth=2, max_seq_len=32, heads=2, bucket_size=8, n_hashes=2, causal=True
    )
    return Tiny(model, words(32))


def perceiver_pytorch() -> Tiny:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        num_freq_bands=2, depth=2, max_freq=5.0, input_channels=3, num_latents=4, latent_dim=16,
        cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=3,
        attn_dropout=0.1, ff_dropout=0.1,
    )  # fmt: skip
    return Tiny(model, (torch.randn(2, 8, 8, 3),), lambda name, module: type(module).__name__ == "PreNorm")


def vector_quantize_pytorch() -> Tiny:
    from vector_quantize_pytorch import VectorQuantize

    run = lambda m, x: m.quantize(m.model(x))[:3:2]  # noqa: E731
    quantize = VectorQuantize(dim=8, codebook_size=16, decay=0.8)
    return Tiny(Composed(run, model=nn.Linear(8, 8), quantize=quantize), (torch.randn(2, 6, 8),))


def siren_pytorch() -> Tiny:
    from siren_pytorch import SirenNet

    return Tiny(SirenNet(2, 16, 1, num_layers=3, dropout=0.1), (torch.randn(8, 2),), "layers.*")


def torchcde() -> Tiny:
    import torchcde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 6)

        def forward(self, t: Tensor, z: Tensor) -> Tensor:
            return self.linear(z).tanh().view(*z.shape[:-1], 3, 2)

    def run(m: Any, x: Tensor) -> Tensor:
        path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))
        return torchcde.cdeint(path, m.field, x.new_ones(2, 3), path.interval, adjoint=False, method="rk4",
                               options={"step_size": 0.5})  # fmt: skip

    return Tiny(Composed(run, field=Field()), (torch.randn(2, 4, 2),), "field")


def geoopt() -> Tiny:
    import geoopt

    ball = geoopt.PoincareBall()
    model = nn.Linear(4, 4)
    run = lambda m, x: ball.logmap0(ball.mobius_add(ball.expmap0(m.model(x)), ball.expmap0(x)))  # noqa: E731
    return Tiny(Composed(run, model=model), (torch.randn(3, 4) / 4,))


def normflows() -> Tiny:
    import normflows as nf

    flows = [nf.flows.AutoregressiveRationalQuadraticSpline(3, 1, 16) for _ in range(2)]
    model = nf.NormalizingFlow(nf.distributions.DiagGaussian(3), flows)
    return Tiny(Composed(lambda m, x: m.flow.forward_kld(x), flow=model), (torch.randn(6, 3),))


def snntorch() -> Tiny:
    import snntorch

    def run(m: Any, x: Tensor) -> Tensor:
        memory, out = m.leaky.init_leaky(), []
        for _ in range(3):
            spike, memory = m.leaky(m.model(x), memory)
            out.append(spike + memory)
        return torch.stack(out)

    return Tiny(Composed(run, model=nn.Linear(4, 4), leaky=snntorch.Leaky(beta=0.9)), (torch.randn(3, 4),))


def diffusers() -> Tiny:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 16),
        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"), dropout=0.1,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    model.forward = _first(model.forward)
    return Tiny(model, (*images(16), torch.tensor(3)), ["down_blocks.*", "up_blocks.*"], other_masks=True)


def _first(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: forward(*args, return_dict=False)[0]


def transformers() -> Tiny:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    run = lambda m, x: m.llama(input_ids=x).logits  # noqa: E731
    return Tiny(Composed(run, llama=LlamaForCausalLM(config)), words(), "llama.model.layers.*")


# Each with the name of its distribution.
CASES: dict[Callable[[], Tiny], str] = {
    timm: "timm", timm_convnext: "timm", timm_resnet: "timm", vit_pytorch: "vit-pytorch",
    x_transformers: "x-transformers", monai_unet: "monai", monai_swin: "monai", kornia: "kornia",
    torch_geometric: "torch_geometric", torch_geometric_gin: "torch_geometric", e3nn: "e3nn",
    mace: "mace-torch", neuraloperator: "neuraloperator", neuraloperator_whole: "neuraloperator",
    torchsde: "torchsde", gpytorch: "gpytorch", gpytorch_marginal: "gpytorch", botorch: "botorch",
    botorch_noisy: "botorch",
    zuko: "zuko", opacus: "opacus", opacus_grad_samples: "opacus", torchjd: "torchjd",
    jaxtyping: "jaxtyping", performer_pytorch: "performer-pytorch", egnn_pytorch: "egnn-pytorch",
    torchdiffeq: "torchdiffeq", segmentation_models_pytorch: "segmentation-models-pytorch",
    nflows: "nflows", linear_attention_transformer: "linear-attention-transformer",
    ema_pytorch: "ema-pytorch", einops_exts: "einops-exts", rotary_embedding_torch: "rotary-embedding-torch",
    reformer_pytorch: "reformer-pytorch", perceiver_pytorch: "perceiver-pytorch",
    vector_quantize_pytorch: "vector-quantize-pytorch", siren_pytorch: "siren-pytorch",
    torchcde: "torchcde", geoopt: "geoopt", normflows: "normflows", snntorch: "snntorch",
    diffusers: "diffusers", transformers: "transformers",
}  # fmt: skip


# -- the comparison ----------------------------------------------------------------------------------------


def torchvision_without_its_library() -> None:
    """torchvision registers rules for ops of its compiled library, which another torch cannot load. Models
    need only its Python."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor")


def made(build: Callable[[], Tiny], dtype: torch.dtype | None = None) -> Tiny:
    torch.manual_seed(3)
    case = build()
    if dtype is not None:
        case.model.to(dtype)
        case.inputs = tuple(
            [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in case.inputs]
        )
    return case


def number(out: Any) -> Tensor:
    parts = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([t.double().sin().mean() * (k + 1) for k, t in enumerate(parts)]).sum()


def steps(case: Tiny, call: Callable[..., Any]) -> list[Any]:
    """What three training steps leave, each of them."""
    seen: list[Any] = []
    for at in range(STEPS):
        torch.manual_seed(100 + at)
        case.model.zero_grad()
        loss = number(call(*case.inputs))
        loss.backward()
        leaves = [*case.model.named_parameters(), *((f"input {k}", x) for k, x in enumerate(case.inputs))]
        grads = {
            n: None if p.grad is None else p.grad.clone()
            for n, p in leaves
            if isinstance(p, Tensor) and p.is_leaf
        }
        for x in case.inputs:
            if isinstance(x, Tensor):
                x.grad = None
        with torch.no_grad():
            for p in case.model.parameters():
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)
        state = {n: t.detach().clone() for n, t in case.model.state_dict().items() if isinstance(t, Tensor)}
        seen.append(
            {"loss": loss.detach(), "gradient": grads, "state": state, "random": torch.get_rng_state()}
        )
    return seen


def functional(case: Tiny, call: Callable[..., Any] | None = None) -> Any:
    """`torch.func.grad` by the parameters, with buffers of its own."""
    model = case.model
    for module in model.modules() if case.other_masks else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    run = remat(_called, policy=save_nothing) if call is not None else _called

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return number(run(model, parameters, buffers, case.inputs))

    seen = []
    for at in range(2):
        torch.manual_seed(200 + at)
        seen.append({"gradient": grad(loss)(parameters), "random": torch.get_rng_state()})
    return [*seen, {"buffers": buffers}]


def _called(model: nn.Module, parameters: Any, buffers: Any, inputs: tuple[Any, ...]) -> Any:
    return functional_call(model, (parameters, buffers), inputs)


def unlike(found: Any, expected: Any) -> tuple[float, str]:
    """The largest relative difference, and where."""
    worst, where = 0.0, ""
    ours, spec = pytree.tree_flatten_with_path(found)
    theirs, other = pytree.tree_flatten_with_path(expected)
    if spec != other:
        return float("inf"), "other results"
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        if (a is None) != (b is None):
            distance = float("inf")
        elif not isinstance(a, Tensor) or torch.equal(a, b) or (a.isnan() & b.isnan() | (a == b)).all():
            continue
        else:
            a, b = a.detach().to(torch.complex128), b.detach().to(torch.complex128)
            distance = float((a - b).abs().max() / b.abs().max().clamp(min=NOTHING))
            distance = float("inf") if distance != distance else distance
        if distance > worst:
            worst, where = distance, pytree.keystr(path)
    return worst, where


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def compared(plain: Callable[[], Any], ours: Callable[[], Any]) -> tuple[str, str]:
    try:
        expected = plain()
    except Exception as error:
        return "torch refuses", said(error)
    try:
        found = ours()
    except Exception as error:
        return "refused", said(error)
    distance, where = unlike(found, expected)
    if distance == 0:
        return "bitwise", ""
    return ("equal" if distance < 1e-6 else "differs"), f"{distance:.1e} at {where}"


def regions(case: Tiny, policy: Any, whole: bool) -> Callable[..., Any]:
    """The model with regions, or all of it as one."""
    if whole or case.layers is None:
        return remat(case.model, policy=policy)
    remat_nn.apply(case.model, policy=policy, layers=case.layers)
    return case.model


def rows(build: Callable[[], Tiny]) -> Iterator[tuple[str, str, str]]:
    """A row for each way."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    layered = made(build).layers is not None
    for whole in (False, True) if layered else (True,):
        for name, policy in POLICIES.items():
            case, other = made(build), made(build)
            way = f"{'the whole' if whole else 'layers'}, {name}"
            call = regions(other, policy, whole)
            yield (way, *compared(lambda: steps(case, case.model), lambda: steps(other, call)))  # noqa: B023
    for whole in (False, True) if layered else (True,):
        result, what = derived(build, whole)
        if result == "differs":
            # Gradients that come to nothing differ by rounding, which more digits tell from an error.
            result, more = derived(build, whole, torch.float64)
            what = f"in float32 {what}; in float64 {more or 'bitwise'}"
        yield (f"{'the whole' if whole else 'layers'}, torch.func", result, what)


def derived(build: Callable[[], Tiny], whole: bool, dtype: torch.dtype | None = None) -> tuple[str, str]:
    """`torch.func` with regions and without."""
    case, other = made(build, dtype), made(build, dtype)
    if not whole:
        remat_nn.apply(other.model, policy=save_nothing, layers=other.layers)
    return compared(lambda: functional(case), lambda: functional(other, remat if whole else None))


# -- the processes -----------------------------------------------------------------------------------------


def install(folder: Path) -> None:
    """The pinned packages, into a folder that an earlier run may have filled."""
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *PINNED], check=True)


def in_a_process(build: Callable[[], Tiny], site: Path) -> Iterator[dict[str, Any]]:
    """The rows of a package, in a process that may crash or be late."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    forked = multiprocessing.get_context("fork")  # torch is there already, and no thread of its own
    process = forked.Process(target=work, args=(build, site, theirs))
    process.start()
    theirs.close()
    end, name = time.monotonic() + SECONDS, build.__name__
    with contextlib.suppress(EOFError):
        while ours.poll(max(0.0, end - time.monotonic())):
            yield ours.recv()
    late = process.is_alive() and time.monotonic() >= end
    if late:
        process.kill()
    process.join()
    if late or process.exitcode:
        what = f"not done within {SECONDS} s" if late else f"the process ended with {process.exitcode}"
        yield {"package": name, "result": "not run", "what": what}


def work(build: Callable[[], Tiny], site: Path, pipe: Any) -> None:
    # Last: a package among them has a folder `benchmarks`, too.
    sys.path.append(str(site))
    torchvision_without_its_library()
    facts = {"package": build.__name__, "torch": torch.__version__}
    try:
        facts["version"] = importlib.metadata.version(CASES[build])
        for way, result, what in rows(build):
            pipe.send(facts | {"way": way, "result": result, "what": what})
    except Exception as error:
        pipe.send(facts | {"result": "not run", "what": said(error)})


def table(found: list[dict[str, Any]]) -> str:
    """What came out, a row for each package."""
    lines = ["| package | version | models | ways | bitwise | equal | refused by torch alone | otherwise |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---|")
    for name in dict.fromkeys(CASES.values()):
        mine = [row for row in found if CASES[CASE_NAMES[row["package"]]] == name]
        if not mine:
            continue
        count = Counter(row["result"] for row in mine)
        others = {f"{row['way']}: {row['result']}" if row.get("way") else row["result"]
                  for row in mine if row["result"] not in USUAL}  # fmt: skip
        models, version = len({row["package"] for row in mine}), mine[0].get("version", "")
        figures = [str(n) for n in (models, len(mine), *(count[kind] for kind in USUAL))]
        lines.append(f"| {name} | {version} | {' | '.join(figures)} | {'; '.join(sorted(others))} |")
    return "\n".join(lines)


USUAL = ("bitwise", "equal", "torch refuses")
CASE_NAMES = {build.__name__: build for build in CASES}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__)
    parser.add_argument("--site", type=Path, help="the folder for the packages; filled if it is not there")
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(b.__name__ for b in CASES)}")
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        site = options.site or Path(folder) / "site"
        install(site)
        for build in CASES:
            if not options.packages or build.__name__ in options.packages:
                for row in in_a_process(build, site):
                    found.append(row)
                    print(*(row.get(field, "") for field in FIELDS), sep="\t", flush=True)
    ran = {row["package"] for row in found}
    if options.packages and CSV.exists():  # those of the others stand
        with CSV.open(newline="") as file:
            found = [row for row in csv.DictReader(file) if row["package"] not in ran] + found
    order = list(CASE_NAMES)
    found.sort(key=lambda row: order.index(row["package"]))
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    rewrite(PAGE, {"packages": table(found)})
    return int(any(row["result"] in ("differs", "refused", "not run") for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
