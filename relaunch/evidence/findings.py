"""Findings, each the reading of one piece of evidence, and the verdict on an examined node.

The readers are `kernel_log`, `dcgm` and `exits`; `diagnose` weighs findings against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from relaunch.evidence.causes import Cause


class Role(StrEnum):
    """What a finding says about the fault.

    Roles matter more than matches, because most lines of a failing job are echoes.
    """

    ROOT = "root"
    """It may be the cause."""
    SYMPTOM = "symptom"
    """Something is wrong, but this does not say what, such as a collective that timed out."""
    CASCADE = "cascade"
    """A consequence of the failure of another rank or GPU: never a cause."""
    CONFIRMATION = "confirmation"
    """Confirms another finding, such as the kernel's line that it killed a process for memory."""
    WRAPPER = "wrapper"
    """Says only that a child process or an inner call has failed."""
    INFORMATION = "information"
    """Worth showing, nothing to act on."""


class Verdict(StrEnum):
    """The verdict on one examined node. UNKNOWN is never treated as healthy or as unhealthy."""

    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    UNKNOWN = "UNKNOWN"


Source = Literal["kernel", "dcgm", "nvml", "node", "log", "exit", "error_file", "ecs"]


@dataclass(frozen=True, slots=True)
class Finding:
    source: Source
    code: str
    """The code that a policy or a budget can name.

    For example `Xid 79`, `SXid 20034`, `DCGM 80`, `exit 137`, `SIGSEGV`, `log cuda_oom` or
    `oom-kill`.
    """
    role: Role
    reason: str
    """A clause for people, with the relevant part of the raw text."""
    cause: Cause | None = None
    """The cause that it is evidence of; None where by itself it is evidence of none."""
    gpu: str | None = None
    """As the source names it: a PCI address (`0000:05:00`) or an index (`5`)."""
    pid: int | None = None
    """The pid of the process that the source names, where it names one."""
    at: float | None = None
    """Seconds by the source's clock (a kernel's uptime), to order its findings only."""
    needs_person: bool = False
    """Neither a reset nor a reboot heals it: a cable, a power plug, the version of a program."""
    vague: bool = False
    """Whether other evidence of the same end may say more."""
