"""Autograd: its engine, its saved-tensor hooks, and functorch's levels, which wrap tensors.

Private names of torch, each with its reason. Supported: torch 2.11 to 2.15. Unless a line says otherwise a
name was tried on 2.11.0, 2.13.0 and 2.15.0 (CPU), by the whole test suite.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch._tensor_str as _tensor_str
from torch._C import (
    _autograd as _autograd_c,
    _functorch as _functorch_c,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch._C._functorch import TransformType, pop_dynamic_layer_stack, push_dynamic_layer_stack
from torch._functorch import (
    autograd_function as functorch_functions,
    eager_transforms,
    utils as functorch_utils,
    vmap as functorch_vmap,
)
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch._functorch.utils import (
    enable_single_level_autograd_function as enable_single_level_autograd_function,
)
from torch._functorch.vmap import restore_vmap as restore_vmap
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.overrides import handle_torch_function

from remat.transforms.compat.patches import exchange

# -- saved-tensor hooks -------------------------------------------------------------------------------
# The context manager of torch.autograd.graph costs a Python object and a generator a region; a region may
# pass 24 times a step, so the frame pushes and pops by hand.
push_hooks: Callable[[Any, Any], None] = _autograd_c._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd_c._pop_saved_tensors_default_hooks
graph_task: Callable[[], int] = torch._C._current_graph_task_id
profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
engine_runs: Callable[[Any], bool] = torch._C._will_engine_execute_node
# The node that this thread's backward pass is running, None outside of one.
running_node: Callable[[], Any] = torch._C._current_autograd_node


def functions_lost() -> bool:
    """Whether a backward runs that a tensor of a user's class has begun: without the functions of such
    classes, as torch turns them off inside of a method."""
    return running_node() is not None and not torch._C._is_torch_function_enabled()


def has_functions(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that has torch functions of its own, or inherits those of tensors."""
    own: Any = type(tensor).__torch_function__
    return type(tensor) is not torch.Tensor and own is not torch._C._disabled_torch_function_impl


# The number that this thread's next autograd node gets.
next_node: Callable[[], int] = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
# Within, ops make no nodes, whatever grad mode says: some kernels look at that mode, and give other results.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd  # pyright: ignore
graph_kept: Callable[[], bool] = _autograd_c._get_current_graph_task_keep_graph
# The innermost saved-tensor hooks of this thread: inner ones hide them, so a region asks them itself.
top_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = functools.partial(
    _autograd_c._top_saved_tensors_default_hooks, True
)


@contextlib.contextmanager
def hooks_aside(which: Callable[[Any], bool] = bool) -> Iterator[list[Any]]:
    """Take saved-tensor hooks off for a while, down to the first pair that `which` does not mean: under them
    torch.func would be refused. Gives those that were taken."""
    taken = []
    while (pair := top_hooks()) is not None and which(pair):
        pop_hooks()
        taken.append(pair)
    try:
        yield taken
    finally:
        for pair in reversed(taken):
            push_hooks(*pair)


# torch.func asks for this where a transform begins, to refuse saved-tensor hooks. Dynamo knows it by its
# identity, and threads without a region go on with it. So the object stays, and what it calls is another
# function. (It is one of `contextlib.contextmanager`, 2.11 to 2.15.)
_disabling: Any = torch.autograd.graph.disable_saved_tensors_hooks
_disabled_by: Any = _disabling.__closure__[0]
_disabled = contextlib.contextmanager(_disabled_by.cell_contents)


def at_transforms(which: Callable[[Any], bool], note: Callable[[Any], None]) -> None:
    """From now on the saved-tensor hooks that `which` means are off within transforms of torch.func.

    These would refuse them. `note` is told of each pair that was taken off.
    """

    def aside(message: str) -> Iterator[None]:
        with contextlib.nullcontext(()) if top_hooks() is None else hooks_aside(which) as taken:
            for pair in taken:
                note(pair)
            with _disabled(message):
                yield

    _disabled_by.cell_contents = aside


# The message with which saved-tensor hooks are refused at this point, or None where they work.
hooks_disabled: Callable[[], str | None] = _autograd_c._saved_tensors_hooks_get_disabled_error_message
allow_hooks: Callable[[], None] = _autograd_c._saved_tensors_hooks_enable
refuse_hooks: Callable[[str], None] = _autograd_c._saved_tensors_hooks_disable  # with this message


@contextlib.contextmanager
def hooks_as_they_are() -> Iterator[None]:
    """Afterwards saved-tensor hooks are refused as before, or not."""
    message = hooks_disabled()
    try:
        yield
    finally:
        if hooks_disabled() != message:
            allow_hooks() if message is None else refuse_hooks(message)


@contextlib.contextmanager
def hooks_allowed() -> Iterator[None]:
    """Lift the refusal that `torch.func` puts on saved-tensor hooks.

    Only for hooks whose values are never unpacked: differentiating through hooks under functorch is silently
    wrong (FACTS section 1), watching what is packed is not.
    """
    with hooks_as_they_are():
        allow_hooks()
        yield


def is_hook_refusal(error: BaseException) -> bool:
    """Whether `error` is torch.func's refusal to run under saved-tensor hooks."""
    return isinstance(error, RuntimeError) and "yet support saved tensor hooks" in str(error)


# `torch.autograd.grad` with `allow_unused`, without its checks, which take a third of a small step's time. Of
# tuples: outputs, cotangents, whether the graph is kept, whether one is made, inputs.
engine_grad: Callable[..., tuple[torch.Tensor | None, ...]] = functools.partial(
    torch.autograd.Variable._execution_engine.run_backward, allow_unreachable=True, accumulate_grad=False
)

# Writes within are told to nobody: what is written is put back, or is what was there.
version_kept: Callable[[torch.Tensor], contextlib.AbstractContextManager[Any]] = (
    torch.autograd._unsafe_preserve_version_counter  # pyright: ignore[reportPrivateImportUsage]
)


def batched_grads_around() -> int:
    """How many calls with `is_grads_batched` are around: an old kind of vmap, in which no op may draw."""
    torch._C._vmapmode_increment_nesting()
    return torch._C._vmapmode_decrement_nesting()


@contextlib.contextmanager
def outside_batched_grads() -> Iterator[None]:
    """What runs again is below such calls."""
    level = batched_grads_around()
    for _ in range(level):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(level):
            torch._C._vmapmode_increment_nesting()


def graded_under(
    mode: contextlib.AbstractContextManager[Any],
    outputs: tuple[torch.Tensor, ...],
    inputs: tuple[torch.Tensor, ...],
    grad_outputs: Any,
    *,
    retain_graph: bool | None,
    create_graph: bool,
    allow_unused: bool | None,
    materialize_grads: bool,
    **_: Any,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` as a torch-function mode is told of it, with `mode` on while the engine runs.

    It is a torch function, so that modes are off where it is called from one.
    """
    given = tuple([None] * len(outputs)) if grad_outputs is None else grad_outputs
    given = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    starts = torch.autograd._make_grads(outputs, given, is_grads_batched=False)
    retain = create_graph if retain_graph is None else retain_graph
    unused = materialize_grads if allow_unused is None else allow_unused
    engine: Any = torch.autograd.Variable._execution_engine
    with mode:
        grads = engine.run_backward(
            outputs, starts, retain, create_graph, inputs, allow_unreachable=unused, accumulate_grad=False
        )
    if not materialize_grads:
        return grads
    zeros = zip(grads, inputs, strict=True)
    return tuple([torch.zeros_like(t, requires_grad=create_graph) if g is None else g for g, t in zeros])


# A transform of torch.func differentiates with `create_graph=True`, and nothing at its level does so again.
# Nothing else tells its passes from a user's. Noted in state that autograd hands on to its threads.
_PASS = "remat_pass_of_func"
_pass_of_func: Any = eager_transforms._autograd_grad


def _noting_pass(*args: Any, **kwargs: Any) -> Any:
    # Dynamo, if it was there before remat, knows the one of torch alone, and looks into this one.
    if torch.compiler.is_dynamo_compiling():
        return _pass_of_func(*args, **kwargs)
    before = in_pass_of_func()
    _tls._stash_obj_in_tls(_PASS, True)
    try:
        return _pass_of_func(*args, **kwargs)
    finally:
        _tls._stash_obj_in_tls(_PASS, before)


_tls: Any = torch._C
exchange(eager_transforms, "_autograd_grad", _noting_pass)


def has_no_level_rule(error: Exception) -> bool:
    """Whether an operator on functions says that it has no rule for a level: a bare torch.cond."""
    return isinstance(error, KeyError) and bool(error.args) and isinstance(error.args[0], TransformType)


def in_pass_of_func() -> bool:
    """Whether the backward pass at hand is that of a transform of torch.func."""
    return bool(_tls._is_key_in_tls(_PASS) and _tls._get_obj_in_tls(_PASS))


# Runs a callback when the running backward pass ends. (2.15 has torch.autograd.graph.queue_callback; this
# spelling works on all.)
at_backward_end: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore[reportAttributeAccessIssue]
)

# A torch-function mode is told of `autograd.Function.apply` under functorch levels only. Below them all that
# apply does with its arguments, before it looks at their derivatives, is to hand them to this one function.
# (Tried on 2.11 and 2.13. In 2.15 apply is C++, which hands them to nobody, so it gets another one around it.
# What was taken from a class before this module was imported, as `f = Custom.apply`, is not seen there.)
_unwrap_dead_wrappers: Callable[[tuple[Any, ...]], tuple[Any, ...]] = functorch_utils.unwrap_dead_wrappers


_APPLY_IN_CPP = not isinstance(torch.autograd.Function.__dict__["apply"], classmethod)


_kinds: list[type[Any]] = []


def _told() -> list[Any]:  # the innermost first
    stack = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return [mode for mode in reversed(stack) if isinstance(mode, tuple(_kinds))]


def _substituted(args: tuple[Any, ...]) -> tuple[Any, ...]:
    for mode in _told():
        args = mode.of_apply(args)
    return args


def _noted(made: Any, how: str) -> Any:
    for mode in _told():
        if (note := getattr(mode, how, None)) is not None:
            note(made)
    return made


def at_function_apply(kind: type[Any]) -> None:
    """From now on every `autograd.Function.apply` below functorch levels goes on with what `of_apply` of the
    torch-function modes of this kind makes of its arguments, the innermost mode first."""
    _kinds.append(kind)
    if len(_kinds) > 1:
        return

    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _unwrap_dead_wrappers(_substituted(args))

    exchange(functorch_utils, "unwrap_dead_wrappers", unwrap_dead_wrappers)
    function: Any = torch.autograd.Function
    if _APPLY_IN_CPP:
        in_cpp = function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return in_cpp.__get__(None, cls)(*_substituted(args), **kwargs)

        exchange(function, "apply", classmethod(apply))


def around_function_apply(
    below: Callable[..., Any], at_level: Callable[..., Any], rule_at_level: Callable[..., Any]
) -> None:
    """From now on an `autograd.Function` runs below functorch levels as `below(apply, cls, args, kwargs)` has
    it, and at one as `at_level(call)`, but what torch calls of it there as `rule_at_level(rule, *args)`.

    (Below them `apply` hands on to its base, which has none of its own until 2.14; in 2.15 it is C++.)
    """
    function: Any = torch.autograd.Function
    if not _APPLY_IN_CPP:

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            of_base: Any = super(SingleLevelFunction, cls)
            go_on = functools.partial(of_base.apply, *args, **kwargs)
            users = issubclass(cls, function) and not cls.__module__.startswith("remat.")
            return below(go_on, cls, args, kwargs) if users else go_on()

        exchange(SingleLevelFunction, "apply", classmethod(apply))
    else:
        own = function.__dict__["apply"]

        def apply_below(cls: Any, *args: Any, **kwargs: Any) -> Any:
            go_on = functools.partial(own.__get__(None, cls), *args, **kwargs)
            return go_on() if in_transform() else below(go_on, cls, args, kwargs)

        exchange(function, "apply", classmethod(apply_below))
    kind: Any = type(custom_function_call)
    as_it_is = kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        go_on = functools.partial(as_it_is, self, *args, **kwargs)
        return at_level(go_on) if in_transform() else go_on()

    exchange(kind, "__call__", called)
    generate = functorch_functions.generate_single_level_function

    def generated(interpreter: Any, cls: Any) -> Any:
        made: Any = generate(interpreter, cls)  # its backward runs later, when all of this is over
        made.setup_context = staticmethod(functools.partial(rule_at_level, made.setup_context))
        made.jvp = staticmethod(functools.partial(rule_at_level, made.jvp))
        return made

    exchange(functorch_functions, "generate_single_level_function", generated)


def ask_about_function(cls: Any, args: Any, kwargs: Any) -> Any:
    """Ask the innermost torch-function mode about an `autograd.Function`, as at a functorch level."""
    return handle_torch_function(custom_function_call, args, cls, *args, **kwargs)


# Whether torch functions ask modes here, of which there are some.
function_modes_asked: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


# A transform of torch.func wraps the tensors that it is given for its level, and calls no torch function with
# them. The functions that do so are replaced while somebody wants to know, and so is what takes a batch off
# a result: of one that has none, vmap makes a new tensor. (Tried on 2.11, 2.13, 2.15.)
_wrapping: Any = (
    (eager_transforms, "_wrap_for_grad", "note_wrapper"),
    (functorch_vmap, "_add_batch_dim", "note_wrapper"),
    (functorch_vmap, "_remove_batch_dim", "note"),
)
_as_they_are = [getattr(where, name) for where, name, _ in _wrapping]
_watched: list[Callable[..., Any]] = [
    (lambda tensor, *level, wrap=wrap, how=how: _noted(wrap(*_substituted((tensor,)), *level), how))
    for wrap, (_, _, how) in zip(_as_they_are, _wrapping, strict=True)
]
_watchers, _watching = [0], threading.Lock()


def watch_transforms(more: int) -> None:
    """Ask `at_function_apply`'s modes about those too, for one more or for one less (-1) who wants that."""
    with _watching:
        _watchers[0] += more
        if _watchers[0] == max(more, 0):  # the first one comes, or the last one goes
            now = _watched if more > 0 else _as_they_are
            for (where, name, _), function in zip(_wrapping, now, strict=True):
                exchange(where, name, function)


# Torch counts forward-mode levels for the whole process, where one can be open, and does not say whose it is.
# So who opens one notes it, in state that autograd hands on to its worker threads.
# (`_stash_obj_in_tls` is what `torch.autograd.graph` keeps context variables in; 2.11 to 2.15.)
_OPEN = "remat_dual_level"


def _level_noted(change: Callable[..., Any], opened: bool) -> Callable[..., Any]:
    @functools.wraps(change)
    def noting(*args: Any, **kwargs: Any) -> Any:
        made = change(*args, **kwargs)
        note_dual_level(opened)
        return made

    return noting


def note_dual_level(opened: bool) -> bool:
    """Note whether the open level is this thread's; returns what was noted before."""
    before = _tls._is_key_in_tls(_OPEN) and _tls._get_obj_in_tls(_OPEN)
    _tls._stash_obj_in_tls(_OPEN, opened)
    return before


_forward_ad: Any = torch.autograd.forward_ad
exchange(_forward_ad, "enter_dual_level", _level_noted(_forward_ad.enter_dual_level, True))
exchange(_forward_ad, "exit_dual_level", _level_noted(_forward_ad.exit_dual_level, False))


def dual_level_open() -> bool:
    """Whether this thread is in a forward-mode level, torch.func's or a plain `dual_level`."""
    if _forward_ad._current_level < 0:
        return False
    return bool(_tls._is_key_in_tls(_OPEN) and _tls._get_obj_in_tls(_OPEN))


def forward_ad_active(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a plain `forward_ad.dual_level` is open and one of `tensors` has a tangent."""
    return dual_level_open() and any(map(has_tangent, tensors))


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether the innermost level pushes a tangent of `tensor` forward, or of what it is a batch of."""
    while is_batched(tensor):  # of which torch tells none
        tensor = unwrap_once(tensor)
    return tangent_of(tensor) is not None


def tangent_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What the innermost level pushes forward of a tensor of its own."""
    if tensor.is_inference():  # torch asserts; in inference mode, where it does not, to ask would be an op
        return None
    try:
        return torch._unpack_dual(tensor, level=0)[1]  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError as error:  # sparse ones have none; nor, below autograd, torch's own and old batches
        known = "native::_fw_primal" in str(error) or "aten::_unpack_dual" in str(error)
        if not known and not isinstance(error, NotImplementedError):
            raise
        return None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let a tensor's version be another one: it was written to, and has its old numbers again."""
    _autograd_c._unsafe_set_version_counter((tensor,), (version,))


def no_view(tensor: torch.Tensor) -> torch.Tensor:
    """What a torch function returned, as no view: to a class of the user's torch turns its results by one."""
    # As `torch.nn.Parameter` does it (2.11 to 2.15).
    return torch.Tensor._make_subclass(type(tensor), tensor) if tensor._is_view() else tensor  # type: ignore[attr-defined]


# -- functorch levels ---------------------------------------------------------------------------------
# torch has no public way to write a rule for "a function under grad / vmap / jvp" other than
# autograd.Function, whose jvp rule evaluates the function a second time. custom_function_call is built from
# these same names.
GRAD, JVP, VMAP = TransformType.Grad, TransformType.Jvp, TransformType.Vmap
FUNCTIONALIZE = TransformType.Functionalize
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
forward_grad_enabled = _set_fwd_grad_enabled
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
wrap_for_grad: Callable[[torch.Tensor, int], torch.Tensor] = _functorch_c._wrap_for_grad
unwrap_for_grad: Callable[[torch.Tensor, int], torch.Tensor] = _functorch_c._unwrap_for_grad
unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = _functorch_c.unwrap_if_dead
unwrap_once: Callable[[torch.Tensor], torch.Tensor] = _functorch_c.get_unwrapped
is_wrapped: Callable[[torch.Tensor], bool] = _functorch_c.is_functorch_wrapped_tensor
is_legacy_batched: Callable[[torch.Tensor], bool] = _functorch_c.is_legacy_batchedtensor
is_dead: Callable[[torch.Tensor], bool] = _functorch_c.is_dead_tensor_wrapper
is_batched: Callable[[torch.Tensor], bool] = _functorch_c.is_batchedtensor
level_of: Callable[[torch.Tensor], int] = _functorch_c.maybe_get_level
add_batch_dim: Callable[[torch.Tensor, int | None, int], torch.Tensor] = _functorch_c._add_batch_dim
unwrap_batched: Callable[[torch.Tensor, int], tuple[torch.Tensor, int | None]] = _functorch_c._unwrap_batched


def wrappers_of(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[tuple[int, int | None], ...]]:
    """The plain tensor below all levels, and the wrappers around it from the outermost in: the level of each,
    and the dimension that it has a batch in."""
    around = []
    while is_wrapped(tensor):
        level = level_of(tensor)
        if is_batched(tensor):
            tensor, dim = unwrap_batched(tensor, level)
        else:
            tensor, dim = unwrap_once(tensor), None
        around.append((level, dim))
    return tensor, tuple(around)


def parts_of(
    tensor: torch.Tensor, forward: Collection[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[Any, ...]]:
    """A tensor and its tangents at the levels `forward`, tangents of tangents included; the plain tensors
    below all levels that these are; and the wrappers around the first as `wrappers_of` has them. Of one with
    a tangent, in the place of the dimension: which of the parts that is, and the wrappers around it."""
    tops: list[torch.Tensor] = []
    bottoms: list[torch.Tensor] = []
    around = _add_parts(tensor, forward, tops, bottoms)[1]
    return tops, bottoms, around


def _add_parts(
    top: torch.Tensor, forward: Collection[int], tops: list[torch.Tensor], bottoms: list[torch.Tensor]
) -> tuple[int, tuple[Any, ...]]:
    at, around = len(tops), []
    tops.append(top)
    bottoms.append(top)
    while is_wrapped(top):
        level = level_of(top)
        if is_batched(top):
            lower, dim = unwrap_batched(top, level)
        else:
            lower, dim = unwrap_once(top), None
            if level in forward:
                with up_to_level(level):
                    tangent = tangent_of(top)
                dim = None if tangent is None else _add_parts(tangent, forward, tops, bottoms)
        around.append((level, dim))
        top = lower
    bottoms[at] = top
    return at, tuple(around)


_SNAPSHOT = torch._C.DispatchKey.PythonTLSSnapshot  # (see `_snapshot_taken`)


@contextlib.contextmanager
def up_to_level(number: int) -> Iterator[None]:
    """Leave the levels inside of this one for a while, also from within an op of one of them."""
    aside, key = [], torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    try:
        while depth() > number:
            aside.append(pop_dynamic_layer_stack())
        included = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(key)
        excluded = torch._C._dispatch_tls_local_exclude_set().remove(key).remove(_SNAPSHOT)
        with torch._C._ForceDispatchKeyGuard(included, excluded):
            yield
    finally:
        while aside:
            push_dynamic_layer_stack(aside.pop())


def made_dual(primal: torch.Tensor, tangent: torch.Tensor, level: int) -> torch.Tensor:
    """A tensor that a level of forward mode pushes a tangent of forward."""
    with up_to_level(level):
        return torch._make_dual(primal, tangent, level=0)  # pyright: ignore[reportPrivateImportUsage]


def wrapped_dead(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the wrapper of a level of grad that has ended: operators take that off.

    A saved-tensor hook may not give a batched tensor back, which torch cannot copy there.
    """
    level = _functorch_c._grad_increment_nesting()
    try:
        return wrap_for_grad(tensor, level)
    finally:
        _functorch_c._grad_decrement_nesting()


def is_batched_below(tensor: torch.Tensor) -> bool:
    """Whether any level around here has a batch of this tensor."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = unwrap_once(tensor)
    return False


def is_batched_anyhow(tensor: torch.Tensor) -> bool:
    """Whether writing `tensor` into a plain tensor would fail for a batch dimension.

    `torch.autograd.grad(..., is_grads_batched=True)` uses the vmap from before functorch, which has no level.
    """
    return is_wrapped(tensor) or is_legacy_batched(tensor)


# The innermost functorch level; only where there is one.
innermost_level: Callable[[], Any] = retrieve_current_functorch_interpreter

# All of them, from the outermost; None outside every transform.
level_stack: Callable[[], list[Any] | None] = _functorch_c.get_interpreter_stack


def interpreter() -> Any | None:
    """The innermost functorch level, or None outside every transform."""
    return innermost_level() if in_transform() else None


@contextlib.contextmanager
def below_levels() -> Iterator[None]:
    """Leave all functorch levels for a while: a vmapped backward asks for values that were made below it."""
    if not in_transform():
        yield
        return
    with temporarily_clear_interpreter_stack():
        if not torch._C._dispatch_tls_local_exclude_set().has(_SNAPSHOT):
            yield
            return
        with _snapshot_taken():
            yield


def autograd_again() -> contextlib.AbstractContextManager[Any]:
    """Undo `below_autograd` for hooks of the user's, which may run a forward: those of torch's checkpoint."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith("Autograd") or name == "ADInplaceOrView":
            excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _snapshot_taken() -> contextlib.AbstractContextManager[Any]:
    """Within, what reaches Python from a dispatch has the state of the dispatch's begin to go back to.

    A functorch level's rule runs below that point. On 2.11 a tensor that dispatches to Python, as those of
    AOTAutograd do, fails an internal assertion there. (2.13 and 2.15 do without.)
    """
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(_SNAPSHOT)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor at the bottom of all functorch wrappers of `tensor`."""
    while is_wrapped(tensor):
        tensor = unwrap_once(tensor)
    return tensor


def every_level() -> list[Any]:
    """The active functorch levels from the outermost."""
    return retrieve_all_functorch_interpreters() if in_transform() else []


def levels() -> list[tuple[int, Any, str]]:
    """The same as numbers, kinds (GRAD, VMAP, JVP, ...) and vmap's randomness."""
    return [(i.level(), i.key(), i.randomness() if i.key() == VMAP else "") for i in every_level()]


def batch_size(level: Any) -> Any:
    """The batch size, perhaps symbolic, of a vmap's level."""
    return _functorch_c.CVmapInterpreterPtr(level).batchSize()


def is_tracing() -> bool:
    """Whether what runs now is being traced below autograd, functionalized, for a compiler."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


def depth() -> int:
    """How many functorch levels are active; the innermost has this number."""
    return len(level_stack() or ())


def unwind_levels(to: int = 0) -> None:
    """Leave the functorch levels of this thread above `to`: a graph that fails halfway leaves those that it
    entered behind, and who has entered one below them would leave one of these instead.

    With the last goes their refusal of saved-tensor hooks. None of all is older than Dynamo's graph:
    torch.compile does not compile inside torch.func.
    """
    kinds = [level.key() for level in level_stack() or ()]
    if len(kinds) <= to:
        return
    # All forward-mode derivatives live on one level below functorch's, which a graph's first jvp opens.
    if JVP in kinds[to:] and JVP not in kinds[:to] and torch.autograd.forward_ad._current_level < 0:
        torch._C._exit_dual_level(level=0)
    for kind in reversed(kinds[to:]):
        _LEAVE[kind]()
    if not to:
        allow_hooks()


_LEAVE: dict[Any, Callable[[], int]] = {
    GRAD: _functorch_c._grad_decrement_nesting,
    VMAP: _functorch_c._vmap_decrement_nesting,
    JVP: _functorch_c._jvp_decrement_nesting,
    FUNCTIONALIZE: _functorch_c._func_decrement_nesting,
}


def _leave_levels(to: int) -> None:
    """What Dynamo calls after each call of compiled code: a graph that fails leaves its levels behind.

    Torch's own leaves forward mode on below them, so that it does not work in that process any more. On 2.11
    it pops each of several levels twice.
    """
    if depth() > to:
        unwind_levels(to)


exchange(_functorch_c, "pop_dynamic_layer_stack_and_undo_to_depth", _leave_levels)


def drop_guards(error: BaseException) -> None:
    """Let go of the guards in frames that an error keeps: when they go, they put back what was dispatched to
    where they were made. (Torch's text for a tensor has one. 2.13)"""
    met: BaseException | None = error
    while met is not None:
        for frame, _ in traceback.walk_tb(met.__traceback__):
            if frame.f_code is _tensor_str._str.__code__:
                frame.clear()
        met = met.__context__


def graph_memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor in a functionalized trace, whose tensors wrap others."""
    return getattr(tensor, "elem", tensor).untyped_storage()


def graph_storage(tensor: torch.Tensor) -> int:
    """What aliases of one memory have in common in a functionalized trace while one of them lives."""
    return graph_memory(tensor)._cdata
