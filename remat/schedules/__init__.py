"""Checkpointing schedules: which carries of a scan are kept, and in which order steps are evaluated again."""

from remat.schedules._auto import auto as auto
from remat.schedules._counts import Stats as Stats
from remat.schedules._offline import (
    All as All,
    Multilevel as Multilevel,
    Revolve as Revolve,
    Schedule as Schedule,
    Segmented as Segmented,
    Sqrt as Sqrt,
    advances as advances,
    as_schedule as as_schedule,
    beta as beta,
    check_checkpoints as check_checkpoints,
    repetitions as repetitions,
    split as split,
)
from remat.schedules._online import Online as Online

__all__ = ["Multilevel", "Online", "Revolve", "Segmented", "Sqrt"]
