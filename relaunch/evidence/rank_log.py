"""Read the log of a process that failed: which of its lines says why.

What a line means depends on where it stands. The exception that ended the process weighs more than
what it survived: an error that it handled, that it retried, or after which it went on to train.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relaunch.evidence.catalog import Catalog
from relaunch.evidence.causes import Cause
from relaunch.evidence.exits import MAX_LINE, read_log_line
from relaunch.evidence.findings import Finding, Role
from relaunch.evidence.last_words import (
    LastWords,
    clean_lines,
    find_last_line,
    find_last_words,
    is_chained,
    outline_log,
    outline_traceback,
    shorten_traceback,
)
from relaunch.evidence.observations import RankError

TAIL_LINES = 200
"""The most lines of its log that a rank's exit has."""
CAUSE_LINES = 40
"""Last lines of a log, without frames, in which a cause is looked for: what is further from the end
was survived."""
ECHO_LINES = 3
"""Last lines in which a process that left no exception says that a peer is gone."""
TEARDOWN = "log nccl_teardown"
"""The code of what NCCL's watchdog prints before it ends the process, whatever the reason."""
SURVIVABLE = frozenset(
    (
        Cause.USER_INPUT,
        Cause.APPLICATION,
        Cause.OUT_OF_MEMORY,
        Cause.NUMERICS,
        Cause.STORAGE,
        Cause.PLATFORM,
        Cause.UNKNOWN,
    )
)
"""Causes that a program can handle. After a fault of a GPU or of a link it may go on to print for a
while, until the next collective. So it may after the notice that its node will be taken away: that
is no fault of the past, unless an exception ends the program first."""

OUTSIDE_KILL = "log limit_kill"
"""The code of what a batch system prints when it kills a job. Nothing survives that, but processes
go on to print until the signal reaches them."""

_AFTERMATH = re.compile(
    r"\bNCCL INFO\b|\] INFO \S+:\d+ -> \d|Sending process \d+ closing signal|^\s*frame #\d+: "
    r"|^slurmstepd: error: Failed to send MESSAGE_TASK_EXIT|Bypassing signal SIG"
)
"""Lines that follow the last words of a process: where NCCL returns its error through, and what a
launcher does then."""
_RECOVERED = re.compile(
    r"(?i)\b(?:retrying|retried|will retry|retry (?:in|after|attempt)|try(?:ing)? again in"
    r"|skipp(?:ed|ing)|recovered|ignor(?:ed|ing)|continuing|falling back|reconnecting)\b"
)
_PROGRESS = re.compile(
    # Each repetition is bounded: a line of thousands of digits would take time by its square.
    r"(?i)\b(?:step|iter(?:ation)?|epoch|batch)s?\b\W{0,4}\d{1,15}"
    r".{0,200}?(?:loss|\blr\b|tok|sec|\bms\b|it/s|time)"
    r"|\d{1,15}/\d{1,15} \[\d{1,9}:\d\d<"
)


@dataclass(frozen=True, slots=True)
class LogReading:
    """What the log of a failed process says about its end."""

    findings: tuple[Finding, ...]
    """One for each line that a row of the catalog matches and that may be about the end."""
    lines: tuple[int, ...]
    """The index of each finding's line; -1 for one of the error file."""
    decisive: Finding | None
    """The one that names the cause: a root or a symptom, or a cascade for an echo."""
    is_echo: bool
    """Whether its last words blame a peer and name no fault of this rank."""
    last_line: str
    """The exception that ended it, or else its last line; empty: it wrote nothing."""
    first: Finding | None
    """The first one that the process did not survive, whatever its role: of a barrier if one is."""
    is_wrapper: bool = False
    """Whether the exception that ended it says only that another process failed."""


BARRIER = "log monitored_barrier"
"""The code of a time-out at a barrier."""


def find_words(
    error: RankError | None, lines: Sequence[str], exit_code: int | None, signal: int | None
) -> LastWords | None:
    """Return what a rank wrote about its end, in its error file or else at the end of its log."""
    return (shorten_traceback(error.traceback) if error else None) or find_last_words(
        lines, exit_code, signal
    )


def read_rank_log(
    lines: Sequence[str],
    exit_code: int | None,
    signal: int | None,
    catalog: Catalog,
    error: RankError | None = None,
) -> LogReading:
    """Return what the log of a failed process says about its end.

    Args:
        lines: The end of its log.
        exit_code: Its exit code; negative for a signal; None: not known.
        signal: The signal that ended it, if one did.
        catalog: The catalog with the user's overrides.
        error: What it wrote into its error file, if it did: its last words.
    """
    reader = _Reader(clean_lines(lines), catalog)
    outline = outline_log(reader.lines, exit_code, signal)
    ended, message = reader.read(outline.ended), reader.read(outline.message)
    has_exception = bool(outline.ended)
    if error is not None and error.message:
        ended, message, has_exception = _read_error(error, catalog), {}, True
    others = [n for n in outline.others if not _AFTERMATH.search(reader.lines[n])]
    around = reader.read(others[-CAUSE_LINES:])
    is_wrapper = any(one.role is Role.WRAPPER for one in ended.values())
    if is_wrapper:
        # The exception of the process that failed may stand before it.
        around = dict(sorted({**around, **reader.read(outline.earlier)}.items()))
    trained = reader.find_last_progress()
    fatal = {
        n: one
        for n, one in around.items()
        if n > trained
        or one.code == OUTSIDE_KILL
        or not (one.cause in SURVIVABLE or (has_exception and one.cause is Cause.PREEMPTED))
    }
    lived = {n: one for n, one in fatal.items() if not reader.is_recovered(n, one)}
    if not has_exception and not lived:
        lived = fatal  # the last error of a program that gave up trying again
    is_echo, decisive = _weigh(
        list(ended.values()),
        list(message.values()),
        list(lived.values()),
        None if has_exception else [lived[n] for n in others[-ECHO_LINES:] if n in lived],
    )
    found = {**around, **message, **ended}
    last = [reader.lines[n] for n in outline.ended[:1]] or [find_last_line(lines)]
    if error is not None:
        last = [error.message or "an error without a message"]
    return LogReading(
        tuple(found[n] for n in sorted(found)),
        tuple(sorted(found)),
        decisive,
        is_echo,
        last[0].strip().partition("\n")[0],
        # Processes that wait at a barrier print first that another one is gone, then for what.
        next((one for one in lived.values() if one.code == BARRIER), None)
        or next((one for one in lived.values() if one.code != TEARDOWN), None),
        is_wrapper,
    )


def choose_finding(log: LogReading, ending: Finding) -> Finding | None:
    """Return the finding that decides, of a process's log and its exit.

    None: neither says more than that it failed.
    """
    said = None if log.is_echo else log.decisive
    if said is not None and said.role is Role.ROOT:
        return said
    if ending.role is Role.ROOT:
        return ending
    return said or (None if ending.role is Role.WRAPPER else ending)


def name_cause(log: LogReading, finding: Finding | None) -> Cause:
    """Return the cause of a process that is no echo, by the finding that decides."""
    if finding is not None:
        return finding.cause or Cause.UNKNOWN
    return Cause.APPLICATION if log.last_line else Cause.UNKNOWN


def is_echo_error(error: RankError, catalog: Catalog) -> bool:
    """Return whether an error file blames a peer. The log does not change that."""
    if not any(map(catalog.may_match, _list_error_lines(error))):
        return False
    return _weigh(list(_read_error(error, catalog).values()), [], [], None)[0]


def names_failure(lines: Sequence[str], catalog: Catalog, error: RankError | None = None) -> bool:
    """Return whether a process that has not ended wrote the exception that ends it.

    It blames no peer, and no line of training follows it.

    Args:
        lines: The end of its log.
        catalog: The catalog with the user's overrides.
        error: What it wrote into its error file, if it did.
    """
    if error is not None:
        return not is_echo_error(error, catalog)
    reader = _Reader(clean_lines(lines), catalog)
    ended = outline_log(reader.lines, None, None).ended
    if not ended or reader.find_last_progress() > ended[0]:
        return False
    return not read_rank_log(lines, None, None, catalog).is_echo


@dataclass(frozen=True, slots=True)
class _Reader:
    lines: list[str]
    catalog: Catalog

    def read(self, numbers: Iterable[int]) -> dict[int, Finding]:
        """Return the findings of lines, by their index."""
        return {
            n: found
            for n in numbers
            if (found := read_log_line(self.lines[n], self.catalog)) is not None
        }

    def is_recovered(self, number: int, finding: Finding) -> bool:
        """Return whether a line says that the program handles the fault that it names."""
        return finding.cause in SURVIVABLE and bool(_RECOVERED.search(self.lines[number]))

    def find_last_progress(self) -> int:
        """Return the index of the last line that shows a step and no fault; -1: there is none.

        The program went on to train after the faults that lines before it name.
        """
        return next(
            (
                n
                for n in reversed(range(len(self.lines)))
                if _PROGRESS.search(self.lines[n])
                and read_log_line(self.lines[n], self.catalog) is None
            ),
            -1,
        )


def _read_error(error: RankError, catalog: Catalog) -> dict[int, Finding]:
    """Return the findings of an error file: of its message, then of what its exception came from.

    Their indices are negative, in order: they are no lines of the log.
    """
    said = _list_error_lines(error)
    found = (
        (n, read_log_line(line[:MAX_LINE], catalog)) for n, line in enumerate(said, -len(said))
    )
    return {n: one for n, one in found if one is not None}


def _list_error_lines(error: RankError) -> list[str]:
    """Return the lines of an error's message, and of the exceptions that it came from."""
    said = error.message.splitlines()
    if is_chained(error.traceback):
        traceback = clean_lines(error.traceback.splitlines())
        said += [traceback[n] for n in outline_traceback(traceback).ended[1:]]
    return said


def _weigh(
    ended: list[Finding],
    message: list[Finding],
    around: list[Finding],
    last: list[Finding] | None,
) -> tuple[bool, Finding | None]:
    """Return whether the process is an echo, and the finding that decides.

    Args:
        ended: Findings of the exceptions that ended it, the last one first.
        message: Findings of further lines of the last exception's message.
        around: Findings of the other lines, in order.
        last: Those of its last lines; None: an exception ended it.
    """
    own = [*ended, *message]
    if (root := _find(ended, Role.ROOT)) is not None:
        return False, root
    vague = _find(ended, Role.ROOT, vague=True)
    if vague is not None and vague.cause is Cause.APPLICATION:
        return False, vague  # an error of the program itself, which no other line explains
    if (root := _find(message, Role.ROOT)) is not None:
        return False, root
    if vague is None and (echo := _find(own, Role.CASCADE)) is not None:
        return True, echo
    if last is not None and not any(one.role is Role.ROOT for one in last):
        echo = _find(last, Role.CASCADE)
        if echo is not None:
            return True, echo
    found = (
        _find(around, Role.ROOT)
        or vague
        or _find([*message, *around], Role.ROOT, vague=True)
        or _find([*own, *around], Role.SYMPTOM)
        or _find([*own, *around], Role.CONFIRMATION)
    )
    # A long text of MPI's or JAX's, whose first lines say it. To have waited for others at a
    # barrier is no fault of this process either.
    is_waiting = found is None or found.code == BARRIER
    if is_waiting and last is not None and (echo := _find(around, Role.CASCADE)) is not None:
        return True, echo
    return False, found


def _find(findings: list[Finding], role: Role, *, vague: bool = False) -> Finding | None:
    """Return the first finding of a role; of roots and symptoms, the first that names a cause."""
    return next(
        (
            one
            for one in findings
            if one.role is role
            and (one.cause is not None or role is Role.CASCADE)
            and (vague or not one.vague)
        ),
        None,
    )
