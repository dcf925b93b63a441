"""Checkpointing schedules: which carries of a scan are kept, and in which order steps are evaluated again."""

from remat.schedules._auto import auto as auto
from remat.schedules._counts import Stats as Stats
from remat.schedules._offline import All as All
from remat.schedules._offline import Multilevel as Multilevel
from remat.schedules._offline import Revolve as Revolve
from remat.schedules._offline import Schedule as Schedule
from remat.schedules._offline import Segmented as Segmented
from remat.schedules._offline import Sqrt as Sqrt
from remat.schedules._offline import advances as advances
from remat.schedules._offline import as_schedule as as_schedule
from remat.schedules._offline import beta as beta
from remat.schedules._offline import check_checkpoints as check_checkpoints
from remat.schedules._offline import repetitions as repetitions
from remat.schedules._offline import split as split
from remat.schedules._online import Online as Online

__all__ = ["Multilevel", "Online", "Revolve", "Segmented", "Sqrt"]
