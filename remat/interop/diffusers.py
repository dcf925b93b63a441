"""Deprecated: diffusers takes `remat.interop.CheckpointFunction(policy)` itself."""

import functools

from remat._deprecated import old

__getattr__ = functools.partial(old, __name__)
