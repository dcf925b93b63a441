"""Which values autograd saves for their shape alone: found by putting NaN in their place.

    python -m tests.regions.only_shapes

For every op that torch's OpInfo knows, each floating value that a node of autograd saves is replaced, alone,
by a stand-in of stride 0 that is full of NaN. Where first and second derivatives are the same bit for bit, in
all samples and dtypes, the node does not read its numbers. A table in `tape/reachability.py` has those.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.conformance.torch_db import databases, inexact, tensors

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_SAMPLES = 12


def stand_in(tensor: Tensor) -> Tensor:
    """NaN of this shape, dtype and device, one element of memory."""
    return torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def nodes_of(outs: list[Tensor]) -> Iterator[Any]:
    """The nodes behind results, each once."""
    seen, stack = set[Any](), [t.grad_fn for t in outs]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
            yield node


def saved_by(node: Any) -> list[str]:
    """The attributes of a node that hold a floating tensor in the default layout."""
    found = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            value = getattr(node, name.replace("_raw", "", 1))
            if inexact(value) and value.layout is torch.strided:
                found.append(name)
    return found


def derivatives(fn: Callable[..., Any], leaves: list[Tensor], hollow: tuple[str, str] | None) -> list[Any]:
    """First and second derivatives of `fn`; `hollow`: nodes by name, and what they save that is replaced."""
    torch.manual_seed(0)
    outs = [t for t in tensors(fn()) if t.requires_grad]
    if hollow is not None:
        for node in nodes_of(outs):
            if node.name() == hollow[0]:
                getattr(node, hollow[1]).register_hooks(lambda t: t, stand_in)
    first = torch.autograd.grad(outs, leaves, [_like(t) for t in outs], create_graph=True, allow_unused=True)
    smooth = [g for g in first if g is not None and g.requires_grad]
    if not smooth:
        return [*first]
    try:
        second = torch.autograd.grad(smooth, leaves, [_like(t) for t in smooth], allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        return [*first, str(error).split("\n")[0]]
    return [*first, *second]


def _like(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(tensor.shape, generator=generator).to(tensor.dtype).to(tensor.device)


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )


def check(fn: Callable[..., Any], leaves: list[Tensor]) -> dict[tuple[str, str], bool]:
    """For each value that a node of `fn` saves, by names: whether its numbers do not matter."""
    torch.manual_seed(0)
    outs = [t for t in tensors(fn()) if t.requires_grad]
    saved = {(node.name(), name) for node in nodes_of(outs) for name in saved_by(node)}
    found: dict[tuple[str, str], bool] = {}
    right = derivatives(fn, leaves, None)
    if not _same(right, derivatives(fn, leaves, None)):
        return found  # NaN of its own, or not repeated
    for pair in saved:
        try:
            found[pair] = _same(right, derivatives(fn, leaves, pair))
        except Exception:
            found[pair] = False
    return found


def programs(
    op: Any, dtype: torch.dtype, device: str = "cpu"
) -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    """The samples of an op of torch's database: calls and leaves."""
    if not op.supports_autograd or dtype not in op.supported_backward_dtypes(device):
        return
    for sample in itertools.islice(op.sample_inputs(device, dtype, requires_grad=True), _SAMPLES):
        leaves = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
        if leaves:
            yield lambda s=sample: op(s.input, *s.args, **s.kwargs), leaves


def table(name: str, device: str = "cpu") -> list[tuple[str, str, str, bool]]:
    """(node, attribute, dtype, whether its numbers do not matter) for each sample of an op."""
    found = []
    for dtype in DTYPES:
        with contextlib.suppress(Exception):  # samples that the database itself skips
            for fn, leaves in programs(databases()[0][name], dtype, device):
                with contextlib.suppress(Exception):
                    verdicts = check(fn, leaves).items()
                    found += [(*pair, str(dtype).removeprefix("torch."), ok) for pair, ok in verdicts]
    return found


def main(device: str = "cpu") -> None:
    warnings.simplefilter("ignore")
    verdicts: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    ops: dict[tuple[str, str], set[str]] = defaultdict(set)
    # A process for each op: some kernels do not expect such memory.
    context = multiprocessing.get_context("fork")
    for name in databases()[0]:
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            try:
                found = pool.submit(table, name, device).result(timeout=120)
            except (concurrent.futures.BrokenExecutor, TimeoutError):
                print(f"{name}: its kernels do not take such memory", flush=True)
                continue
        for node, attribute, dtype, ok in found:
            verdicts[node, attribute][dtype].append(ok)
            ops[node, attribute].add(name)
    print(f"torch {torch.__version__}, {device}")
    for pair, by in sorted(verdicts.items()):
        if any(all(seen) for seen in by.values()):
            said = ", ".join(f"{dtype} {'yes' if all(ok) else 'NO'} ({len(ok)})" for dtype, ok in by.items())
            print(
                f"{pair[0]} {pair[1].removeprefix('_raw_saved_')}: {said}: {', '.join(sorted(ops[pair])[:6])}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
