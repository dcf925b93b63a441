"""What is kept of the ops of a forward: verdicts, names that change them, what regions share."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from remat.transforms.compat import below_levels, is_strided, storage_key, watch_fused_steps
from remat.transforms.context import Mode, active, untracked
from remat.transforms.offload import INPUT, send
from remat.transforms.ops import Traits, has_strides, metas, storage, tensors_in
from remat.transforms.placeholders import Meta
from remat.transforms.pytree import flatten
from remat.transforms.sharded import local_tensors, placements_of
from remat.transforms.tape.tape import OFFLOAD, RECOMPUTE, SAVE, Node, ValueNumbering, map_tensors

# Dropout between the layers of an RNN: where its probability is among the arguments, and whether it trains.
OWN_DRAWS = {"_cudnn_rnn": (11, 12), "miopen_rnn": (9, 10)}


class KeptValues(Mode):
    """The part of a recorder that keeps values (see `recorder.Recorder`)."""

    make_selector: Callable[[], Any] | None
    selector: Any
    kept: dict[int, Any]
    kept_bytes: int
    op_in_parent: dict[int, int]
    outside: list[torch.Tensor]
    lies: dict[int, str]  # for reports, how the wrappers lie whose local tensors these values are
    _kept_in: dict[int, list[int]]  # the ops of which something is kept, by the memory that it lies in
    _numbers: ValueNumbering

    @property
    def selective(self) -> bool:
        """Whether anything may be kept."""
        return self.make_selector is not None

    def meet(self, tensor: Any) -> None:
        """Note that a tensor is around local ones, if it is; for reports, how it lies."""
        super().meet(tensor)
        if active.listeners and (lies := placements_of(tensor)) is not None:
            numbers = map(self._numbers.of, local_tensors([tensor]))
            self.lies.update([(number, lies) for number in numbers if number is not None])

    def judge(self, at: int, verdict: int, out: Any) -> None:
        """Keep `out` for an op, or forget it, as the verdict says."""
        node = self.tape.nodes[at]
        node.verdict = verdict
        if verdict == RECOMPUTE:
            self.kept.pop(at, None)
        elif at not in self.kept:
            self.kept[at] = self._hold(at, node, verdict, out)
            self._kept_in.setdefault(node.root, []).append(at)
            if verdict == SAVE:
                self.kept_bytes += sum(t.numel() * t.element_size() for t in tensors_in(out))

    def keep_own_draws(self, at: int, facts: Traits, args: Any, out: Any) -> None:
        """Keep what a kernel drew from a random state of its own: no generator makes it again."""
        p, trains = OWN_DRAWS[facts.name]
        if args[trains] and args[p] > 0:
            self.judge(at, self.tape.nodes[at].verdict or SAVE, out)

    def other_memory(self, tensor: Any, number: int | None) -> Any:
        """A tensor that was given the memory of a storage: who reads it finds out what it looks at."""
        if number is None or number < 0:
            self.tape.run_again_whole("it gives a tensor from outside other memory")
        self.forget(tensor)
        return tensor

    def forget(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError

    def _hold(self, at: int, node: Node, verdict: int, out: Any) -> Any:
        """What is kept of an op's results under this verdict; other regions keep some, too."""
        if verdict != OFFLOAD:
            return untracked(map_tensors, torch.Tensor.detach, out)
        # Of memory that was written to since, what was sent is out of date.
        fresh = node.root < 0 or node.root == at or node.root in self.tape.last_write
        root = None if fresh else self.kept.get(node.root)
        source = self.outside[-1 - node.root] if node.name == INPUT and node.root < 0 else None

        def sent(tensor: torch.Tensor) -> Any:
            # (What has no strides stays where it is: sparse and nested tensors.)
            return send(tensor, root, source) if has_strides(tensor) else tensor.detach()

        return untracked(map_tensors, sent, out)

    def shared(self, ops: Iterable[int]) -> list[torch.Tensor]:
        """The results of these ops that somebody else has, too, and may write to."""
        numbers = {number for at in ops for number in self.tape.nodes[at].makes()}
        held = [ref() for ref, number in self._numbers.values() if number in numbers]
        return [tensor for tensor in held if tensor is not None]

    def owner(self, node: Node, value: torch.Tensor) -> int | None:
        """The op whose whole result lies in the memory of `value`, the result of `node`, if there is one."""
        at, nodes = node.root, self.tape.nodes
        if at < 0 or at in self.tape.last_write or nodes[at] is node or value.storage_offset():
            return None
        if value.is_conj() or value.is_neg():
            return None  # it reads that memory as other numbers
        # Size.numel() would make numbers of symbolic sizes, for which the graph then holds alone.
        outs = [m for m in metas(nodes[at].outs) if math.prod(m[0]) == value.numel()]
        return at if any(m[2] is value.dtype for m in outs) else None

    def judge_again(self, at: int, verdict: int, value: torch.Tensor) -> None:
        """Change what is kept of op `at` and of the views of its result, all of which `value` is."""
        node = self.tape.nodes[at]
        for i in self._kept_in.get(at, ()):
            if verdict != SAVE or i == at:
                self.kept.pop(i, None)
                self.tape.nodes[i].verdict = RECOMPUTE
        node.verdict = RECOMPUTE
        if verdict != RECOMPUTE and isinstance(node.outs, Meta):
            shape, stride = node.outs[:2]
            same = value.shape == shape and value.stride() == stride
            self.judge(at, verdict, value if same else untracked(torch.as_strided, value, shape, stride, 0))
        elif verdict != RECOMPUTE and (number := self._numbers.of(value)) is not None and number >= 0:
            # The op's other results are gone: what the name speaks of is kept alone.
            self.judge(self.tape.makers[number], verdict, value)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name the value `tensor`, which an op of its own made."""
        number = self._numbers.of(tensor)
        if number is None or number < 0:
            return
        self.tape.names.append((number, name))
        at = self.tape.makers[number]
        node = self.tape.nodes[at]
        if name == INPUT and (node.deps or self._kept_in.get(node.root)):
            return  # the argument of a region inside, or one that was named
        node.name = name
        if self.selector is not None:
            # The user's code runs above the levels, what is kept belongs below them.
            with below_levels():
                self.selector.name(self, at, tensor, name)
        elif (owner := self.owner(node, tensor)) is not None:
            # An enclosing region may keep it, and share it.
            self.tape.nodes[owner].name = name

    def share_around(self) -> None:
        """What regions around this one keep is not computed again by this one."""
        around, mode = list[Any](), self
        while not mode.apart and (mode := mode.parent) is not None:
            around.append(mode)
        if not any(getattr(mode, "kept", None) for mode in around):
            return
        for at, there in self.op_in_parent.items():
            if at in self.kept or self.tape.nodes[at].written:
                continue
            place: int | None = there
            for mode in around:
                kept: dict[int | None, Any] = getattr(mode, "kept", {})
                if place in kept:
                    self.kept[at] = kept[place]
                    mode.tape.lent.add(place)
                    self.tape.cacheable = False
                    break
                place = getattr(mode, "op_in_parent", {}).get(place)

    def offer_around(self, kept: Mapping[int, Any]) -> None:
        """What this region keeps is not computed again by any region around it."""
        for at, value in kept.items():
            mode: Any = self
            op = self.tape.nodes[at].op
            while at in mode.op_in_parent and mode.parent.records and not mode.apart:
                at, mode = mode.op_in_parent[at], mode.parent
                mode.offer(at, value, op)

    def offer(self, at: int, value: Any, op: Any) -> None:
        """A region inside keeps the result of op `at` of this one: then it is kept for this one too."""
        nodes = self.tape.nodes
        if nodes[at].op is op and at not in self.kept:
            self.kept[at] = value
            self.tape.offered.add(at)
            nodes[at].verdict = SAVE
            root = nodes[at].root
            self._kept_in.setdefault(root, []).append(at)
            if self.tape.last_write.get(root, -1) > at:
                # It is a copy by now. A later forward, which keeps it at once, has to copy it then too.
                for node in nodes[at + 1 :]:
                    if root in node.written and at not in node.overwrites:
                        node.overwrites = (*node.overwrites, at)


# -- observers -------------------------------------------------------------------------------------------
# A tap on what regions keep, for `saved_residuals` and the tests: `report` costs nothing when nobody
# listens.


@dataclass(frozen=True)
class Kept:
    """One tensor that a region keeps from its forward to its backward.

    Attributes:
        why: "argument", "captured", "policy", "decision", "random" (generator state) or "residual" (a value
            kept because keeping it costs no more than what it would be recomputed from).
        tensor: the tensor itself, below functorch.
        region: the region's name.
        index: the argument's position among the region's tensors, or the op's position in the region.
        op: the op that made it, None for arguments.
        name: its `checkpoint_name`, or None.
        away: whether it lies in host memory, sent there: true once it has left.
        placements: of the `DTensor` whose local part it is, where that is known.
    """

    why: str
    tensor: torch.Tensor
    region: str
    index: int
    op: Any = None
    name: str | None = None
    away: Any = False
    placements: str | None = None


def made_by(args: Any, kwargs: Any, out: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """The blocks of memory of an op's results that are not those of its operands, with their keys."""
    given = {storage_key(t) for t in flatten((args, kwargs))[0] if is_strided(t)}
    for tensor in flatten(out)[0]:
        if is_strided(tensor) and (key := storage_key(tensor)) not in given:
            yield key, tensor.untyped_storage()


def report(kept: Kept) -> None:
    """Tell every listener of this thread of a kept tensor."""
    for listener in active.listeners:
        listener.append(kept)


@contextlib.contextmanager
def listen(heard: Any = None) -> Iterator[Any]:
    """Collect what the regions called inside keep, in a new list or whatever else has `append`."""
    heard = [] if heard is None else heard
    active.listeners = (*active.listeners, heard)
    try:
        yield heard
    finally:
        # By identity: two listeners that heard nothing compare equal.
        active.listeners = tuple([other for other in active.listeners if other is not heard])


# -- holders ---------------------------------------------------------------------------------------------
# Who holds tensors from outside until a backward, for writes by fused optimizers, which no version tells.


class Holder(Protocol):
    """What holds tensors until a backward and knows their versions."""

    def memories(self) -> Iterable[int]:
        """Their storages."""
        ...


# Weak references to those that are alive; each takes its own out when it goes. (A set's own methods, as
# every call of a region adds one.)
holders: set[weakref.ref[Any]] = set()
# Not empty once fused steps are watched.
noticing: list[bool] = []


def holds(holder: Holder) -> None:
    """Note a holder, and watch fused steps from the first one on."""
    if not noticing:
        noticing.append(True)
        watch_fused_steps(_stepped)
    holders.add(weakref.ref(holder, holders.discard))


def _stepped(parameters: Sequence[torch.Tensor]) -> None:
    """Count up the versions of those parameters that are held."""
    alive = [holder for ref in list(holders) if (holder := ref()) is not None]
    held = {key for holder in alive for key in holder.memories()}
    for parameter in parameters if held else ():
        if any(storage(part) in held for part in local_tensors([parameter])):
            torch.autograd.graph.increment_version(parameter)
