"""Read a node's kernel log: first line by line, then all lines about one GPU together.

The second step follows NVIDIA's workflows. A code that is not in the catalog is a symptom, never a
cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from relaunch.evidence.catalog import Catalog, RecoveryAction, XidRow
from relaunch.evidence.catalog.nvlink import XIDS as NVLINK_XIDS
from relaunch.evidence.catalog.nvlink import decode, interpret_rule
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Finding, Role

KERNEL_MARKS: tuple[str, ...] = (
    "NVRM: Xid",
    "SXid (",
    "oom-kill:",
    "ut of memory",
    "Machine Check",
    "achine check",
    "mce: ",
    "MCE: ",
    "[Hardware Error]",
    "Memory failure: ",
    " UE",
    "Lost carrier",
    "ink is down",
    "ink is Down",
    "ink down",
    "ink Down",
    "definitely down",
    "I/O error",
    "error, dev ",
    "EXT4-fs error",
    "Remounting filesystem read-only",
    "orruption",
    "hutting down filesystem",
    "nvme nvme",
    " not responding",
    " was lost",
    "blocked for more than",
)
"""A line without any of these is no evidence. Agents use the same list to select lines to send."""

EXCERPT = 120
"""Characters of a line in a reason: enough for the text before the register values."""
MAX_LINE = 1024
"""Characters of a line that are searched: the kernel itself prints no longer lines."""

PREEMPTIVE_REMOVAL, DOUBLE_BIT, REMAPPED, CONTAINED, ACTION_CHANGED = (
    45,
    48,
    (63, 64),
    (94, 95),
    154,
)
SYMPATHY = frozenset((48, 140, 171, 172, *NVLINK_XIDS))
"""Xids that memory errors 94 and 95 may accompany ("in sympathy").

Source: NVIDIA's table for 144 to 150 and its workflow for 48.
"""

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F]+(?::[0-9a-fA-F]+)+)(?:\.\d)?[^)]*\): "
    r"(?P<code>\d+)(?:,|$)\s*(?P<rest>.*)"
)
_REST = re.compile(
    r"(?:pid='?(?P<pid>[^,']*)'?,?\s*)?(?:name=(?P<name>[^,]*),?\s*)?(?P<text>.*)", re.DOTALL
)
_AT = re.compile(r"(?:^(?:<\d+>)?|kernel: )\[\s*(\d+(?:\.\d+)?)\]")
_ACTION = re.compile(r"changed from .* to (0x[0-9a-fA-F]+)")


@dataclass(frozen=True, slots=True)
class _KernelFinding:
    """The finding of one line, with what the workflows need."""

    finding: Finding
    row: XidRow | None = None
    """The catalog's row, for an Xid to which workflows apply."""
    action: RecoveryAction | None = None
    """The recovery action, for an Xid 154 that could be read."""

    @property
    def code(self) -> int:
        return self.row.code if self.row else 0

    def reweigh(self, role: Role, cause: Cause | None, words: str) -> _KernelFinding:
        return replace(
            self,
            finding=replace(
                self.finding, role=role, cause=cause, reason=f"{self.finding.reason}; {words}"
            ),
        )


def is_kernel_evidence(line: str) -> bool:
    return any(mark in line for mark in KERNEL_MARKS)


def read_kernel_log(lines: Iterable[str], catalog: Catalog) -> tuple[Finding, ...]:
    """Return one finding for each line that is evidence, in the order of the lines."""
    read = [
        found
        for line in lines
        if is_kernel_evidence(line) and (found := _read_line(line[:MAX_LINE], catalog))
    ]
    of_gpu: dict[str, list[int]] = {}
    for index, each in enumerate(read):
        if each.row is not None and each.finding.gpu is not None:
            of_gpu.setdefault(each.finding.gpu.lower(), []).append(index)
    for indexes in of_gpu.values():
        for index, each in zip(
            indexes, _weigh_together([read[index] for index in indexes]), strict=True
        ):
            read[index] = each
    return tuple(each.finding for each in read)


def _read_line(line: str, catalog: Catalog) -> _KernelFinding | None:
    when = _AT.search(line)
    at = float(when[1]) if when else None
    if xid := _XID.search(line):
        return _read_xid(xid, at, catalog)
    for row in catalog.kernel_lines:
        if found := row.pattern.search(line):
            named = found.groupdict()
            code = f"{row.code} {named['number']}" if "number" in named else row.code
            gpu, pid = named.get("gpu"), named.get("pid")
            about = f"{code} on {gpu}: {row.meaning}" if gpu else row.meaning
            reason = f"{about} ({line[found.start() :][:EXCERPT].strip()})"
            return _KernelFinding(
                Finding(
                    "kernel", code, row.role, reason, row.cause, gpu, int(pid) if pid else None, at
                )
            )
    return None


def _read_xid(found: re.Match[str], at: float | None, catalog: Catalog) -> _KernelFinding:
    code, gpu = int(found["code"]), found["gpu"]
    rest = _REST.match(found["rest"])
    assert rest is not None  # every part of the pattern may be absent
    pid = int(rest["pid"]) if rest["pid"] and rest["pid"].isdecimal() else None
    who = f" under {rest['name'] or 'a program'} (pid {pid})" if pid is not None else ""
    text = rest["text"].strip()
    row = catalog.xids.get(code)
    role, cause = (row.role, row.cause) if row else (Role.SYMPTOM, None)
    meaning = row.meaning if row else "a code that our catalog does not know"
    action = None
    if row is not None and not row.by_user and code in NVLINK_XIDS:
        role, cause, decoded = _read_nvlink(row, text, catalog)
        meaning = f"{meaning}, {decoded}"
    elif row is not None and not row.by_user and code == ACTION_CHANGED:
        action, role, cause, meaning = _read_action(text, catalog)
    reason = f"Xid {code} on GPU {gpu}{who}: {meaning}"
    if text and text.rstrip(".").lower() not in meaning.lower():
        reason += f" ({text[:EXCERPT].strip()})"
    finding = Finding("kernel", f"Xid {code}", role, reason, cause, gpu, pid, at)
    return _KernelFinding(finding, row if row and not row.by_user else None, action)


def _read_nvlink(row: XidRow, text: str, catalog: Catalog) -> tuple[Role, Cause | None, str]:
    rule = decode(row.code, text, catalog.nvlink)
    if isinstance(rule, str):
        # Only the line's own text is left: a nonfatal error is no reason for a reset.
        return (
            (Role.SYMPTOM, None, rule)
            if "nonfatal" in text.lower()
            else (row.role, row.cause, rule)
        )
    role, cause = interpret_rule(rule)
    return (
        role,
        cause,
        f"by NVIDIA's table {rule.severity}, {rule.resolution}, then {rule.investigatory}",
    )


def _read_action(
    text: str, catalog: Catalog
) -> tuple[RecoveryAction | None, Role, Cause | None, str]:
    found = _ACTION.search(text)
    if found is None:
        return None, Role.SYMPTOM, None, "what the driver asks for cannot be read"
    action = catalog.recovery_actions.get(int(found[1], 16))
    if action is None:
        return (
            None,
            Role.SYMPTOM,
            None,
            f"the driver asks for {found[1]}, which our catalog does not know",
        )
    return action, action.role, action.cause, action.meaning


def _weigh_together(read: Sequence[_KernelFinding]) -> list[_KernelFinding]:
    """Return the Xids of one GPU, each weighed against the others.

    Takes linear time: a faulty GPU may print thousands.
    """
    other = next(
        (
            each
            for each in read
            if each.code != PREEMPTIVE_REMOVAL and each.finding.role is not Role.INFORMATION
        ),
        None,
    )
    sympathy: list[_KernelFinding | None] = []
    first = None
    for each in read:
        sympathy.append(first)
        first = first or (each if each.code in SYMPATHY else None)
    remapped: list[_KernelFinding | None] = []
    after = None
    for each in reversed(read):
        remapped.append(after)
        after = each if each.code in REMAPPED else after
    neighbours = zip(read, sympathy, reversed(remapped), strict=True)
    weighed = [_weigh_xid(each, other, before, later) for each, before, later in neighbours]
    verdicts = [index for index, each in enumerate(weighed) if each.action is not None]
    return _apply_driver_verdict(weighed, verdicts) if verdicts else weighed


def _weigh_xid(
    each: _KernelFinding,
    other: _KernelFinding | None,
    sympathy: _KernelFinding | None,
    remapped: _KernelFinding | None,
) -> _KernelFinding:
    """Return one Xid, weighed against other Xids of its GPU.

    Args:
        each: The Xid.
        other: The first Xid that is neither a 45 nor mere information.
        sympathy: The first earlier Xid that it may accompany.
        remapped: The next Xid that remaps memory.
    """
    role, cause = each.finding.role, each.finding.cause
    if each.code == PREEMPTIVE_REMOVAL and other:
        return each.reweigh(Role.CASCADE, None, f"it goes with {other.finding.code}")
    if each.code == DOUBLE_BIT and remapped:
        return each.reweigh(
            role, Cause.GPU_RESET, f"followed by {remapped.finding.code}: drain and reset"
        )
    if each.code == DOUBLE_BIT:
        return each.reweigh(role, cause, "not followed by Xid 63 or 64: a field diagnostic is due")
    if each.code in CONTAINED and sympathy:
        return each.reweigh(
            role,
            cause,
            f"in sympathy with {sympathy.finding.code}, which is the one to investigate",
        )
    return each


def _apply_driver_verdict(read: list[_KernelFinding], verdicts: list[int]) -> list[_KernelFinding]:
    """Return the Xids of one GPU according to the last Xid 154.

    It is the driver's own verdict on the GPU, and outweighs every table.
    """
    last = verdicts[-1]
    action = read[last].action
    assert action is not None  # `verdicts` are the indices of Xids with an action
    result = list(read)
    for index in verdicts[:-1]:
        result[index] = read[index].reweigh(
            Role.INFORMATION, None, "a later Xid 154 says otherwise"
        )
    if action.role is not Role.ROOT:
        return result
    for index, each in enumerate(result):
        # A graver Xid that came later was not known to the driver when it printed the 154.
        graver = index > last and each.finding.cause is Cause.GPU_FATAL
        if index != last and each.finding.role is Role.ROOT and not graver:
            result[index] = each.reweigh(
                Role.ROOT, action.cause, f"Xid {ACTION_CHANGED}: {action.meaning}"
            )
    return result
