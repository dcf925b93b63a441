"""The joint graph of a function: every op of its forward and of its plain-autograd backward, on fake tensors.

A dispatch mode at the bottom of the stack makes the record. So the forward half lists exactly the ops
that an eager run with gradients dispatches, in order. That is what lets a decision about "op 17" made
here be carried out there. `detach`, which autograd inserts when it saves an output, is not an op here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from remat._core import collecting_rarely, did, name_of
from remat._torch import DEVICE, Repeats, states_watched
from remat.plan.joint.holes import around, is_held, parts_of
from remat.plan.joint.lives import Lives
from remat.plan.joint.ops import Hole, Joint, Op, Ref, Value, noted
from remat.plan.joint.packing import Packing
from remat.plan.joint.stand_ins import StandIns, refused, stood_in
from remat.plan.joint.workspace import least_bytes
from remat.transforms import (
    Wrapper,
    active,
    flatten,
    is_cast_of_leaf,
    is_tensor,
    local_tensors,
    on_wrappers,
    traits,
    tree_leaves,
    unflatten,
    untracked,
    user_line,
    wraps,
)
from remat.transforms.closure import trial
from remat.transforms.compat import (
    DispatchMode,
    at_hand,
    autocasting,
    fake_mode,
    function_modes_asked,
    functions_as_they_are,
    hooks_aside,
    is_fake,
    memory_is_real,
    next_node,
    outside_all_modes,
    running_node,
    storage_held,
    storage_key,
    without_module_trackers,
)
from remat.transforms.intermediates import only
from remat.transforms.region import planning
from remat.transforms.tape import shapes_read

_CONSTANT = torch.ops.aten.lift_fresh.default


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape in numbers: of a size that a compiler leaves open, the one at hand."""
    return tuple(map(at_hand, tensor.shape))


class JointRecorder(Packing, DispatchMode):
    """Writes down every op below autograd, with values numbered by tensor identity."""

    plans = True

    def __init__(self, stand_ins: Any) -> None:
        super().__init__()
        self.stand_ins, self.run = stand_ins, Repeats().run
        self.casts = autocasting()
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[int] = []
        self.saved: dict[int, None] = {}
        self.captured: dict[int, torch.Tensor] = {}
        self.made: tuple[int, ...] = ()
        self.shapes = frozenset[int]()
        # Which node each value was saved for, counted from the first of the forward.
        self.owners: list[tuple[int, int]] = []
        self.packed: list[tuple[int, int, int]] = []
        # A region that is met while the model around it is recorded will run as that does.
        outer = around.get()
        self.on_memory = memory_is_real() if outer is None else outer.on_memory
        self.gradients: tuple[int, ...] = ()
        self.differentiated: tuple[int, ...] = ()
        self.in_forward = True
        self.there: set[int] = set()
        self.found: dict[int, torch.Tensor] = {}
        self.holes: list[Any] = []
        # What is there as long as nodes lead to a result of a hole, and which.
        self.leading: list[tuple[Any, int, int]] = []
        self.last = ("", "")
        self._number: dict[int, int] = {}
        self._storage: dict[int, int] = {}
        self._writer: dict[int, int] = {}
        self.lives = Lives(self._number)
        # Results of calls that were left out which others than the caller hold.
        self.staying: list[torch.Tensor] = []
        # States of generators that were taken since the last op.
        self.states: list[weakref.ref[torch.Tensor]] = []
        self._place: tuple[int | None, int] = None, -1
        # A storage that is gone lends its address to no other one meanwhile.
        self._kept: list[Any] = []
        self._others: list[Any] = []

    def add(self, tensor: torch.Tensor, origin: str, producer: int = -1, least: int = 0) -> int:
        """A new number for a tensor, which lies in `least` bytes or more; of a sharded one, for this rank's
        part."""
        if wraps(tensor):
            return [self.add(local, origin, producer) for local in local_tensors([tensor])][0]
        key = storage_key(tensor) if tensor.layout == torch.strided else -id(tensor)
        if key not in self._storage:
            shares, whole = self._place
            held = storage_held(tensor) if key >= 0 else tensor
            if shares is not None:
                self._storage[key] = shares
                self._others.append(held)
            else:
                self._storage[key] = len(self.storages)
                dense = at_hand(tensor.numel()) * tensor.dtype.itemsize
                # An input that is a slice does not own its base; what an op allocates is kept whole.
                owned = at_hand(tensor.untyped_storage().nbytes()) if origin == "op" and key >= 0 else dense
                self.storages.append(whole if whole >= 0 else max(owned, least))
                self._kept.append(held)
        stride = tuple(map(at_hand, tensor.stride())) if tensor.layout == torch.strided else ()
        lies = stride, self._storage[key], producer, origin, tensor.is_conj()
        self.values.append(Value(sizes_of(tensor), tensor.dtype, tensor.device, *lies))
        return self.same(tensor, len(self.values) - 1)

    @contextlib.contextmanager
    def in_storage(self, other: int | None, whole: int) -> Iterator[None]:
        """What is made within lies in the memory of value `other`, or in so many bytes (-1: as it is)."""
        self._place = None if other is None else self.values[other].storage, whole
        try:
            yield
        finally:
            self._place = None, -1

    def number(self, tensor: torch.Tensor, origin: str = "parameter") -> int:
        """The number of a tensor; an unknown one is a capture, or another handle on a known storage.

        A sharded tensor goes by the number of this rank's part. `origin`: of an unknown one.
        """
        if wraps(tensor):
            number = self.number(next(local_tensors([tensor])))
            if tensor.requires_grad and tensor.is_leaf:
                # The part is no leaf: what the backward ends in is the gradient of the whole.
                self.captured[id(tensor)] = tensor
            return number
        known = self._number.get(id(tensor))
        if known is not None:
            outside = self.values[known].producer < 0 and self.in_forward
            if outside and tensor.requires_grad and tensor.is_leaf:
                # It may have been made of one that is known: a module that was moved to where it is.
                self.captured[id(tensor)] = tensor
            return known
        stand_in = self.stand_ins.of(tensor)
        if stand_in is not tensor:
            # An autograd.Function was called with it, which no torch function tells of.
            self.captured[id(tensor)] = tensor
            return self.same(tensor, self.number(stand_in, origin))
        storage = self._storage.get(storage_key(tensor)) if tensor.layout == torch.strided else None
        if storage is not None:
            for candidate in range(len(self.values) - 1, -1, -1):
                value = self.values[candidate]
                if (
                    value.storage == storage
                    and value.shape == sizes_of(tensor)
                    and value.dtype == tensor.dtype
                ):
                    return self.same(tensor, candidate)
        self.captured[id(tensor)] = tensor
        return self.add(tensor, origin)

    def _meet(self, *trees: Any) -> None:
        """Number the sharded parameters among the arguments of an op."""
        for leaf in tree_leaves(trees):
            if is_tensor(leaf) and wraps(leaf) and leaf.is_leaf and leaf.requires_grad:
                self.number(leaf)

    def same(self, tensor: torch.Tensor, number: int) -> int:
        """Let a tensor go by a number that exists."""
        self._number[id(tensor)] = number
        self.lives.see(tensor, number, self.values[number].storage, not self.in_forward)
        return number

    def accumulated(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient that a backward inside of this one has left at a leaf, as torch's reentrant checkpoint
        does; None where there is none."""
        grad = leaf.grad
        number = None if grad is None else self._number.get(id(grad))
        return None if number is None or self.values[number].producer < 0 else grad

    def take_state(self, state: torch.Tensor) -> None:
        """The state of a generator is there, which no op has made."""
        self.states.append(weakref.ref(state))

    def forward_ends(self) -> None:
        """From here on handles are those of the backward."""
        # A node that nothing leads to, such as that of `x.amax().detach()`, is gone with what it saved.
        self.saved = {v: None for v in self.saved if self.lives.packed(v)}
        for token, hole, place in self.leading:
            if token() is None:
                self.holes[hole][6] += (place,)
        # Some entries are sparse tensors, of which nothing is known.
        self.there = {s for s, kept in enumerate(self._kept) if getattr(kept, "expired", _never)() is False}
        self.in_forward, self.lives.backward = False, True

    def forget(self) -> None:
        """Let go of all tensors: nodes that no backward has passed hold this, by their hooks."""
        self._kept, self.captured, self.found = [], {}, {}
        self.staying, self._others = [], []
        self.lives.forget()
        self.stand_ins.forget()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Notes what autograd keeps."""
        number = self.number(tensor)
        self.saved[number] = None
        owner = next_node() - 1 if self.owner is None else self.owner
        self.owners.append((owner - self.start, number))
        self.packed.append((number, len(self.ops), owner))
        # Whose the other handle is tells whether Python holds the tensor, too.
        with self.lives.keeping():
            return super().pack(tensor)

    def _noted(self, value: Any, reads: set[int]) -> Any:
        """What stands for a part of an op's arguments; the values that it reads are added to `reads`."""
        if is_tensor(value):
            reads.add(number := self.number(value))
            return Ref(number)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._noted(one, reads) for one in value])
        if kind is dict:
            return {name: self._noted(one, reads) for name, one in value.items()}
        return noted(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return self.run(func, args, {})
        if function_modes_asked():  # an op of C++: the user's modes know nothing of it
            with functions_as_they_are():
                return self.__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if active.untracked:
            return func(*args, **kwargs)
        if on_wrappers(types):
            self._meet(args, kwargs)
            return NotImplemented  # asks the sharded tensor, whose ops on this rank's part come back here
        facts = traits(func)
        if facts.ignored:
            out = self.run(func, args, kwargs)
            if is_tensor(out):
                # Nobody else holds a constant that the function makes.
                self.same(out, self.number(args[0], "argument" if func is _CONSTANT else "parameter"))
            return out
        location = user_line() if self.in_forward else ""
        self.last = (str(func), location)
        reads: set[int] = set()
        refs = self._noted(args, reads), self._noted(kwargs, reads)
        reads |= {self._writer[s] for v in reads if (s := self.values[v].storage) in self._writer}
        position = self.lives.now = len(self.ops)
        states = [state for told in self.states if (state := told()) is not None]
        beside = tuple([self.add(state, "op", position) for state in states])
        self.states.clear()
        out = self.run(func, args, kwargs)
        mutated = [
            kwargs.get(w) if isinstance(w, str) else args[w] if w < len(args) else None for w in facts.writes
        ]
        overwritten = [t for t in tree_leaves(mutated) if is_tensor(t)] if mutated else []
        old = tuple(self.number(t) for t in overwritten)
        outputs = []
        for tensor in overwritten:
            outputs.append(self.add(tensor, "op", position))
            self._writer[self.values[outputs[-1]].storage] = outputs[-1]
        for leaf in (out,) if is_tensor(out) else tree_leaves(out):
            if is_tensor(leaf) and not any(leaf is t for t in overwritten):
                outputs.append(self.add(leaf, "op", position, least_bytes(func, args, leaf)))
        made = func, refs[0], refs[1], tuple(sorted(reads)), tuple(outputs), old, self.in_forward, location
        optional = self.casts and self.in_forward and is_cast_of_leaf(func, args)
        node = -1 if self.in_forward else _node()
        self.ops.append(Op(*made, optional=optional, node=node, beside=beside))
        if not len(self.ops) % 64:
            did("traced", len(self.ops))
        return out


def _never() -> None:
    return None


def _node() -> int:
    """The number of the autograd node whose backward runs."""
    node = running_node()
    return -1 if node is None else node._sequence_nr()


def record(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    functional: bool = False,
    held: Iterable[int] = (),
    backward: bool = True,
    present: Collection[int] | None = None,
    gone: Collection[int] = (),
    lie: Sequence[tuple[int, ...]] | None = None,
) -> Joint:
    """The joint graph of `fn(*args, **kwargs)`, from metadata alone: nothing is computed or allocated.

    Inputs that require grad are differentiated, captured ones too. The current autocast, default dtype and
    grad state are those of the call; gradients are enabled. With `functional`, `fn` differentiates by itself:
    it is called with a switch before its arguments, and calls that between its forward and its backward.
    `held`: which leaves of the arguments somebody else holds; what Dynamo has traced says so itself.
    Without `backward` the graph ends with the forward. `present`: the places in `Joint.made` of the results
    that a gradient comes for; None where one comes for all. `gone`: of those that the caller lets go of
    before the backward, with all that leads to them alone. `lie`: the strides of these gradients. What
    meanwhile calls `left_out` is a hole in it. Nobody collects named values meanwhile, and
    `is_recomputing()` is true: what counts has its turn in the run proper.

    Raises:
        NotOnFakes: where the function looks at data (`.item()`, a branch on a value) or an op has no fake
            kernel; names the op and the user's line.
    """
    mode = fake_mode(tree_leaves((args, kwargs)))
    recorder = JointRecorder(StandIns(mode))
    with (
        collecting_rarely(),
        outside_all_modes(),
        without_module_trackers(),
        trial(),
        only(()),
        planning(name_of(fn)),
    ):
        token = around.set(recorder)
        try:
            run = (
                _run_functional
                if functional
                else functools.partial(
                    differentiated,
                    backward=backward,
                    present=present,
                    gone=gone,
                    cotangents=functools.partial(_gradients, lie=lie),
                )
            )
            held = getattr(fn, "held", held)
            results = _trace(fn, args, kwargs or {}, recorder, run, held)
            made = graph_of_run(recorder, results)
        finally:
            around.reset(token)
            recorder.forget()
    return made


def graph_of_run(recorder: JointRecorder, results: tuple[int, ...]) -> Joint:
    """What was recorded, as plain data."""
    storages, alive = len(recorder.storages), len(recorder.ops)
    held, ends = (recorder.lives.ends(storages, late=late, alive=alive) for late in (False, True))
    return Joint(
        ops=tuple(recorder.ops),
        values=tuple(recorder.values),
        storages=tuple(recorder.storages),
        saved=tuple(recorder.saved),
        packed=tuple([one for one in recorder.packed if one[0] in recorder.saved]),
        results=results,
        made=recorder.made,
        shapes=recorder.shapes,
        gradients=recorder.gradients,
        differentiated=recorder.differentiated,
        holes=tuple([Hole(*hole) for hole in recorder.holes]),
        pinned=_pinned(recorder, results, held),
        held=held,
        ends=ends,
    )


def _pinned(
    recorder: JointRecorder, results: tuple[int, ...], held: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """The memories that nodes which take no hooks hold until they have run."""
    first = next((at for at, op in enumerate(recorder.ops) if not op.forward), len(recorder.ops))
    made = {v.storage for v in recorder.values if 0 <= v.producer < first}
    made -= {v.storage for v in recorder.values if v.producer < 0}
    made -= {recorder.values[v].storage for v in results}
    return tuple([(s, held[s]) for s in sorted(made) if first <= held[s] < len(recorder.ops)])


def _trace(
    fn: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    recorder: JointRecorder,
    run: Callable[..., tuple[int, ...]],
    known: Iterable[int],
) -> tuple[int, ...]:
    """Stand-ins for the arguments, then the run; returns the numbers of the results."""
    leaves, spec = flatten((args, kwargs))
    mode = recorder.stand_ins.mode
    fakes: dict[int, torch.Tensor] = {}
    for at, leaf in enumerate(leaves):
        if is_tensor(leaf) and id(leaf) not in fakes:
            # Torch has no stand-ins for some: nested ones of the strided layout.
            with refused(fn, lambda: recorder.last):
                fakes[id(leaf)] = _stand_in(leaf, mode)
            held = at in known or is_held(leaf, args, kwargs)
            recorder.add(fakes[id(leaf)], "parameter" if held else "argument")
    args, kwargs = unflatten([fakes.get(id(x), x) if is_tensor(x) else x for x in leaves], spec)
    with (
        refused(fn, lambda: recorder.last),
        stood_in(recorder.stand_ins),
        recorder,
        states_watched(recorder.take_state),
        torch.autograd.set_multithreading_enabled(False),
        hooks_aside(),  # those of the user's count what is saved
    ):
        return run(fn, args, kwargs, recorder, list(fakes.values()))


def _stand_in(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """A fake leaf with the metadata of `tensor`; of a sharded one, such parts in the same wrapper."""
    if wraps(tensor):
        wrapper = Wrapper(tensor, lambda local: _stand_in(local.detach(), mode))
        return wrapper.around(wrapper.parts).detach().requires_grad_(tensor.requires_grad)
    if is_fake(tensor) and tensor.is_leaf:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    if tensor.layout != torch.strided:
        return mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


def differentiated(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    recorder: JointRecorder,
    inputs: list[torch.Tensor],
    backward: bool,
    cotangents: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
    present: Collection[int] | None = None,
    gone: Collection[int] = (),
) -> tuple[int, ...]:
    """Forward, then `backward` from `cotangents`, or from fake ones; returns the numbers of the results."""
    # By hooks: those of a recording around must not see what it saves.
    with torch.enable_grad(), recorder.packing():
        out = fn(*args, **kwargs)
    results = [t for t in tree_leaves(out) if is_tensor(t)]
    recorder.hook_late(results)
    made: list[Any] = parts_of(out, args, kwargs)[1]
    recorder.made = tuple(map(recorder.number, made))
    numbers = tuple(dict.fromkeys([*map(recorder.number, results), *recorder.made]))
    if gone:
        out, made = None, [None if at in gone else t for at, t in enumerate(made)]
        results = [t for t in made if t is not None]
    recorder.forward_ends()
    recorder.shapes = _read_for_shape(recorder, results)
    if not backward:
        return numbers
    wanting = results if present is None else [t for at, t in enumerate(made) if at in present]
    active = [t for t in wanting if t.requires_grad]
    leaves = {id(t): t for t in (*inputs, *recorder.captured.values())}
    wanted = [t for t in leaves.values() if t.requires_grad and t.is_leaf]
    if active and wanted:
        # No op of this graph makes them.
        tangents = untracked(cotangents, active)
        for tangent in tangents:
            recorder.add(tangent, "tangent")
        found = torch.autograd.grad(active, _edges(wanted), tangents, allow_unused=True)
        found = [recorder.accumulated(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
        recorder.found = {id(t): g for t, g in zip(wanted, found, strict=True) if g is not None}
        graded: dict[int, torch.Tensor] = {}
        for t, g in zip(wanted, found, strict=True):
            if g is not None:
                number = recorder.number(t)
                graded[number] = graded[number] + g if number in graded else g
        recorder.differentiated = tuple(graded)
        recorder.gradients = tuple(map(recorder.number, graded.values()))
    # From here on results go, and with them what nodes hold by themselves, such as attributes of a `ctx`.
    recorder.lives.now = len(recorder.ops)
    return numbers


def _edges(leaves: list[torch.Tensor]) -> list[Any]:
    """Where the gradients of these arrive. A function mode would put stand-ins in the place of the leaves,
    and transforms of torch.func take a tensor as it is. A sharded one has no view here."""
    with outside_all_modes(), functions_as_they_are():
        return [leaf if wraps(leaf) else get_gradient_edge(leaf) for leaf in leaves]


def _read_for_shape(recorder: JointRecorder, results: list[torch.Tensor]) -> frozenset[int]:
    """The saved values of which every node reads the shape alone, in a run on tensors with memory."""
    if not recorder.on_memory:
        return frozenset()
    values = [recorder.values[number] for _, number in recorder.owners]
    metas: list[Any] = [(torch.Size(v.shape), v.stride, v.dtype, v.device) for v in values]
    saved = [(owner, meta) for (owner, _), meta in zip(recorder.owners, metas, strict=True)]
    places = shapes_read([op.target for op in recorder.ops], results, recorder.start, saved)
    found = {recorder.owners[place][1] for place in places}
    return frozenset(found - {n for at, (_, n) in enumerate(recorder.owners) if at not in places})


def _gradients(results: Sequence[torch.Tensor], lie: Any = None) -> list[torch.Tensor]:
    """Gradients of results, without data: they lie as they are known to, or as the results do."""
    if lie is None or len(lie) != len(results) or any(map(wraps, results)):
        return [torch.empty_like(t) for t in results]
    pairs = zip(results, lie, strict=True)
    return [torch.empty_strided(t.shape, s, dtype=t.dtype, device=t.device) for t, s in pairs]


def _run_functional(
    fn: Callable[..., Any], args: Any, kwargs: Any, recorder: JointRecorder, inputs: list[torch.Tensor]
) -> tuple[int, ...]:
    """The same for a function that differentiates with torch.func: saved-tensor hooks are refused there.

    `fn` is given a switch to call between its forward and its backward. What the backward reads stands in for
    what autograd packs.
    """

    def switch() -> None:
        recorder.forward_ends()

    fn(switch, *args, **kwargs)
    recorder.saved = _read_in_backward(recorder)
    return ()


def _read_in_backward(recorder: JointRecorder) -> dict[int, None]:
    """The values that the backward reads, neither made there nor given, and what else is still there."""
    made = {o for op in recorder.ops if not op.forward for o in op.outputs}
    made |= {number for number, value in enumerate(recorder.values) if value.origin == "tangent"}
    found = {r: None for op in recorder.ops if not op.forward for r in op.reads if r not in made}
    known = {recorder.values[number].storage for number in found}
    # Whoever gave an argument holds it, and views of it with it.
    known |= {value.storage for value in recorder.values if value.producer < 0}
    for number, value in enumerate(recorder.values):
        if value.origin == "op" and value.storage in recorder.there - known:
            known.add(value.storage)
            found[number] = None
    return found
