"""Explains one piece of evidence: an Xid, an exit, a DCGM report, a log, a kernel log.

It only reads, and needs no job. Combining several pieces of evidence is the task of `diagnose`; its
result is shown on the job's page.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from relaunch.cli.policy_views import WIDTH, first, first_rung
from relaunch.config import ConfigError
from relaunch.evidence.catalog import Catalog, catalog
from relaunch.evidence.causes import HARDWARE_CAUSES, Cause
from relaunch.evidence.findings import Finding, Role
from relaunch.spec.policy import Policy
from relaunch.text import count_noun, printable

MAX_ROW = 120
"""Characters of a line in the row that is suggested for it."""
MAX_BYTES = 16 << 20
"""Of a file, the most that is held: its end, where a log says why a process ended."""
MAX_KERNEL_LINES = 100_000
"""Last lines of a kernel log that are looked at: seconds of processor time if each is evidence."""
KINDS = ("xid", "npu", "exit", "dcgm", "log", "kernel")
NO_CAUSE = "no finding names a cause"


@dataclass(frozen=True)
class LocatedFinding:
    """A finding, and the line it was read from, if known: 1 is the first; -1 the last, where what
    is before was not read."""

    finding: Finding
    line: int | None = None


@dataclass(frozen=True)
class LogEnd:
    """The last lines of a log, and how much is before them."""

    lines: list[str]
    unread_bytes: int

    def number(self, index: int) -> int:
        """Return the number of a line, as people count: see LocatedFinding."""
        return index - len(self.lines) if self.unread_bytes else index + 1

    def describe(self, looked_at: str, evidence: int) -> tuple[str, ...]:
        """Return the text lines that say what was read, and what was not."""
        text = f"{count_noun(len(self.lines), 'line')} read{looked_at}"
        lines = [f"{text}, {evidence} with evidence" if evidence else text]
        if self.unread_bytes:
            size = _format_size(self.unread_bytes)
            lines.append(f"Not read: the {size} before them. Line -1 is the last line.")
        return (*lines, "") if evidence else tuple(lines)


@dataclass(frozen=True)
class Explanation:
    found: tuple[LocatedFinding, ...]
    cause: Cause | None
    reason: str
    more: dict[str, Any]
    """JSON keys that only this kind of evidence has."""
    head: tuple[str, ...] = ()
    """Text lines printed before the findings."""
    foot: tuple[str, ...] = ()
    verdict: str | None = None
    root: LocatedFinding | None = None
    """The finding that decides, where a job's rules choose it; None: the gravest, as of a node."""


def read_end(path: str) -> LogEnd:
    """Read the last lines of a file, or of standard input for `-`.

    Bytes that are not UTF-8 are replaced: logs may be cut anywhere. Of a pipe, all is read and only
    the end is held.

    Raises:
        ConfigError: The file cannot be read.
    """
    unread = 0
    with _open(path) as file:
        if file.seekable():
            begin = file.tell()
            unread = max(0, file.seek(0, 2) - begin - MAX_BYTES)
            file.seek(begin + unread)
            end = bytearray(file.read(MAX_BYTES))
        else:
            end = bytearray()
            while chunk := file.read(MAX_BYTES // 16):
                end += chunk
                if (more := len(end) - MAX_BYTES) > 0:
                    del end[:more]
                    unread += more
    if unread and 0 < (first := end.find(b"\n") + 1) < len(end):
        del end[:first]  # a line without its beginning
        unread += first
    return LogEnd(end.decode(errors="replace").splitlines(), unread)


def read_text(path: str, what: str) -> str:
    """Read a whole file, or standard input for `-`.

    Args:
        path: The file.
        what: What it should be, for the error.

    Raises:
        ConfigError: The file cannot be read, or is larger than MAX_BYTES.
    """
    with _open(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {_format_size(MAX_BYTES)}: expected {what}")
    return content.decode(errors="replace")


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _format_size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def explain(kind: str, what: str, exit_code: int | None, policy: Policy | None) -> Explanation:
    """Explain evidence of one kind.

    Raises:
        ConfigError: There is no such kind, or the evidence cannot be read.
    """
    if exit_code is not None and kind not in ("dcgm", "log"):
        raise ConfigError(
            f"--exit-code {exit_code} is the exit code of dcgmi or of a rank: use it with "
            f"`explain dcgm` or `explain log`, not `explain {kind}`"
        )
    match kind:
        case "xid":
            return explain_xid(what, policy)
        case "npu":
            return explain_npu(what, policy)
        case "exit":
            return explain_exit(what, policy)
        case "dcgm":
            return explain_dcgm(what, exit_code, policy)
        case "log":
            return explain_log(what, exit_code, policy)
        case "kernel":
            return explain_kernel(what, policy)
    raise ConfigError(
        f"explain: unknown kind of evidence {kind!r}: expected one of {', '.join(KINDS)}"
    )


def explain_xid(word: str, policy: Policy | None) -> Explanation:
    if not re.fullmatch(r"[0-9]{1,9}", word):
        raise ConfigError(f"explain xid: {word[:60]!r} is not a number: expected one such as 79")
    tables = _catalog(policy)
    row = tables.xids.get(int(word))
    if row is None:
        raise ConfigError(
            f"Xid {int(word)} is not in the catalog: a job counts it as a symptom without a cause"
        )
    finding = Finding("kernel", f"Xid {row.code}", row.role, row.meaning, row.cause)
    nvidia = {
        "mnemonic": row.mnemonic,
        "description": row.description,
        "action": row.action,
        "investigate": row.investigate,
    }
    head = [f"Xid {row.code}  {row.mnemonic}".rstrip()]
    if row.description:
        head += _entry("  NVIDIA   ", row.description)
    if row.action or row.investigate:
        head += _entry(
            "           ",
            "; ".join(
                f"{k}: {v}" for k, v in (("at once", row.action), ("then", row.investigate)) if v
            ),
        )
    head += _entry("  relaunch ", f"{_format_cause(finding)}: {row.meaning}")
    if row.note:
        head += _entry("  note     ", row.note)
    if rules := tuple(rule for rule in tables.nvlink if rule.xid == row.code):
        units = ", ".join(dict.fromkeys(rule.unit for rule in rules))
        head += _entry(
            "  decoded  ",
            f"depends on the kernel log line, {len(rules)} rules: {units}; `explain kernel` "
            "decodes a line",
        )
    more = {"nvidia": nvidia, "note": row.note}
    return Explanation((LocatedFinding(finding),), row.cause, row.meaning, more, tuple(head))


def explain_npu(word: str, policy: Policy | None) -> Explanation:
    from relaunch.evidence.exits import read_npu_code

    code = word.upper().removeprefix("0X")
    if not re.fullmatch(r"[0-9A-F]{8,9}", code):
        raise ConfigError(
            f"explain npu: {word[:60]!r} is not a fault code: expected one such as 80C98002"
        )
    row = _catalog(policy).npu_codes.get(code)
    if row is None:
        raise ConfigError(
            f"NPU fault {code} is not in the catalog: a job does not count it as evidence"
        )
    finding = read_npu_code(row, "log")
    head = [" ".join(filter(None, (f"NPU {row.code} ", row.part)))]
    by = f", caused by: {row.by.replace('/', ' or ')}" if row.by else ""
    head += _entry("  MindCluster ", f"{row.level}{by}")
    head += _entry("  relaunch    ", f"{_format_cause(finding)}: {row.meaning}")
    more = {"mindcluster": {"level": row.level, "part": row.part, "by": row.by}}
    return Explanation((LocatedFinding(finding),), row.cause, row.meaning, more, tuple(head))


def explain_exit(word: str, policy: Policy | None) -> Explanation:
    from relaunch.evidence.catalog.signals import SIGNALS
    from relaunch.evidence.exits import read_exit

    signal = next(
        (
            number
            for number, name in SIGNALS.items()
            if word.upper() in (name, name.removeprefix("SIG"))
        ),
        None,
    )
    if (number := re.fullmatch(r"-([1-9][0-9]?)", word)) and int(number[1]) in SIGNALS:
        signal = int(number[1])  # as Python and torchrun print an end by a signal
    if signal is None and not re.fullmatch(r"25[0-5]|2[0-4][0-9]|[01]?[0-9]{1,2}", word):
        raise ConfigError(
            f"explain exit: {word[:60]!r} is not an exit: expected a code from 0 to 255, or a "
            "signal such as SIGSEGV or -11"
        )
    code = None if signal is not None else int(word)
    finding = read_exit(code, signal, stopped=False, kernel=(), pid=None, catalog=_catalog(policy))
    head = _entry(f"{finding.code}  ", f"{_format_cause(finding)}: {finding.reason}")
    foot = []
    if finding.code in ("SIGKILL", "exit 137"):
        foot = _entry(
            "",
            "If the kernel log says that the process was killed for memory, the cause is "
            "OUT_OF_MEMORY.",
        )
    return Explanation(
        (LocatedFinding(finding),), finding.cause, finding.reason, {}, tuple(head), tuple(foot)
    )


def explain_dcgm(path: str, exit_code: int | None, policy: Policy | None) -> Explanation:
    from relaunch.evidence.dcgm import read_diag

    examination = read_diag(
        read_text(path, "the output of dcgmi"), exit_code, _catalog(policy).dcgm
    )
    cause = next(
        (finding.cause for finding in examination.findings if finding.role is Role.ROOT), None
    )
    version = f"DCGM {examination.version}" if examination.version else "DCGM of an unknown version"
    tests = f"{count_noun(examination.tests_run, 'test')} run"
    head = [
        f"{examination.verdict}  {version}, {tests}",
        *_entry("  ", f"{examination.advice}: {examination.reason}"),
    ]
    more = {
        "advice": str(examination.advice),
        "version": examination.version,
        "tests_run": examination.tests_run,
    }
    found = tuple(LocatedFinding(finding) for finding in examination.findings)
    return Explanation(
        found, cause, examination.reason, more, tuple(head), verdict=str(examination.verdict)
    )


def explain_log(path: str, exit_code: int | None, policy: Policy | None) -> Explanation:
    """Explain the log of a rank that failed, by the function that judges the ranks of a job.

    Args:
        path: The file with its log.
        exit_code: Its exit code; negative for a signal; None: 1, Python's for an exception.
        policy: The policy whose catalog is used.

    Raises:
        ConfigError: The file cannot be read, or no process ends with this exit code.
    """
    from relaunch.evidence.rank_log import TAIL_LINES
    from relaunch.job.diagnose import diagnose_log

    code = 1 if exit_code is None else exit_code
    if code == 0 or not -64 <= code <= 255:
        raise ConfigError(
            f"--exit-code {code} is no failure of a rank: expected a code from 1 to 255, or a "
            "signal such as -9"
        )
    end = read_end(path)
    before = max(0, len(end.lines) - TAIL_LINES)
    diagnosis, log = diagnose_log(end.lines[before:], code, _catalog(policy))
    found = tuple(
        LocatedFinding(finding, end.number(before + number))
        for finding, number in zip(log.findings, log.lines, strict=True)
    )
    root = next((one for one in found if one.finding is log.decisive), None)
    if root is not None and (log.is_echo or root.finding.cause is not diagnosis.cause):
        root = None
    last = f", the last {TAIL_LINES} of them as a job does" if before else ""
    head = end.describe(last, len(found))
    reason = root.finding.reason if root is not None else printable(diagnosis.reason)
    foot = _suggest_row(printable(log.last_line)) if log.decisive is None and log.last_line else ()
    more = {"unread_bytes": end.unread_bytes}
    return Explanation(found, diagnosis.cause, reason, more, head, foot, root=root)


def _suggest_row(line: str) -> tuple[str, ...]:
    """Return how a team tells relaunch what a line means that no row of the catalog matches."""
    from relaunch.evidence.exits import strip_rank

    # Escaped for RE2, which refuses what `re.escape` writes for a space.
    pattern = re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", strip_rank(line)[:MAX_ROW])
    pattern = re.sub(r"\d+", r"\\d+", pattern).replace("'", "''")
    return (
        "",
        "No row of the catalog matches that line. If you know what it means, write that into a",
        "policy file, and look again:",
        "",
        "catalog:",
        "  log:",
        f"    - {{id: our_error, pattern: '{pattern}', cause: {Cause.APPLICATION}, meaning: …}}",
        "",
        "relaunch explain log FILE --policy ours.yaml",
        "relaunch policy change JOB ours.yaml --reason …     # for a job that runs",
    )


def explain_kernel(path: str, policy: Policy | None) -> Explanation:
    from relaunch.evidence.kernel_log import read_kernel_log as read

    tables = _catalog(policy)
    end = read_end(path)
    before = max(0, len(end.lines) - MAX_KERNEL_LINES)
    indices = [n for n in range(before, len(end.lines)) if read((end.lines[n],), tables)]
    findings = read([end.lines[n] for n in indices], tables)
    # Each line that is evidence by itself gives one finding. If a reader joins lines, the counts
    # differ, and line numbers are left out rather than shown wrong.
    known = len(indices) == len(findings)
    numbers = map(end.number, indices) if known else [None] * len(findings)
    found = tuple(map(LocatedFinding, findings, numbers))
    root = _find_root(found)
    last = f", the last {MAX_KERNEL_LINES} of them examined" if before else ""
    head = end.describe(last, len(found))
    more = {"unread_bytes": end.unread_bytes}
    if root is None:
        return Explanation(found, None, NO_CAUSE, more, head)
    return Explanation(found, root.finding.cause, root.finding.reason, more, head)


def _find_root(found: tuple[LocatedFinding, ...]) -> LocatedFinding | None:
    """Return the decisive finding, chosen as a job chooses it.

    That is the gravest hardware root, else the first root, else the first symptom with a cause.
    """
    roots = [one for one in found if one.finding.role is Role.ROOT]
    hardware = [one for one in roots if one.finding.cause in HARDWARE_CAUSES]
    if hardware:
        return min(
            hardware, key=lambda one: HARDWARE_CAUSES.index(one.finding.cause or Cause.UNKNOWN)
        )
    symptoms = (one for one in found if one.finding.role is Role.SYMPTOM and one.finding.cause)
    return roots[0] if roots else next(symptoms, None)


def lines_of(explanation: Explanation, policy: Policy | None, source: str | None) -> list[str]:
    """Return an explanation as text lines. `source` is the policy's name as it was typed."""
    lines = list(explanation.head)
    if explanation.verdict is not None or not _is_single_finding(explanation):
        root = explanation.root or _find_root(explanation.found)
        for one in explanation.found:
            marker = "→" if one is root else " "
            where = f"line {one.line}  " if one.line is not None else ""
            finding = one.finding
            text = (
                finding.reason
                if finding.reason.startswith(finding.code)
                else f"{finding.code}: {finding.reason}"
            )
            if finding.cause and one.finding.role in (Role.ROOT, Role.SYMPTOM):
                text = f"{finding.cause}: {text}"
            lines += _entry(f"{marker} {where}{finding.role:<12} ", text)
        if explanation.verdict is None:
            lines += [
                "",
                *_entry(
                    "",
                    f"{explanation.cause}: {explanation.reason}"
                    if explanation.cause
                    else explanation.reason,
                ),
            ]
    lines += explanation.foot
    if policy is not None and explanation.cause is not None:
        lines += [
            "",
            *_entry(
                f"{source} first: ", first_rung(policy, explanation.cause, _root_code(explanation))
            ),
        ]
    return lines


def view_of(explanation: Explanation, policy: Policy | None) -> dict[str, Any]:
    """Return an explanation as JSON-compatible values."""
    return {
        **({"verdict": explanation.verdict} if explanation.verdict is not None else {}),
        "cause": str(explanation.cause) if explanation.cause else None,
        "findings": [
            {
                "source": one.finding.source,
                "code": one.finding.code,
                "role": str(one.finding.role),
                "cause": str(one.finding.cause) if one.finding.cause else None,
                "reason": one.finding.reason,
                "gpu": one.finding.gpu,
                "pid": one.finding.pid,
                "line": one.line,
            }
            for one in explanation.found
        ],
        "reason": explanation.reason,
        **explanation.more,
        **({"first": _find_first(explanation, policy)} if policy is not None else {}),
    }


def _find_first(explanation: Explanation, policy: Policy) -> str | None:
    """Return the strategy that a policy tries first; None: no evidence names a cause."""
    if explanation.cause is None:
        return None
    return str(first(policy, explanation.cause, _root_code(explanation)).strategy)


def _is_single_finding(explanation: Explanation) -> bool:
    """Return whether the evidence is an Xid or an exit, which the head explains completely."""
    return len(explanation.found) == 1 and explanation.found[0].line is None


def _root_code(explanation: Explanation) -> str:
    root = explanation.root or _find_root(explanation.found)
    return (
        root.finding.code
        if root is not None
        else next((one.finding.code for one in explanation.found), "")
    )


def _format_cause(finding: Finding) -> str:
    role = {Role.ROOT: "a root", Role.SYMPTOM: "a symptom", Role.CASCADE: "a cascade"}.get(
        finding.role, f"{finding.role}"
    )
    return f"{finding.cause}, {role}" if finding.cause else role


def _catalog(policy: Policy | None) -> Catalog:
    return catalog() if policy is None else catalog(policy.catalog)


def _entry(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )
