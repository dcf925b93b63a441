"""A machine that looks to Inductor and Triton as if it had a GPU, for as long as code for one is made.

Private names of Inductor, of `torch.cuda` and of Triton, each replaced inside a context that puts it back.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from remat.gpu.inductor.methods import methods_by_ops


@dataclass(frozen=True)
class Chip:
    """What compilers ask of a GPU.

    Attributes:
        name: what it is called.
        capability: compute capability, as (major, minor).
        processors: streaming multiprocessors.
        shared: bytes of shared memory that one block can have.
        memory: bytes of the device.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    shared: int
    memory: int

    @property
    def number(self) -> int:
        """The capability as Triton writes it: 90 is (9, 0)."""
        return 10 * self.capability[0] + self.capability[1]


DEVICE = torch.device("cuda", 0)
# What functions that were called on this machine keep: answers for another one.
_CACHES = (
    ("torch._inductor.runtime.hints", "DeviceProperties.create"),
    ("torch._inductor.codecache", "CacheBase.get_system"),
    ("torch._inductor.select_algorithm", "get_algorithm_selector_cache"),
    ("torch._inductor.utils", "get_gpu_type"),
    ("torch._inductor.utils", "is_big_gpu"),
    ("torch._inductor.utils", "get_device_tflops"),
    ("torch._inductor.utils", "get_gpu_dram_gbps"),
)
_WITH_TRITON = ("scheduler", "compile_fx", "fx_passes.pad_mm", "kernel.mm_grouped")


@contextlib.contextmanager
def pretended(chip: Chip) -> Iterator[None]:
    """Within, compilers find this GPU. Nothing runs on it. (2.11, 2.13, 2.14)"""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import codecache, compile_fx, scheduler  # noqa: F401
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    answers = _answers(chip)
    able = {"get_compute_capability": lambda device=None: chip.number, "is_triton_capable": lambda *_: True}
    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.cuda, answers), (CudaInterface, {**answers, **able})):
            for name, value in names.items():
                if hasattr(owner, name):
                    made: Any = staticmethod(value) if owner is CudaInterface else value
                    stack.enter_context(mock.patch.object(owner, name, made))
        for name in _WITH_TRITON:
            module = sys.modules.get(f"torch._inductor.{name}")
            if hasattr(module, "has_triton"):
                stack.enter_context(mock.patch.object(module, "has_triton", lambda: True))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        # They read all files of Triton for the keys of caches, which are of no use here. (2.11 has but one.)
        for owner, name in ((codecache, "triton_key"), (_triton, "triton_hash_with_backend")):
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, lambda: "pretended"))
        # Fake tensors of a GPU ask for a context of it. (2.11 wherever it finds one.)
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        raw = "_cuda_getCurrentRawStream"
        stack.enter_context(mock.patch.object(torch._C, raw, lambda device: 0, create=True))
        stack.enter_context(methods_by_ops())
        stack.enter_context(triton_target(chip.number))
        _forget()
        stack.callback(_forget)
        yield


def _answers(chip: Chip) -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=chip.name,
        gcnArchName="",
        major=chip.capability[0],
        minor=chip.capability[1],
        multi_processor_count=chip.processors,
        total_memory=chip.memory,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=chip.shared,
        shared_memory_per_multiprocessor=chip.shared + 1024,
        L2_cache_size=50 << 20,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: chip.capability,
        "get_device_name": lambda device=None: chip.name,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        # What torch's checkpoint keeps beside an op that could draw.
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "_DeviceGuard": lambda device: contextlib.nullcontext(),
        "_lazy_init": lambda: None,
    }


@contextlib.contextmanager
def triton_target(capability: int) -> Iterator[None]:
    """Within, Triton compiles for a GPU of this capability, 90 for (9, 0)."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    target = GPUTarget("cuda", capability, 32)
    driver = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: DEVICE,
        get_device_interface=lambda: torch.cuda,
    )
    holder: Any = triton.runtime.driver
    before = holder._active
    holder.set_active(driver)
    try:
        yield
    finally:
        holder._active = before


def _forget() -> None:
    for name, path in _CACHES:
        found: Any = sys.modules.get(name)
        for part in path.split("."):
            found = getattr(found, part, None)
        if hasattr(found, "cache_clear"):
            found.cache_clear()


# The Triton that a release of torch was built with, by the metadata of its wheels for GPUs.
_TRITONS = {"2.11": "3.6.0", "2.12": "3.7.0", "2.13": "3.7.0", "2.14": "3.8.0", "2.15": "3.9.0"}


def triton_wanted() -> str | None:
    """What to install so that kernels can be compiled; None where a Triton is there."""
    if importlib.util.find_spec("triton") is not None:
        return None
    version = _TRITONS.get(".".join(torch.__version__.split(".")[:2]))
    return f"triton=={version}" if version else "the triton that this torch names in its release notes"
