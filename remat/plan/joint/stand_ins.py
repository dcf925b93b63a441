"""Running a function on fake tensors: none of the real ones that it holds may be met by an op.

An op that writes to a real buffer would count twice, move its version, and hang the trace's history on it;
autocast would remember a fake cast of a real weight. So every torch call has the real tensors among its
arguments taken for fakes, wherever the function read them from.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from remat._core import first_line, isolated, name_of
from remat._torch import asking_nobody, nothing_gathered
from remat.plan.joint.fused import kernel_of_target
from remat.transforms import ADDRESSES, RematError, flatten, is_tensor, unflatten, untracked
from remat.transforms.closure import trial
from remat.transforms.compat import (
    at_function_apply,
    autocasting,
    dispatch_is_off,
    fake_mode,
    function_mode_at,
    function_modes,
    functions_as_they_are,
    is_fake,
    is_wrapped,
    outside_all_modes,
    without_module_trackers,
)
from remat.transforms.intermediates import only
from remat.transforms.region import planning


class StandIns(TorchFunctionMode):
    """Puts a fake of `mode` in the place of every real tensor."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        # Identities are only good while the objects live.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling() or dispatch_is_off():
            # Torch makes a fake of a tensor that an old constructor made, such as `torch.FloatTensor([1.0])`.
            return func(*args, **(kwargs or {}))
        args, kwargs = self.swapped(args), self.swapped(kwargs or {})
        if getattr(func, "__name__", "") in ADDRESSES:
            # Of a fake that is 0: whoever went there would end the process.
            raise TypeError(f"{func.__name__} goes to memory, which they have not")
        if (kernel := kernel_of_target(func, args, kwargs)) is not None:
            return kernel()
        if not types and (opened := asking_nobody(func)) is not func:
            with self:
                return opened(*args, **kwargs)
        return func(*args, **kwargs)

    def swapped(self, value: Any) -> Any:
        """`value` with fakes in it, for all of one call: it may be any of tuple, list and dict."""
        if is_tensor(value):
            return self.of(value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.swapped(v) for v in value])
        return {k: self.swapped(v) for k, v in value.items()} if kind is dict else value

    def of_apply(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What an `autograd.Function` is given, whose `apply` calls no torch function: one that marks a
        tensor as dirty would hang the trace's history on the real one."""
        return self.swapped(args)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor; a subclass of somebody else's stays, its ops are what it says."""
        known = self._made.get(id(tensor))
        if known is not None:
            return known[1]
        plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        if not plain or is_fake(tensor) or is_lazy(tensor) or is_wrapped(tensor):
            return tensor
        fake = self._fake(tensor)
        self._made[id(tensor)] = tensor, fake
        self._made[id(fake)] = fake, fake
        return fake

    def on_top(self) -> contextlib.AbstractContextManager[Any]:
        """Within, this mode is on: a backward inside may have been called from one, where modes are off."""
        on = any(function_mode_at(at) is self for at in range(function_modes()))
        return contextlib.nullcontext() if on else self

    def forget(self) -> None:
        """Let go of all tensors."""
        self._made = {}

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with outside_all_modes(), functions_as_they_are(), warnings.catch_warnings():
            # It asks for the gradient of every tensor, and is warned that some have none.
            warnings.simplefilter("ignore")
            try:
                return self.mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            except (RuntimeError, NotImplementedError):
                # Layouts that fakes do not know.
                return tensor


at_function_apply(StandIns)


class NotOnFakes(RematError):
    """A function needs data, so that it cannot be looked at before it runs."""


@contextlib.contextmanager
def refused(fn: Callable[..., Any], last: Callable[[], tuple[str, str]]) -> Iterator[None]:
    """Say in the user's words what does not run on fakes; `last` tells the op met last and its line.

    Torch logs a traceback of each such op, at every depth of budgets in budgets.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    except RematError:
        raise
    except Exception as error:
        op, line = last()
        where = f" at {line}" if line else ""
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise NotOnFakes(
            f"{name_of(fn)} cannot be planned: {op or 'the function'}{where} "
            f"does not run on fake tensors ({reason}). A plan needs shapes only. Keep .item() and branches "
            "on values out of the region. Give custom ops a fake kernel (torch.library.register_fake). Or "
            "use a policy without a budget."
        ) from error
    finally:
        log.disabled = disabled


@contextlib.contextmanager
def stood_in(stand_ins: StandIns) -> Iterator[None]:
    """Within, ops run on fakes, and wrappers of modules gather no parameters."""
    caching = torch.is_autocast_cache_enabled()
    # What is in the cache of an autocast around stays there until that ends.
    torch.set_autocast_cache_enabled(caching and not autocasting())
    try:
        with isolated(stand_ins.on_top), stand_ins.mode, stand_ins, nothing_gathered(untracked):
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)


def on_fakes(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What `run(*args, **kwargs)` returns on fake tensors like those given.

    Nobody collects named values meanwhile, and `is_recomputing()` is true, as in `record`.
    """
    leaves, spec = flatten((args, kwargs or {}))
    stand_ins = StandIns(fake_mode(leaves))
    with without_module_trackers(), trial(), only(()), planning(name_of(run)), warnings.catch_warnings():
        # The engine asks for addresses, which fake tensors grudgingly give.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with refused(run, lambda: ("", "")), stood_in(stand_ins), torch.enable_grad():
            given, keywords = unflatten([stand_ins.swapped(leaf) for leaf in leaves], spec)
            return run(*given, **keywords)
