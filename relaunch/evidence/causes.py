"""The causes of a generation's faults, and which of them are the job's or the hardware's."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    USER_INPUT = "USER_INPUT"
    """The command, its folder or its arguments are wrong."""
    APPLICATION = "APPLICATION"
    """The program failed by itself."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The job ran out of memory of a GPU or of the host."""
    NUMERICS = "NUMERICS"
    """NaN, infinity, or a loss that jumps."""
    GPU_TRANSIENT = "GPU_TRANSIENT"
    """A GPU fault that is over once the program is restarted."""
    GPU_RESET = "GPU_RESET"
    """A GPU fault that a reset of the GPU clears."""
    GPU_FATAL = "GPU_FATAL"
    """A GPU fault that needs a reboot, another node, or a technician."""
    GPU_USER_INDUCED = "GPU_USER_INDUCED"
    """A GPU error that a program caused: a page fault, an illegal instruction."""
    NETWORK = "NETWORK"
    STORAGE = "STORAGE"
    NODE_FAULT = "NODE_FAULT"
    """The host: it rebooted, a CPU or DIMM failed, a process cannot be killed, its disk is full,
    a network card or its link is dead."""
    NODE_LOST = "NODE_LOST"
    """The host does not answer."""
    HANG = "HANG"
    PREEMPTED = "PREEMPTED"
    """An authorized user or system took the node or the processes away."""
    PLATFORM = "PLATFORM"
    """A fault of relaunch itself, or of the platform that runs it."""
    UNKNOWN = "UNKNOWN"
    """No readable evidence, or contradictory evidence."""


OWN_CAUSES = (
    Cause.USER_INPUT,
    Cause.APPLICATION,
    Cause.OUT_OF_MEMORY,
    Cause.NUMERICS,
    Cause.GPU_USER_INDUCED,
    Cause.HANG,
    Cause.UNKNOWN,
)
"""Faults that the job itself may have caused; with UNKNOWN, so that unexplained loops end, too."""

HARDWARE_CAUSES = (Cause.GPU_FATAL, Cause.GPU_RESET, Cause.GPU_TRANSIENT, Cause.NODE_FAULT)
"""Faults that a node's kernel, driver or diagnostics report, the gravest first."""
