"""One reading of one piece of evidence, whatever it came from, and the verdict on an examined node.

The readers are `kernel_log`, `dcgm` and `exits`; weighing findings against each other is `diagnose`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from relaunch.evidence.causes import Cause


class Role(StrEnum):
    """What a finding says about the fault. Roles matter more than matches: most lines of a dying job are echoes."""

    ROOT = "root"
    """It may be the cause."""
    SYMPTOM = "symptom"
    """Something is wrong and this does not say what, such as a collective that timed out."""
    CASCADE = "cascade"
    """Seen because another rank or GPU failed: never a cause."""
    CONFIRMATION = "confirmation"
    """Makes another finding certain, such as the kernel's note that it killed a process for memory."""
    WRAPPER = "wrapper"
    """Says only that something beneath has failed."""
    INFORMATION = "information"
    """Worth showing, nothing to act on."""


class Verdict(StrEnum):
    """Of one examined node. Unknown is never healthy, and never unhealthy."""

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    UNKNOWN = "UNKNOWN"


Source = Literal["kernel", "dcgm", "nvml", "node", "log", "exit", "error_file", "ecs"]


@dataclass(frozen=True, slots=True)
class Finding:
    source: Source
    code: str
    """What a policy or a budget can name: `Xid 79`, `SXid 20034`, `DCGM 80`, `exit 137`, `SIGSEGV`, `log cuda_oom`, `oom-kill`."""
    role: Role
    reason: str
    """A clause for a person, with what matters of the raw text."""
    cause: Cause | None = None
    """What it is evidence of; None where it is evidence of nothing by itself."""
    gpu: str | None = None
    """As the source names it: a PCI address (`0000:05:00`) or an index (`5`)."""
    pid: int | None = None
    """Of the process the source names, where it names one."""
    at: float | None = None
    """Seconds by the source's own clock (a kernel's uptime), for order among findings of the same source only."""
