"""JAX as a peer: the same blocks, weights and batch under `jax.jit`, the matching `jax.checkpoint` policy.

The extra `jax` brings it; nothing of it is imported before a peer is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from benchmarks.common.models import GPT, Llama, Model, MoE, Problem

# Ours -> JAX's name of the policy. Its attention on a CPU is made of dots, which `dots_saveable` keeps too.
POLICIES = {
    "save_nothing": "nothing_saveable",
    "save_matmuls": "dots_saveable",
    "save_weight_matmuls": "dots_with_no_batch_dims_saveable",
    "save_everything": "everything_saveable",
}


def available() -> bool:
    """Whether JAX can be imported; asks it not to take most of a GPU's memory for itself."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


class JaxStep:
    """A compiled step and its operands. `peak` is XLA's: temporaries and results, without its operands."""

    # It runs on streams of its own, which events on torch's do not time.
    wall_clock = True

    def __init__(self, model: Model, problem: Problem, mode: str, policy: str) -> None:
        import jax  # pyright: ignore[reportMissingImports]

        scanned = mode == "scan"
        loss = partial(total, network(model, policy, scanned, problem.batch.is_cuda), scanned)
        self.mode, self.batch = mode, to_jax(problem.batch[:, None] if mode == "vmap" else problem.batch)
        self.order = problem.params["blocks"]
        # A whole step gives its parameters away; all others can share them.
        self.params = copied(problem) if mode == "step" else shared(problem)
        self.rate = jax.numpy.zeros(())
        step, donated = {
            "vmap": (jax.vmap(jax.grad(loss), (None, 0)), ()),
            "step": (partial(descend, loss), (0,)),
        }.get(mode, (jax.grad(loss), ()))
        operands = (self.params, self.batch, *((self.rate,) if mode == "step" else ()))
        self.run = jax.jit(step, donate_argnums=donated).lower(*operands).compile()
        memory: Any = self.run.memory_analysis()
        self.peak = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def __call__(self) -> Any:
        """One step, waited for."""
        import jax  # pyright: ignore[reportMissingImports]

        if self.mode != "step":
            return jax.block_until_ready(self.run(self.params, self.batch))
        # The parameters are given away and come back updated, at rate 0 with the same numbers.
        loss, self.params = jax.block_until_ready(self.run(self.params, self.batch, self.rate))
        return loss

    def gradients(self) -> Any:
        """Those of one step, as the tree of tensors that torch's steps give; none of a whole step."""
        return (
            None
            if self.mode == "step"
            else {"blocks": ordered(pytree.tree_map(to_torch, self()), self.order)}
        )


def copied(problem: Problem) -> Any:
    return pytree.tree_map(to_jax, problem.params["blocks"])


@lru_cache(maxsize=1)
def of_problem(key: int) -> dict[str, Any]:
    """What is made once of the problem with this id; that of another one goes."""
    return {}


def shared(problem: Problem) -> Any:
    made = of_problem(id(problem))
    if "params" not in made:
        made["params"] = copied(problem)
    return made["params"]


def descend(loss: Callable[..., Any], params: Any, batch: Any, rate: Any) -> tuple[Any, Any]:
    import jax  # pyright: ignore[reportMissingImports]

    value, gradients = jax.value_and_grad(loss)(params, batch)
    return value, jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, gradients)


def total(block: Callable[..., Any], scanned: bool, params: Any, x: Any) -> Any:
    import jax  # pyright: ignore[reportMissingImports]

    if scanned:
        x = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)[0]
    else:
        for layer in params:
            x = block(layer, x)
    return jax.numpy.square(x.astype("float32")).mean()


def network(model: Model, policy: str, scanned: bool, gpu: bool) -> Callable[..., Any]:
    """The block under the policy."""
    import jax  # pyright: ignore[reportMissingImports]

    attention = partial(jax.nn.dot_product_attention, implementation="cudnn" if gpu else "xla")
    kinds: list[tuple[type, Callable[..., Any]]] = [(MoE, moe), (GPT, gpt), (Llama, llama)]
    made = next((block for kind, block in kinds if isinstance(model, kind)), missing)
    block = partial(made, model, attention)
    if policy == "none":
        return block
    rule = getattr(jax.checkpoint_policies, POLICIES[policy])
    # In a scan nothing can be merged across iterations, and JAX's docs say to leave the barrier out.
    return jax.checkpoint(block, policy=rule, prevent_cse=not scanned)


def missing(model: Model, attention: Any, p: Any, x: Any) -> Any:
    raise NotImplementedError(f"{model.name} is not written in JAX")


def gpt(model: GPT, attention: Any, p: Any, x: Any) -> Any:
    x = attended(model, attention, p, x)
    h = layer_norm(x, p["norm2_scale"], p["norm2_shift"])
    return x + (gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"])


def attended(model: GPT, attention: Any, p: Any, x: Any) -> Any:
    """The first half of a GPT block."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    h = layer_norm(x, p["norm1_scale"], p["norm1_shift"])
    qkv = h @ p["qkv"] + p["qkv_bias"]
    q, k, v = (z.reshape(*z.shape[:-1], model.heads, -1) for z in jnp.split(qkv, 3, -1))
    out = attention(q, k, v, is_causal=model.causal).reshape(x.shape)
    return x + (out @ p["proj"] + p["proj_bias"])


def moe(model: MoE, attention: Any, p: Any, x: Any) -> Any:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    x = attended(model, attention, p, x)
    tokens = layer_norm(x, p["norm2_scale"], p["norm2_shift"]).reshape(-1, x.shape[-1])
    capacity = model.chosen * len(tokens) // model.experts
    weight, taken = jax.lax.top_k(jax.nn.softmax(tokens @ p["router"], -1).T, capacity)
    inner = jnp.matmul(tokens[taken], p["first"])
    made = jnp.matmul(gelu(inner), p["second"]) * weight[..., None]
    return x + jnp.zeros_like(tokens).at[taken].add(made).reshape(x.shape)


def gelu(x: Any) -> Any:
    import jax  # pyright: ignore[reportMissingImports]

    return jax.nn.gelu(x, approximate=False)


def llama(model: Llama, attention: Any, p: Any, x: Any) -> Any:
    import jax  # pyright: ignore[reportMissingImports]

    h, head = rms_norm(x, p["norm1"]), model.width // model.heads
    q, k, v = (z.reshape(*z.shape[:-1], -1, head) for z in (h @ p["q"], h @ p["k"], h @ p["v"]))
    attended = attention(rotate(q), rotate(k), v, is_causal=True).reshape(x.shape)
    x = x + attended @ p["proj"]
    h = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    wide = x.astype("float32")
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return (normed * scale + shift).astype(x.dtype)


def rms_norm(x: Any, scale: Any) -> Any:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    wide = x.astype("float32")
    return (wide / jnp.sqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rotate(x: Any) -> Any:
    """As `remat.cli.models.rotate`, for x [..., t, h, e]."""
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    t, half = x.shape[-3], x.shape[-1] // 2
    angle = jnp.arange(t)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle).astype(x.dtype)[:, None, :] for f in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def ordered(got: Any, like: Any) -> Any:
    """`got` with the keys of its dicts in the order of those of `like`; JAX sorts them."""
    if isinstance(like, list):
        return [ordered(*pair) for pair in zip(got, like, strict=True)]
    return {key: got[key] for key in like}


def to_jax(tensor: Tensor) -> Any:
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    return jnp.asarray(tensor.float().cpu().numpy(), dtype=str(tensor.dtype).removeprefix("torch."))


def to_torch(array: Any) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.array(array, dtype="float32"))
