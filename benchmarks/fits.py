"""`remat.fit` on models of other packages: which are planned, and how near planned peaks are to real ones.

    python -m benchmarks.fits [model ...]

The packages are not dependencies of this repository: those that cannot be imported are left out. Each model
is planned as it is, and at the lowest peak that a plan is found for. The steps then run, and the bytes that
they allocate are read from the profiler. Peaks and limits are over what lives throughout the step. Where the
lowest peak has regions, torch's checkpoint is measured on the blocks that fit tries: the lowest of those
peaks. There are two or three rows for each model in `benchmarks/results/fits.csv`.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.common.records import RESULTS
from remat._blocks import largest_class, listed
from remat.cli.measure import trace_memory

CSV = RESULTS / "fits.csv"
FIELDS = ("model", "planned_from", "peak", "predicted", "measured", "error", "regions", "limit")


def _of(package: str, name: str) -> Any:
    """What a package has by this name, if it is there."""
    return getattr(importlib.import_module(package), name)


def _vit() -> Any:
    ViT = _of("vit_pytorch", "ViT")

    model = ViT(image_size=64, patch_size=8, num_classes=10, dim=128, depth=4, heads=4, mlp_dim=256)
    return model, (torch.randn(8, 3, 64, 64),)


def _simple_vit() -> Any:
    SimpleViT = _of("vit_pytorch", "SimpleViT")

    model = SimpleViT(image_size=64, patch_size=8, num_classes=10, dim=128, depth=4, heads=4, mlp_dim=256)
    return model, (torch.randn(8, 3, 64, 64),)


def _cait() -> Any:
    CaiT = _of("vit_pytorch.cait", "CaiT")

    sizes = {"image_size": 64, "patch_size": 8, "num_classes": 10, "dim": 128, "heads": 4, "mlp_dim": 256}
    return CaiT(**sizes, depth=4, cls_depth=2), (torch.randn(8, 3, 64, 64),)


def _max_vit() -> Any:
    MaxViT = _of("vit_pytorch.max_vit", "MaxViT")

    model = MaxViT(num_classes=10, dim_conv_stem=16, dim=24, dim_head=8, depth=(2, 2), window_size=4)
    return model, (torch.randn(2, 3, 64, 64),)


def _x_transformer() -> Any:
    layers = _of("x_transformers", "Decoder")(dim=128, depth=4, heads=4)
    model = _of("x_transformers", "TransformerWrapper")(num_tokens=256, max_seq_len=128, attn_layers=layers)
    return model, (torch.randint(256, (4, 128)),)


def _titans() -> Any:
    MemoryAsContextTransformer = _of("titans_pytorch", "MemoryAsContextTransformer")

    model = MemoryAsContextTransformer(
        num_tokens=256, dim=64, depth=2, segment_len=32, num_persist_mem_tokens=2
    )
    return model, (torch.randint(256, (1, 64)),)


def _neural_memory() -> Any:
    NeuralMemory = _of("titans_pytorch", "NeuralMemory")

    class Memories(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(NeuralMemory(dim=32, chunk_size=16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)[0]
            return x

    return Memories(), (torch.randn(2, 64, 32),)


def _performer() -> Any:
    PerformerLM = _of("performer_pytorch", "PerformerLM")

    model = PerformerLM(num_tokens=256, max_seq_len=128, dim=128, depth=3, heads=4, causal=False)
    return model, (torch.randint(256, (4, 128)),)


def _tabnet() -> Any:
    TabNet = _of("pytorch_tabnet.tab_network", "TabNet")

    groups = torch.eye(32)
    model = TabNet(32, 4, n_d=16, n_a=16, n_steps=4, group_attention_matrix=groups, virtual_batch_size=64)
    return model, (torch.randn(256, 32),), lambda out: out[0].square().mean() + out[1].mean()


def _kornia_loftr() -> Any:
    LoFTR = _of("kornia.feature", "LoFTR")

    class Matcher(torch.nn.Module):
        """What is trained of it: its matching takes depth maps."""

        def __init__(self) -> None:
            super().__init__()
            whole = LoFTR(pretrained=None)
            self.backbone, self.places, self.loftr = whole.backbone, whole.pos_encoding, whole.loftr_coarse

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            found = [self.places(self.backbone(image)[0]).flatten(2).mT for image in (one, other)]
            first, second = self.loftr(*found)
            return torch.einsum("nlc,nsc->nls", first, second)

    return Matcher(), (torch.rand(1, 1, 64, 64), torch.rand(1, 1, 64, 64))


def _kornia_vit() -> Any:
    VisionTransformer = _of("kornia.models.vit", "VisionTransformer")

    model = VisionTransformer(image_size=64, patch_size=8, embed_dim=128, depth=4, num_heads=4)
    return model, (torch.randn(4, 3, 64, 64),)


def _egnn() -> Any:
    EGNN_Network = _of("egnn_pytorch", "EGNN_Network")

    model = EGNN_Network(num_tokens=21, num_positions=64, dim=32, depth=3, num_nearest_neighbors=8)
    feats, coors = torch.randint(21, (2, 64)), torch.randn(2, 64, 3)
    return model, (feats, coors), lambda out: out[0].square().mean() + out[1].square().mean()


def _soft_moe() -> Any:
    SoftMoE = _of("soft_moe_pytorch", "SoftMoE")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(SoftMoE(dim=64, seq_len=64, num_experts=4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    return Experts(), (torch.randn(4, 64, 64),)


def _se3() -> Any:
    SE3Transformer = _of("se3_transformer_pytorch", "SE3Transformer")

    model = SE3Transformer(
        dim=16, heads=2, depth=2, dim_head=8, num_degrees=2, valid_radius=10, num_neighbors=4
    )
    return model, (torch.randn(1, 16, 16), torch.randn(1, 16, 3), torch.ones(1, 16).bool())


def _mega() -> Any:
    Mega = _of("mega_pytorch", "Mega")

    model = Mega(num_tokens=256, dim=64, depth=3, attn_dim_qk=32, attn_dim_value=64, ema_heads=8)
    return model, (torch.randint(256, (2, 64)),)


def _mixture() -> Any:
    MoE = _of("mixture_of_experts", "MoE")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(MoE(dim=32, num_experts=4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: Any = 0.0
            for layer in self.layers:
                out, aux = layer(x)
                x, loss = x + out, loss + aux
            return x.square().mean() + loss

    return Experts(), (torch.randn(2, 64, 32),)


def _timm(name: str, batch: int = 2, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        create = _of("timm", "create_model")

        return create(name, num_classes=10, **options), (torch.randn(batch, 3, 64, 64),)

    return make


_SWIN: Any = {"img_size": 64, "window_size": 4, "embed_dim": 48, "depths": (2, 2, 4, 2)}

MODELS: dict[str, Callable[[], Any]] = {
    "vit": _vit,
    "simple_vit": _simple_vit,
    "cait": _cait,
    "max_vit": _max_vit,
    "x_transformer": _x_transformer,
    "titans_mac": _titans,
    "titans_memory": _neural_memory,
    "performer": _performer,
    "tabnet": _tabnet,
    "kornia_loftr": _kornia_loftr,
    "kornia_vit": _kornia_vit,
    "egnn": _egnn,
    "soft_moe": _soft_moe,
    "se3": _se3,
    "mega": _mega,
    "mixture_of_experts": _mixture,
    "swin": _timm("swin_tiny_patch4_window7_224", **_SWIN),
    "swin_batch_32": _timm("swin_tiny_patch4_window7_224", batch=32, **_SWIN),
    "convnext": _timm("convnext_atto"),
    "convnext_batch_32": _timm("convnext_atto", batch=32),
    "resnet": _timm("resnet26"),
    "efficientnet": _timm("efficientnet_b0"),
}


def measured(model: Any, args: Any, loss: Callable[[Any], Any]) -> int:
    """The most that a step allocates; the model's result is held throughout, as by a loop that logs it."""

    def step(mark: Callable[[], None]) -> Any:
        torch.manual_seed(0)  # routes that are drawn are the same in all steps
        out = model(*args)
        mark()
        loss(out).backward()
        return out

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step(lambda: None)
    model.zero_grad(set_to_none=True)
    gc.collect()
    peak = trace_memory(step).peak
    model.zero_grad(set_to_none=True)
    return peak


@contextlib.contextmanager
def _checkpointed(model: Any, names: list[str]) -> Iterator[None]:
    """Torch's checkpoint around these blocks."""

    def around(forward: Any) -> Any:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    blocks = [model.get_submodule(name) for name in names]
    for block in blocks:
        block.forward = around(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _lowest_checkpoint(model: Any, args: Any, loss: Callable[[Any], Any]) -> tuple[int, int]:
    """The lowest peak of torch's checkpoint on blocks as `fit` finds them, and how many they are."""
    found = []
    for names in [*listed(model)] or [largest_class(model)]:
        with _checkpointed(model, names):
            found.append((measured(model, args, loss), len(names)))
    return min(found)


def _loss(out: Any) -> Any:
    return out.float().square().mean()


def rows(name: str) -> Iterator[dict[str, Any]]:
    """What is planned of a model, and what is measured: as it is, and at the lowest peak."""
    torch.manual_seed(0)
    model, args, *rest = MODELS[name]()
    loss = rest[0] if rest else _loss
    options: dict[str, Any] = {"loss": loss}
    try:
        plain = remat.fit(model, *args, peak="1TiB", **options)
    except remat.RematError:
        options["measure"] = True
        plain = remat.fit(model, *args, peak="1TiB", **options)
    held, how = plain.held.bytes, "two steps" if options.get("measure") else "shapes"

    def made(peak: str, planned: int, regions: int, limit: int | None = None) -> dict[str, Any]:
        found, free = measured(model, args, loss), "" if limit is None else limit - held
        facts = name, how, peak, planned - held, found, f"{(planned - held) / found - 1:.4f}", regions, free
        return dict(zip(FIELDS, facts, strict=True))

    yield made("plain", plain.plain_bytes, 0)
    try:
        remat.fit(model, *args, peak=held + 8, **options)
    except remat.RematError as error:
        found = re.search(r"lowest found is ([\d,]+)", str(error))
        assert found is not None, error
        limit = int(found[1].replace(",", ""))
        done = remat.fit(model, *args, peak=limit, **options)
        yield made("lowest", done.peak_bytes, len(done.applied), limit)
        remat.nn.remove(model)
        try:
            peak, blocks = _lowest_checkpoint(model, args, loss)
        except RuntimeError as error:  # torch.func inside refuses its hooks
            print(f"{name}: torch's checkpoint: {str(error)[:80]}", flush=True)
            return
        facts = name, "", "torch checkpoint", "", peak, "", blocks, ""
        yield dict(zip(FIELDS, facts, strict=True))


def main(names: list[str]) -> None:
    """Print the rows of these models, or print and write those of all."""
    warnings.simplefilter("ignore")
    found: list[Any] = []
    for name in names or list(MODELS):
        try:
            for row in rows(name):
                print(*row.values(), sep="\t", flush=True)
                found.append(row)
        except ImportError as error:
            print(f"{name}: left out: {error}", flush=True)
        except Exception as error:  # of one model; the others have rows
            print(f"{name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    if not names:
        with CSV.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    main(sys.argv[1:])
