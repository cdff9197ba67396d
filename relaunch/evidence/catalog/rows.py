"""The rows of the catalog's tables: facts about codes and lines, with our reading of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from relaunch.evidence.catalog.dcgm_tables import Advice
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Role
from relaunch.fields import Pattern


@dataclass(frozen=True, slots=True)
class XidRow:
    code: int
    mnemonic: str
    description: str
    action: str
    """NVIDIA's immediate action; empty where its catalog lists none."""
    investigate: str
    """NVIDIA's investigatory action."""
    role: Role
    cause: Cause | None
    meaning: str
    """Our clause: "the GPU has fallen off the bus"."""
    note: str
    """Where sources disagree: what each says and which one we follow, and why."""
    by_user: bool = False
    """A user's override: it says everything about the code, and no workflow of NVIDIA's is applied to it."""


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """What Xid 154 says that a GPU needs, by the number in its text: the words beside it differ between drivers."""

    number: int
    name: str
    role: Role
    cause: Cause | None
    meaning: str


@dataclass(frozen=True, slots=True)
class NvlinkRule:
    """One way to decode an Xid of 144 to 150."""

    xid: int
    unit: str
    """As printed; the names of two driver generations are divided by a slash."""
    pattern_v1: str
    """Bits of the first word, most significant first; `-` is any."""
    pattern_v2: str
    error_status: str
    resolution: str
    investigatory: str
    severity: str
    second_action: str
    hw_sw: str
    effect: str


@dataclass(frozen=True, slots=True)
class ExitRow:
    key: str
    """`exit 126` or `SIGSEGV`."""
    cause: Cause
    role: Role
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class LogRow:
    id: str
    pattern: Pattern
    role: Role
    cause: Cause | None
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A line of the kernel's that is no Xid. The pattern may name the groups `gpu`, `number` and `pid`."""

    code: str
    pattern: re.Pattern[str]
    role: Role
    cause: Cause | None
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class EcsStopRow:
    stop_code: str
    """Empty: any."""
    reason: re.Pattern[str] | None
    """None: any."""
    cause: Cause
    role: Role
    meaning: str


@dataclass(frozen=True, slots=True)
class Catalog:
    xids: dict[int, XidRow]
    recovery_actions: dict[int, RecoveryAction]
    nvlink: tuple[NvlinkRule, ...]
    exits: dict[str, ExitRow]
    log_lines: tuple[LogRow, ...]
    advice_lines: tuple[re.Pattern[str], ...]
    """Lines that only advise what to try; they repeat the words of faults."""
    kernel_lines: tuple[KernelRow, ...]
    ecs_stops: tuple[EcsStopRow, ...]
    dcgm: dict[int, Advice]
    """Only what a user overrides; the table itself is `dcgm_tables`."""
