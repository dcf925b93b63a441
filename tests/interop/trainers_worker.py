"""What each of two processes does for `test_packages.py`: accelerate, Hugging Face's Trainer, Lightning."""

from __future__ import annotations

import copy
import logging
import os
import socket
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import remat
from remat import save_matmuls, save_nothing
from remat.interop import huggingface
from tests.helpers import OpCounter

POLICIES = {"none": None, "nothing": save_nothing, "matmuls": save_matmuls}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        intermediate_size=32,
        vocab_size=11,
        hidden_size=16,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def tokens(at: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(at))


def whole(model: nn.Module) -> list[torch.Tensor]:
    """The parameters, put together where they are sharded."""
    # Fixes the order, since FSDP1 and Trainer wrap modules.
    pairs = sorted(model.state_dict().items(), key=lambda pair: pair[0])
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for _, t in pairs]


def accelerated(policy: Any) -> tuple[list[torch.Tensor], int]:
    """Three steps of accelerate with FSDP2, regions in the layers: parameters, matmuls of the backwards."""
    from accelerate import (  # pyright: ignore[reportMissingImports]
        Accelerator,
        FullyShardedDataParallelPlugin,
    )
    from accelerate.state import AcceleratorState  # pyright: ignore[reportMissingImports]

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    model = llama()
    if policy is not None:
        remat.nn.apply(model, layers="model.layers.*", policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    dots = 0
    for at in range(3):
        batch = tokens(2 * at + dist.get_rank())
        loss = model(input_ids=batch, labels=batch).loss
        with OpCounter() as counter:
            accelerator.backward(loss)
        dots += counter.dots
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), dots


def by_trainer(policy: Any, folder: str) -> tuple[list[torch.Tensor], int]:
    """Three steps of `transformers.Trainer`, under DistributedDataParallel."""
    from accelerate.state import AcceleratorState  # pyright: ignore[reportMissingImports]

    AcceleratorState._reset_state(reset_partial_state=True)
    model = llama()
    if policy is not None:
        huggingface.enable(model, policy)
    rows: Any = [{"input_ids": row, "labels": row} for at in range(6) for row in tokens(at)]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo",
    )
    with OpCounter() as counter:
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    return whole(model), counter.dots


def by_lightning(policy: Any, folder: str) -> tuple[list[torch.Tensor], int]:
    """Three steps of Lightning's Trainer, under its strategy "ddp"."""
    import lightning  # pyright: ignore[reportMissingImports]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            if policy is not None:
                remat.nn.apply(self.model, layers="model.layers.*", policy=policy)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module()
    with OpCounter() as counter:
        trainer.fit(module, torch.utils.data.DataLoader(torch.cat([tokens(at) for at in range(6)]), 2))  # type: ignore[arg-type]
    return whole(module), counter.dots


def same(found: dict[str, tuple[list[torch.Tensor], int]]) -> None:
    expected, least = found["none"]
    before = whole(llama())
    assert not all(map(torch.equal, expected, before))
    for name, (parameters, dots) in found.items():
        assert all(map(torch.equal, parameters, expected)), name
        assert dots > least if name == "nothing" else dots == least, (name, dots, least)


def work(rank: int, folder: str, which: str, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",  # says to Lightning that the processes are there
        "ACCELERATE_USE_CPU": "true",
    }
    if which == "accelerate":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        same({name: accelerated(policy) for name, policy in POLICIES.items()})
    elif which == "Trainer":
        same({name: by_trainer(policy, folder) for name, policy in POLICIES.items()})
    else:
        same({name: by_lightning(copy.copy(policy), folder) for name, policy in POLICIES.items()})
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
