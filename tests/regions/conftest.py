from typing import Any

import pytest

from tests.regions.inside import Frame


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What became of each forward of a region, in order: "recorded", "followed" or "left", and its tape."""
    seen: list[tuple[str, Any]] = []
    forward = Frame.forward

    def noting(self: Frame, args: Any, kwargs: Any, known: Any) -> Any:
        out = forward(self, args, kwargs, known)
        became = "recorded" if known is None else "followed" if self.tape is known.tape else "left"
        seen.append((became, self.tape))
        return out

    monkeypatch.setattr(Frame, "forward", noting)
    return seen
