"""The names of what can be wrong with a generation, and whose fault each is."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    USER_INPUT = "USER_INPUT"
    """The command, its folder or its arguments are wrong."""
    APPLICATION = "APPLICATION"
    """The program failed by itself."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """Of a GPU or of the host, and the job's own doing."""
    NUMERICS = "NUMERICS"
    """NaN, infinity, a loss that jumps."""
    GPU_TRANSIENT = "GPU_TRANSIENT"
    """A GPU's fault that is over once the program is started again."""
    GPU_RESET = "GPU_RESET"
    """A GPU that works again after a reset."""
    GPU_FATAL = "GPU_FATAL"
    """A GPU that needs a reboot, another node, or a technician."""
    GPU_USER_INDUCED = "GPU_USER_INDUCED"
    """A GPU reports what a program did to it: a page fault, an illegal instruction."""
    NETWORK = "NETWORK"
    STORAGE = "STORAGE"
    NODE_FAULT = "NODE_FAULT"
    """The host: it rebooted, a CPU or DIMM failed, a process cannot be killed, its disk is full."""
    NODE_LOST = "NODE_LOST"
    """The host does not answer."""
    HANG = "HANG"
    PREEMPTED = "PREEMPTED"
    """Somebody who may do so took the node or the processes away."""
    PLATFORM = "PLATFORM"
    """relaunch's own doing, or that of what runs it."""
    UNKNOWN = "UNKNOWN"
    """Nothing readable, or evidence that disagrees."""


OWN_CAUSES = (
    Cause.USER_INPUT,
    Cause.APPLICATION,
    Cause.OUT_OF_MEMORY,
    Cause.NUMERICS,
    Cause.GPU_USER_INDUCED,
    Cause.HANG,
    Cause.UNKNOWN,
)
"""Faults that may be the job's own. UNKNOWN is among them, so that a loop nobody can explain still ends."""

HARDWARE_CAUSES = (Cause.GPU_FATAL, Cause.GPU_RESET, Cause.GPU_TRANSIENT, Cause.NODE_FAULT)
"""Faults that a node's kernel, driver or diagnostics bear witness to, the gravest first."""
