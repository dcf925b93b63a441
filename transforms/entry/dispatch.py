"""Which of the two ways of recomputing a region takes; and its call as that of a primitive, with arguments,
captured tensors and offsets as flat operands."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch

from remat.transforms.closure import (
    MOST_TRIES,
    Bindings,
    ClosureConversion,
    Missed,
    Stored,
    anew,
    as_operand,
    broken_off,
    captured,
    known_around,
    made_for,
    made_inside,
    parts_of,
    reached,
    refuse_given,
    results_of,
    standing_in,
    stored_first,
)
from remat.transforms.compat import (
    below_levels,
    depth,
    function_modes,
    functions_as_they_are,
    hooks_aside,
    hooks_disabled,
    in_transform,
    is_batched,
    is_tracing,
    jit_trace,
    level_of,
    modes_active,
    tangent_of,
    top_hooks,
    uncompiled,
    unwrapped,
)
from remat.transforms.compiled import GraphLowering
from remat.transforms.context import (
    active,
    enclosing,
    inside,
    is_of_a_look,
    labelled,
    of_users,
    on_scratch,
    past_function_modes,
    planning,
    recordings,
    run_innermost,
    scoped,
    selective_around,
    untracked,
)
from remat.transforms.eager import (
    NOT_BELOW,
    NOTHING_REVERSED,
    Frame,
    Inputs,
    LevelFrame,
    LevelInputs,
    Unserved,
    enclosed,
    served_level,
    steering,
    stop_enclosing,
    users,
    users_own,
)
from remat.transforms.errors import RematError, carried, changing
from remat.transforms.functorch import Aliasing, Family, Prim, World, call
from remat.transforms.intermediates import Mirrors, current
from remat.transforms.objects import is_a, is_tensor
from remat.transforms.pytree import check_results, flatten, merge, split, unflatten
from remat.transforms.region import Region
from remat.transforms.state import (
    Ambient,
    Called,
    RandomState,
    device_kinds,
    note,
    under_levels,
    users_aside,
)

# Autograd calls it, also from a backward that compiled code has left to Python.
uncompiled(Frame.unpack)
uncompiled(LevelFrame.unpack)


def outermost() -> bool:
    """Whether no other region is being recorded or recomputed around here."""
    # Under hooks of the user's, torch's checkpoint may run it again with nothing around.
    return users_own(top_hooks()) or (enclosing() is None and not enclosed())


def under_hooks(innermost: Any = None) -> bool:
    """Whether saved-tensor hooks of the user's are around, which may count what is packed.

    `innermost`: the hooks in force, where the caller has asked for them.
    """
    hooks = users(innermost or top_hooks())
    return hooks is not None and not is_of_a_look(hooks[1])


def run_transparently(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], everywhere: bool = True
) -> Any:
    """Call `function` and keep what autograd keeps, regions inside it included.

    `everywhere`: also those under hooks of the user's inside, which torch's checkpoint runs again alone.
    """
    hooks = None if everywhere else top_hooks()
    with scoped(transparent=True if everywhere else (None if hooks is None else hooks[0],)):
        return function(*args, **kwargs)


def _transparent() -> bool:
    """Whether regions keep what autograd keeps here."""
    found, hooks = active.transparent, top_hooks()
    return found is True or hooks is None or hooks[0] is found[0] or not users_own(hooks)


def run(
    region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], bind: Callable[..., Region] | None = None
) -> Any:
    """Call `region`: by a frame in plain autograd, by the primitive under functorch levels.

    `bind`: makes the region of this very call, where they differ. In plain autograd it is given the inputs
    and their signature, None where they tell nothing of other calls; elsewhere nothing.
    """
    # A program that is written down for elsewhere has no backward.
    if (active.transparent and _transparent()) or torch.compiler.is_exporting() or jit_trace() is not None:
        return region.function(*args, **kwargs)
    if in_transform():
        level = served_level()
        if level in (NOTHING_REVERSED, NOT_BELOW):
            if not _trained(region, args, kwargs):
                return _run_forward(region, args, kwargs)
            level = None if level == NOT_BELOW else level
        cache = region.cache
        unframed = cache.unframed or cache.differentiates or cache.by_levels
        traced = active.sessions or (modes_active() and is_tracing())
        if level is not None and not unframed and not traced:
            if not function_modes():
                return _run_leveled(region, args, kwargs, bind, level)
            with past_function_modes():
                out = _run_leveled(region, args, kwargs, bind, level)
            # Without a history nothing else tells a region around, past whose mode it ran.
            made_inside([t for t in flatten(out)[0] if is_tensor(t)])
            return out
        return _run_primitive(region if bind is None else bind(), args, kwargs)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return region.function(*args, **kwargs)
    # AOTAutograd without Dynamo calls no hooks.
    if hooks_disabled() is not None or (modes_active() and is_tracing()):
        return _run_primitive(region if bind is None else bind(), args, kwargs)
    if function_modes():
        with past_function_modes():
            return _run_frame(region, args, kwargs, bind)
    return _run_frame(region, args, kwargs, bind)


def _trained(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether plain autograd differentiates a call under vmaps and forward mode alone, as far as is known."""
    if not torch.is_grad_enabled():
        return False
    if current() or region.cache.hides_leaves:
        return True
    # (Tangents are looked at once the function has run: to ask for each takes as long as a small op.)
    with users_aside():
        given = [*flatten((args, kwargs))[0], *captured(reached(region.function))]
        return any([is_tensor(leaf) and unwrapped(leaf).requires_grad for leaf in given])


def _run_forward(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where nothing wants a reverse pass the function runs as it is.

    torch.cond, which compiles itself, refuses the primitive's modes.
    """
    out = region.function(*args, **kwargs)
    # Where something is differentiated that the search has not found, this call keeps what autograd keeps: a
    # second run would write and draw twice. Later calls recompute.
    if torch.is_grad_enabled():
        region.cache.hides_leaves = _graded(flatten(out)[0])
    return out


def _graded(leaves: Iterable[Any]) -> bool:
    """Whether plain autograd differentiates a tensor of these, or the innermost level's tangent of one."""
    innermost = depth()
    with users_aside():
        for leaf in leaves:
            if not is_tensor(leaf):
                continue
            if unwrapped(leaf).requires_grad:
                return True
            if level_of(leaf) == innermost and not is_batched(leaf):
                tangent = tangent_of(leaf)
                if tangent is not None and unwrapped(tangent).requires_grad:
                    return True
    return False


@uncompiled
def _run_frame(
    region: Region, args: tuple[Any, ...], kwargs: dict[str, Any], bind: Callable[..., Region] | None
) -> Any:
    inputs = Inputs(region, args, kwargs)
    # Offsets add ops to those that earlier calls ran; who listens is told by recording.
    key = None if region.key is None or inputs.taps or active.listeners else inputs.signature()
    hooked = inputs.hooks is not None and under_hooks(inputs.hooks)
    if key is not None and enclosing() is not None:
        apart = hooked and users_own(inputs.hooks)
        if on_scratch() or (selective_around() and not apart):
            key = None  # what a region around keeps, or has copies of, decides what this one computes again
    if bind is not None:
        region = inputs.region = of_users(bind, inputs, key)
        key = None if region.key is None else key
    if hooked:  # a cast that an earlier call has cached is one from outside to this one
        torch.clear_autocast_cache()
    if key is not None and hooked:
        out = region.cache.lasting.held_against(
            (region.key, key), functools.partial(_forward, inputs, args, kwargs)
        )
    else:
        known = own = None if key is None else region.traces.get(key)
        if own is None and key is not None:
            known = region.alike(key)
        out, frame = _forward(inputs, args, kwargs, known)
        if key is not None and (own is None or frame.tape is not own.tape):
            region.learn(key, known, frame)
    inputs.finish()
    if inputs.hooks is not None:
        stop_enclosing(inputs.hooks)
    return out


def _forward(inputs: Inputs, args: Any, kwargs: Any, known: Any) -> tuple[Any, Frame]:
    frame = Frame(inputs)
    with labelled("forward", inputs.region.name), inside():
        return frame.forward(args, kwargs, known), frame


def _leave_out(begun: Iterable[tuple[Any, int]]) -> None:
    """A run is broken off: recordings around know its ops, and run without them if they run again. `begun`:
    these, and how many ops they had before."""
    for mode, first in begun:
        mode.start_recording()
        for node in mode.tape.nodes[first:]:
            node.optional = True


def _reads_trained(function: Any, reach: Any) -> bool:
    """Whether plain autograd differentiates what a function captures, by all that can be told before a call.

    One that calls `functional_call` seems to put others in the place of the parameters that it captures. A
    frame that meets a trained one after all leaves the call to the primitive, which begins again.
    """
    code = function.__code__ if type(function) in (FunctionType, MethodType) else None
    if code is not None and "functional_call" in (*code.co_names, *code.co_freevars):
        return False
    return any([unwrapped(t).requires_grad for t in captured(reach)])


@uncompiled
def _run_leveled(
    region: Region,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bind: Callable[..., Region] | None,
    level: int,
) -> Any:
    """Call a region by a frame at a level of torch.func, or by the primitive where that is needed."""
    if not torch.is_grad_enabled():
        return region.function(*args, **kwargs)
    inputs = LevelInputs(region, args, kwargs, level)
    below = inputs.wrappers or inputs.inference or (level and any([t.requires_grad for t in inputs.local]))
    key = None if region.key is None or active.listeners else inputs.signature()
    hooked = level == NOTHING_REVERSED and inputs.hooks is not None
    if key is not None and active.stack and (on_scratch() or selective_around()):
        key = None
    elif hooked and under_hooks(inputs.hooks):
        key = None  # every call packs the same
    if bind is not None:
        region = inputs.region = of_users(bind) if below else of_users(bind, inputs, key)
        key = None if region.key is None else key
    known = None if below or key is None else region.traces.get(key)
    if known is None or level == NOTHING_REVERSED:
        reach = reached(region.function, *[leaf for leaf in inputs.leaves if leaf is not None])
        if below or (level and _reads_trained(region.function, reach)):
            return _run_primitive(region, args, kwargs)
        inputs.note_world(reach)
        parts = parts_of(reach) if level == NOTHING_REVERSED else ()
        if any([is_a(part, torch.jit.ScriptModule) for part in parts]):
            region.cache.unframed = True  # optimized TorchScript takes no batches, and there are none below
            return _run_primitive(region, args, kwargs)
    frame = LevelFrame(inputs)
    begun = [(mode, mode.position) for mode in recordings()] if active.stack else []
    try:
        with labelled("forward", region.name), inside():
            out = frame.forward(args, kwargs, known)
    except Unserved:
        _leave_out(begun)
        inputs.restore_state(frame.watcher)
        if level == NOTHING_REVERSED and known is not None:
            region.traces.pop(key, None)
            return _run_leveled(region, args, kwargs, None, level)
        region.cache.unframed = True
        # (Torch refuses the one without remat, too, and not what is trained below: Python runs twice there.)
        if known is not None and not frame.unserved:
            raise RematError(
                f"region {region.name!r} does in this call, under torch.func, what its calls before did not: "
                "it fills memory past torch, or gives a tensor other data. What its Python has done until "
                "there cannot be undone. (A further call will run it.) Give what differs a region of its own."
            ) from None
        return _run_primitive(region, args, kwargs)
    if key is not None and (known is None or frame.tape is not known.tape):
        region.learn(key, known, frame)
    inputs.finish()
    if hooked:
        stop_enclosing(inputs.hooks)
    return out


def _run_primitive(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not function_modes() or (modes_active() and is_tracing()):
        return _as_primitive(region, args, kwargs)
    with users_aside():
        return of_users(_as_primitive, region, args, kwargs)


@uncompiled
def _as_primitive(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec, tensors, at = list(args), None, list(args), []
    if kwargs or not all([issubclass(type(arg), torch.Tensor) for arg in args]):
        leaves, spec = flatten((args, kwargs))
        tensors, at = split(leaves)
    taps = Mirrors(lambda: _dry_run(region, args, kwargs, tensors)) if active.sessions and current() else None
    others = [leaf for leaf in leaves if not issubclass(type(leaf), torch.Tensor)]
    reach = reached(region.function, *others)
    found = [*filter(known_around, captured(reach, unsaved=True)), *(taps.offsets if taps else ())]
    random = RandomState(tensors, own=reach)
    for _ in range(MOST_TRIES):
        world = GraphLowering(region) if modes_active() and is_tracing() else None
        watches: list[Any] = []
        attempt = FlatCall(region, leaves, spec, at, tensors, others, found, reach, taps, world)
        begun = [(mode, mode.position) for mode in recordings()]
        try:
            with scoped(attempt=watches):
                return attempt()
        except Missed as missed:
            if missed.around():
                raise
            if any(t is missed.tensor for t in found):
                break
            found.append(missed.tensor)
            begun = []  # a recomputation of the region around misses it again
        except Exception as error:
            if "leaf Variable that requires grad" in str(error) and world is None:
                raise RematError(carried(region.name)) from error
            if "is not differentiable with respect to" in str(error) and not region.cache.by_levels:
                region.cache.by_levels = True
            elif "would mutate a captured Tensor" in str(error) and not region.cache.writes_operands:
                region.cache.writes_operands = True
            else:
                attempt.broken_off(error)
                raise
        _leave_out(begun)
        # What the broken-off run wrote to memory is written again, and what it drew is drawn again. What
        # generators were before the call comes last: the watch knows them from a draw, after a seed.
        attempt.restore_state(watches)
        random.restore()
    raise RematError(changing(region.name))


def _dry_run(region: Region, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
    """Run the function for its names. A region around has no such ops where its pull-back runs it again."""
    random = RandomState(tensors)
    try:
        with torch.no_grad(), planning(region.name):
            untracked(run_transparently, region.function, args, kwargs)
    finally:
        random.restore()


# -- the call as one of a primitive --------------------------------------------------------------------


class FlatCall:
    """A region's call with every tensor it depends on as a flat operand.

    Args:
        region: what is called.
        leaves: of the arguments; those at the positions `at` are `tensors`, the rest `others`.
        spec: the structure of the arguments, None where they are tensors alone.
        captured: what the function reads besides: tensors it closes over, offsets of captures.
        reach: what the function leads to.
        taps: how captures look into it, None where none is open.
        world: where its primitives run, None in eager.
    """

    def __init__(
        self,
        region: Region,
        leaves: Any,
        spec: Any,
        at: Any,
        tensors: Any,
        others: Any,
        captured: Any,
        reach: Any,
        taps: Any,
        world: World | None,
    ) -> None:
        self.region, self.spec, self.at, self.taps = region, spec, at, taps
        # Nodes hold this, and what they have saved is for them, or for hooks, to hold.
        self.leaves = [] if spec is None else merge(leaves, at, [None] * len(at))
        # One that was passed twice is one for the function, too.
        unique = list({id(t): t for t in tensors}.values())
        places = {id(t): i for i, t in enumerate(unique)}
        self.places = [places[id(t)] for t in tensors]
        self.count = len(unique)
        self.originals = [weakref.ref(t) for t in unique]
        self.captured = captured
        self.operands = [as_operand(t) for t in (*unique, *captured)]
        ambient = Ambient(device_kinds(self.operands))
        # Who has registered state of their own puts it back: what their objects are bound to is theirs.
        self.bindings = Bindings(reach, states=True, bound=not ambient.captured)
        self.family = Family(region, ambient, world)
        if world is None:
            self.family.steering = spec, tuple(steering(others))
        self.levels = world is None and under_levels()
        self.out_leaves, self.out_at = list[Any](), list[int]()
        self.out_spec: Any = None  # that of a single tensor is None
        self.aliasing = Aliasing()
        # What the function stores, in what it is given too, is what its first run brings in reach.
        self.others = others
        self.stored: Stored | None = None
        self.known: Any = {id(v): v for v in reach if issubclass(type(v), torch.Tensor)}

    def restore_state(self, watches: list[Any]) -> None:
        """Undo what a run that was broken off has written; `watches` have noted that, the innermost last."""
        self.bindings.restore_state()
        with torch.no_grad(), below_levels(), functions_as_they_are():
            for watch in reversed(watches):
                watch.restore_state()

    def __call__(self) -> Any:
        with labelled("forward", self.region.name):
            given = self.operands
            outs = call(Prim(self.body, self.family), given)
        made_inside(outs)
        rebuilt = self.aliasing.rebuilt
        # No ops of the user's: a region around, whose two runs may come here by other ways, counts none.
        whole = self.family.world is None
        outs = untracked(rebuilt, outs, given) if whole else rebuilt(outs, given)
        out, named, stored = outs[0], (), []
        if self.out_spec is not None:
            tree = unflatten(
                merge(self.out_leaves, self.out_at, list(outs)[: len(self.out_at)]), self.out_spec
            )
            out, named, stored = tree
        if self.taps is not None:
            self.taps.pass_on(named)
        if self.stored is not None:
            self.stored.put(stored)
        self.operands = []
        return out

    def broken_off(self, error: Exception) -> None:
        """An exception ends the call: what leaves with it belongs to levels that are gone."""
        roots = self.region.function, *self.others, error
        left = [] if self.known is None else anew(reached(*roots), self.known)
        if left:
            broken_off(f"region {self.region.name!r}", roots, left, self.operands)

    def body(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.family.ambient.casts:
            # Autocast caches casts of leaves; below the levels every operand would be one, above them none.
            # A region around, whose two runs may come here by other ways, counts no aliases as ops.
            operands = tuple([torch.ops.aten.alias.default(t) for t in operands])
        made_inside(operands)  # for regions around, of which no torch call has told them
        captured = operands[self.count :]
        own = tuple([operands[i] for i in self.places])
        args: Any = own
        kwargs: Any = {}
        if self.spec is not None:
            args, kwargs = unflatten(merge(self.leaves, self.at, list(own)), self.spec)
        table = {id(t): operand for t, operand in zip(self.captured, captured, strict=True)}
        conversion = ClosureConversion(table, own, self.captured)
        given = {
            id(t): operand
            for ref, operand in zip(self.originals, operands, strict=False)
            if (t := ref()) is not None
        }
        with (
            self.bindings.restored(),
            self.bindings.in_scripts(table)
            if self.bindings.scripts is not None
            else contextlib.nullcontext(),
            standing_in(self.region.function, given) as function,
            conversion,
        ):
            if self.stored is not None:
                self.stored.begins_again((function, *self.others))
            run = functools.partial(self._run, function)
            out, named = self._tapped(run, args, kwargs, table) if self.taps else (run(args, kwargs), ())
            stored: list[torch.Tensor] = []
            objects = [] if self.family.world is not None else results_of(self.region.name, out)
            if self.stored is not None:
                held = made_for(objects, self.stored.before, conversion.is_inside)
                again = self.family.present, self.aliasing.specs, len(self.out_at)
                stored = self.stored.found_again((function, *self.others), held, *again)
        note(conversion)
        if self.known is not None:
            if any([issubclass(type(arg), (dict, list, tuple)) for arg in (*args, *kwargs.values())]):
                refuse_given(self.region.name, (args, kwargs), own, out)
            stored = self._stored_first(self.known, objects, conversion)
        if self.taps is None and is_tensor(out) and not stored:
            return self._leaving([table.get(id(out), out)], operands)
        if self.family.world is not None:
            check_results(out, self.region.name)
        self.out_leaves, self.out_spec = flatten((out, named, stored))
        tensors, self.out_at = split(self.out_leaves)
        self.out_leaves = merge(self.out_leaves, self.out_at, [None] * len(self.out_at))
        # A captured tensor may be returned as it is, without any torch call that would have met it.
        tensors = [table.get(id(t), t) for t in tensors]
        return self._leaving(tensors, operands)

    def _stored_first(
        self, known: dict[int, Any], objects: list[Any], conversion: ClosureConversion
    ) -> list[torch.Tensor]:
        region, roots, self.known = self.region, (self.region.function, *self.others), None
        new = [v for v in reached(*roots) if is_tensor(v) and id(v) not in known]
        new += made_for(objects, {**known, **{id(t): t for t in new}}, conversion.is_inside)
        roots = (*roots, *objects)
        stored, self.stored = stored_first(region.name, roots, new) if new else ([], None)
        return stored

    def _leaving(self, results: list[torch.Tensor], operands: tuple[torch.Tensor, ...]) -> Any:
        outs = self.aliasing.leaving(results, operands, self.family.present)
        if self.family.results is not None:
            self.family.results.met(outs)
        return outs

    def _tapped(self, run: Any, args: Any, kwargs: Any, table: dict[int, torch.Tensor]) -> tuple[Any, Any]:
        # Named values leave as results like any other: every run of the body has the same ones.
        context, mirrors = self.taps.opened(table)
        with context:
            out = run(args, kwargs)
        return out, self.taps.found(mirrors)

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        called = Called(function, self.levels) if self.family.world is None else function
        # Nodes hold what these ops save for as long as the forward runs: hooks of the user's would be given
        # what no backward reads, and their own ops would be ops of the region.
        with hooks_aside():
            return run_innermost(called, self.region.selector is not None, args, kwargs)
