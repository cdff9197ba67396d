"""Row types of the catalog's tables: facts about codes and lines, with relaunch's reading."""

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
    """relaunch's own clause: "the GPU has fallen off the bus"."""
    note: str
    """Where sources disagree: what each says, which one relaunch follows, and why."""
    by_user: bool = False
    """Whether it is a user's override, which is final: no workflow of NVIDIA's is applied to it."""


@dataclass(frozen=True, slots=True)
class RecoveryAction:
    """What a GPU needs according to Xid 154.

    It is identified by the number in the message, because the words differ between drivers.
    """

    number: int
    name: str
    role: Role
    cause: Cause | None
    meaning: str


@dataclass(frozen=True, slots=True)
class NpuRow:
    """A fault code of an Ascend NPU."""

    code: str
    """In hexadecimal capitals, without `0x`."""
    level: str
    """What MindCluster does about it, by the name in its configuration."""
    part: str
    """The part of the chip, as MindCluster calls it; empty: it does not say."""
    by: str
    """What MindCluster says may cause it: Hardware, Software, User; empty: it does not say."""
    role: Role
    cause: Cause | None
    meaning: str


@dataclass(frozen=True, slots=True)
class NvlinkRule:
    """One rule to decode an Xid from 144 to 150."""

    xid: int
    unit: str
    """As printed; the names in two driver generations are separated by a slash."""
    pattern_v1: str
    """Bits of the first word, most significant first; `-` matches any."""
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
    vague: bool = False
    """Whether other lines about the same end may say more: a bare exception, `unhandled error`."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel log line other than an Xid; its pattern may have groups `gpu`, `number`, `pid`."""

    code: str
    pattern: re.Pattern[str]
    role: Role
    cause: Cause | None
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class EcsStopRow:
    stop_code: str
    """Empty: matches any."""
    reason: re.Pattern[str] | None
    """None: matches any."""
    cause: Cause
    role: Role
    meaning: str


@dataclass(frozen=True, slots=True)
class Catalog:
    xids: dict[int, XidRow]
    npu_codes: dict[str, NpuRow]
    recovery_actions: dict[int, RecoveryAction]
    nvlink: tuple[NvlinkRule, ...]
    exits: dict[str, ExitRow]
    log_lines: tuple[LogRow, ...]
    any_log_line: tuple[Pattern, ...]
    """Patterns of which one matches each line that a row of `log_lines` matches.

    Almost no line is evidence, and to try each row takes time.
    """
    advice_lines: tuple[re.Pattern[str], ...]
    """Lines that only give advice; they repeat the words of faults, and are ignored."""
    kernel_lines: tuple[KernelRow, ...]
    ecs_stops: tuple[EcsStopRow, ...]
    dcgm: dict[int, Advice]
    """Only the user's overrides; the table itself is in `dcgm_tables`."""

    def may_match(self, line: str) -> bool:
        """Return whether a row of `log_lines` may match a line."""
        return any(pattern.search(line) for pattern in self.any_log_line)
