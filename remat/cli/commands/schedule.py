"""`remat schedule`: draws which carries a scan keeps and in which order steps are evaluated again."""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps
from typing import Any

from remat.cli.errors import UsageError
from remat.schedules import Multilevel, Online, Revolve, Schedule, Sqrt
from remat.transforms.scan import Advance, Restore, Reverse, Store


@dataclass
class Draw:
    """Draw a checkpointing schedule as text."""

    length: int = 32
    """Steps of the scan."""
    slots: int = 4
    """Kept carries, the initial one counted."""
    kind: str = "revolve"
    """revolve, online, sqrt or multilevel (half of the slots on the host)."""
    json: bool = False
    """Print one JSON object instead of the picture."""

    def __call__(self) -> int:
        if self.length < 1:
            raise UsageError(f"--length {self.length}: a scan has at least one step. Write --length 32.")
        schedule = self.schedule()
        if self.json:
            print(dumps(record(schedule, self.length), indent=2))
        else:
            print(schedule.explain(self.length))
            print(picture(schedule, self.length))
        return 0

    def schedule(self) -> Schedule:
        """The schedule that the options name."""
        host = self.slots // 2
        kinds = {
            "revolve": lambda: Revolve(self.slots),
            "online": lambda: Online(self.slots),
            "sqrt": Sqrt,
            "multilevel": lambda: Multilevel(device=self.slots - host, host=host),
        }
        if self.kind not in kinds:
            raise UsageError(f"kind {self.kind!r} is none of {', '.join(kinds)}")
        try:
            return kinds[self.kind]()
        except ValueError as error:
            raise UsageError(str(error)) from error


def record(schedule: Schedule, n: int) -> dict[str, Any]:
    """The reversal as plain data: steps kept in the forward, then each action and what is kept meanwhile."""
    actions = [
        {
            "action": type(action).__name__.lower(),
            "start": action.start,
            "stop": action.stop,
            "kept": sorted(kept),
        }
        for action, kept in timeline(schedule, n)
    ]
    forward = sorted(schedule.forward(n).values())
    return {"schedule": repr(schedule), "length": n, "kept_in_forward": forward, "actions": actions}


def timeline(schedule: Schedule, n: int) -> list[tuple[Advance | Reverse, set[int]]]:
    """The actions of the reversal, each with the steps whose states are kept meanwhile."""
    stored = schedule.forward(n)
    kept = {slot: step for step, slot in stored.items()}
    rows = []
    for action in schedule.actions(n, stored):
        if isinstance(action, Store):
            kept[action.slot] = action.step
        elif isinstance(action, (Advance, Reverse)):
            rows.append((action, set(kept.values())))
        elif not isinstance(action, Restore):
            del kept[action.slot]
    return rows


def picture(schedule: Schedule, n: int, width: int = 100, most: int = 60) -> str:
    """The reversal from top to bottom: `o` a kept carry, `>` an advance, `<` a reversed step."""
    if n > width:
        return f"(no picture: {n} steps are more than {width} columns)"
    rows = ["".join("o" if k in schedule.forward(n) else ">" for k in range(n)) + "  forward"]
    for action, kept in timeline(schedule, n):
        line = ["o" if k in kept else " " for k in range(n)]
        mark = ">" if isinstance(action, Advance) else "<"
        for k in range(action.start, action.stop):
            line[k] = "o" if k in kept and mark == ">" else mark
        rows.append("".join(line).rstrip())
    if len(rows) > most:
        rows = [*rows[:most], f"... {len(rows) - most} more rows"]
    return "\n".join(rows)
