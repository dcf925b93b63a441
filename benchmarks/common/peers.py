"""The peers: what a model can be run with, each a few lines behind one interface.

A peer is named by a text, which is its row in every table: `none`, `torch checkpoint`, `torch SAC`,
`torch SAC titan`, `torch budget dp 0.5` (compiled only), `torch_remat`, `torch_remat regions`,
`jax save_matmuls`, `budget 0.5`, `fit 0.5` and `fit save_nothing` (eager only), `names`, or one of our
policies as one writes it in Python; compiled, each but JAX's also with ` without buffer reuse` behind it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.models import Around, Part, plain
from remat import checkpoint_name, checkpoint_policy, save_names
from remat.cli.models import Wrap
from remat.cli.rows import MATMULS, parse, remat_under, torch_checkpoint, torch_sac, untouched

aten = torch.ops.aten
NO_REUSE = " without buffer reuse"
# What the peers that choose by place keep: the inputs of nothing but cheap steps are left out.
KEPT = ("qkv", "q", "k", "v", "attention", "up", "gate")
# Of a Llama block, as policies are written.
LLAMA_KEPT = ", ".join(repr(name) for name in KEPT if name != "qkv")
KEPT_NAMES, OFFLOADED_NAMES = f"save_names({LLAMA_KEPT})", f"offload(save_names({LLAMA_KEPT}))"


@dataclass(frozen=True)
class Peer:
    """One way to run a model.

    Attributes:
        name: as in the tables.
        family: none, torch, torch_remat, remat or jax.
        around: what it puts into the model.
        compiling: a context for compilation, for peers that are settings of the compiler.
        only: "compiled" where the peer means nothing in eager, else empty.
    """

    name: str
    family: str
    around: Around
    compiling: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)
    only: str = ""


def peer(name: str) -> Peer:
    """The peer called `name`; a name that is none of ours is read as a policy."""
    if name.endswith(NO_REUSE):
        return without_reuse(peer(name.removesuffix(NO_REUSE)))
    if name.startswith("torch budget "):
        return memory_budget(name)
    if name.startswith("jax "):
        return Peer(name, "jax", Around(untouched))
    if name.startswith("budget "):
        return ours(name, checkpoint_policy(budget=float(name.split()[1])))
    if name.startswith("fit "):
        # A panel makes the regions, of its own step.
        return Peer(name, "remat", Around(untouched), only="eager")
    if name == "names":
        return ours(name, save_names(*KEPT), part=checkpoint_named)
    if name in FIXED:
        return FIXED[name]
    return ours(name, parse(name), part=checkpoint_named if "names(" in name else plain)


def is_planned(name: str) -> bool:
    """Whether a peer follows plans: a budget's, or those that make a step fit."""
    return name.startswith(("budget ", "fit "))


def without_reuse(one: Peer) -> Peer:
    """The peer where Inductor gives every buffer memory of its own, and lets go of it after its last use.

    As a rule it holds memory that is free until a buffer of the same size needs it; that can be the peak.
    """

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        from torch._inductor import config

        with one.compiling(), config.patch(allow_buffer_reuse=False):
            yield

    return replace(one, name=one.name + NO_REUSE, compiling=compiling, only="compiled")


def ours(name: str, policy: Any, part: Part = plain) -> Peer:
    return Peer(name, "remat", Around(partial(remat_under, policy), part, {"policy": policy}))


def checkpoint_named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint_name(fn(*args), name)


# -- torch ----------------------------------------------------------------------------------------------


def memory_budget(name: str) -> Peer:
    """`torch budget SOLVER SHARE`: the compiler's own choice of what to keep, for the whole graph."""
    solver, share = name.split()[2:]
    settings = {"activation_memory_budget": float(share), "activation_memory_budget_solver": solver}

    def patched() -> AbstractContextManager[Any]:
        from torch._functorch import config

        return config.patch(settings)

    return Peer(name, "torch", Around(untouched), patched, only="compiled")


def torch_sac_titan(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Selective checkpointing as torchtitan does it: its list of ops, and every second matmul of them."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    contexts = lambda: create_selective_checkpoint_contexts(every_second())  # noqa: E731
    return partial(checkpoint, fn, use_reentrant=False, context_fn=contexts)


def every_second() -> Callable[..., Any]:
    from torch.utils.checkpoint import CheckpointPolicy

    count: dict[bool, int] = defaultdict(int)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in COUNTED:
            count[context.is_recompute] += 1
        second = op in COUNTED and count[context.is_recompute] % 2 == 0
        kept = op in TITAN and not second
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


COUNTED = {aten.mm.default, aten.addmm.default, aten.linear.default}
# torchtitan's list, without those of its ops that no model here calls.
TITAN = {
    *COUNTED,
    *MATMULS,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten.max.default,
    aten.topk.default,
}


# -- torch_remat ----------------------------------------------------------------------------------------


def torch_remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Meta's package, which recomputes a whole block but for what is marked in it."""
    import torch_remat as package

    return package.checkpoint(region_name="block")(fn)


def torch_remat_region(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    import torch_remat as package

    return package.region(fn, name, recompute=name not in KEPT)


def rival(name: str, wrap: Wrap, family: str = "torch", part: Part = plain) -> Peer:
    return Peer(name, family, Around(wrap, part))


FIXED = {
    known.name: known
    for known in (
        rival("none", untouched, "none"),
        rival("torch checkpoint", torch_checkpoint),
        rival("torch SAC", torch_sac),
        rival("torch SAC titan", torch_sac_titan),
        rival("torch_remat", torch_remat, "torch_remat"),
        rival("torch_remat regions", torch_remat, "torch_remat", torch_remat_region),
    )
}
