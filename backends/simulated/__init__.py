"""A fleet in memory: thousands of nodes that follow a script. For tests, demos and rehearsals; runs nothing."""

from backends.simulated.backend import SimulatedBackend
from backends.simulated.clock import Clock, ManualClock, RealClock
from backends.simulated.record import Call, Life, Obeyed
from backends.simulated.script import (
    Chaos,
    Cut,
    Exit,
    Fault,
    KeeperDies,
    Lingers,
    Prints,
    Progress,
    Reboot,
    Refuse,
    Script,
    error_file,
)

__all__ = [
    "Call",
    "Chaos",
    "Clock",
    "Cut",
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
    "Refuse",
    "Script",
    "SimulatedBackend",
    "error_file",
]
