"""Deprecated: what was here is in `remat`."""

import functools

from remat._deprecated import old

__getattr__ = functools.partial(old, __name__)
