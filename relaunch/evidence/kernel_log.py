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
from relaunch.text import escape_controls

KERNEL_MARKS: tuple[str, ...] = (
    "NVRM: Xid",
    "SXid (",
    "oom-kill:",
    "fallen off the bus",
    "NV_ERR_GPU_IS_LOST",
    "RmInitAdapter",
    "rm_init_adapter",
    "(Fatal)",
    "AER: device recovery failed",
    "soft lockup",
    "hard LOCKUP",
    "health compromised",
    "fatal error state",
    "health recovery failed",
    "insufficient power",
    "Cable error",
    "Cable unplugged",
    "invoked oom-killer",
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
    "NV_ERR_RESET_REQUIRED",
    "GPU reset begin",
    "GPU reset end with",
    "GPU Recovery Failed",
    "error during GPU init",
    "device lost from bus",
    "uncorrectable hardware error",
    "page fault (src_id:",
    "timeout, but soft recovered",
    "timeout, signaled seq",
    "failed to respond to msg",
    "unrecoverable state",
    "Queue preemption time out",
    "qcm fence wait loop",
    "as wedged",
    "Engine reset: engine_class=",
    "GPU HANG: ecode",
    "is NOT usable",
    "BUG: unable to handle",
    "BUG: kernel NULL pointer",
    "Unable to handle kernel",
    "invalid opcode: ",
    "divide error: ",
    "stack segment: ",
    "double fault: ",
    "Internal error: ",
    "Oops: ",
    "general protection fault",
    "kernel BUG at ",
    "Kernel panic",
)
"""A line without any of these is no evidence. Agents use the same list to select lines to send."""

EXCERPT = 120
"""Characters of a line in a reason: enough for the text before the register values."""
MAX_LINE = 1024
"""Characters of a line that are searched: the kernel itself prints no longer lines."""

PREEMPTIVE_REMOVAL, DOUBLE_BIT, REMAPPED, NVLINK, CONTAINED, ACTION_CHANGED = (
    45,
    48,
    (63, 64),
    74,
    (94, 95),
    154,
)
SWITCH_TIMEOUT = 109
IGNORABLE = (1 << 0 | 1 << 23 | 1 << 30, 0, 0, 0)
SYMPATHETIC = (IGNORABLE[0] | 1 << 1 | 1 << 20, 0, 0, 1 << 16 | 1 << 17)
"""Bits of the first four registers of an Xid 74 that ask for nothing by themselves.

Source: NVIDIA, Analyzing Xid Errors with the Xid Catalog, WORKFLOW_NVLINK_ERR. Other bits, and any
of the other registers, are faults of the link.
"""
REMAPPED_WITHIN = 60.0
"""Seconds by which the line that rows are remapped may stand before the Xid 48 that it belongs to.

They are printed by two parts of the driver, in either order.
"""
SYMPATHY = frozenset((48, 140, 171, 172, *NVLINK_XIDS))
"""Xids that memory errors 94 and 95 may accompany ("in sympathy").

Source: NVIDIA's table for 144 to 150 and its workflow for 48.
"""

ACTIONS_OF_PEOPLE = ("CHECK_MECHANICALS", "UPDATE_SWFW")
"""NVIDIA's actions that no reset and no reboot replaces: a power plug, another driver."""

_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F]+(?::[0-9a-fA-F]+)+)(?:\.\d)?[^)]*\): "
    r"(?P<code>\d+)(?:,|$)\s*(?P<rest>.*)"
)
_REST = re.compile(
    r"(?:pid='?(?P<pid>[^,']*)'?,?\s*)?(?:name=(?P<name>[^,]*),?\s*)?(?P<text>.*)", re.DOTALL
)
_REGISTERS = re.compile(r"\(((?:0x[0-9a-fA-F]+(?:, )?){4,})\)?")
_ORIGIN = re.compile(r"\b(?:caused by|due to) previous Xid (\d+)")
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
                self.finding,
                role=role,
                cause=cause,
                reason=f"{self.finding.reason}; {words}",
                needs_person=False,
            ),
        )


def is_kernel_evidence(line: str) -> bool:
    return any(mark in line for mark in KERNEL_MARKS)


def read_kernel_log(lines: Iterable[str], catalog: Catalog) -> tuple[Finding, ...]:
    """Return one finding for each line that is evidence, in the order of the lines."""
    read = [
        found
        for line in lines
        if is_kernel_evidence(line)
        and (found := _read_line(escape_controls(line[:MAX_LINE]), catalog))
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
    elif row is not None and not row.by_user and code == NVLINK:
        role, cause, meaning = _read_link_registers(row, text)
    elif row is not None and not row.by_user and code == PREEMPTIVE_REMOVAL:
        role, cause, meaning = _read_removal(row, text, catalog)
    reason = f"Xid {code} on GPU {gpu}{who}: {meaning}"
    if text and text.rstrip(".").lower() not in meaning.lower():
        reason += f" ({text[:EXCERPT].strip()})"
    needs_person = row is not None and not row.by_user and row.action in ACTIONS_OF_PEOPLE
    finding = Finding("kernel", f"Xid {code}", role, reason, cause, gpu, pid, at, needs_person)
    return _KernelFinding(finding, row if row and not row.by_user else None, action)


def _read_link_registers(row: XidRow, text: str) -> tuple[Role, Cause | None, str]:
    """Return what an Xid 74 means by the registers that it prints."""
    found = _REGISTERS.search(text)
    words = [int(word, 16) for word in found[1].rstrip(", ").split(", ")] if found else []
    if not any(words):
        return row.role, row.cause, row.meaning
    if _is_within(words, IGNORABLE):
        return Role.INFORMATION, None, f"{row.meaning}, with bits that can be ignored"
    if _is_within(words, SYMPATHETIC):
        return Role.SYMPTOM, None, f"{row.meaning}, as a consequence of another error"
    return row.role, row.cause, row.meaning


def _is_within(words: list[int], allowed: tuple[int, ...]) -> bool:
    return not any(words[len(allowed) :]) and not any(
        word & ~bits for word, bits in zip(words, allowed, strict=False)
    )


def _read_removal(row: XidRow, text: str, catalog: Catalog) -> tuple[Role, Cause | None, str]:
    """Return what a 45 means that names the Xid it comes from, whose own line may be missing."""
    found = _ORIGIN.search(text)
    origin = catalog.xids.get(int(found[1])) if found is not None else None
    if origin is None or origin.code == row.code or origin.role is not Role.ROOT:
        return row.role, row.cause, row.meaning
    return origin.role, origin.cause, f"{row.meaning} after Xid {origin.code}, {origin.meaning}"


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
    remapped.reverse()
    earlier = None
    for index, each in enumerate(read):
        if remapped[index] is None and earlier is not None and _is_near(earlier, each):
            remapped[index] = earlier
        earlier = each if each.code in REMAPPED else earlier
    neighbours = zip(read, sympathy, remapped, strict=True)
    weighed = [_weigh_xid(each, other, before, near) for each, before, near in neighbours]
    weighed = _excuse_switch_timeouts(weighed)
    verdicts = [index for index, each in enumerate(weighed) if each.action is not None]
    return _apply_driver_verdict(weighed, verdicts) if verdicts else weighed


def _excuse_switch_timeouts(read: list[_KernelFinding]) -> list[_KernelFinding]:
    """Return the Xids with each 109 that follows from what the same process did before.

    A process that faults holds its context until it is ended, and the switch away from it times
    out. The authors of Quadrants saw 31, then 109 for a bug of their own
    (Genesis-Embodied-AI/quadrants#589).
    """
    faults: dict[int, _KernelFinding] = {}
    result = []
    for each in read:
        pid = each.finding.pid
        if each.finding.cause is Cause.GPU_USER_INDUCED and pid is not None:
            faults.setdefault(pid, each)
        before = faults.get(pid) if pid is not None and each.code == SWITCH_TIMEOUT else None
        words = f"it follows {before.finding.code} of the same process" if before else ""
        result.append(each.reweigh(Role.CASCADE, None, words) if before else each)
    return result


def _is_near(earlier: _KernelFinding, each: _KernelFinding) -> bool:
    if earlier.finding.at is None or each.finding.at is None:
        return True
    return each.finding.at - earlier.finding.at <= REMAPPED_WITHIN


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
        remapped: The next Xid that remaps memory, or else the one just before.
    """
    role, cause = each.finding.role, each.finding.cause
    if each.code == PREEMPTIVE_REMOVAL and other:
        return each.reweigh(Role.CASCADE, None, f"it goes with {other.finding.code}")
    if each.code == DOUBLE_BIT and remapped:
        return each.reweigh(role, Cause.GPU_RESET, f"with {remapped.finding.code}: drain and reset")
    if each.code == DOUBLE_BIT:
        return each.reweigh(role, cause, "without Xid 63 or 64: a field diagnostic is due")
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
