"""Interpret a probe's NVML reading of a node's GPUs: findings, unreadable values, GPU processes.

A hot, busy or throttled GPU is not a fault, and a value that NVML did not return is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relaunch.evidence.catalog import Catalog
from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import MOST_GPUS, count, fields, text, unreadable
from relaunch.evidence.findings import Finding, Role

NOT_SUPPORTED = "NOT_SUPPORTED"
"""NVML's code for a feature that this GPU does not have, so that no reading is missing."""
NVML_HANGS = "NVML hangs"
"""Code of the finding that NVML was asked and gave no answer, as where a GPU's firmware hangs."""
LOST = "GPU lost"
"""Code of the finding that a GPU has fallen off the bus."""
VERSION_MISMATCH = "LIB_RM_VERSION_MISMATCH"
"""NVML's code where the node's own driver libraries and its kernel module are of two versions.

The kernel's line about that (`NVRM: API mismatch`) is no evidence: it is printed for each client of
another version, such as an exporter in a container, thousands of times a day while jobs train.
"""

# nvml.h, nvmlClocksEventReason*. A slowdown by hardware may be a fault of cooling or power; one
# that software asked for is a setting.
_BY_HARDWARE = {
    0x8: "hardware slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_BY_SOFTWARE = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
}

_ADDRESS = re.compile(
    r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.[0-7])?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What NVML says about all GPUs of a node."""

    findings: tuple[Finding, ...] = ()
    unread: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    """Bus id by index; empty where it is not known."""
    working: int | None = None
    """Number of GPUs that NVML can read; None: NVML could not be queried."""
    read_in_full: tuple[str, ...] = ()
    """Bus ids of the GPUs that work and of which everything required was read."""
    users: tuple[str, ...] = ()
    """`pid 4242 uses GPU 0000:05:00`."""


def bus_id(name: str, seen: tuple[str, ...]) -> str | None:
    """Return the bus id of a GPU in NVML's notation; None: it cannot be determined.

    Args:
        name: The GPU as the kernel (`0000:05:00`) or DCGM (`5`) names it.
        seen: The bus id of each GPU by its index.
    """
    if name.isascii() and name.isdecimal():
        return (seen[int(name)] or None) if len(name) < 4 and int(name) < len(seen) else None
    address = _parse_address(name)
    if address is None:
        return None
    return next(
        (known for known in seen if _parse_address(known) == address),
        f"{address[0]:08X}:{address[1]:02X}:{address[2]:02X}.0",
    )


def short(name: str) -> str:
    """Return a GPU's bus id as the kernel prints it: `0000:05:00`."""
    address = _parse_address(name)
    return f"{address[0]:04x}:{address[1]:02x}:{address[2]:02x}" if address else name


def _parse_address(name: str) -> tuple[int, int, int] | None:
    found = _ADDRESS.fullmatch(name)
    return (int(found[1] or "0", 16), int(found[2], 16), int(found[3], 16)) if found else None


def read_gpus(answer: object, expected: int, catalog: Catalog) -> GpuReading:
    reading = fields(answer)
    rows = reading.get("gpus") if reading is not None else None
    if not isinstance(rows, list) or len(rows) > MOST_GPUS:
        unread = f"GPUs by NVML: {unreadable(answer if reading is None else rows)}"
        hangs = isinstance(answer, Mapping) and answer.get("hangs") is True
        if hangs:
            found = Finding("nvml", NVML_HANGS, Role.SYMPTOM, unread, Cause.GPU_RESET)
            return GpuReading((found,), (unread,))
        if VERSION_MISMATCH in unread:
            words = "the GPU driver's libraries and its kernel module are of two versions: reboot"
            found = Finding(
                "nvml", "driver-mismatch", Role.ROOT, f"{words} ({unread})", Cause.NODE_FAULT
            )
            return GpuReading((found,), (unread,))
        return GpuReading((), (unread,))
    gpus = [_Gpu(row, position, catalog) for position, row in enumerate(rows)]
    findings = [finding for gpu in gpus for finding in gpu.findings]
    if len(gpus) < expected:
        reason = f"only {len(gpus)} of {expected} GPUs are there"
        findings.append(Finding("nvml", "GPU missing", Role.ROOT, reason, Cause.GPU_FATAL))
    by_index = {gpu.index: gpu.bus for gpu in gpus}
    return GpuReading(
        findings=tuple(findings),
        unread=tuple(clause for gpu in gpus for clause in gpu.unread),
        seen=tuple(by_index.get(index, "") for index in range(max(by_index, default=-1) + 1)),
        working=sum(gpu.works for gpu in gpus),
        read_in_full=tuple(gpu.bus for gpu in gpus if gpu.works and gpu.bus and not gpu.unread),
        users=tuple(user for gpu in gpus for user in gpu.users),
    )


class _Gpu:
    """One row of the answer, which is read by the constructor."""

    def __init__(self, row: object, position: int, catalog: Catalog) -> None:
        self.findings: list[Finding] = []
        self.unread: list[str] = []
        self.users: list[str] = []
        self.index, self.bus, self.works = position, "", False
        if not isinstance(row, Mapping):
            self.unread.append(f"GPU {position}: {unreadable(row)}")
            return
        index = count(row.get("index"))
        self.index = index if index is not None and index < MOST_GPUS else position
        named = row.get("bus_id")
        self.bus = named if isinstance(named, str) and _parse_address(named) else ""
        self.name = f"GPU {short(self.bus)}" if self.bus else f"GPU {self.index}"
        if "lost" in row:
            self._add_finding(
                LOST,
                Role.ROOT,
                f"is lost: {text(row['lost']) or 'no reason given'}",
                Cause.GPU_FATAL,
            )
            return
        self.works = True
        if not self.bus:
            self._note_unread("bus id", named)
        self._read_ecc(row.get("ecc"))
        self._read_memory_repairs(row)
        self._read_recovery_action(row.get("recovery_action"), catalog)
        self._read_clocks(row.get("throttle"))
        links = row.get("nvlink_inactive")
        if isinstance(links, list) and links:
            self._add_finding(
                "NVLink inactive", Role.SYMPTOM, f"{len(links)} of its NVLinks are not active"
            )
        self._read_users(row.get("processes"))

    def _add_finding(self, code: str, role: Role, words: str, cause: Cause | None = None) -> None:
        self.findings.append(
            Finding("nvml", code, role, f"{self.name}: {words}", cause, self.bus or str(self.index))
        )

    def _note_unread(self, what: str, value: object) -> None:
        self.unread.append(f"{self.name}: {what}: {unreadable(value)}")

    def _read_ecc(self, value: Any) -> None:
        counts = fields(value)
        if counts is None:
            if not _is_unsupported(value):
                self._note_unread("ECC errors", value)
            return
        now, ever = (
            count(counts.get("volatile_uncorrected")),
            count(counts.get("aggregate_uncorrected")),
        )
        if now is None or ever is None:
            self._note_unread(
                "ECC errors",
                counts.get("volatile_uncorrected" if now is None else "aggregate_uncorrected"),
            )
        if now:
            since = f", {ever} in its life" if ever is not None else ""
            # Contained errors only end a program; row remapping tells if the memory is worn out.
            self._add_finding(
                "ECC uncorrected",
                Role.SYMPTOM,
                f"{now} uncorrected ECC errors since the driver was loaded{since}",
            )

    def _read_memory_repairs(self, row: Mapping[str, Any]) -> None:
        """Read the memory repairs, of which one must be readable.

        GPUs remap rows from Ampere on, and retired pages before it.
        """
        remapped, retired = row.get("remapped"), row.get("retired_pending")
        rows = fields(remapped)
        if rows is not None:
            for key, cause, words in (
                ("failed", Cause.GPU_FATAL, "remapping a row of its memory has failed"),
                (
                    "pending",
                    Cause.GPU_RESET,
                    "a row of its memory waits for a reset to be remapped",
                ),
            ):
                value = rows.get(key)
                if value is True:
                    self._add_finding(f"row remap {key}", Role.ROOT, words, cause)
                elif value is not False:
                    self._note_unread(f"row remap {key}", value)
        if retired is True:
            self._add_finding(
                "page retirement pending",
                Role.ROOT,
                "a page of its memory waits for a reset to be retired",
                Cause.GPU_RESET,
            )
        if (
            rows is None
            and not isinstance(retired, bool)
            and not (_is_unsupported(remapped) and _is_unsupported(retired))
        ):
            what, value = (
                ("retired pages", retired)
                if _is_unsupported(remapped)
                else ("remapped rows", remapped)
            )
            self._note_unread(what, value)

    def _read_recovery_action(self, value: Any, catalog: Catalog) -> None:
        number = count(value)
        if number is None:
            if not _is_unsupported(value):
                self._note_unread("recovery action", value)
            return
        action = catalog.recovery_actions.get(number)
        if action is None:
            self._add_finding(
                f"recovery action {number}",
                Role.SYMPTOM,
                f"the driver asks for recovery action {number}, which is unknown here",
            )
            self.unread.append(
                f"{self.name}: the driver asks for recovery action {number}, which is unknown here"
            )
        elif number:
            self._add_finding(
                f"recovery action {number}",
                action.role,
                f"{action.meaning} (recovery action {number})",
                action.cause,
            )

    def _read_clocks(self, value: Any) -> None:
        bits = count(value) or 0
        hard = [name for bit, name in _BY_HARDWARE.items() if bits & bit]
        soft = [name for bit, name in _BY_SOFTWARE.items() if bits & bit]
        if hard:
            self._add_finding(
                "throttle", Role.SYMPTOM, f"its clocks are held down by {' and '.join(hard)}"
            )
        elif soft:
            self._add_finding(
                "throttle", Role.INFORMATION, f"its clocks are held down by {' and '.join(soft)}"
            )

    def _read_users(self, value: Any) -> None:
        for process in value if isinstance(value, list) else ():
            pid = count(process.get("pid")) if isinstance(process, Mapping) else None
            self.users.append(f"{'a process' if pid is None else f'pid {pid}'} uses {self.name}")


def _is_unsupported(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("unreadable") == NOT_SUPPORTED
