"""One forward and backward of a function, measured: what is kept, what runs, what lives at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from remat._inspect.looking import looked_at
from remat._inspect.report.timeline import Timeline
from remat._inspect.report.watch import TRANSFER, Ran, Watch
from remat._inspect.residuals import Residuals, saved_residuals
from remat.transforms import RematError, flatten, is_tensor, leaves_behind, smooth, unflatten
from remat.transforms.compat import in_transform
from remat.transforms.entry import run_transparently
from remat.transforms.tape import listen


class NoBackward(RematError):
    """There is nothing to differentiate."""


@dataclass(frozen=True)
class Work:
    """Ops that ran, views and bookkeeping aside.

    Attributes:
        ops: how many.
        flops: their floating point operations; 0 for pointwise ops, reductions, and ops without a formula.
        bytes: of their operands and results, which is what they move where nothing is fused.
    """

    ops: int = 0
    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.ops + other.ops, self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Recomputed:
    """An op of the user's that runs again: the region, the op, the line, and the work of all its runs."""

    region: str
    op: str
    location: str
    work: Work


@dataclass(frozen=True)
class RegionUse:
    """A region, all its calls together.

    Attributes:
        name: the region's name.
        calls: how often it was called outside of other regions; 0 for one that is only called inside others.
        forward, recomputed: the work of its own ops, those of regions inside it aside.
        saved: bytes that its policy saves where they are.
        offloaded: bytes that its policy sends to the host.
        inputs: bytes of its arguments and captured tensors that its backward reads.
        holds_regions: whether other regions are called inside it.
        share: the largest share of all forward ops that one call of it runs.
    """

    name: str
    calls: int
    forward: Work
    recomputed: Work
    saved: int
    offloaded: int
    inputs: int
    holds_regions: bool
    share: float


@dataclass(frozen=True)
class Measured:
    """One forward and backward.

    Attributes:
        kept: what waits between them: activations, and the arguments and captured tensors that are read.
        peak: the most bytes alive at once of what ops made, in both; those in host memory aside.
        work: (pass, class of op) -> work; passes are "forward", "recompute", "backward". What is offloaded is
            sent in the first and comes back in the last, as the class "transfer".
        recomputed: what runs again, most expensive first.
        regions: the regions that were met, in order.
        timeline: which bytes lived when.
    """

    kept: Residuals
    peak: int
    work: dict[tuple[str, str], Work]
    recomputed: tuple[Recomputed, ...]
    regions: tuple[RegionUse, ...]
    timeline: Timeline

    def total(self, when: str) -> Work:
        """The work of one pass, transfers aside."""
        found = [work for (at, kind), work in self.work.items() if at == when and kind != TRANSFER]
        return sum(found, Work())

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations that stay on their device between forward and backward."""
        return self.kept.kept_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes that ops made and that live between forward and backward."""
        return sum(block.bytes for block in self.timeline.waiting())

    @property
    def flops(self) -> int:
        """Of all passes."""
        return sum(work.flops for work in self.work.values())


def measure(
    fn: Callable[..., Any], args: Any, kwargs: Any, *, regions: bool = True, whole: bool = False
) -> Measured:
    """Run `fn` forward and backward once, and forward once more to see what is kept.

    Modules, tensors and random streams are as before in the end. Without `regions`, regions run as plain
    functions. With `whole`, `fn` may run its backward itself, and no argument is differentiated that does
    not require grad.

    Raises:
        RematError: under a transform of `torch.func`, or when nothing can be differentiated.
    """
    if in_transform():
        raise RematError("call explain outside of torch.func transforms; they may be inside the function.")

    def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if regions else run_transparently(function, args, kwargs)

    kept = called(saved_residuals, fn, *args, **kwargs)
    with looked_at(fn, args, kwargs):
        watch = _watched(fn, called, args, kwargs, whole)
    return _summary(kept, watch)


def _watched(
    fn: Callable[..., Any], called: Callable[..., Any], args: Any, kwargs: Any, whole: bool
) -> Watch:
    watch = Watch()
    if followed(fn, called, args, kwargs, watch) or (whole and any(r.when == "backward" for r in watch.ran)):
        return watch
    if whole:
        raise NoBackward("nothing that the step returns requires grad, and it runs no backward.")
    # Nothing requires grad: differentiate every argument that can be, as torch.func.grad does.
    leaves, spec = flatten((args, kwargs))
    args, kwargs = unflatten([x.detach().requires_grad_() if smooth(x) else x for x in leaves], spec)
    watch = Watch()
    if not followed(fn, called, args, kwargs, watch):
        raise NoBackward(
            "the result depends on nothing that requires grad and on no floating point argument, so there is "
            "no backward to look at. Pass what is to be differentiated as an argument."
        )
    return watch


def followed(
    fn: Callable[..., Any], called: Callable[..., Any], args: Any, kwargs: Any, watch: Watch
) -> bool:
    """One forward and backward under `watch`; False when there is nothing to differentiate."""
    # Accelerators' backwards would run in threads where no mode sees them.
    with torch.enable_grad(), listen(watch.kept), torch.autograd.set_multithreading_enabled(False):
        with watch:
            out = called(fn, *args, **kwargs)
        results = [t for t in flatten(out)[0] if is_tensor(t) and t.requires_grad]
        del out
        roots = [t for t in results if t.grad_fn is not None]
        if not roots:
            return False
        leaves, cotangents = leaves_behind(roots), [torch.ones_like(t) for t in roots]
        watch.end_forward()
        with watch:
            torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    return True


# -- adding up ----------------------------------------------------------------------------------------


def _summary(kept: Residuals, watch: Watch) -> Measured:
    work: dict[tuple[str, str], Work] = defaultdict(Work)
    again: dict[tuple[str, str, str], Work] = defaultdict(Work)
    for ran in watch.ran:
        work[ran.when, ran.kind] += _work(ran)
        if ran.when == "recompute":
            again[ran.region or "", str(ran.op), ran.location] += _work(ran)
    recomputed = [Recomputed(*key, work) for key, work in again.items()]
    recomputed.sort(key=lambda r: (r.work.flops, r.work.bytes), reverse=True)
    found = tuple(_regions(watch))
    return Measured(kept, watch.blocks.peak, dict(work), tuple(recomputed), found, watch.timeline())


def _work(ran: Ran) -> Work:
    return Work(1, ran.flops, ran.bytes)


def _regions(watch: Watch) -> Iterable[RegionUse]:
    forward = [ran for ran in watch.ran if ran.when == "forward" and ran.kind != TRANSFER]
    # A call's outermost region is the one whose ops are not inner; a region of one call holds the others.
    owner = {ran.call: ran.region for ran in forward if ran.call is not None and not ran.inner}
    sizes: dict[Any, int] = defaultdict(int)
    for ran in forward:
        sizes[ran.call] += 1
    holders = {owner.get(ran.call) for ran in forward if ran.call is not None and ran.inner}
    for name in dict.fromkeys(ran.region for ran in watch.ran if ran.region is not None):
        calls = [call for call, region in owner.items() if region == name]
        yield RegionUse(
            name,
            len(calls),
            sum((_work(r) for r in forward if r.region == name), Work()),
            sum((_work(r) for r in watch.ran if r.region == name and r.when == "recompute"), Work()),
            watch.kept.bytes.get((name, "policy"), 0) + watch.kept.bytes.get((name, "decision"), 0),
            watch.kept.bytes.get((name, "offloaded"), 0),
            watch.kept.bytes.get((name, "argument"), 0) + watch.kept.bytes.get((name, "captured"), 0),
            name in holders,
            max((sizes[call] for call in calls), default=0) / max(len(forward), 1),
        )
