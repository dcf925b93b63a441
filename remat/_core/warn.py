"""Warnings at the line of the user's that they are about."""

from __future__ import annotations

import sys
import warnings

from remat.transforms import is_user_frame


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that belongs to neither torch nor this library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_user_frame(frame):
        frame = frame.f_back
        # `warnings` counts no frames of Python's import.
        level += "importlib._bootstrap" not in frame.f_code.co_filename
    warnings.warn(text, category, level)
