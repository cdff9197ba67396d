"""Interpret one run of `dcgmi diag -j` on a node, from its output and exit code.

Reads the output of DCGM 2 to 4, also where it is cut short or preceded by other lines, and never
raises. Judges by error id, because NVIDIA's severities changed between versions, and exit code 226
stands for a wrong setting as well as for a broken GPU. Never calls a node healthy that was not
examined, or whose output could not be read completely.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from types import MappingProxyType
from typing import Any

from relaunch.evidence.catalog.dcgm_tables import (
    Advice,
    DcgmErrorRow,
    load_dcgm_errors,
    load_dcgm_exits,
)
from relaunch.evidence.causes import Cause
from relaunch.evidence.dcgm_output import DiagDocument, read_output
from relaunch.evidence.findings import Finding, Role, Verdict
from relaunch.text import count_noun, join_clauses

NO_OVERRIDES: Mapping[int, Advice] = MappingProxyType({})

GRAVITY = (
    Advice.RMA,
    Advice.ISOLATE,
    Advice.RESET,
    Advice.RETRY,
    Advice.INCONCLUSIVE,
    Advice.CONFIG_ERROR,
    Advice.HEALTHY,
)
"""Advice by gravity, the gravest first; the gravest wins.

Broken hardware stays broken whatever else went wrong, and hardware to be replaced must also be
isolated. RETRY comes before INCONCLUSIVE because a repetition takes only minutes and may resolve
both. CONFIG_ERROR comes after them because it implies that nothing worse was found, which cannot be
said of a run that was not understood.
"""

_VERDICTS = {Advice.HEALTHY: Verdict.HEALTHY} | dict.fromkeys(
    (Advice.RESET, Advice.ISOLATE, Advice.RMA), Verdict.UNHEALTHY
)

# A setting such as persistence mode was the same before the fault, so it is shown but not blamed.
_ROLES: dict[Advice, tuple[Role, Cause | None]] = {
    Advice.RMA: (Role.ROOT, Cause.GPU_FATAL),
    Advice.ISOLATE: (Role.ROOT, Cause.GPU_FATAL),
    Advice.RESET: (Role.ROOT, Cause.GPU_RESET),
    Advice.INCONCLUSIVE: (Role.SYMPTOM, None),
    Advice.RETRY: (Role.INFORMATION, None),
    Advice.CONFIG_ERROR: (Role.INFORMATION, None),
    Advice.HEALTHY: (Role.INFORMATION, None),
}

# NVIDIA/DCGM dcgmlib/dcgm_errors.h: one enum up to 3.2.6, another since 3.3.1; both use the same
# integers.
_SEVERITIES_SINCE_3_3 = ("NONE", "MONITOR", "ISOLATE", "UNKNOWN", "TRIAGE", "CONFIG", "RESET")
_SEVERITIES_BEFORE = ("MONITOR", "ISOLATE", "UNKNOWN")
_BY_SEVERITY = {"ISOLATE": Advice.ISOLATE, "RESET": Advice.RESET, "CONFIG": Advice.CONFIG_ERROR}

# Up to 3.2.6 the deployment checks recorded a text without an id; each of these checks has only one
# error (nvvs Software.cpp, 3.1.8).
_ID_BY_CHECK = {
    "Persistence Mode": 29,
    "Environment Variables": 28,
    "Graphics Processes": 25,
    "Inforom": 9,
}

_MAX_FINDINGS = 64  # four on each of sixteen GPUs; they are stored in a job's history
_ISOLATE_EXIT, _ERROR_EXIT = 205, 226
_OTHER_EXITS = {
    126: "dcgmi may not be executed",
    127: "dcgmi is not installed",
    254: "dcgmi ended with an exception",
}


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of one run of `dcgmi diag`."""

    verdict: Verdict
    advice: Advice
    reason: str
    findings: tuple[Finding, ...]
    """The gravest first."""
    version: str
    """DCGM's version; empty where it could not be read."""
    tests_run: int
    """Number of tests that were executed on at least one entity; skipped ones do not count."""


@dataclass(frozen=True, slots=True)
class _Error:
    id: int | None
    severity: int | None
    text: str
    gpu: str | None
    where: str
    """`GPU 3`, `NvSwitch 1`, or empty where it is about the whole node."""


@dataclass(slots=True)
class _DiagReading:
    """What was collected from one document."""

    modern: bool | None
    """Whether severities use the enum since 3.3; None where the version is not known."""
    errors: list[_Error] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    """What could not be read or gives no reason; it always prevents a healthy verdict."""
    unexamined: list[str] = field(default_factory=list)
    """What was not run. Ignored if an error was recorded, because DCGM skips the rest after one."""
    runtime_error: str | None = None
    tests_run: int = 0
    skipped: int = 0
    gpus: set[str] = field(default_factory=set)


def read_diag(
    stdout: str,
    exit_code: int | None,
    catalog_overrides: Mapping[int, Advice] = NO_OVERRIDES,
    *,
    level: int = 1,
) -> Examination:
    """Return the result of one run of `dcgmi diag -r LEVEL -j`.

    Args:
        stdout: Its output.
        exit_code: Its exit code; negative for a signal; None where it was killed, for instance
            because it took too long.
        catalog_overrides: By error id, the user's advice in place of the table's.
        level: The requested level. A document does not name it, and a document of level 3 in which
            only level 1 was run looks like a complete one.
    """
    documents, whole = read_output(stdout)
    readings = [_read(document, level) for document in documents]
    judged = [
        (_choose_advice(error, reading, catalog_overrides), error)
        for reading in readings
        for error in reading.errors
    ]
    alike: dict[tuple[Advice, int | str], list[_Error]] = {}
    for advice, error in judged:
        alike.setdefault((advice, error.text if error.id is None else error.id), []).append(error)
    reasons = [(advice, _describe_errors(errors)) for (advice, _), errors in alike.items()]
    if whole:
        reasons += [
            (Advice.INCONCLUSIVE, clause) for reading in readings for clause in reading.unclear
        ]
    if not documents:
        reasons.append(
            (
                Advice.INCONCLUSIVE,
                "its output holds no DCGM document"
                if stdout.strip()
                else "dcgmi diag printed nothing",
            )
        )
    elif not whole:
        reasons.append((Advice.INCONCLUSIVE, "its output is cut short"))
    runtime_error = next(
        (reading.runtime_error for reading in readings if reading.runtime_error is not None), None
    )
    ended = _judge_exit(exit_code, readings, runtime_error, explained=bool(reasons))
    if ended:
        reasons.append(ended)
    elif runtime_error is not None:
        reasons.append((Advice.INCONCLUSIVE, f"dcgmi diag failed: {shorten(runtime_error, 200)}"))
    if not judged and not ended and runtime_error is None:
        reasons += [
            (Advice.INCONCLUSIVE, clause) for reading in readings for clause in reading.unexamined
        ]

    advice = min((advice for advice, _ in reasons), key=GRAVITY.index, default=Advice.HEALTHY)
    return Examination(
        verdict=_VERDICTS.get(advice, Verdict.UNKNOWN),
        advice=advice,
        reason=_summarize(reasons, readings),
        findings=_make_findings(judged, ended, exit_code),
        version=next((document.version for document in documents if document.version), ""),
        tests_run=sum(reading.tests_run for reading in readings),
    )


def _summarize(reasons: list[tuple[Advice, str]], readings: list[_DiagReading]) -> str:
    if not reasons:
        tests, skipped = (
            sum(reading.tests_run for reading in readings),
            sum(reading.skipped for reading in readings),
        )
        gpus = sorted({gpu for reading in readings for gpu in reading.gpus}, key=int)
        return (
            f"{count_noun(tests, 'test')} passed"
            + (f" on {_format_gpus(gpus)}" if gpus else "")
            + (f", {skipped} skipped" if skipped else "")
        )
    clauses = list(
        dict.fromkeys(
            clause for _, clause in sorted(reasons, key=lambda reason: GRAVITY.index(reason[0]))
        )
    )
    return join_clauses(clauses)


# --- reading a document


def _read(document: DiagDocument, level: int) -> _DiagReading:
    reading = _DiagReading(modern=_is_modern(document))
    body = document.body
    if "runtime_error" in body:
        reading.runtime_error = _read_text(body["runtime_error"]) or "it does not say why"
        if "test_categories" not in body:
            return reading
    hardware_listed = hardware_run = False
    on_gpus: dict[bool, dict[str, bool]] = {
        True: {},
        False: {},
    }  # key: whether only software was checked
    for category in _read_objects(body.get("test_categories"), "test_categories", reading):
        software = category.get("category") == "Deployment"
        if not isinstance(category.get("category"), str):
            reading.unclear.append("a category of tests has no readable name")
        for test in _read_objects(category.get("tests"), "tests", reading):
            ran, gpus = _read_test(test, reading, deployment_of_3=software and not document.is_4)
            hardware_listed |= not software
            hardware_run |= ran and not software
            reading.tests_run += ran
            reading.skipped += not ran
            if (
                not software or document.is_4
            ):  # version 3 names a GPU in a deployment check only in an error
                for gpu, executed in gpus.items():
                    on_gpus[software][gpu] = on_gpus[software].get(gpu, False) or executed
    reading.gpus = {gpu for gpu, executed in on_gpus[not hardware_listed].items() if executed}
    if not reading.tests_run:
        reading.unexamined.append("no test was run")
    elif not hardware_run and (hardware_listed or level > 1):
        reading.unexamined.append("nothing beyond the software checks was run")
    elif reading.gpus and (
        unexamined := {*on_gpus[True], *on_gpus[False], *document.gpus} - reading.gpus
    ):
        reading.unexamined.append(f"{_format_gpus(sorted(unexamined, key=int))} not examined")
    return reading


def _read_test(
    test: dict[str, Any], reading: _DiagReading, *, deployment_of_3: bool
) -> tuple[bool, dict[str, bool]]:
    """Return whether a test was executed on anything, and for each GPU whether it was."""
    name = _read_text(test.get("name"))
    if not name:
        reading.unclear.append("a test has no readable name")
    ran, on_gpus, failed = False, dict[str, bool](), list[str]()
    before = len(reading.errors)
    for result in _read_objects(test.get("results"), f"results of {name}", reading):
        gpu, where = _read_entity(result)
        executed = _is_executed(result.get("status"), f"{where or 'the node'}: {name}", reading)
        ran |= executed
        if gpu is not None:
            on_gpus[gpu] = on_gpus.get(gpu, False) or executed
        if executed and _read_text(result["status"]).lower() != "pass":
            failed.append(where)
        for error in _read_errors(result, gpu, where, name, reading):
            # Version 3 puts the deployment errors of all GPUs into one result, under the id of the
            # last GPU (dcgmi/Diag.cpp, 3.3.9).
            named = _find_gpu(error.text) if deployment_of_3 else None
            reading.errors.append(
                _Error(error.id, error.severity, error.text, named, f"GPU {named}")
                if named
                else error
            )
    summary = test.get("test_summary")
    if isinstance(summary, dict):
        known = {(error.id, error.text) for error in reading.errors[before:]}
        for error in _read_errors(summary, None, "", name, reading):
            if (
                error.id,
                error.text,
            ) not in known:  # it repeats the results' errors; only those of no entity are new
                gpu = _find_gpu(error.text)
                reading.errors.append(
                    _Error(error.id, error.severity, error.text, gpu, f"GPU {gpu}" if gpu else "")
                )
        if not failed and _read_text(summary.get("status")).lower() in {"fail", "warn"}:
            failed.append("")
    elif summary is not None:
        reading.unclear.append(f"the summary of {name} cannot be read")
    blamed = {error.where for error in reading.errors[before:]}
    for where in dict.fromkeys(failed):
        if where not in blamed and "" not in blamed and not (where == "" and blamed):
            reading.unclear.append(f"{where or 'the node'}: {name} failed without saying why")
    return ran, on_gpus


def _read_errors(
    holder: dict[str, Any], gpu: str | None, where: str, test: str, reading: _DiagReading
) -> Iterator[_Error]:
    """Yield the errors recorded beside a status, whatever it is: an error under Pass counts."""
    recorded = holder.get("warnings")
    for item in recorded if isinstance(recorded, list) else [recorded]:
        if isinstance(item, str):  # up to 3.2.6: only the text; since 3.2 with the id beside it
            item = {"warning": item, "error_id": holder.get("error_id")}  # noqa: PLW2901 (one form)
        if isinstance(item, dict):
            text = _read_text(item.get("warning")) or _read_text(
                item.get("warnings")
            )  # 3.3: the plural, in deployment checks
            code = _read_number(item.get("error_id")) or _ID_BY_CHECK.get(
                test
            )  # 0 means "no error", which does not apply to a warning
            yield _Error(code, _read_number(item.get("error_severity")), text, gpu, where)
        elif item is not None:
            reading.unclear.append(f"{where or 'the node'}: a warning of {test} cannot be read")


def _is_executed(status: object, what: str, reading: _DiagReading) -> bool:
    word = _read_text(status).lower()
    if word not in {"pass", "fail", "warn", "skip", "not run"}:
        reading.unclear.append(f"{what} has no readable status")
    return word in {"pass", "fail", "warn"}


def _read_entity(result: dict[str, Any]) -> tuple[str | None, str]:
    """Return the index of the GPU that a result is about (None: no GPU), and the entity's name."""
    group, number = result.get("entity_group_id"), _read_number(result.get("entity_id"))
    if number is None:
        number = _read_number(
            result.get("gpu_id", result.get("gpu_ids"))
        )  # version 3: a string, or an integer in a deployment check
        group = 1
    if number is None:
        return None, ""
    if group == 1 or result.get("entity_group") == "GPU":
        return str(number), f"GPU {number}"
    return None, f"{_read_text(result.get('entity_group')) or 'entity'} {number}"


def _read_objects(value: object, what: str, reading: _DiagReading) -> Iterator[dict[str, Any]]:
    if not isinstance(value, list):
        reading.unclear.append(
            f"{what} cannot be read" if value is not None else f"{what} are missing"
        )
        return
    for item in value:
        if isinstance(item, dict):
            yield item
        elif item is not None:  # DCGM leaves nulls where a test was taken out
            reading.unclear.append(f"an entry of {what} cannot be read")


# --- advice


def _choose_advice(error: _Error, reading: _DiagReading, overrides: Mapping[int, Advice]) -> Advice:
    if error.id is not None and error.id in overrides:
        return overrides[error.id]
    row = _find_row(error)
    if row is not None:
        return row.advice
    severities = {True: _SEVERITIES_SINCE_3_3, False: _SEVERITIES_BEFORE, None: ()}[reading.modern]
    known = error.severity is not None and 0 <= error.severity < len(severities)
    return (
        _BY_SEVERITY.get(severities[error.severity or 0], Advice.INCONCLUSIVE)
        if known
        else Advice.INCONCLUSIVE
    )


def _find_row(error: _Error) -> DcgmErrorRow | None:
    return load_dcgm_errors().get(error.id) if error.id is not None else None


def _judge_exit(
    exit_code: int | None,
    readings: list[_DiagReading],
    runtime_error: str | None,
    *,
    explained: bool,
) -> tuple[Advice, str] | None:
    """Return what the exit code adds to the output; None where it adds nothing."""
    if exit_code is None:
        return Advice.INCONCLUSIVE, "dcgmi diag did not finish"
    if exit_code == 0 or (exit_code == _ERROR_EXIT and explained):
        return None
    if exit_code == _ISOLATE_EXIT and any(
        _isolates(error, reading) for reading in readings for error in reading.errors
    ):
        # The error itself was judged, perhaps as less grave: a missing library, or an override.
        return None
    row = load_dcgm_exits().get(exit_code)
    if row is not None:
        detail = f" ({shorten(runtime_error, 200)})" if runtime_error else ""
        return row.advice, f"dcgmi exit {exit_code}: {row.meaning}{detail}"
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number in {known.value for known in signal.Signals}:
        return Advice.INCONCLUSIVE, f"dcgmi diag was ended by {signal.Signals(number).name}"
    return Advice.INCONCLUSIVE, _OTHER_EXITS.get(
        exit_code, f"dcgmi exit {exit_code}, which DCGM does not define"
    )


def _isolates(error: _Error, reading: _DiagReading) -> bool:
    """Return whether this error makes its version's exit code ask for isolation."""
    row = _find_row(error)
    if row is None:
        return False
    if reading.modern is False:
        return (row.old_severity or row.severity) == "ISOLATE"
    return row.severity == "ISOLATE" or row.advice in {Advice.ISOLATE, Advice.RMA}


def _is_modern(document: DiagDocument) -> bool | None:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", document.version)
    return (int(found[1]), int(found[2])) >= (3, 3) if found else (True if document.is_4 else None)


# --- text for people


def _describe_errors(alike: list[_Error]) -> str:
    """Return one sentence for all entities with the same error."""
    error = alike[0]
    gpus = sorted({other.gpu for other in alike if other.gpu is not None}, key=int)
    others = list(
        dict.fromkeys(other.where for other in alike if other.gpu is None and other.where)
    )
    who = ", ".join(([_format_gpus(gpus)] if gpus else []) + others[:4]) or "the node"
    row = _find_row(error)
    if error.id is None:
        return f"{who}: {shorten(error.text, 160) or 'an error without a text'}"
    meaning = (row.meaning if row else "") or shorten(error.text, 160)
    if error.id == 101 and (
        found := re.search(r"\bxid (\d{1,5})\b", error.text, re.IGNORECASE)
    ):  # DCGM_FR_XID_ERROR
        meaning = "Xid 45, a process on it was killed" if found[1] == "45" else f"Xid {found[1]}"
    return f"{who}: {row.title if row else 'an error unknown here'} (DCGM {error.id})" + (
        f": {meaning}" if meaning else ""
    )


def _make_findings(
    judged: list[tuple[Advice, _Error]], ended: tuple[Advice, str] | None, exit_code: int | None
) -> tuple[Finding, ...]:
    findings = []
    for advice, error in judged:
        role, cause = _ROLES[advice]
        if cause is not None and error.where.startswith("CPU"):
            cause = Cause.NODE_FAULT
        row = _find_row(error)
        reason = shorten(error.text, 200) or (row.title if row else "an error without a text")
        findings.append((advice, Finding("dcgm", _code(error), role, reason, cause, error.gpu)))
    if ended and exit_code is not None:
        role, cause = _ROLES[ended[0]]
        findings.append(
            (ended[0], Finding("dcgm", f"dcgmi exit {exit_code}", role, ended[1], cause))
        )
    ordered = sorted(
        findings, key=lambda pair: GRAVITY.index(pair[0])
    )  # stable: equals stay in DCGM's order
    return tuple(dict.fromkeys(finding for _, finding in ordered))[:_MAX_FINDINGS]


def _code(error: _Error) -> str:
    return "DCGM" if error.id is None else f"DCGM {error.id}"


def _format_gpus(indices: list[str]) -> str:
    """Return GPU indices as text: `GPU 3`, `GPUs 0-7`, `GPUs 0-2, 5`."""
    runs: list[list[int]] = []
    for index in map(int, indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spans = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"GPU{'s' if len(indices) > 1 else ''} {spans}"


def _find_gpu(text: str) -> str | None:
    found = set(re.findall(r"\bGPU (\d{1,3})\b", text))
    return found.pop() if len(found) == 1 else None


def _read_number(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9
        else None
    )


def _read_text(value: object) -> str:
    """Return a text as one line that any encoder accepts: it may hold any output of a driver."""
    return (
        " ".join(value.encode("utf-8", "replace").decode().split())
        if isinstance(value, str)
        else ""
    )
