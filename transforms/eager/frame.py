"""Recomputation under plain autograd: one graph, kept through saved-tensor hooks.

The forward runs as it is, watched op by op; what autograd would save is replaced by a handle. When the
backward asks for the first of them, the ops that the saved values take run again from the tape, below
autograd. A saved variable reattaches its own history when it is unpacked, so it needs data only. Hooks, FSDP,
in-place ops on results and captured tensors behave as without remat, because the autograd graph is the one
without remat. The idea of the hooks is that of torch.utils.checkpoint (non-reentrant).

Where the tape does not tell all that was computed (raw kernels, collectives, operators on functions), the
user's function runs again as a whole (`rerun.Rerun`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from remat.transforms.compat import (
    Hooked,
    below_autograd,
    below_levels,
    bookkeeping_aside,
    dual_level_open,
    function_modes_asked,
    functions_as_they_are,
    functions_lost,
    graph_kept,
    graph_task,
    has_functions,
    hook_saved,
    in_transform,
    next_node,
    pop_hooks,
    set_grad_enabled,
)
from remat.transforms.context import (
    all_of,
    gathering,
    memory_watch,
    node_of,
    past_function_modes,
    repeated,
    run_innermost,
    untracked,
)
from remat.transforms.eager.inputs import Inputs
from remat.transforms.eager.recorded import hold_again
from remat.transforms.eager.rerun import Rerun
from remat.transforms.eager.residuals import Residuals
from remat.transforms.eager.saved import (
    Handle,
    Packer,
    SavedInput,
    check_shapes,
    hook,
    noted,
    one_at_a_time,
    resumed,
    tables,
    users,
    users_own,
)
from remat.transforms.eager.settle import (
    broken_off,
    drop,
    early_value,
    hold_kept,
    note_tables,
    settle,
)
from remat.transforms.errors import RematError, overwritten
from remat.transforms.offload import Store
from remat.transforms.ops import geometry, storage, version_of
from remat.transforms.pytree import flatten, split
from remat.transforms.region import CachedTrace, recomputing
from remat.transforms.sharded import PLAIN, Wrapper, wraps
from remat.transforms.state import generators_again
from remat.transforms.tape import (
    Held,
    Program,
    Reachability,
    RecomputeSteps,
    Recorder,
    Replaced,
    Tape,
    TraceFollower,
    holders,
    holds,
    nodes_behind,
    standing_for,
)

_NOTHING = contextlib.nullcontext()


class Frame(Packer):
    """One forward of a region, and whatever it takes to make again what its backward reads.

    Attributes:
        recorder: what watches the forward; None once that is over.
        tape: the ops of the forward.
        dead: saved values that no node has any more once the forward is over: those of dead code.
        hollow: saved values of which nodes read the shape alone.
        direct: saved values that are simply there: the positions of those tensors from outside.
        kept: what is kept, by op.
        held: the tensors from outside that the backward needs, by their positions on the tape.
        read, later: what a pass that kept its graph has read, and what passes after such a one read again.
        spare: those that it would need besides if nothing was kept, and that are leaves.
        program: what runs again; None where the function does (`rerun`).
        raw: memories from outside that the function writes to past torch, as they were before.
        replaced: tensors from outside that it gives other memory.
        freed: memories from outside that it frees and fills, by their roots.
        values: saved values that were made again and that the backward has not read yet.
        versions: of those that were written to while they were made.
        whole: whether all that autograd saves is held.
        early: saved values of a function that differentiates, or that replaces the data of tensors, by their
            handles, while it runs.
        late: what autograd has saved inside of transforms of torch.func, which refuse hooks, by its handles;
            None where there was no transform.
        owner: the node that has saved what is packed, where it is not the last one.
        recorded: the first pass that was recorded and holds handles of values; None while there is none.
        plain: whether it serves plain autograd.
    """

    dead: frozenset[int] = frozenset()
    hollow: frozenset[int] = frozenset()
    read: frozenset[int] | None = None
    later: Any = frozenset()
    whole = False
    early: Any = None
    late: Any = None
    owner: int | None = None
    recorded: int | None = None
    plain = True

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.region, self.inner = inputs, inputs.region, 0
        self.task = -1  # the backward pass for which values were made again
        self.recorder: Recorder | None = None
        self.tape: Tape = None  # type: ignore[assignment]  # there is one once the forward runs
        self.direct: dict[int, int] = {}
        self.kept, self.random = {}, {}
        self.held: dict[int, SavedInput] = {}
        self.spare: dict[int, SavedInput] = {}
        self.handles: list[weakref.ref[Handle] | None] = []  # None where nobody asked for one
        self.values, self.versions = {}, {}
        self.snapshots, self.raw, self.freed = {}, [], {}
        self.replaced: tuple[Replaced, ...] = ()
        self.program: Program | None = None
        self.rerun: Rerun | None = None
        self.reach: Reachability | None = None
        self.store: Store | None = None
        self.spent = False  # whether kept values were let go of
        self.residuals: Residuals | None = None
        self.shapes: dict[int, Any] = {}  # of saved values, where a recomputation may make others
        self.start = next_node()
        self.nodes = 0  # how many autograd nodes the forward made

    # -- forward ---------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: CachedTrace | None) -> Any:
        """Run the function and settle what is kept of it; `known` is what an earlier call did."""
        region, inputs, pack = self.region, self.inputs, self.pack
        casts, select, begin = inputs.ambient.casts, region.selector, inputs.note_random
        if known is not None and known.tape.writes_arguments and not known.tape.shares_alike(inputs.local):
            known = None
        if known is not None and known.draws:
            begin(torch.Generator.get_state)  # for a while: nothing that is followed runs its function again
        if known is None:
            begin()
            bookkeeping_aside(gathering, untracked, repeated)
            tape = Tape(region.name)
            recorder = Recorder(
                tape, select, inputs.local, digest=region.digest, casts=casts, decisions=region.decisions
            )
            self.residuals = Residuals(inputs.local, recorder)
        else:
            recorder = TraceFollower(
                known.tape, known.kept, select, inputs.local, casts, region.decisions, begin
            )
            self.residuals = Residuals((), None) if known.residual else None
            simple = self.residuals is None and known.ends is None and not known.tape.sized_by_data
            if simple and not (known.dead or region.cache.differentiates) and inputs.hooks is None:
                pack = self.pack_expected
        self.recorder, recorder.local = recorder, {}
        self.begin(recorder)
        if inputs.hooks is not None:
            recorder.apart = users_own(inputs.hooks)
        for at in inputs.wrappers:
            recorder.meet(inputs.tensors[at])
        watching = self.watching(recorder) if recorder.selector else _NOTHING
        hook((pack, self.unpack))
        try:
            with watching, memory_watch, recorder:
                out = run_innermost(region.function, select is not None, args, kwargs)
                if self.late is not None:
                    self.hook_late(pack, out)
        except BaseException as error:
            self.break_off(recorder, error)
            raise
        finally:
            pop_hooks()
            self.values, self.early, self.task = {}, None, -1
        self.nodes = next_node() - self.start
        self.tape = recorder.tape
        try:
            if recorder.apart and functions_lost():
                self.refuse_other_run(recorder)
            self.end(known, recorder, out)
        except BaseException:
            drop(self)
            raise
        self.recorder = self.late = None
        if self.rerun is None:
            inputs.random, inputs.leaves = None, []
            self.region = inputs.region = region.released
        if recorder.selector:
            recorder.selector.finished(self.tape)
        return out

    def begin(self, recorder: Recorder) -> None:
        """Called before the forward runs."""

    def watching(self, recorder: Recorder) -> contextlib.AbstractContextManager[Any]:
        """Around the user's function: the selector notes the calls that ops come from."""
        return recorder.selector.watching()

    def break_off(self, recorder: Recorder, error: BaseException) -> None:
        """An exception ends the forward."""
        broken_off(self, recorder, error)

    def end(self, known: CachedTrace | None, recorder: Recorder, out: Any) -> None:
        """The forward is over: keep what is needed of it; `out` is what it returned."""
        # (Somebody may have what was dead in the call before.)
        followed = known is not None and isinstance(recorder, TraceFollower) and recorder.followed
        if known is not None and followed and not any(map(self.is_held, known.dead)):
            assert isinstance(recorder, TraceFollower)
            self._settle_as(known, recorder, out)
            if (ranks := self.region.ranks) is not None and ranks.unmet:
                ranks.compare(self, recorder, out)
        else:
            recorder.start_recording()
            self.tape = recorder.tape
            self.tape.tangents = dual_level_open()
            settle(self, recorder, out)
            holds(self)
            if (ranks := self.region.ranks) is not None:
                ranks.compare(self, recorder, out)
        if self.kept or recorder.parent is not None or self.inputs.hooks is not None:
            hold_kept(self, recorder, out)

    def differentiated(self, out: Any) -> list[torch.Tensor]:
        """The results with a history."""
        return [t for t in split(flatten(out)[0])[0] if node_of(t) is not None]

    def hold_whole(self) -> bool:
        """Where the function is to run again: whether all that autograd saves is held instead."""
        return False

    def pack(self, tensor: torch.Tensor) -> Any:
        if function_modes_asked():  # by a node of C++
            with functions_as_they_are():
                return Frame.pack(self, tensor)
        recorder = self.recorder
        assert recorder is not None
        if type(tensor) not in PLAIN and wraps(tensor):
            recorder.meet(tensor)
            return Wrapper(tensor, self.pack)
        # What a region inside this one keeps is no node's of this one.
        owner = self.owner
        if owner is None and not self.inner:
            owner = next_node() - 1 - self.start
        handle = Handle(len(self.handles))
        self.handles.append(weakref.ref(handle))
        recorder.pack(tensor, owner)
        if recorder.tape.sized_by_data:
            self.shapes[handle.at] = tensor.shape
        if self.region.cache.differentiates or recorder.replaces_data:
            if self.early is None:
                self.early = weakref.WeakKeyDictionary()
            # (With a history it would hold the node that holds the handle.)
            self.early[handle] = untracked(tensor.detach)
        if self.owner is not None:
            self.late[handle] = untracked(tensor.detach)
        if self.residuals is not None and not self.residuals.add(handle, tensor):
            self.residuals = None
        return handle

    def pack_expected(self, tensor: torch.Tensor) -> Any:
        """As `pack`, where the forward is the known one and nobody asks what becomes of the handles."""
        recorder: Any = self.recorder
        if type(tensor) not in PLAIN and wraps(tensor):
            recorder.meet(tensor)
            return Wrapper(tensor, self.pack_expected)
        at = recorder.packs
        if recorder.expects(tensor):
            return at
        self.handles += [None] * (at - len(self.handles))
        return self.pack(tensor)

    def refuse_other_run(self, recorder: Recorder) -> None:
        """Raise where it has met tensors of users' classes, whose functions are off in this run alone."""
        met = next((t for t in recorder.outside if has_functions(t) and not wraps(t)), None)
        if met is not None:
            raise RematError(
                f"region {self.region.name!r} runs again for hooks around it, such as torch's "
                f"checkpoint, in a backward that a {type(met).__name__} has begun. Torch turns the "
                "functions of that class off there, so that the two runs differ. Begin with a plain "
                "tensor: loss.as_subclass(torch.Tensor).backward()."
            )

    def stood_back(self) -> None:
        self.late = {}

    def hook_late(self, pack: Any, out: Any) -> None:
        """Hook what autograd has saved inside of transforms of torch.func, which refuse hooks."""
        recorder: Any = self.recorder
        elsewhere = self.elsewhere()
        start = -1 if elsewhere and not recorder.snapshots else self.start
        ends = map(node_of, recorder.outside) if elsewhere else ()
        for node in nodes_behind(list(map(node_of, self.differentiated(out))), start, ends):
            self.owner = node._sequence_nr() - self.start
            hook_saved(node, pack, self.unpack)
        self.owner = None

    def elsewhere(self) -> bool:
        """Whether nodes of a backward inside may have been made, and numbered, by a device's own thread."""
        assert self.recorder is not None
        return any([t.device.type != "cpu" for t in self.recorder.outside])

    def hold_late(self) -> None:
        """Hold what autograd has saved inside of transforms as it is."""
        for handle, tensor in self.late.items():
            handle.value = Held(tensor, self.region.name, users(self.inputs.hooks))
        first = min([handle.at for handle in self.late])
        del self.tape.saved_values[first:], self.tape.owners[first:]

    def lesson(self) -> CachedTrace | None:
        """What this forward tells of the next call with the same signature, None if nothing."""
        tape, program = self.tape, self.program
        if program is None or not tape.cacheable or tape.meta or self.region.digest is not None:
            return None
        # (Under hooks a call that leaves the trace chooses between the same as one that is recorded.)
        kept = self.kept if users(self.inputs.hooks) is None else program.kept
        held, kept = frozenset(self.held), frozenset(kept) | tape.lent
        ends = None if self.reach is None else self.reach.ends
        residual, unread, self.later = self.residuals is not None, (self.dead, self.hollow), set()
        draws = any([node.draws for node in tape.nodes])
        made = CachedTrace(tape, program, kept, held, residual, ends, self.nodes, self.later, draws, *unread)
        return made.shared()

    def _settle_as(self, known: CachedTrace, recorder: TraceFollower, out: Any) -> None:
        """The forward was the known one: keep what that kept."""
        self.program, self.direct, self.later = known.program, known.program.direct, known.later
        self.dead, self.hollow = known.dead, known.hollow
        if self.inputs.hooks is not None:
            note_tables(self, recorder)
        if self.residuals is not None:
            self.hold_residuals(self.residuals)
        else:
            self.kept = {at: recorder.kept[at] for at in known.program.kept}
            self.take(recorder, known.held)
        if known.ends is not None and self.nodes == known.nodes:
            self.reach = Reachability(self.differentiated(out), self.start, known.ends)

    def take(self, recorder: Recorder, held: Any) -> None:
        """Hold these tensors from outside, and what the recomputation starts from besides."""
        inputs, tape = self.inputs, self.tape
        snapshots, raw = recorder.snapshots, [storage(tensor) for tensor, _ in self.raw]
        apart = bool(snapshots or raw or recorder.moved or self.freed)
        other = {id(known.tensor): known for known in self.replaced}
        # One value may come as two tensors, one of which hooks of the user's gave back: it is held once.
        once: Any = None if inputs.hooks is None else {}
        for at in sorted(held):
            tensor, written = recorder.outside[at], False
            if other and (known := other.get(id(tensor))) is not None:
                if known.at != at and at >= tape.arguments:
                    continue  # which the function gives it again
                tensor = known.before
                assert tensor is not None  # what an op has read
            if apart:
                root = tape.outside[at].root
                if written := root in snapshots:
                    self.snapshots[root] = snapshots[root]
                else:
                    # (What it fills itself it fills again.)
                    written = root in recorder.moved or (root in self.freed and root in tape.last_write)
                    written = written or (bool(raw) and storage(tensor) in raw)
            around = recorder.around(tensor) if recorder.local else tensor
            if once is None:
                self.held[at] = SavedInput(tensor, None, written, around)
                continue
            place = storage(tensor), geometry(tensor), tensor.requires_grad, written
            if place not in once:
                hooks = None if tensor in tables else inputs.hooks
                once[place] = SavedInput(tensor, hooks, written, around)
            self.held[at] = once[place]
        if self.held:
            holders.add(weakref.ref(self, holders.discard))
        self.random = recorder.random if self.kept or self.program is None or self.program.draws else {}
        if self.kept and self.program is not None:
            # After what is kept was let go of, all may be asked for once more. Autograd itself holds leaves.
            others = {at: recorder.outside[at] for at in self.program.unkept.outside if at not in self.held}
            around = {at: recorder.around(tensor) for at, tensor in others.items()}
            leaves = {at: t for at, t in around.items() if t.is_leaf and t.requires_grad}
            self.spare = {at: SavedInput(others[at], None, around=t) for at, t in leaves.items()}

    def memories(self) -> Iterator[int]:
        """The storages of what it holds from outside, where versions tell of writes."""
        for held in (*self.held.values(), *self.spare.values()):
            if held.version >= 0:
                yield storage(held.packed)

    def hold_residuals(self, residuals: Residuals) -> None:
        """Hold all that autograd saves as it is."""
        residuals.leave(self.hollow)
        for handle, tensor in list(residuals.tensors.items()):
            handle.value = Held(tensor, self.region.name, users(self.inputs.hooks))
        residuals.finish()

    # -- backward --------------------------------------------------------------------------------------

    def unpack(self, handle: Any) -> torch.Tensor:
        value = None
        if type(handle) is int:
            at = handle
        elif type(handle) is Wrapper:
            return handle.around(map(self.unpack, handle.parts))
        else:
            at, value = handle.at, handle.value
        if self.recorder is not None:
            if self.owner is not None:
                raise Hooked
            return early_value(self, at, self.recorder)
        if value is not None:
            return value.get()
        if (there := self.direct.get(at)) is not None and (input := self.held.get(there)) is not None:
            return input.get(self.inputs, there)
        task = graph_task()
        if at not in self.values or (task != self.task and not resumed(self, task, at)):
            if at in self.hollow:
                meta = self.tape.meta_of(self.tape.saved_values[at][0])
                return untracked(standing_for, meta, self.shapes.get(at, meta[0]))
            self._fill(at, task)
        # A recorded backward and the one it was recorded from may both read it in one pass.
        again = self.recorded is not None and self.recorded != task
        value = self.values[at] if again else self.values.pop(at)
        # What was made in inference mode counts no writes; a level saves it, plain autograd does not.
        if not value.is_inference() and value._version != self.versions.get(at, 0):
            raise RematError(overwritten(self.region.name, value))
        if torch.is_grad_enabled() and self.plain:
            hold_again(self, handle, value)
        if task == -1:
            self.forget()
        return value

    def _fill(self, at: int, task: int) -> None:
        """Make saved value `at` again, and with it what else this backward reads."""
        one_at_a_time(self)
        if self.values or self.inputs.hooks is not None:
            self.forget(task)
        self.task = task
        with below_levels() if in_transform() else _NOTHING:
            self._run(at)
        self.versions = {
            at: made
            for at, value in self.values.items()
            if not value.is_inference() and (made := value._version)
        }
        noted(self, task)

    def _run(self, at: int) -> None:
        if self.rerun is not None:
            self.values = self.rerun.run(self)
            if self.kept and graph_task() != -1 and not graph_kept():
                # They go as autograd's own do. Should one be asked for again after all, all ops run.
                self.kept = {}
                needs = RecomputeSteps(self.tape, range(len(self.tape.nodes)), {})
                self.rerun = Rerun(needs, self.rerun.absent, self.rerun.prints)
            return
        program = self.program
        if program is None:
            raise RematError(f"region {self.region.name!r}: its forward was broken off: it has no backward")
        part = None if self.reach is None else self._part()
        if part is not None and at in part:
            program = self._program_for(sorted(part))
        elif self.spent:
            program, self.held = program.unkept, {**self.spare, **self.held}
        spend = bool(self.kept) and program is self.program and self._spends()
        take: Any = self.kept.__getitem__
        if spend:
            take, self.spent = self.kept.pop, True
        # Hooks of the user's may run a forward, as those of torch's checkpoint do.
        there = {at: self.held[at].get(self.inputs, at) for at in program.outside}
        self.values = self.execute(program, there, take)
        if self.shapes:
            check_shapes(self.tape, self.shapes, self.values)
        if spend:
            self.kept = {}

    def execute(self, program: Program, there: dict[int, torch.Tensor], take: Any) -> dict[int, torch.Tensor]:
        """Run a program under the state in which the forward ran, and leave no trace of it.

        `there`: what it reads from outside; `take` gives what was kept of an op.
        """
        scratch = {root: untracked(snapshot.copy) for root, snapshot in self.snapshots.items()}
        for at in there if scratch else ():
            if (root := self.tape.outside[at].root) in scratch:
                there[at] = untracked(scratch[root].view, there[at])
        graded, end = torch.is_grad_enabled(), recomputing(self.region.name)
        random = self.random if self.region.preserve_rng_state else {}
        ambient = self.inputs.ambient
        contexts: list[Any] = [ambient.restored(False)] if ambient.must_be_restored() else []
        if program.draws and random:
            contexts.append(generators_again(random.values()))
        if self.store is not None:
            contexts.append(self.store.fetched(program.kept))
        try:
            # Modes and subclasses were asked in the forward, and what they did is on the tape. Hooks give
            # what was kept, and are the user's: torch's checkpoint runs its function there.
            past = functions_as_they_are if self.inputs.hooks is None else past_function_modes
            with all_of(contexts) if contexts else _NOTHING, below_autograd(), past():
                return program.run(there, take, random, self.region.digest)
        finally:
            end()
            set_grad_enabled(graded)

    def _part(self) -> set[int] | None:
        """The saved values that the backward under way reads, None for all of them."""
        if self.reach is None or graph_task() == -1:
            return None
        idle = self.reach.idle_now()
        owners = enumerate(self.tape.owners)
        return {i for i, o in owners if o not in idle and i not in self.hollow and self.is_held(i)}

    def is_held(self, i: int) -> bool:
        """Whether saved value `i` may still be asked for."""
        ref = self.handles[i] if i < len(self.handles) else None
        return ref is None or ref() is not None

    def rests(self, i: int, value: torch.Tensor) -> bool:
        """Whether saved value `i`, which was made again, serves another pass: a backward of the user's may
        have written to it."""
        outside = self.tape.root_of(self.tape.saved_values[i][0]) < 0
        return self.is_held(i) and (outside or version_of(value) == 0)

    def _program_for(self, wanted: list[int]) -> Program:
        wanted = [i for i in wanted if i not in self.direct]
        return Program(self.tape, RecomputeSteps(self.tape, self.tape.sources_of(wanted), self.kept), wanted)

    def _spends(self) -> bool:
        """Whether kept values go as they are read, like autograd's own saved values.

        A pass that keeps no graph reads each of them once. Should one be asked for again after all, as by
        another such pass through other nodes, everything is computed anew; that takes all that was read.
        (Held until the region's last node is through, they cost a network that is one region under
        `save_matmuls` 3.8 % of its peak.)
        """
        assert self.program is not None
        if graph_kept() or self.reach is not None:
            return False
        return all([at in self.held or at in self.spare for at in self.program.unkept.outside])

    def forget(self, task: int = -1) -> None:
        """Let go of recomputed values, and of what hooks gave, but for the backward pass `task`."""
        self.values = {}
        if self.inputs.hooks is not None:
            for held in self.held.values():
                held.forget(task)

    def repack(self, tensor: torch.Tensor) -> Any:
        """Take the next value that a run of the function saves."""
        assert self.rerun is not None
        return Wrapper(tensor, self.rerun.pack) if wraps(tensor) else self.rerun.pack(tensor)

    @property
    def complete(self) -> bool:
        """Whether a run of the function that is under way has seen all it was started for."""
        return self.rerun is not None and self.rerun.complete
