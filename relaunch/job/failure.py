"""Describe for people the fault that ended a job, or that it recovers from, and those before it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from relaunch.job.copies import replace
from relaunch.job.diagnose import UNEXPLAINED
from relaunch.job.state import FaultRecord, Incident, JobState, Phase
from relaunch.text import count_noun, join_names

NO_VALID_CHECKPOINT = re.compile(r"Can't find a valid checkpoint at (\S+)")
"""What Hugging Face's Trainer says of the newest folder, where a full disk or a kill has left it
without weights. `get_last_checkpoint` takes it all the same."""
MAX_EARLIER = 4
"""Lines about earlier faults; a further line counts the rest."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The fault that ended a job, or the newest one of an open incident."""

    fault: FaultRecord
    earlier: tuple[str, ...]
    """A line for each run of equal faults before it, the newest first."""
    logs: str
    """The command that prints the log of the failed rank; empty: it left none."""

    @property
    def advice(self) -> str:
        """Return what helps against a fault that no further launch mends, or that no row of the
        catalog explains; empty: not known."""
        if self.logs and UNEXPLAINED in self.fault.reason:
            return (
                f"if that line names the cause, `{self.logs} | relaunch explain log -` prints a "
                "row for it, to add to the policy's catalog"
            )
        found = NO_VALID_CHECKPOINT.search(self.fault.traceback or self.fault.reason)
        if found is None:
            return ""
        return (
            f"{found[1].rstrip('.')} is not complete, and the program takes it as the newest "
            "checkpoint: remove that folder, then retry"
        )

    @property
    def title(self) -> str:
        """Return the cause and its generation, such as `HANG in generation 2`."""
        return f"{self.fault.cause} in generation {self.fault.generation}"


def list_faults(incident: Incident) -> tuple[FaultRecord, ...]:
    """Return the faults of an incident, oldest first, each with what is known of it."""
    first = FaultRecord(
        incident.opened,
        incident.generation,
        incident.cause,
        incident.reason,
        incident.nodes,
        incident.gpus,
        incident.code,
    )
    first, *later = incident.faults or (first,)
    return (replace(first, ranks=incident.ranks, traceback=incident.traceback), *later)


def find_failure(job: JobState) -> Failure | None:
    """Return the fault that ended a job, or the newest of its open incident; None: there is none.

    A job that was cancelled during an incident was not ended by its fault, but has one.
    """
    incident, closed = job.incident, job.incidents
    ended_badly = job.phase in (Phase.FAILED, Phase.CANCELLED)
    # An incident that was open at the end was closed at that moment.
    if incident is None and ended_badly and closed and closed[-1].closed == job.ended_at:
        incident, closed = closed[-1], closed[:-1]
    if incident is None:
        return None
    faults = list_faults(incident)
    counted = [fault for fault in faults if not fault.withdrawn] or [*faults]
    newest = counted[-1]
    # Generations of an earlier submission have the same numbers.
    closed = tuple(one for one in closed if one.opened >= job.submitted_at)
    earlier = _describe_faults(counted[:-1], newest)
    earlier += [_describe_closed(one) for one in reversed(closed)]
    if (more := len(earlier) - MAX_EARLIER) > 0:
        earlier = [*earlier[:MAX_EARLIER], f"and {more} more"]
    return Failure(newest, tuple(earlier), logs_command(job, newest))


def logs_command(job: JobState, fault: FaultRecord) -> str:
    """Return the command that prints what the failed rank wrote; empty: there is nothing to print.

    Numbers of generations start again with each submission, and only those of the present one can
    be asked for.
    """
    never_started = fault.generation == job.generation and job.launched_at is None
    if fault.at < job.submitted_at or fault.generation < 1 or never_started:
        return ""
    rank = f" --rank {fault.ranks[0]}" if fault.ranks else ""
    return f"relaunch logs {job.name}{rank} --generation {fault.generation}"


def describe_failure(job: JobState) -> list[str]:
    """Return the lines that say why a job ended badly: the last fault, and those before it.

    What the job's own reason already says is not repeated.
    """
    failure = find_failure(job)
    if failure is None:
        return []
    fault = failure.fault
    label = "root cause" if job.phase is Phase.FAILED else "last fault"
    reason = "" if fault.reason in job.reason else f": {fault.reason}"
    return [
        f"{label}: {failure.title}{reason}",
        *(f"| {line}" for line in fault.traceback.splitlines()),
        *([f"what helps: {failure.advice}"] if failure.advice else []),
        *(f"before it: {line}" for line in failure.earlier),
    ]


def list_commands(job: JobState, can_retry: bool = True) -> list[str]:
    """Return the lines with what a person may type after a job that ended badly.

    Args:
        job: The job, ended.
        can_retry: Whether a server goes on that could run it again.
    """
    failure = find_failure(job)
    commands = [
        ("the rank's log", failure.logs if failure is not None else ""),
        ("what was done", f"relaunch history {job.name}"),
        ("run it again", f'relaunch retry {job.name} --reason "…"' if can_retry else ""),
    ]
    return [f"{f'{what}:':<16}{command}" for what, command in commands if command]


def _describe_closed(incident: Incident) -> str:
    how = "recovered: " if incident.recovered is not None else ""
    where = _describe(incident.cause, (incident.generation,), incident.nodes)
    return f"{where}, {how}{incident.outcome or 'closed'}"


def _describe_faults(faults: list[FaultRecord], newest: FaultRecord) -> list[str]:
    """Return a line for each run of faults with the same cause and nodes, the newest first."""
    runs: list[list[FaultRecord]] = []
    for fault in faults:
        if runs and (runs[-1][0].cause, runs[-1][0].nodes) == (fault.cause, fault.nodes):
            runs[-1].append(fault)
        else:
            runs.append([fault])
    return [
        _describe(run[0].cause, tuple(one.generation for one in run), run[0].nodes)
        + (", launched again" if run[-1].generation < newest.generation else "")
        for run in reversed(runs)
    ]


def _describe(cause: str, generations: tuple[int, ...], nodes: tuple[str, ...]) -> str:
    first, last = generations[0], generations[-1]
    where = f" on {join_names(nodes, 4)}" if nodes else ""
    if first == last:
        return f"{cause} in generation {first}{where}"
    return f"{cause} in {count_noun(len(set(generations)), 'generation')}, {first} to {last}{where}"
