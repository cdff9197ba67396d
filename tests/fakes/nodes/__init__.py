"""A fleet in memory: thousands of nodes that follow a script.

For tests, demos and rehearsals; runs nothing.
"""

from tests.fakes.nodes.backend import SimulatedBackend
from tests.fakes.nodes.clock import Clock, ManualClock, RealClock
from tests.fakes.nodes.record import Call, Life, Obeyed, Upkeep
from tests.fakes.nodes.script import (
    Chaos,
    Cut,
    DiagHangs,
    Exit,
    Fault,
    Lingers,
    Prints,
    Progress,
    Reboot,
    RebootFails,
    RebootHangs,
    Refuse,
    ResetFails,
    Script,
    ShimDies,
    Sick,
    Stranger,
    Takes,
    Writes,
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
    "ShimDies",
    "Sick",
    "SimulatedBackend",
    "Stranger",
    "Takes",
    "Upkeep",
    "Writes",
    "error_file",
]
