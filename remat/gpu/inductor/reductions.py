"""Which kernels compute the reductions of a graph, and how a GPU would cut these into blocks.

Numbers are added in the order of the blocks. So a reduction that runs twice has the same bits if its two
kernels are cut alike.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

from torch.fx import Node

from remat.gpu.inductor.machine import Chip, pretended


@contextlib.contextmanager
def reductions_noted() -> Iterator[dict[Node, list[str]]]:
    """Gives a dict that has the texts of its kernels for each reduction that is lowered within."""
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.utils import Placeholder

    names = "|".join(re.escape(str(name)) for name in Placeholder)
    noted: dict[Node, list[str]] = {}
    define = TritonScheduling.define_kernel

    def defined(self: Any, text: str, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        named = re.sub(names, "kernel", text)
        for one in schedule:
            if getattr(one, "is_reduction", bool)() and one.node is not None:
                # The others are read by it.
                for origin in sorted(filter(_reduces, one.node.get_origins()))[-1:]:
                    texts = noted.setdefault(origin, [])
                    texts += [] if named in texts else [named]
        return define(self, text, schedule, *args, **kwargs)

    with mock.patch.object(TritonScheduling, "define_kernel", defined):
        yield noted


def _reduces(node: Node) -> bool:
    # The maximum and the sum of a softmax are one op to Inductor.
    known = "prepare_softmax_online" in str(node.target)
    return known or any(tag.name == "reduction" for tag in getattr(node.target, "tags", ()))


def cut(texts: list[str], chip: Chip) -> tuple[str, ...]:
    """How kernels are cut, in the first configuration that a GPU would try: what decides about their bits."""
    return tuple(_cut(re.sub(r"'kernel_num_gb': [^,}]*,?", "", text), chip) for text in texts)


@lru_cache(maxsize=4096)
def _cut(text: str, chip: Chip) -> str:
    from torch._inductor.codecache import PyCodeCache

    with pretended(chip):
        tuner: Any = PyCodeCache.load(text).kernel
    first = tuner.configs[0]
    blocks = " ".join(f"{key}={value}" for key, value in sorted(first.kwargs.items()))
    kind = re.findall(r"@triton_heuristics\.(\w+)", text)[0]
    sizes = "x".join(map(str, tuner.size_hints.values()))
    return f"{kind} of {sizes} with {blocks} num_warps={first.num_warps}"
