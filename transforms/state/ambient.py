"""The ambient state under which a region ran, so that its recomputation runs under the same; and what is
compared of the two runs' results, where their ops cannot be."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from remat.transforms.compat import (
    CompactState,
    DeviceContext,
    around_function_apply,
    ask_about_function,
    autocasting,
    depth,
    function_mode_at,
    function_modes,
    function_modes_asked,
    function_stack,
    functions_as_they_are,
    has_drawn,
    in_transform,
    is_legacy_batched,
    modes_active,
    outside_all_modes,
    outside_batched_grads,
    set_state,
    state_of,
    switches,
    traced_as_it_runs,
    unwrapped,
)
from remat.transforms.context import active, scoped, untracked
from remat.transforms.errors import RematError
from remat.transforms.objects import is_tensor
from remat.transforms.ops import tensors_in
from remat.transforms.pytree import smooth

_READERS = tuple(read for read, _ in switches)
_ONLY_CPU = ("cpu",)
_NO_AUTOCAST: tuple[tuple[str, torch.dtype | None], ...] = (("cpu", None),)

# What users have registered: (capture, replay), by its handle.
registered: dict[object, tuple[Callable[[], Any], Callable[[Any], Any]]] = {}


class Ambient:
    """A snapshot of switches, autocast, the user's torch-function modes, a default device among them, and
    users' own state; `restored()` puts it back."""

    __slots__ = ("autocast", "captured", "casts", "modes", "switches")

    def __init__(self, device_types: Sequence[str]) -> None:
        self.switches = [read() for read in _READERS]
        self.captured = [(replay, capture()) for capture, replay in registered.values()] if registered else ()
        self.modes = user_modes() if function_modes() or active.users is not None else ()
        # Whether autocast was on for any of the devices, and what it cast to.
        self.casts = False
        self.autocast: tuple[tuple[str, torch.dtype | None], ...] = _NO_AUTOCAST
        if device_types is not _ONLY_CPU or autocasting():
            self.autocast = tuple([(d, _autocast_dtype(d)) for d in device_types])
            self.casts = any([dtype is not None for _, dtype in self.autocast])

    @contextlib.contextmanager
    def restored(self, casts: bool = True, called: bool = False) -> Iterator[None]:
        """Put it back for a while; without `casts` for ops below autocast and below torch functions, whose
        casts and modes have had their say. `called`: the function is `Called`, and a backward follows it."""
        with contextlib.ExitStack() as stack:
            stack.callback(_write_switches, [read() for read in _READERS])
            _write_switches(self.switches)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=casts and dtype is not None))
            before = user_modes() if self.captured else ()
            for replay, captured in self.captured:
                stack.enter_context(replay(captured))
            if casts:
                # Who has a mode put back by a replay of theirs needs no second one.
                again = [mode for mode in user_modes() if mode not in before] if self.captured else []
                kinds = {type(mode) for mode in again}
                own = [mode for mode in self.modes if type(mode) not in kinds]
                put_on = users_in_place if called else just_these_modes
                stack.enter_context(put_on([*own, *again]))
            yield

    def must_be_restored(self) -> bool:
        """Whether a recomputation at this point must restore it; with autocast always."""
        return self.casts or self.differs()

    def differs(self) -> bool:
        """Whether the present state is another than the snapshot."""
        # (A hook of the user's may turn a switch between two nodes of a pass.)
        if self.captured or [read() for read in _READERS] != self.switches:
            return True
        there = function_modes() or active.users is not None
        if self.modes != (user_modes() if there else ()):
            return True
        if not self.casts and not autocasting():
            return False
        return tuple([(kind, _autocast_dtype(kind)) for kind, _ in self.autocast]) != self.autocast


@contextlib.contextmanager
def switches_put_back() -> Iterator[None]:
    """Leave the switches as they are now, whatever is turned inside."""
    before = [read() for read in _READERS]
    try:
        yield
    finally:
        _write_switches(before)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast casts to on such devices, None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _write_switches(values: Sequence[Any]) -> None:
    for (read, write), value in zip(switches, values, strict=True):
        if read() != value:
            write(value)


def device_kinds(tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The kinds of device among `tensors`, the CPU always first."""
    if all([t.is_cpu for t in tensors]):
        return _ONLY_CPU
    kinds = {t.device.type for t in tensors}
    return ("cpu", *sorted(kinds - {"cpu", "meta"}))


# Threads share generators. While one notes a state and draws from it, or puts one back and draws, others that
# run regions wait, or something else would be drawn again. (Not for ops that are not torch's own, which may
# themselves wait for another thread.)
_drawing = threading.RLock()
ReadState: TypeAlias = Callable[[torch.Generator], Any]
_NOTHING = contextlib.nullcontext()


def first_draw(call: Callable[..., Any], native: bool, args: Any, kwargs: Any) -> tuple[GeneratorState, Any]:
    """Run an op that draws, `native` for one of torch; the state that it has drawn from, and its result."""
    with _drawing if native else _NOTHING:
        state = untracked(state_before, args, kwargs)
        state.native = native
        out = call(*args, **kwargs)
        if type(state.state) is CompactState:
            has_drawn(state.generator, sum([t.numel() for t in tensors_in(out)]))
        return state, out


class GeneratorState:
    """The state of a generator: of one object, or of the one that a device has by default.

    `of`: how it is read; the default is small for long.
    """

    __slots__ = ("device", "generator", "native", "state")

    def __init__(
        self, generator: torch.Generator | None, device: torch.device, of: ReadState = state_of
    ) -> None:
        if generator is None and device.type == "cpu":
            generator = torch.default_generator
        self.generator, self.device, self.native = generator, device, True
        self.state: Any = self._module.get_rng_state(device) if generator is None else of(generator)

    @property
    def _module(self) -> Any:
        return getattr(torch, self.device.type)

    def restore(self, generator: torch.Generator | None = None) -> None:
        generator = generator or self.generator
        with _drawing:
            if generator is not None:
                set_state(generator, self.state)
            else:
                self._module.set_rng_state(self.state, self.device)

    def draw_again(self, region: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have an op of a recomputation draw what it drew, from the generator that it is given."""
        refuse_traced_draws(region)
        with _drawing if self.native else _NOTHING:
            untracked(self.restore, kwargs.get("generator"))
            return call(*args, **kwargs)

    def now(self, of: ReadState) -> GeneratorState:
        """The present state of the same generator."""
        return GeneratorState(self.generator, self.device, of)


def state_before(args: Any, kwargs: Any) -> GeneratorState:
    """The state of the generator that an op is about to draw from."""
    return GeneratorState(kwargs.get("generator"), _device_of(args, kwargs))


def held_states(states: Iterable[GeneratorState]) -> list[torch.Tensor]:
    """What generator states take, for reports: those in full, and one tensor of the size of what the others
    have of their own."""
    held, small = dict[int, torch.Tensor](), 0
    with outside_all_modes():
        for state in [one.state for one in states]:
            tensors, own = state.takes() if isinstance(state, CompactState) else ([state], 0)
            held.update({id(tensor): tensor for tensor in tensors})
            small += own
        return [*held.values(), *([torch.empty(small, dtype=torch.uint8)] if small else [])]


def refuse_traced_draws(region: str) -> None:
    """Raise where make_fx writes down a recomputation that draws: it writes no generator states."""
    if traced_as_it_runs():
        raise RematError(
            f"the recomputation of {region!r} draws random numbers while make_fx writes it down, and the "
            "graph would draw others than in its forward. Trace with torch.compile, draw outside, or write "
            "torch.func.jvp in the place of torch.func.linearize."
        )


@contextlib.contextmanager
def generators_again(states: Iterable[GeneratorState]) -> Iterator[None]:
    """Within, generators begin where the first state of each says; afterwards they are as now.

    A region inside notes the state that an op of its own is about to draw from before the op runs.
    """
    found: dict[Any, GeneratorState] = {}
    for state in states:
        found.setdefault(state.device if state.generator is None else id(state.generator), state)
    now = [state.now(torch.Generator.get_state) for state in found.values()]
    try:
        for state in found.values():
            state.restore()
        with outside_batched_grads():
            yield
    finally:
        for state in now:
            state.restore()


_CPU = torch.device("cpu")


def _device_of(args: Any, kwargs: Any) -> torch.device:
    """Where an op draws: on the device of its first tensor, or where it is told to make one."""
    for value in (*args, *kwargs.values()):
        if is_tensor(value):
            return _CPU if value.is_meta else value.device
    device = kwargs.get("device")
    return _CPU if device is None or torch.device(device).type == "meta" else torch.device(device)


class RandomState:
    """Generator states of the CPU and of every device among the arguments, and of generators among `own`.

    Whoever knows `device_kinds` of the tensors already may say so. `of`: as for `GeneratorState`.
    """

    __slots__ = ("states",)

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        kinds: tuple[str, ...] | None = None,
        own: Sequence[Any] = (),
        of: ReadState = state_of,
    ) -> None:
        self.states = [GeneratorState(None, _CPU, of)]
        if (kinds or device_kinds(tensors)) != _ONLY_CPU:
            found = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
            self.states += [GeneratorState(None, device) for device in found]
        self.states += [GeneratorState(x, _CPU, of) for x in own if issubclass(type(x), torch.Generator)]

    def restore(self) -> None:
        with _drawing:
            for state in self.states:
                state.restore()

    def again(self, of: ReadState = state_of) -> RandomState:
        """The present state of the same generators."""
        new = RandomState.__new__(RandomState)
        new.states = [state.now(of) for state in self.states]
        return new


@contextlib.contextmanager
def drawing_again(
    random: RandomState | None, states: Collection[GeneratorState], unheld: str | None
) -> Iterator[None]:
    """Around a run of a function again: all generators are as they were at its start, afterwards as now.

    `states`: those that its ops drew from. `unheld`: its name, where no op is given the state of its own.
    """
    if random is None:
        yield
        return
    if unheld is not None and states:
        refuse_traced_draws(unheld)
    now = random.again(torch.Generator.get_state)
    try:
        with generators_again(states):
            # After the others: a function that seeds inside draws first from another state.
            random.restore()
            yield
    finally:
        now.restore()


# -- the operands that stood for captured tensors -----------------------------------------------------------


def noting(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What `function` returns, and the substitution of captured tensors that it ran under, None without."""
    active.noted.append(None)
    try:
        out = function(*args)
    finally:
        last = active.noted.pop()
    note(last)
    return out, last


def note(conversion: Any) -> None:
    """A function has run under `conversion`, or as it is."""
    if active.noted:
        active.noted[-1] = conversion


class in_backward:  # a class, since every step of a scan enters it
    """What `noting` gave, for the backward of what ran; regions in there note their own substitutions."""

    def __init__(self, last: Any) -> None:
        self.inner = contextlib.nullcontext() if last is None else last.in_backward()
        # Its hooks and custom rules are the user's code again, under the modes of the pass.
        self.before = active.users, active.passing
        modes = active.passing
        self.modes = contextlib.nullcontext() if modes is None else just_these_modes(modes)

    def __enter__(self) -> None:
        active.noted.append(None)
        self.inner.__enter__()
        self.modes.__enter__()
        active.users = active.passing = None

    def __exit__(self, *raised: Any) -> None:
        active.noted.pop()
        active.users, active.passing = self.before
        self.modes.__exit__(*raised)
        self.inner.__exit__(*raised)


# -- what two runs must have alike ----------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """What is compared of a float tensor: norm and some elements; a GPU keeps them until they are read."""

    shape: torch.Size
    dtype: torch.dtype
    norm: torch.Tensor | float
    some: torch.Tensor | list[float]

    def read(self) -> tuple[float, list[float]]:
        """The root of the mean square, and the elements."""
        some = self.some.tolist() if isinstance(self.some, torch.Tensor) else self.some
        return float(self.norm) / math.sqrt(max(1, math.prod(self.shape))), some


def fingerprints_of(tensors: Sequence[Any]) -> list[Fingerprint]:
    """Those of float tensors that have numbers in plain memory."""
    watched = modes_active() or in_transform() or function_modes()
    given = [t for t in tensors if is_tensor(t)]
    if not watched:
        return [_fingerprint_of(t) for t in given if _has_numbers(t)]
    with outside_all_modes(), functions_as_they_are():
        return [_fingerprint_of(t) for t in map(unwrapped, given) if _has_numbers(t)]


def _has_numbers(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return plain and smooth(tensor) and not is_legacy_batched(tensor)


def _fingerprint_of(tensor: torch.Tensor) -> Fingerprint:
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    some = plain.reshape(-1)[:: plain.numel() // 8 + 1]
    norm = torch.linalg.vector_norm(plain, dtype=torch.promote_types(plain.dtype, torch.float32))
    some = some.clone()  # of zeros that take no memory, too, which `tolist` refuses
    read = (norm.item(), some.tolist()) if plain.is_cpu else (norm, some)
    return Fingerprint(tensor.shape, tensor.dtype, *read)


def alike(before: Sequence[Fingerprint], found: Sequence[Fingerprint], casts: bool) -> bool:
    """Whether two runs had the same results, as far as prints tell.

    Kernels may differ in last bits between the runs, so the comparison allows for the square root of a
    dtype's precision, that of bfloat16 where autocast `casts`.
    """
    if [m[:2] for m in before] != [m[:2] for m in found]:
        return False
    pairs = [(m.dtype, *m.read(), *n.read()) for m, n in zip(before, found, strict=True)]
    pairs = [pair for pair in pairs if math.isfinite(pair[1] + pair[3])]
    largest = max((pair[1] for pair in pairs), default=0.0)
    for dtype, size, some, size2, some2 in pairs:
        scale = max([largest, *map(abs, some)]) * math.sqrt(
            torch.finfo(torch.bfloat16 if casts else dtype).eps
        )
        if any(abs(a - b) > scale for a, b in zip([size, *some], [size2, *some2], strict=True)):
            return False
    return True


def same_numbers(tensor: torch.Tensor, other: torch.Tensor, casts: bool = False) -> bool:
    """Whether two tensors have the same numbers: floats as `alike` has it."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if smooth(tensor):
        return alike(fingerprints_of([tensor]), fingerprints_of([other]), casts)
    return tensor.layout is not torch.strided or torch.equal(tensor, other)


# -- function modes --------------------------------------------------------------------------------------


def user_modes() -> tuple[Any, ...]:
    """The user's torch-function modes that are on, the outermost first, and in the place of a default device
    the device; where the engine works, those that it has put aside. Those of torch and of regions are not the
    user's."""
    if active.users is not None:
        return active.users
    return _on()


def _on() -> tuple[Any, ...]:
    if not function_modes():
        return ()
    found = filter(_is_users, _stack())
    return tuple([mode.device if isinstance(mode, DeviceContext) else mode for mode in found])


@contextlib.contextmanager
def just_these_modes(modes: Sequence[Any]) -> Iterator[None]:
    """Within, these of the user's torch-function modes are on and no others; those of torch and of regions
    stay, around them: what the user's are given is what the user's code has given."""
    if tuple(modes) == _on():
        yield
        return
    others = [mode for mode in _stack() if not _is_users(mode)]
    with function_stack([*others, *map(_entered, modes)]):
        yield


@contextlib.contextmanager
def users_aside() -> Iterator[None]:
    """Within, the engine works: the user's torch-function modes are asked about what the user calls alone."""
    if not (modes := _on()):
        yield
        return
    with just_these_modes(()), scoped(users=modes, passing=modes):
        yield


@contextlib.contextmanager
def users_in_place(modes: Sequence[Any]) -> Iterator[None]:
    """Within, the engine runs what the user called under these modes, and goes backward after that."""
    with users_aside(), scoped(passing=user_modes(), users=tuple(modes)):
        yield


def under_levels() -> bool:
    """Whether the user's code at hand was called at a level of torch.func."""
    if active.seen is None:
        return in_transform()
    base, there = active.seen
    return there or depth() > base


class Called:
    """A function of the user's as the engine runs it: its torch functions ask those modes that they would ask
    where it was called, and about the same.

    The user's torch-function modes, where the engine runs the user's code.

    The engine's own work asks none of them. And the engine runs a function elsewhere than where it was
    called: below the levels of torch.func, or at a level of its own. That shows at an `autograd.Function`. At
    a level torch asks a mode about it as a whole, and runs it without modes; in plain autograd it asks
    nothing, and the modes see what the Function calls. Here it goes as it would where the user's code was
    called.

    Args:
        levels: what `under_levels` says there.
    """

    def __init__(self, function: Callable[..., Any], levels: bool) -> None:
        self.function, self.levels = function, levels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes = active.users
        if modes is None and active.seen is None and not (self.levels or in_transform()):
            return self.function(*args, **kwargs)
        with (
            just_these_modes(modes) if modes is not None else contextlib.nullcontext(),
            scoped(users=None, passing=None, seen=(depth(), self.levels), through=False),
        ):
            return self.function(*args, **kwargs)


def _below_levels(apply: Callable[[], Any], cls: Any, args: Any, kwargs: Any) -> Any:
    """Run a Function below all levels."""
    if active.seen is None:
        return apply()
    if active.through:
        return _rule_at_level(apply)
    if not (function_modes_asked() and under_levels()):
        return apply()
    stack = _stack()
    if not (users := [mode for mode in stack if _is_users(mode)]):
        return apply()
    # Torch takes off the innermost one, asks it, and comes here again for the next. Regions' own see it all.
    with function_stack([*[mode for mode in stack if not _is_users(mode)], *users]):
        return ask_about_function(cls, args, kwargs)


def _at_level(call: Callable[[], Any]) -> Any:
    """Run a Function at a level."""
    if active.seen is None or not function_modes_asked() or under_levels() or not _on():
        return call()
    with users_aside(), scoped(through=True):
        return call()


def _rule_at_level(rule: Callable[..., Any], *args: Any) -> Any:
    """Run what a Function has of the user's."""
    if not active.through:
        return rule(*args)
    # From a level of the engine's: in plain autograd the modes see it.
    with just_these_modes(active.users or ()), scoped(users=None, passing=None, through=False):
        return rule(*args)


around_function_apply(_below_levels, _at_level, _rule_at_level)


def _stack() -> list[Any]:
    """The torch-function modes that are on, the outermost first."""
    return [function_mode_at(i) for i in range(function_modes())]


def _is_users(mode: Any) -> bool:
    return isinstance(mode, DeviceContext) or not type(mode).__module__.startswith(("torch.", "remat."))


def _entered(mode: Any) -> Any:
    return DeviceContext(mode) if isinstance(mode, torch.device) else mode
