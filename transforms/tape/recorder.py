"""Writing down the ops of a region's forward, and keeping what a policy says.

A dispatch mode sees aten ops below autograd and below functorch, so that one recorder serves plain autograd
and `torch.func` at any depth. `follower.TraceFollower` is one that expects the ops of an earlier tape.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from remat.transforms.compat import (
    data_of,
    function_modes_asked,
    functions_as_they_are,
    groups_in,
    memory_is_real,
    set_data,
    unwrapped,
)
from remat.transforms.context import active, by_sharding, on_scratch, ranks_met, scratch_around, untracked
from remat.transforms.errors import RematError, user_line, user_place
from remat.transforms.offload import Elsewhere, away_in
from remat.transforms.ops import (
    Decisions,
    Traits,
    draws,
    geometry,
    is_cast_of_leaf,
    is_hollow,
    is_shape_arithmetic,
    memory_of,
    metadata,
    place,
    read_by,
    storage,
    targets,
    tensors_in,
    traits,
)
from remat.transforms.placeholders import Meta, without_objects
from remat.transforms.sharded import wraps
from remat.transforms.state import GeneratorState, first_draw
from remat.transforms.tape.kept_values import OWN_DRAWS, KeptValues
from remat.transforms.tape.snapshots import Contents, Snapshot, memory_around
from remat.transforms.tape.tape import (
    RECOMPUTE,
    SAVE,
    SMALL,
    Node,
    Outside,
    Ref,
    Tape,
    ValueNumbering,
    default_of,
    is_graded,
    map_tensors,
    reads,
)

_as_strided, _copy = torch.ops.aten.as_strided.default, torch.ops.aten.copy_.default
# What stands in a template as it is, and means the same in another call.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN += (torch.memory_format,)

# Why a function runs again that one level of torch.func differentiates.
CARRIES = "it writes a derivative into an argument"


class Recorder(KeptValues):
    """Writes down the ops of a region and keeps what its selector says.

    Args:
        tape: where to write.
        selector: makes the selector, whose `decide(index, node, args, kwargs, outs)` says RECOMPUTE, OFFLOAD
            or SAVE. None keeps nothing.
        inputs: the region's argument tensors.
        digest: a checksum of an op's results to compare bitwise later, or None.
        casts: whether autocast is on. It caches casts of leaves across regions: whether one happens is luck.
        decisions: whether decisions are kept, whatever the selector says.

    Attributes:
        outside: the tensors from outside, as on the tape.
        kept: what is kept, by op.
        random: for every op that draws, the state of its generator before.
        snapshots: memories from outside as they were before the region wrote to them.
        shown: memories from outside that user code has looked at itself, as they were then.
        moved: memories from outside that torch.distributed frees and fills.
        op_in_parent: for every op its number on the tape of the region around, if there is one.
        graded: the positions of the arguments that levels of torch.func differentiate.
        replaced: tensors from outside that user code has given other memory (`.data = `).
        replaces_data: whether it has given any tensor, of the function's own too, other memory.
        given_again: those that it has given the memory that they had, before an op met them.
        sizes: of memories from outside that user code has looked at, when it did so first.
        contents: small memories of its own that others may fill past torch, by their roots.
    """

    records = True
    followed = False  # whether a forward that is over was one on a known tape
    graded: Collection[int] = ()
    replaced: tuple[Replaced, ...] = ()
    replaces_data = False
    given_again: tuple[torch.Tensor, ...] = ()
    _room = SMALL  # for what others have filled memory with

    def __init__(
        self,
        tape: Tape,
        selector: Callable[[], Any] | None = None,
        inputs: Sequence[torch.Tensor] = (),
        *,
        digest: Callable[[Any], Any] | None = None,
        casts: bool = False,
        decisions: bool = False,
    ) -> None:
        super().__init__()
        self.decisions = Decisions() if decisions else None
        self.tape, self.digest, self.casts = tape, digest, casts
        self.make_selector, self.selector = selector, None
        self.outside: list[torch.Tensor] = []
        self.kept: dict[int, Any] = {}
        self.random: dict[int, GeneratorState] = {}
        self.snapshots, self.shown = dict[int, Snapshot](), dict[int, Snapshot]()
        self.op_in_parent, self.moved, self.sizes = dict[int, int](), set[int](), dict[int, int]()
        self.kept_bytes = 0  # of what is kept on its device
        self.lies = dict[int, str]()
        self._numbers = ValueNumbering()
        # Living memories by the ids of their storage objects: where they come from, and a value in them.
        self._memory: dict[int, tuple[Any, int, int, Any]] = {}
        self._places: dict[int, int] = {}  # where memories from outside begin: which tensor came first
        self._kept_in: dict[int, list[int]] = {}
        self.contents = dict[int, Contents]()
        self._begin(inputs)

    def _begin(self, inputs: Sequence[torch.Tensor]) -> None:
        self.tape.meta = any(t.is_meta for t in inputs)
        self.tape.arguments = len(inputs)
        if self.make_selector is not None:
            self.selector = self.make_selector()
        for tensor in inputs:
            self._from_outside(tensor)

    @property
    def position(self) -> int:
        return len(self.tape.nodes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_modes_asked():  # an op of C++: the user's modes know nothing of it
            with functions_as_they_are():
                return self.__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if active.untracked:
            return func(*args, **kwargs)
        if types and self.takes_apart(types, args):
            return NotImplemented
        facts = traits(func)
        if facts.ignored or (not self.tape.meta and is_shape_arithmetic(args, kwargs)):
            return self._pass(func, facts, args, kwargs)
        return self._record(func, facts, args, kwargs)

    def pack(self, tensor: torch.Tensor, owner: int | None) -> int:
        """Autograd saves `tensor` for the node with this number: which value that is."""
        number = self.number(tensor)
        if self.contents:
            # (What nothing has told of may be filled later: `tell_saved`.)
            known = self.contents.get(self.tape.root_of(number))
            if known is not None and known.known is not None:
                self._tell(self.tape.root_of(number))
        self.tape.saved_values.append((number, len(self.tape.nodes)))
        self.tape.owners.append(owner)
        return number

    def bound(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that is known, None if it is not."""
        return self._numbers.of(tensor)

    def met(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that user code reads here, None if it is not known."""
        return self.bound(tensor)

    # -- recording -----------------------------------------------------------------------------------------

    def _pass(self, func: Any, facts: Traits, args: Any, kwargs: Any) -> Any:
        """Run an op that computes nothing; what it returns stands for its operand."""
        first = next(iter(tensors_in(args)), None)
        number = self.met(first) if first is not None else None
        out = func(*args, **kwargs)
        if facts.name == "set_":
            return self.other_memory(out, number)
        if self.local is not None and wraps(out):
            return out  # around `first`
        if not isinstance(out, torch.Tensor) or first is None or out is first:
            if func is torch.ops.aten._has_same_storage_numel.default and not self.tape.loose:
                self.start_recording()
                self.tape.loose = True
            return out
        if out.is_meta and not first.is_meta:
            return out  # its shape, for tangents known to be zero
        if func is torch.ops.aten._new_zeros_with_same_feature_meta.default or out.dtype != first.dtype:
            # Memory of its own, which a tangent is then copied into.
            self.start_recording()
            self.tape.loose = self.tape.loose or out.dtype == first.dtype
            self._add(
                func, facts, (self._template(args), self._template(kwargs)), args, kwargs, out, optional=True
            )
            return out
        if number is None:
            self.start_recording()
            number = self.number(first)
        self._numbers.add(out, number)
        return out

    def _record(self, func: Any, facts: Traits, args: Any, kwargs: Any) -> Any:
        template = self._template(args), self._template(kwargs)
        for root, contents in [*self.contents.items()] if self.contents else ():
            if reads(self.tape, func, *template, root, contents.known is not None):
                self._tell(root)
        if facts.writes:
            self._before_write(func, facts, args, kwargs)
        around = -1 if self.parent is None else self.parent.position
        if facts.may_draw and (not facts.random or draws(func, args, kwargs)):
            state, out = first_draw(func, facts.native, args, kwargs)
        else:
            state, out = None, func(*args, **kwargs)
        chance = self.casts and is_cast_of_leaf(func, args)
        at = self._add(func, facts, template, args, kwargs, out, draws_from=state, optional=chance)
        if self.parent is not None:
            self._link(self.parent, at, around)
        return out

    def _add(
        self,
        func: Any,
        facts: Traits,
        template: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        draws_from: GeneratorState | None = None,
        optional: bool = False,
    ) -> int:
        tape = self.tape
        at = len(tape.nodes)
        node = Node()
        node.op, node.name, node.digest, node.verdict = func, None, None, RECOMPUTE
        node.args, node.kwargs = template
        node.first, node.outs, node.optional = len(tape.makers), metadata(out), optional
        node.draws, node.overwrites = draws_from is not None, ()
        tape.sized_by_data = tape.sized_by_data or facts.sized_by_data
        node.place = user_place() if active.listeners or tape.sized_by_data else None
        if draws_from is not None:
            self.random[at] = draws_from
        self._link_operands(node, facts, args)
        node.graded, node.default = is_graded(tape, node, facts, args), default_of(node, args, kwargs)
        if facts.collective:
            node.args, node.outs = without_objects(node.args), without_objects(node.outs)
            tape.groups |= groups_in(func, args)
            tape.run_again_whole(f"it calls {func}, which acts outside of this process")
            tape.sharded = tape.sharded or not node.graded
        if facts.asks_grad:
            tape.run_again_whole(f"it calls {func}, which computes less where nothing requires grad")
        if facts.higher_order:
            tape.run_again_whole(f"it calls {func}, an operator on functions")
        node.written = tuple(map(self.root, self._written(facts, args, kwargs))) if facts.writes else ()
        if node.written:
            node.overwrites = tuple([i for root in node.written for i in self._kept_in.get(root, ())])
        node.root = self._root_of_results(at, facts, args, out)
        tape.nodes.append(node)
        if facts.saves_unwritten:
            tape.saved_values = [
                (n, i + (i == at and tape.root_of(n) in node.written)) for n, i in tape.saved_values
            ]
        for root in node.written:
            tape.last_write[root] = at
            if root in self.contents and not untracked(self.contents[root].written):
                del self.contents[root]
        if facts.uninitialized:
            self._watch(at, out)
        for tensor in tensors_in(out):
            number = len(tape.makers)
            tape.makers.append(at)
            self._numbers.add(tensor, number)
            self._remember(memory_of(tensor), node.root, number, tensor)
        # (Views of what nothing has filled are no numbers either: dropout under torch.func draws for such.)
        if self.digest is not None and not self._is_unfilled(at, node, facts):
            node.digest = untracked(self.digest, out)
        self._decide(at, node, facts, args, kwargs, out)
        return at

    def _is_unfilled(self, at: int, node: Node, facts: Traits) -> bool:
        root = node.root
        if facts.uninitialized or root < 0 or root == at:
            return facts.uninitialized
        return traits(self.tape.nodes[root].op).uninitialized and root not in self.tape.last_write

    def _decide(self, at: int, node: Node, facts: Traits, args: Any, kwargs: Any, out: Any) -> None:
        # What an op wrote in place is handed to its caller by reference, so it cannot be kept in its stead.
        asked = not facts.writes or facts.conditional is not None
        if self.selector is not None and asked and not active.without_policy and not node.optional:
            self.judge(at, self.selector.decide(at, node, args, kwargs, out), out)
        if facts.name in OWN_DRAWS and facts.native:
            self.keep_own_draws(at, facts, args, out)
        if self.decisions is not None:
            given = (t.numel() for t in tensors_in((args, kwargs)))
            read = read_by(node, self.tape)
            decides = self.decisions.meets(at, node, facts, read, bool(node.verdict), given)
            if decides and not active.without_policy:
                self.tape.decided.add(at)
                self.judge(at, SAVE, out)

    def _template(self, value: Any) -> Any:
        """The arguments of a call with numbers in the place of tensors."""
        if isinstance(value, torch.Tensor):
            return Ref(self.number(value))
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._template(v) for v in value])
        if isinstance(value, dict):
            return {k: self._template(v) for k, v in value.items()}
        if isinstance(value, (tuple, list)) and any(True for _ in tensors_in(value)):
            return tuple([self._template(v) for v in value])
        self.tape.cacheable = self.tape.cacheable and isinstance(value, (*_PLAIN, tuple, list))
        return value

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that the forward meets; one that is unknown comes from outside."""
        number = self._numbers.of(tensor)
        return self._unknown(tensor) if number is None else number

    def _known(self, memory: Any) -> tuple[Any, int, int, Any] | None:
        """What is known of a memory, by its storage object."""
        known = self._memory.get(id(memory))
        return known if known is not None and known[0]() is memory else None

    def _unknown(self, tensor: torch.Tensor) -> int:
        memory = memory_of(tensor)
        known, offset = self._known(memory), tensor.storage_offset() if memory is not None else 0
        if known is None and self.tape.nodes and not tensor.requires_grad:
            known, offset = memory_around(self._memory.values(), tensor)
        if known is None or known[1] < 0:
            return self._from_outside(tensor)
        # Autograd, `.data`, DLPack and C++ make aliases that no dispatch mode sees.
        _, root, number, base = known
        self._remember(memory, root, number, tensor)
        if geometry(tensor) == base and offset == tensor.storage_offset():
            self._numbers.add(tensor, number)
            # (No view holds what it is an alias of: a later call would not know where it comes from.)
            self.tape.cacheable = self.tape.cacheable and not tensor.is_inference()
            return number
        self.tape.cacheable = False
        if base[0] is not tensor.dtype or base[1] != tensor.is_conj() or tensor.is_neg():
            self.tape.run_again_whole("it looks at memory as another dtype, unseen")
            return self._from_outside(tensor)
        there = list(tensor.shape), list(tensor.stride()), int(offset)
        template = (Ref(number), *there), {}
        at = self._add(_as_strided, traits(_as_strided), template, (), {}, tensor, optional=True)
        self.tape.nodes[at].root = root
        return self.tape.nodes[at].first

    def _from_outside(self, tensor: torch.Tensor) -> int:
        if is_lazy(tensor):
            raise RematError(
                f"region {self.tape.region!r} runs a lazy module for the first time, which makes its "
                "parameters. Run the module once before: `with torch.no_grad(): module(x)`."
            )
        number = -1 - len(self.outside)
        self.outside.append(tensor)
        if self._numbers.of(tensor) is None:
            self._numbers.add(tensor, number)
        known = self._known(memory := memory_of(tensor))
        if known is None and memory is not None:
            first = self._places.setdefault(spot := place(tensor), -1 - number)
            if first != -1 - number and place(other := self.outside[first]) == spot:
                # NumPy has made a storage of its own around this memory. No later call is held against this.
                known, self.tape.cacheable = self._known(memory_of(other)), False
        scratch = scratch_around(storage(tensor)) if on_scratch() else None
        there = None if scratch is None else scratch.place
        if known is None and there is not None:
            known = self._known(there)  # by a view of it that came before
        root = known[1] if known is not None and known[1] < 0 else number
        self.tape.outside.append(Outside(metadata(tensor), root))
        if scratch is not None:
            # A run of the region around has a copy, where views of it lie, and may write to it later.
            self.snapshots.setdefault(root, untracked(scratch.copy))
            if there is not None:
                self._remember(there, root, number, tensor)
        self._remember(memory, root, number, tensor)
        return number

    def _remember(self, memory: Any, root: int, number: int, tensor: torch.Tensor) -> None:
        if memory is not None and self._known(memory) is None:
            self._memory[id(memory)] = weakref.ref(memory), root, number, geometry(tensor)

    def _root_of_results(self, at: int, facts: Traits, args: Any, out: Any) -> int:
        """The memory that the results of an op lie in, whatever its schema says of aliases."""
        for tensor in tensors_in(out):
            number = self._numbers.of(tensor)
            # What is written in place has a number; `set_` gives it other memory.
            made = number is None or facts.name == "set_"
            if made and (known := self._known(memory_of(tensor, values=True))) is not None:
                return known[1]
            if number is not None:
                return self.tape.root_of(number)
        if facts.view or facts.inplace:
            first = next(iter(tensors_in(args)), None)
            if first is not None and memory_of(first) is None:
                return self.root(first)
        return at

    def root(self, tensor: torch.Tensor) -> int:
        """The memory that a tensor lies in."""
        return self.tape.root_of(self.number(tensor))

    def _link_operands(self, node: Node, facts: Traits, args: Any) -> None:
        tape, deps, external = self.tape, [], []
        node.shape_only = facts.shape_only and _is_plain(args) and not tape.sized_by_data
        for number in node.reads():
            maker = tape.makers[number] if number >= 0 else -1
            if number >= 0:
                deps.append(maker)
            else:
                external.append(-1 - number)
            # A write is an op of its own, which reads what was written before: the last one leads to all.
            write = tape.last_write.get(tape.root_of(number)) if tape.last_write else None
            if write is not None and write > maker:
                deps.append(write)
        node.deps, node.external = deps, tuple(external)

    # -- writes to memory, and other looks at it -------------------------------------------------------------

    def _before_write(self, func: Any, facts: Traits, args: Any, kwargs: Any) -> None:
        if facts.collective or (self.tape.sharded and not torch.is_grad_enabled()):
            return
        for tensor in self._written(facts, args, kwargs):
            root = self.root(tensor)
            if root >= 0:
                self._copy_kept(self._kept_in.get(root, ()))
            elif (graded := self._differentiated(root)) and self.level is not None:
                self.tape.run_again_whole(CARRIES)
            elif graded:
                raise RematError(self._refusal(func, tensor))
            elif facts.only_shape and -1 - root < self.tape.arguments:
                raise RematError(self._refusal(func, tensor))
            elif root not in self.snapshots:
                self._snapshot(root, facts, args)

    def _differentiated(self, root: int) -> bool:
        """Whether arguments in this memory have a derivative, which a write would change."""
        at = [i for i in range(self.tape.arguments) if self.tape.outside[i].root == root]
        self.tape.writes_arguments = self.tape.writes_arguments or bool(at)
        return any([i in self.graded or self.around(self.outside[i]).requires_grad for i in at])

    def _written(self, facts: Traits, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
        """The tensors whose memory a call writes to.

        None if it gives another shape to a tensor object of the region's own, as `t_` does."""
        if facts.only_shape and not any(args[0] is tensor for tensor in self.outside):
            return ()
        return targets(facts, args, kwargs)

    def _snapshot(self, root: int, facts: Traits, args: Any) -> None:
        """Hold memory from outside as it is before the region writes to it, for the recomputation."""
        self.snapshots[root] = untracked(
            Snapshot, self.outside[-1 - root], self._is_unread(root, facts, args)
        )

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
        for at, tensor in enumerate(self.outside):
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
            self.tape.run_again_whole("memory from outside is freed or filled in it")
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
            if root in but or not untracked(before.differs, tensor):
                continue
            if self._differentiated(root):
                raise RematError(self._refusal("a raw kernel or NumPy", tensor))
            self.tape.run_again_whole("raw memory from outside is written to")
            # The function runs again, on that memory itself: there is no scratch copy that it could find.
            self.snapshots.pop(root, None)
            found.append((tensor.detach(), before))
        return found

    def restore_state(self) -> None:
        """Let memory from outside and generators be as before: the run was broken off, and begins again."""
        for state in reversed(self.random.values()):
            state.restore()
        for tensor, before, *_ in self.replaced:
            if before is not None:
                set_data(tensor, before)
        for root, before in {**self.snapshots, **self.shown}.items():
            tensor = self.outside[-1 - root]
            if root in self.snapshots or untracked(before.differs, tensor):
                before.undo(tensor)

    def _copy_kept(self, kept: Iterable[int]) -> None:
        """What is kept is about to be overwritten."""
        for i in kept:
            value = self.kept.get(i)
            if value is not None:
                self.kept[i] = untracked(map_tensors, _copied, value)
                for away in away_in(value):
                    away.parcel.wait()

    def expose(self, tensor: torch.Tensor, moved: bool = False) -> None:
        """User code looks at the memory of `tensor` itself, or torch.distributed does, which may move it."""
        bottom = unwrapped(tensor)
        if moved:
            self.moved.add(self.root(bottom))
            return
        if (root := self.root(bottom)) >= 0:
            self.tape.cacheable = False
            if root not in self.tape.raw_accessed and not self._watch(root, bottom, shown=True):
                self.tape.show(root)
            return
        if (memory := memory_of(bottom)) is not None:
            self.sizes.setdefault(root, memory.nbytes())
        if bottom.is_cpu and root not in self.shown:
            # A look may be a write, which no op tells of: its end is compared with its begin (`raw_writes`).
            self.shown[root] = self.snapshots.get(root) or untracked(Snapshot, self.outside[-1 - root])

    def _watch(self, root: int, tensor: torch.Tensor, shown: bool = False) -> bool:
        """Whether the memory of op `root`, which others may fill past torch, is small enough to be held."""
        if (known := self.contents.get(root)) is not None:
            known.shown = known.shown or shown
            return True
        node = self._sized_by(root)
        if self.reruns or type(node.outs) is not Meta or not tensor.is_cpu or not memory_is_real():
            return False
        (shape, stride, dtype, _), memory = node.outs, memory_of(tensor)
        if memory is None or stride is None or not 0 < memory.nbytes() <= SMALL:
            return False
        if memory.nbytes() != math.prod(shape) * dtype.itemsize:
            return False
        if ranks_met() and by_sharding():
            return False  # FSDP gathers weights in such memory: the function does so again
        filled = not traits(self.tape.nodes[root].op).uninitialized
        if filled:
            self._copy_kept(self._kept_in.get(root, ()))
        self.contents[root] = untracked(Contents, memory, filled, shown)
        return True

    def _sized_by(self, root: int) -> Node:
        """The op that has given the memory of op `root` its size: that one, or the last one to resize it."""
        nodes, last = self.tape.nodes, self.tape.last_write.get(root, root)
        sizes = (n for n in reversed(nodes[root : last + 1]) if traits(n.op).name.startswith("resize"))
        return next((n for n in sizes if root in n.written), nodes[root])

    def _tell(self, root: int) -> None:
        """Note what others have filled a memory with: as an op that copies it from a tensor from outside."""
        tape, known = self.tape, self.contents[root]
        node = self._sized_by(root)
        if (memory := untracked(known.now)) is None:
            return
        shape, stride, dtype, _ = node.outs
        self._room -= memory.nbytes()
        if self._room < 0 or memory.nbytes() != math.prod(shape) * dtype.itemsize:
            # Ops do not tell it: whoever needs it has the function run again.
            del self.contents[root]
            tape.show(root)
            tape.cacheable = False
            return
        told, held = known.known is not None, untracked(memory.clone)
        there, now = (untracked(_around, m, dtype, shape, stride) for m in (memory, held))
        template = Ref(node.first), Ref(self.number(now))
        self._numbers.add(there, node.first)
        self._copy_kept(self._kept_in.get(root, ()))
        at = self._add(_copy, traits(_copy), (template, {}), (there, now), {}, there, optional=True)
        self.contents[root] = known
        known.known, tape.cacheable = held, False
        if not told:  # whatever was saved of it until now
            tape.saved_values = [(n, at + 1 if tape.root_of(n) == root else i) for n, i in tape.saved_values]

    def tell_saved(self) -> None:
        """Note what others have filled memories with that autograd alone has read."""
        for root in [root for root, known in self.contents.items() if known.known is None]:
            if any(self.tape.root_of(number) == root for number, _ in self.tape.saved_values):
                self._tell(root)

    def sets_again(self, tensor: torch.Tensor) -> None:
        """User code gives `tensor` the memory that it has. Hooks that fetch weights and drop them later do so
        in a first call; in a second one they give it other memory, and it is the function's in both."""
        if self._numbers.of(tensor) is None:
            self.given_again = (*self.given_again, tensor)

    def replaces(self, tensor: torch.Tensor) -> None:
        """User code is about to give `tensor` other memory."""
        self.replaces_data = True
        number = self._numbers.of(tensor)
        if number is not None and number >= 0:
            self.tape.show(self.tape.root_of(number))
        elif any([tensor is one for one in self.given_again]):
            self.replaced = (*self.replaced, Replaced(tensor, data_of(tensor), None, True))
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

    # -- regions inside and around ---------------------------------------------------------------------------

    def _link(self, mode: Any, at: int, around: int) -> None:
        """Note the number of op `at` on the tape around, if it is one op there beside what need not occur."""
        place, state = mode.position - 1, self.random.get(at)
        if state is not None:
            self.random[at] = getattr(mode, "random", {}).get(place, state)  # a run around has set it since
        if place >= around and all(node.optional for node in mode.tape.nodes[around:place]):
            self.op_in_parent[at] = place

    def forget(self, tensor: torch.Tensor) -> None:
        """Meet `tensor` for the first time if it is met again."""
        self._numbers.pop(id(tensor), None)

    def bind(self, tensor: torch.Tensor, number: int) -> None:
        """Let `tensor` be another object with the value of this number: a recomputed copy."""
        self._numbers.add(tensor, number)
        self._remember(memory_of(tensor), self.tape.root_of(number), number, tensor)

    def replaced_by(self, other: torch.Tensor, tensor: torch.Tensor, number: int) -> None:
        """Let `other` have the value of this number in the place of `tensor`, before any op."""
        self.forget(tensor)
        self.bind(other, number)

    def bind_around(self, tensor: torch.Tensor, number: int) -> None:
        """The same for the recordings around as well: one that was on a tape knows no memory whose tensors
        are gone."""
        mode: Any = self
        while True:
            at = mode.tape.makers[number] if number >= 0 else -1
            there, parent = mode.op_in_parent.get(at), mode.parent
            mode.bind(tensor, number)
            if there is None or not parent.records:
                return
            number += parent.tape.nodes[there].first - mode.tape.nodes[at].first
            mode = parent

    def living_values(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors that ops have made and that somebody holds."""
        return list(self._numbers.living())


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


def _around(memory: torch.UntypedStorage, dtype: torch.dtype, shape: Any, stride: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, 0, shape, stride)


def _copied(value: Any) -> Any:
    return value if isinstance(value, Elsewhere) else value.clone()


def _is_plain(args: Any) -> bool:
    """Whether a factory's first operand can be stood in for by its metadata."""
    tensor: Any = args[0] if args else None
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and memory_is_real()
    )
