"""A fleet in memory: thousands of nodes that follow a script. For tests, demos and rehearsals; runs nothing."""

from backends.simulated.backend import SimulatedBackend
from backends.simulated.clock import Clock, ManualClock, RealClock
from backends.simulated.record import Call, Life, Obeyed, Upkeep
from backends.simulated.script import (
    Chaos,
    Cut,
    DiagHangs,
    Exit,
    Fault,
    KeeperDies,
    Lingers,
    Prints,
    Progress,
    Reboot,
    RebootFails,
    RebootHangs,
    Refuse,
    ResetFails,
    Script,
    Sick,
    Takes,
    error_file,
)

__all__ = [
    "Call",
    "Chaos",
    "Clock",
    "Cut",
    "DiagHangs",
    "Exit",
    "Fault",
    "KeeperDies",
    "Life",
    "Lingers",
    "ManualClock",
    "Obeyed",
    "Prints",
    "Progress",
    "RealClock",
    "Reboot",
    "RebootFails",
    "RebootHangs",
    "Refuse",
    "ResetFails",
    "Script",
    "Sick",
    "SimulatedBackend",
    "Takes",
    "Upkeep",
    "error_file",
]
