"""What is going on around the code at hand: recordings, regions that run again, captures, our own ops."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.profiler import record_function
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from remat.transforms.compat import (
    DispatchMode,
    code_seen,
    function_state,
    functions_as_they_are,
    functions_off,
    is_strided,
    is_wrapped,
    modes_aside,
    profiling,
    seen_as_one_op,
    set_function_state,
    sharding_aside,
    storage_key,
)
from remat.transforms.sharded import is_wrapper, local_tensors, wraps

if TYPE_CHECKING:
    from remat.transforms.tape import Tape


class _Active(threading.local):
    """What is going on in this thread. (A bare threading.local is slow to say that it lacks something.)"""

    stack: Any = ()
    selecting = False  # whether the innermost region around may keep values
    # Whether regions keep what autograd keeps: True, or in a tuple the first of the hooks where they do.
    transparent: Any = False
    sessions: tuple[Any, ...] = ()  # the captures that are open
    listeners: tuple[Any, ...] = ()  # who wants to know what regions keep
    place: str | None = None  # the user's line of the op that runs again, for those
    untracked = False
    aside = False  # whether what runs only says how the results of an op on wrappers lie
    without_policy = False
    seeding = False  # whether the op that runs draws a seed
    travelling: str | None = None  # where what runs brings a value, "host" or "device"
    evaluating = False  # whether a step of a scan runs for its shapes alone: a scan in it runs no steps
    shown: Any = None  # the scan in eager that Dynamo is shown stand-ins of, in a list, until it has begun
    attempt: list[Any] | None = None  # the watchers of a run that may begin again
    # Of the level of torch.func that a function is run again for: "own" where no level inside differentiates,
    # "inner" where one does; None in plain autograd. And whether levels around differentiate that run, too.
    leveled: tuple[str, bool] | None = None
    functions: Any = None  # whether torch functions ask modes in the user's code, where the engine's ask none
    # The user's torch-function modes, where the engine has put them aside; and those of the pass for which it
    # runs a function again.
    users: tuple[Any, ...] | None = None
    passing: tuple[Any, ...] | None = None
    # How many levels of torch.func there are where the engine runs a function, and whether there are any
    # where the user called it.
    seen: tuple[int, bool] | None = None
    through = False  # whether an `autograd.Function` of that goes through levels of the engine's
    owner: list[Any] | None = None  # holds what must live as long as the steps that are being compiled

    def __init__(self) -> None:
        self.rerun: list[str] = []  # names of the regions that are being run again
        self.replays: list[Any] = []  # under functorch: what hands out values, and how to end the rerun
        self.swaps: list[Any] = []  # substitutions of captured tensors (`closure`) in force
        self.noted: list[Any] = []  # for whom the last one is noted down


active = _Active()
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def scoped(**fields: Any) -> Iterator[None]:
    """Let these be so for a while."""
    before = {name: getattr(active, name) for name in fields}
    active.__dict__.update(fields)
    try:
        yield
    finally:
        active.__dict__.update(before)


class Mode(DispatchMode):
    """Shared by recording and replaying: a stack of those active, and silence for the engine's own ops."""

    tape: Tape
    records = False  # whether it watches a forward
    reruns = False  # whether it watches one of which the function runs again
    refused = False  # whether hooks of the user's have refused a value, by an exception
    # The level of torch.func that differentiates what it watches: 0 for plain autograd below vmaps.
    level: int | None = None
    parent: Mode | None = None  # what records or replays around it
    # Whether hooks of the user's lie between. They may run it again alone, as torch's checkpoint does, and
    # then it has to keep the same: it shares nothing with what is around.
    apart = False
    # Whether it sees ops on local tensors in the place of those on wrappers around them; then wrappers that
    # were met, by the ids of their local tensors: they have versions of their own.
    local: dict[int, weakref.ref[torch.Tensor]] | None = None
    # Copies that ops find in the place of memory from outside, by its storage.
    scratch: Mapping[int, Any] = types.MappingProxyType({})

    def takes_apart(self, types: Any, args: Any) -> bool:
        """Whether an op is one on wrappers, which is to run as ops on their local tensors."""
        if self.local is None or not on_wrappers(types):
            return False
        for arg in args:
            for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                self.meet(tensor)
        return True

    def meet(self, tensor: Any) -> None:
        """Note that a tensor is around local ones, if it is."""
        if self.local is not None and isinstance(tensor, torch.Tensor) and wraps(tensor):
            known = weakref.ref(tensor)
            self.local.update([(id(part), known) for part in local_tensors([tensor])])

    def around(self, part: torch.Tensor) -> torch.Tensor:
        """The wrapper around a local tensor, if one is known; the tensor itself otherwise."""
        wrapper = known() if self.local and (known := self.local.get(id(part))) is not None else None
        return part if wrapper is None or all(t is not part for t in local_tensors([wrapper])) else wrapper

    def __enter__(self) -> Any:
        stack = active.__dict__.setdefault("stack", [])
        self.parent = stack[-1] if stack else None
        stack.append(self)
        # As the base does, without going there: a mode begins in each call of a region.
        if not code_seen and "torch._dynamo" in sys.modules:
            seen_as_one_op(DispatchMode)
        return super(DispatchMode, self).__enter__()

    def __exit__(self, *exc: Any) -> Any:
        active.stack.pop()
        return super().__exit__(*exc)

    def start_recording(self) -> None:
        """Go on recording where a forward was held against a tape."""

    def bound(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that is known, None if it is not; a graph has none."""
        return None

    @property
    def position(self) -> int:
        """How many ops it has seen."""
        raise NotImplementedError


def enclosing() -> Mode | None:
    """The innermost recording or replaying in progress on this thread."""
    stack = active.stack
    return stack[-1] if stack else None


def scratch_around(key: int) -> Any:
    """What ops around here find in the place of the memory with this storage, None where that is it."""
    return next((mode.scratch[key] for mode in reversed(active.stack) if key in mode.scratch), None)


def on_scratch() -> bool:
    """Whether ops around here find copies in the place of memory from outside."""
    return any([mode.scratch for mode in active.stack])


def inside() -> AbstractContextManager[None]:
    """Tell the enclosing recording, if any, that what runs now is a region of its own.

    Where the function around runs again, that region runs a forward of its own, with all of its ops.
    """
    mode = enclosing()
    return _NOTHING if mode is None or not mode.reruns else _inside(mode)


@contextlib.contextmanager
def _inside(mode: Mode) -> Iterator[None]:
    start = mode.position
    yield
    if (pair := (start, mode.position)) not in mode.tape.inner:  # as on a tape that is followed
        mode.tape.inner.append(pair)


def selective_around() -> bool:
    """Whether a region around may keep values, which one inside must then not recompute."""
    return any(getattr(mode, "selective", True) for mode in active.stack)


def recordings() -> list[Any]:
    """The recordings in progress on this thread, outermost first."""
    return [mode for mode in active.stack if mode.records]


def run_again_whole(reason: str) -> None:
    """Have the regions around run their functions again as a whole, not their ops from the tape."""
    for mode in recordings():
        mode.start_recording()
        mode.tape.run_again_whole(reason)


def on_wrappers(types: Any) -> bool:
    """Whether an op is one on wrappers; what runs to find out how its results lie is `aside` from now on."""
    if not any([is_wrapper(kind) for kind in types]):
        return False
    sharding_aside(_aside)
    return True


def _aside(function: Callable[..., Any], *args: Any) -> Any:
    with scoped(aside=True, untracked=True):
        return function(*args)


def gathering(function: Callable[..., Any]) -> Any:
    """Run what gathers parameters or frees them: no op of the region around, which does so again."""
    run_again_whole("parameters are gathered in it")
    handle: Any = next(iter(getattr(function, "args", ())), None)
    if (group := getattr(handle, "process_group", None)) is not None:
        for mode in recordings():
            mode.tape.groups.add(group.group_name)
    return untracked(function)


def repeated(function: Callable[..., Any]) -> Any:
    """Run what gathers parameters or frees them by ops, which are repeated: no policy is asked about them."""
    begun = [(mode, mode.position) for mode in recordings()]
    try:
        return without_policy(function)
    finally:
        for mode, first in begun:
            mode.tape.bookkeeping.update(range(first, mode.position))


# A raw kernel (Triton, ctypes, NumPy on shared memory) writes without an op and without a new version. Doors
# to raw memory that Python code has are torch functions, but for the old `to_dlpack` (`tape/tape.py`). What
# lies in memory that was shown is unknown from then on. (An extension that asks for the pointer in C++ is not
# seen.) Nor is it an op to set `tensor.data`. ADDRESSES are read and written, whether memory is there or not.
ADDRESSES = frozenset("data_ptr const_data_ptr __dlpack__ apply_ map_ map2_".split())
RAW_ACCESSORS = ADDRESSES | {"__set__", "numpy", "__array__", "untyped_storage", "storage"}
_DATA = torch.Tensor.data
# What Python makes numbers of, past the dispatcher. Where a function runs again they are to be there again.
_LOOK = "tolist"
PAST_DISPATCH = RAW_ACCESSORS | {_LOOK}


def notice(func: Any, args: Any) -> None:
    """Tell the recording around of a torch function that goes past torch's dispatcher."""
    name = getattr(func, "__name__", "")
    if any([mode.level for mode in active.stack]):
        # Levels have no such memory, and a plain tensor that is captured is no operand there.
        run_again_whole("raw memory is looked at under torch.func")
    elif name == "__set__" and func.__self__ is _DATA:
        if len(args) > 1 and _is_there(*args):
            for mode in recordings():  # as `module.to(x)` does where nothing moves
                mode.sets_again(args[0])
            return
        run_again_whole("it replaces the data of a tensor")
        moved = by_sharding()
        for mode in recordings():
            mode.expose(args[0], moved=True) if moved else mode.replaces(args[0])
    elif name == _LOOK:
        run_again_whole("its Python makes numbers of a tensor")
    elif name != "__set__" and name in RAW_ACCESSORS and args and isinstance(args[0], torch.Tensor):
        moved = by_sharding()
        for mode in recordings():
            mode.expose(args[0], moved)


def _is_there(tensor: Any, data: Any) -> bool:
    """Whether a tensor is set to the data that it has."""
    if data is tensor:
        return True
    with functions_as_they_are():
        if not (is_strided(tensor) and is_strided(data)) or is_wrapped(tensor) or is_wrapped(data):
            return False
        same = tensor.dtype == data.dtype and tensor.shape == data.shape and tensor.stride() == data.stride()
        return (
            same
            and tensor.storage_offset() == data.storage_offset()
            and tensor.numel() > 0
            and storage_key(tensor) == storage_key(data)
        )


def by_sharding() -> bool:
    """Whether it is torch.distributed that looks at memory: FSDP frees and fills that of parameters.

    What it brings there are the parameters that the layer reads, and it brings them again for a backward.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed.")


_BETWEEN = ("remat.transforms.", "torch._tensor", "torch.overrides", "torch.storage")


class MemoryWatch(TorchFunctionMode):
    """Around a forward in plain autograd: notices what goes past torch's dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo looks into modes that are on where a compiled function is called: this one adds nothing.
        if not is_dynamo_compiling() and func not in _no_doors and _may_be_door(func):
            notice(func, args)
        return func(*args, **kwargs) if kwargs else func(*args)


def _may_be_door(func: Any) -> bool:
    if getattr(func, "__name__", "") in RAW_ACCESSORS:
        return True
    if type(func) in _BUILTIN and not isinstance(getattr(func, "__self__", None), torch.Tensor):
        _no_doors.add(func)
    return False


# Torch's own functions that are none: the name of such a function is a new string each time.
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType)
_no_doors: set[Any] = set()
# It knows nothing of its own, so one does for all.
memory_watch = MemoryWatch()


def untracked(function: Callable[..., Any], *args: Any) -> Any:
    """Run an op of the engine's own, which no recording counts.

    A region around may come here by another way when its function runs again, without this op.
    """
    before = active.untracked
    active.untracked = True
    try:
        return function(*args)
    finally:
        active.untracked = before


def beyond_regions(hook: Callable[..., Any], *args: Any) -> Any:
    """Run a hook of the user's. What it computes is no op of the regions around, in the forward or later.

    Torch's checkpoint runs its function again there, with regions inside: in the middle of a forward where
    that goes backward itself. These keep what they kept, whatever is around.
    """
    if not active.stack:
        return of_users(hook, *args)
    with scoped(stack=[], untracked=False, selecting=False), modes_aside(Mode):
        return of_users(hook, *args)


def packed_by(hook: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """Have a hook of the user's pack a value, which is no op of a region around.

    If it raises, the regions that this breaks off give it no more: torch's checkpoint counts them.
    """
    try:
        return untracked(hook, tensor)
    except BaseException:
        for mode in recordings():
            mode.refused = True
        raise


Numbered: TypeAlias = "tuple[tuple[weakref.ref[Any], int], ...]"


def numbered(tensor: torch.Tensor) -> Numbered:
    """Under which numbers the recordings around know a tensor."""
    known = [(mode, mode.bound(tensor)) for mode in recordings()]
    return tuple([(weakref.ref(mode), number) for mode, number in known if number is not None])


def numbered_again(tensor: torch.Tensor, known: Numbered) -> None:
    """Have recordings that are still in progress know what hooks gave back as what those were given."""
    for ref, number in known if active.stack else ():
        mode: Any = ref()
        if mode in active.stack and mode.bound(tensor) != number:
            mode.bind(tensor, number)


@contextlib.contextmanager
def past_function_modes() -> Iterator[None]:
    """Within, the engine works: the user's torch-function modes see the calls of the user's code alone."""
    state, before = function_state(), active.functions
    set_function_state(functions_off)
    active.functions = state if before is None else before
    try:
        yield
    finally:
        active.functions = before
        set_function_state(state)


@contextlib.contextmanager
def _functions_on() -> Iterator[None]:
    """Within, the user's code runs, as it would without the engine around."""
    state, before = function_state(), active.functions
    set_function_state(before)
    active.functions = None
    try:
        yield
    finally:
        active.functions = before
        set_function_state(state)


def of_users(function: Callable[..., Any], *args: Any) -> Any:
    """Run what is the user's, or runs what is, so that the user's torch-function modes see it."""
    if active.functions is None:
        return function(*args)
    with _functions_on():
        return function(*args)


def node_of(tensor: torch.Tensor) -> Any:
    """The autograd node of a tensor. No torch-function mode, such as that of a region around, sees us ask."""
    with functions_as_they_are():
        return tensor.grad_fn


def without_policy(function: Callable[..., Any], *args: Any) -> Any:
    """Run an op of the engine's own, which recordings count, and no selector is asked about."""
    with scoped(without_policy=True):
        return function(*args)


# -- regions around the code at hand ---------------------------------------------------------------------


def run_innermost(
    function: Callable[..., Any], selects: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a region's function as a part of a recording or of a recomputation; `selects`: it has a policy."""
    if active.functions is not None:
        with _functions_on():
            return run_innermost(function, selects, args, kwargs)
    before = active.selecting
    if not selects and not before:
        return function(*args, **kwargs)
    active.selecting = selects
    try:
        return function(*args, **kwargs)
    finally:
        active.selecting = before


def selecting() -> bool:
    """Whether the innermost region that runs around here, for the first time or again, may keep values."""
    return active.selecting


def choosing() -> AbstractContextManager[None]:
    """Around a function that a policy lets run as it is: the innermost region there keeps all values."""
    return scoped(selecting=True)


def recomputing(name: str) -> Callable[[], Any]:
    """Begin to run the region `name` again on this thread; call what comes back at the end."""
    names = active.rerun
    names.append(name)
    if not profiling():
        return names.pop
    label = labelled("recompute", name)
    label.__enter__()

    def end() -> None:
        label.__exit__(None, None, None)
        names.pop()

    return end


@contextlib.contextmanager
def all_of(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Several contexts as one, the first outermost."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def of_a_look(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the second of two saved-tensor hooks by which a look at a function sees what is saved."""
    hook.__dict__["of_a_look"] = True
    return hook


def is_of_a_look(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of these, and none of the user's."""
    return getattr(hook, "of_a_look", False)


@contextlib.contextmanager
def planning(name: str) -> Iterator[None]:
    """Run the region `name` for what it would do: a run beside the passes, as a recomputation is."""
    active.rerun.append(name)
    active.noted.append(None)  # what the function ran under is told nobody around
    try:
        yield
    finally:
        active.noted.pop()
        active.rerun.pop()


def labelled(phase: str, name: str) -> AbstractContextManager[Any]:
    """A label for the profiler's trace, such as `remat::recompute block`, if a profiler is on."""
    return record_function(f"remat::{phase} {name}") if profiling() else _NOTHING


def recomputed_region() -> str | None:
    """The name of the region that this thread is running again, None if it is running none."""
    names = active.rerun
    return names[-1] if names else None


def is_recomputing() -> bool:
    """Whether the code that asks runs as part of a recomputation.

    Under plain autograd, and under one derivative of `torch.func`, a recomputation runs ops and no code of
    yours: hooks, counters and prints run once and the answer is no. It is true where the function itself runs
    again. That is under nested derivatives of `torch.func`, and where ops do not tell all that it computed
    (raw kernels, collectives, operators on functions). Also where a budget is planned (once for each shape of
    the arguments, on tensors without data), and where `capture_grads` looks for names under `torch.func`. For
    counters, prints and logs. The same torch ops must run in both passes. Under nested derivatives a result
    that the backward does not need may hold no numbers in the recomputation. For intermediates there is
    `remat.capture`.

    Example:
        >>> from remat import is_recomputing
        >>> is_recomputing()
        False
    """
    return bool(active.rerun)


def ranks_met() -> bool:
    """Whether this process is one of a group's."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
