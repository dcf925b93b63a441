"""What is kept of the ops of a forward: verdicts, names that change them, what regions share; and what writes
overwrite, held as it was."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from remat.transforms.compat import below_levels, data_of, memory_is_real, set_data, unwrapped
from remat.transforms.context import Mode, active, quiet
from remat.transforms.errors import RematError, user_line
from remat.transforms.offload import Elsewhere, away_in, send
from remat.transforms.ops import Traits, is_hollow, memory_of, metas, targets, tensors_in, traits
from remat.transforms.placeholders import Meta
from remat.transforms.sharded import local_tensors, placements_of
from remat.transforms.state import GeneratorState
from remat.transforms.tape.snapshots import Snapshot
from remat.transforms.tape.tape import OFFLOAD, RECOMPUTE, SAVE, Node, ValueNumbering, map_tensors

# Dropout between the layers of an RNN: where its probability is among the arguments, and whether it trains.
OWN_DRAWS = {"_cudnn_rnn": (11, 12), "miopen_rnn": (9, 10)}


class Verdicts(Mode):
    """The part of a recorder that keeps values (see `recorder.Recorder`)."""

    make_selector: Callable[[], Any] | None
    selector: Any
    kept: dict[int, Any]
    kept_bytes: int
    outer: dict[int, int]
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
            self.tape.open = self.tape.open or "it gives a tensor from outside other memory"
        self.forget(tensor)
        return tensor

    def forget(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError

    def _hold(self, at: int, node: Node, verdict: int, out: Any) -> Any:
        """What is kept of an op's results under this verdict; other regions keep some, too."""
        if verdict != OFFLOAD:
            return quiet(map_tensors, torch.Tensor.detach, out)
        # Of memory that was written to since, what was sent is out of date.
        fresh = node.root < 0 or node.root == at or node.root in self.tape.last_write
        root = None if fresh else self.kept.get(node.root)
        return quiet(map_tensors, lambda tensor: send(tensor, root), out)

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
            self.judge(at, verdict, value if same else quiet(torch.as_strided, value, shape, stride, 0))
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
        for at, there in self.outer.items():
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
                place = getattr(mode, "outer", {}).get(place)

    def offer_around(self, kept: Mapping[int, Any]) -> None:
        """What this region keeps is not computed again by any region around it."""
        for at, value in kept.items():
            mode: Any = self
            op = self.tape.nodes[at].op
            while at in mode.outer and mode.parent.records and not mode.apart:
                at, mode = mode.outer[at], mode.parent
                mode.offer(at, value, op)

    def offer(self, at: int, value: Any, op: Any) -> None:
        """A region inside keeps the result of op `at` of this one: then it is kept for this one too."""
        nodes = self.tape.nodes
        if at < len(nodes) and nodes[at].op is op and at not in self.kept:
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


class WriteWatch(Verdicts):
    """The part of a recorder that is asked before a write (see `recorder.Recorder`)."""

    outside: list[torch.Tensor]
    random: dict[int, GeneratorState]
    snapshots: dict[int, Snapshot]
    shown: dict[int, Snapshot]
    moved: set[int]
    graded: Collection[int] = ()  # the arguments that levels of torch.func differentiate
    graded_written: Sequence[int] = ()  # those that the function was about to write to
    # Tensors from outside that user code has given other memory (`.data = `).
    replaced: tuple[Replaced, ...] = ()
    # Sizes of memories from outside that user code has looked at, when it did so first.
    sizes: dict[int, int]

    def root(self, tensor: torch.Tensor) -> int:
        """The memory that a tensor lies in."""
        raise NotImplementedError

    def _known(self, memory: Any) -> Any:
        """What is known of a memory, None for nothing."""
        raise NotImplementedError

    def _before_write(self, func: Any, facts: Traits, args: Any, kwargs: Any) -> None:
        if facts.collective or (self.tape.sharded and not torch.is_grad_enabled()):
            return
        for tensor in self._written(facts, args, kwargs):
            root = self.root(tensor)
            if root >= 0:
                self._copy_kept(self._kept_in.get(root, ()))
            elif (places := self._differentiated(root)) and self.levels:
                self.tape.open = self.tape.open or "it writes a derivative into an argument"
            elif places:
                self.graded_written = places
                raise RematError(self._refusal(func, tensor))
            elif facts.only_shape and -1 - root < self.tape.arguments:
                raise RematError(self._refusal(func, tensor))
            elif root not in self.snapshots:
                self._snapshot(root, facts, args)

    def _differentiated(self, root: int) -> list[int]:
        """The arguments in this memory that have a derivative, which a write would change."""
        at = [i for i in range(self.tape.arguments) if self.tape.outside[i].root == root]
        self.tape.writes_arguments = self.tape.writes_arguments or bool(at)
        return [i for i in at if i in self.graded or self.around(self.outside[i]).requires_grad]

    def _written(self, facts: Traits, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
        """The tensors whose memory a call writes to.

        None if it gives another shape to a tensor object of the region's own, as `t_` does."""
        if facts.only_shape and not any(args[0] is tensor for tensor in self.outside):
            return ()
        return targets(facts, args, kwargs)

    def _snapshot(self, root: int, facts: Traits, args: Any) -> None:
        """Hold memory from outside as it is before the region writes to it, for the recomputation."""
        self.snapshots[root] = quiet(Snapshot, self.outside[-1 - root], self._is_unread(root, facts, args))

    def _is_unread(self, root: int, facts: Traits, args: Any) -> bool:
        """Whether a memory from outside is about to be written over as a whole, and nobody has read it."""
        if not facts.fills or root in self.shown or root in self.sizes:
            return False
        written = [t for t in tensors_in(args[0]) if self.root(t) == root]
        if len(written) != 1 or any(self.root(t) == root for t in tensors_in(args[1:])):
            return False
        memory = memory_of(tensor := written[0])
        if memory is None or tensor.nbytes != memory.nbytes() or not tensor.is_contiguous():
            return False
        tape = self.tape
        so_far = itertools.islice(tape.nodes, self.position)
        return all(
            traits(node.op).view or all(tape.root_of(number) != root for number in node.reads())
            for node in so_far
        )

    def freed(self) -> dict[int, Freed]:
        """Memories from outside that user code frees or fills while the function runs, as offloaders do with
        those of weights. They are no longer held against snapshots: the function fills them again."""
        found: dict[int, Freed] = {}
        # (FSDP2 gathers inside, and its hooks see to it in both passes that parameters are there.)
        for at, tensor in enumerate(() if self.tape.sharded else self.outside):
            root = self.tape.outside[at].root
            memory = None if root in found or root in self.moved else memory_of(tensor)
            if memory is None or (-1 - root != at and root not in self.sizes):
                continue
            size, first = memory.nbytes(), self.sizes.get(root)
            if size == first or (first is None and not (is_hollow(tensor) and memory_is_real())):
                continue
            before = self.shown.pop(root, None)
            if first is None and self._is_filled_first(root):
                first = 0
            found[root] = Freed(first, before if first else None)
            self.snapshots.pop(root, None)
        if found:
            self.tape.open = self.tape.open or "memory from outside is freed or filled in it"
        return found

    def _is_filled_first(self, root: int) -> bool:
        """Whether the first op that meets a memory from outside writes to it."""
        outside, nodes = self.tape.outside, self.tape.nodes
        met = (node for node in nodes if any(outside[i].root == root for i in node.external))
        return any(root in node.written for node in itertools.islice(met, 1))

    def raw_writes(self, but: Container[int] = ()) -> list[tuple[torch.Tensor, Snapshot]]:
        """Memories from outside that user code wrote to past torch's dispatcher, as they were before."""
        found = []
        for root, before in self.shown.items():
            tensor = self.outside[-1 - root]
            if root in but or not quiet(before.differs, tensor):
                continue
            if self._differentiated(root):
                raise RematError(self._refusal("a raw kernel or NumPy", tensor))
            self.tape.open = self.tape.open or "raw memory from outside is written to"
            # The function runs again, on that memory itself: there is no scratch copy that it could find.
            self.snapshots.pop(root, None)
            found.append((tensor.detach(), before))
        return found

    def put_back(self) -> None:
        """Let memory from outside and generators be as before: the run was broken off, and begins again."""
        for state in reversed(self.random.values()):
            state.restore()
        for tensor, before, *_ in self.replaced:
            if before is not None:
                set_data(tensor, before)
        for root, before in {**self.snapshots, **self.shown}.items():
            tensor = self.outside[-1 - root]
            if root in self.snapshots or quiet(before.differs, tensor):
                before.undo(tensor)

    def _copy_kept(self, kept: Iterable[int]) -> None:
        """What is kept is about to be overwritten."""
        for i in kept:
            value = self.kept.get(i)
            if value is not None:
                self.kept[i] = quiet(map_tensors, _copied, value)
                for away in away_in(value):
                    away.parcel.wait()

    def expose(self, tensor: torch.Tensor, moved: bool = False) -> None:
        """User code looks at the memory of `tensor` itself, or torch.distributed does, which may move it."""
        bottom = unwrapped(tensor)
        if moved:
            self.moved.add(self.root(bottom))
            return
        if (root := self.root(bottom)) >= 0:
            self.tape.exposed.add(root)
            self.tape.cacheable = False
            return
        if (memory := memory_of(bottom)) is not None:
            self.sizes.setdefault(root, memory.nbytes())
        if bottom.is_cpu and root not in self.shown:
            # A look may be a write, which no op tells of: its end is compared with its begin (`raw_writes`).
            self.shown[root] = self.snapshots.get(root) or quiet(Snapshot, self.outside[-1 - root])

    def replaces(self, tensor: torch.Tensor) -> None:
        """User code is about to give `tensor` other memory."""
        number = self._numbers.of(tensor)
        if number is not None and number >= 0:
            self.tape.exposed.add(self.tape.root_of(number))
        elif all(tensor is not known.tensor for known in self.replaced):
            at = None if number is None else -1 - number
            met = at is not None or self._known(memory_of(tensor)) is not None
            self.replaced = (*self.replaced, Replaced(tensor, data_of(tensor), at, met))
        # From now on it is another value.
        self.forget(tensor)

    def _refusal(self, func: Any, tensor: torch.Tensor) -> str:
        return (
            f"region {self.tape.region!r} writes with {func} at {user_line()} into a "
            f"{tuple(tensor.shape)} {tensor.dtype} tensor from outside the region, which is an argument that "
            "is differentiated, or whose shape it changes. A recomputation would write again. Write out of "
            "place, or into a `.clone()` made in the region."
        )


class Replaced(NamedTuple):
    """A tensor from outside that user code has given other memory."""

    tensor: torch.Tensor
    before: torch.Tensor | None  # what it had before
    at: int | None  # its position among those from outside until then, None where no op had read it
    met: bool  # whether anything had read that memory


class Freed(NamedTuple):
    """A memory from outside that user code frees or fills."""

    size: int | None  # its size when the region began, None where nobody knows
    before: Snapshot | None  # what it held then


def _copied(value: Any) -> Any:
    return value if isinstance(value, Elsewhere) else value.clone()
