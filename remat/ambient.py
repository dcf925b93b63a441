"""State of the user's that a recomputation must find as its forward found it."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from remat._deprecated import old
from remat.transforms import RematError
from remat.transforms.state import registered

T = TypeVar("T")


class AmbientError(RematError, TypeError):
    """A pair of functions that is none."""


class AmbientPair(NamedTuple):
    """A pair for `register_state(*pair)`."""

    capture: Callable[[], Any]
    replay: Callable[[Any], AbstractContextManager[Any]]


class Registration:
    """What `register_state` returns: `remove()` ends it, as does leaving it as a context."""

    def remove(self) -> None:
        """Capture no more; what was captured is still put back."""
        registered.pop(self, None)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def register_state(
    capture: Callable[[], T], replay: Callable[[T], AbstractContextManager[Any]]
) -> Registration:
    """Restore state of your own for every recomputation, as its forward found it.

    Use it for state that the ops of a region depend on and that torch does not know. Examples are a library's
    FP8 recipe with its histories, a flag of your own, and a torch-function mode. Autocast, default dtype and
    device, torch's generators and its kernel switches are restored anyway.

    Under plain autograd, and under one derivative of `torch.func`, a recomputation runs ops and no Python.
    There only kernels of custom ops see the restored state. The state matters where the function runs again:
    under nested derivatives, and where its ops do not tell all that it computed (docs/measured/design.md). A
    compiled graph is traced once, so this is called once.

    Args:
        capture: called when the forward of a region, or of a scan, begins; returns anything.
        replay: a function of that to a context manager, which is entered around the recomputation. It puts
            the state back and, at its end, leaves it as it found it.

    Returns:
        A registration, to be removed; also a context manager.

    Raises:
        RematError: one of them cannot be called (also a TypeError).

    Example:
        >>> import contextlib
        >>> import torch
        >>> from remat import register_state, remat
        >>> flags = {"scale": 2.0}
        >>> @contextlib.contextmanager
        ... def put_back(captured):
        ...     now = dict(flags)
        ...     flags.update(captured)
        ...     yield
        ...     flags.update(now)
        >>> with register_state(lambda: dict(flags), put_back):
        ...     out, pull = torch.func.vjp(remat(lambda x: (x * flags["scale"]).sin()), torch.ones(()))
        >>> flags["scale"] = 3.0
        >>> pull(torch.ones(()))[0]
        tensor(-0.8323)
    """
    for what, value in (("capture", capture), ("replay", replay)):
        if not callable(value):
            raise AmbientError(f"register_state({what}=...): expected a function, got {value!r}.")
    made = Registration()
    registered[made] = capture, replay
    return made


def _generator(find: Callable[[], Any], read: str, write: str) -> AmbientPair:
    """How the state of a module's generator is captured and put back; `find` gives the module, or None."""

    @contextlib.contextmanager
    def replay(state: Any) -> Iterator[None]:
        if state is None:
            yield
            return
        now = getattr(find(), read)()
        getattr(find(), write)(state)
        try:
            yield
        finally:
            getattr(find(), write)(now)

    return AmbientPair(lambda: getattr(find(), read, lambda: None)(), replay)


python_random = _generator(lambda: random, "getstate", "setstate")
"""The generator of Python's `random`: `register_state(*python_random)`."""

numpy_random = _generator(lambda: sys.modules.get("numpy.random"), "get_state", "set_state")
"""NumPy's global generator: `register_state(*numpy_random)`."""

__getattr__ = functools.partial(old, __name__)
