"""`remat schedule`: draws which carries a scan keeps and in which order steps are evaluated again."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any

from remat.cli.checked import writable
from remat.cli.errors import UsageError
from remat.schedules import Multilevel, Online, Revolve, Schedule, Sqrt
from remat.transforms.scan import Advance, Restore, Reverse, Store


@dataclass
class Draw:
    """Draw a checkpointing schedule as text, and as a PNG."""

    length: int = 32
    """Steps of the scan."""
    slots: int = 4
    """Kept carries, the initial one counted."""
    kind: str = "revolve"
    """revolve, online, sqrt or multilevel (half of the slots on the host)."""
    png: Path | None = None
    """Also draw into this file."""
    json: bool = False
    """Print one JSON object instead of the picture."""

    def __call__(self) -> int:
        if self.length < 1:
            raise UsageError(f"--length {self.length}: a scan has at least one step. Write --length 32.")
        writable("--png", self.png)
        schedule = self.schedule()
        if self.json:
            print(dumps(record(schedule, self.length), indent=2))
        else:
            print(schedule.explain(self.length))
            print(picture(schedule, self.length))
        if self.png:
            plot(schedule, self.length, self.png)
            print(f"wrote {self.png}", file=sys.stderr if self.json else sys.stdout)
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


def plot(schedule: Schedule, n: int, path: Path) -> None:
    """Step against evaluation, kept carries as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    time = n
    axes.plot([0, n], [0, n], color="tab:blue", label="forward and advance")
    for action, kept in timeline(schedule, n):
        took = action.stop - action.start
        color = "tab:blue" if isinstance(action, Advance) else "tab:red"
        axes.plot([time, time + took], [action.start, action.stop], color=color)
        for step in kept:
            axes.plot([time, time + took], [step, step], color="tab:gray", linewidth=0.5)
        time += took
    axes.plot([], [], color="tab:red", label="reverse")
    axes.plot([], [], color="tab:gray", linewidth=0.5, label="kept carry")
    axes.set(xlabel="evaluations of the body", ylabel="step", title=f"{schedule} over {n} steps")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
