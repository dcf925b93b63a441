"""Compiling in tests: graphs counted, nothing shared between tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition


def compiled(fn: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    """`fn` in one graph, or an error."""
    return torch.compile(fn, backend=backend, fullgraph=True, **options)


class Graphs:
    """`fn` compiled in one graph, by AOTAutograd and Inductor's partitioner; counts what came out.

    Attributes:
        frames: how often Dynamo compiled.
        forward, backward: ops of the last graphs; what has no backward of its own is a forward.
        saved_bytes: what the forward hands to the backward, inputs of the function included.
    """

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.frames = 0
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.saved_bytes = 0
        inner = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            partition_fn=min_cut_rematerialization_partition,
        )

        def backend(module: Any, inputs: Any, **_: Any) -> Any:
            self.frames += 1
            return inner(module, inputs)

        self.run = compiled(fn, backend, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    @property
    def both(self) -> Counter[str]:
        return self.forward + self.backward

    def _forward(self, module: torch.fx.GraphModule, _: Any) -> Any:
        self.forward = ops(module)
        return make_boxed_func(module.forward)

    def _backward(self, module: torch.fx.GraphModule, _: Any) -> Any:
        self.backward = ops(module)
        inputs = [
            n for n in module.graph.nodes if n.op == "placeholder" and not n.name.startswith("tangents")
        ]
        values = [n.meta["val"] for n in inputs]
        self.saved_bytes = sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
        return make_boxed_func(module.forward)


def ops(module: torch.fx.GraphModule) -> Counter[str]:
    """Names of the ops of a graph, without namespace and overload."""
    targets: list[Any] = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return Counter(
        op._schema.name.rpartition("::")[2] for op in targets if isinstance(op, torch._ops.OpOverload)
    )


def dots(counts: Counter[str]) -> int:
    """Matrix products, however a batch dimension makes torch write them."""
    return sum(counts[name] for name in ("mm", "bmm", "addmm", "baddbmm"))
