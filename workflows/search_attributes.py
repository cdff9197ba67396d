"""What the web UI shows of a job: search attributes, memo, and current details. None of them holds
secrets."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from relaunch.evidence.health import Health
from relaunch.fields import duration
from relaunch.job.drain import pending, what_next
from relaunch.job.ladder import used_budgets
from relaunch.job.state import JobState, Phase
from relaunch.repair.state import AskPerson, Finish, RepairState, Step, StepRecord
from relaunch.repair.treatment import Course, Examine, Treatment
from relaunch.spec.policy import Strategy
from relaunch.text import join_names

PHASE = SearchAttributeKey.for_keyword("Phase")
CAUSE = SearchAttributeKey.for_keyword("Cause")
STRATEGY = SearchAttributeKey.for_keyword("Strategy")
NODES = SearchAttributeKey.for_keyword_list("Nodes")
GENERATION = SearchAttributeKey.for_int("Generation")

DETAILS_LIMIT = 18_000
"""Bytes; the server accepts 20,000."""
MOST_INCIDENTS = 8


def attributes(job: JobState) -> dict[str, object]:
    """Return the current values of the search attributes.

    Compare them before upserting: each upsert is an event in the history.
    """
    # A job that failed or was cancelled keeps its last cause, so that `Phase = "FAILED" AND Cause =
    # "HANG"` finds it.
    ended_badly = job.phase in (Phase.FAILED, Phase.CANCELLED) and bool(job.incidents)
    incident = job.incident or (job.incidents[-1] if ended_badly else None)
    last = (
        next((d.strategy for d in reversed(incident.decisions) if d.strategy), None)
        if incident
        else None
    )
    if incident is None and job.strategy is Strategy.GROW:
        last = Strategy.GROW.value  # shown while the grown generation runs: no incident records it
    return {
        "Phase": job.phase.value,
        "Generation": job.generation,
        "Cause": incident.cause.value if incident else None,
        "Strategy": last,
        "Nodes": list(incident.nodes[:8]) if incident and incident.nodes else None,
    }


def updates(
    before: dict[str, object], after: dict[str, object]
) -> list[SearchAttributeUpdate[Any]]:
    result: list[SearchAttributeUpdate[Any]] = []
    for key in (PHASE, GENERATION, CAUSE, STRATEGY, NODES):
        value = after.get(key.name)
        if value == before.get(key.name):
            continue
        result.append(key.value_unset() if value is None else key.value_set(value))  # type: ignore[arg-type]
    return result


def memo(job: JobState) -> dict[str, object]:
    return {
        "phase": job.phase.value,
        "reason": job.reason,
        "next": _next(job),
        "fleet": job.spec.fleet,
        "submission": job.submission,
    }


def current_details(job: JobState, now: datetime) -> str:
    """Return the job's page as an incident report, in Markdown.

    It shows the state, its reason, the next step, the remaining budgets, and how to overrule the
    job.
    """
    lines = [
        f"## {job.phase} · generation {job.generation}",
        "",
        f"**Why** {job.reason}",
        "",
        f"**Next** {_next(job)}",
        "",
    ]
    if job.lost:
        lines += [
            "**Not answering** "
            + ", ".join(
                f"{lost.node} (last heard {_clock(lost.last_heard_at)})" for lost in job.lost[:8]
            ),
            "",
        ]
    if job.slots:
        lines += [f"**Nodes** {join_names((slot.node for slot in job.slots), 16)}", ""]
    if wanted := pending(job):
        lines += [
            "### Nodes that it is to leave",
            "",
            *(f"- {one}" for one in wanted[:MOST_INCIDENTS]),
            "",
        ]
    if job.fewer:
        lines += [f"**Fewer than it takes** {job.fewer}", ""]
    if job.avoided:
        lines += ["**Avoided** " + ", ".join(avoided.node for avoided in job.avoided[:16]), ""]
    # Lists, not tables: the web UI renders the cells of a table without space between them.
    lines += [
        "### Budgets",
        "",
        f"- the job's own restarts: {job.restarts_spent} of {job.policy.max_restarts} spent",
    ]
    lines += [
        f"- generations without progress: {job.flat_generations} of {job.policy.no_progress_stop}"
    ]
    for budget in used_budgets(job, now):
        rung = budget.rung
        window = f" in {duration(rung.window)}" if rung.window else ""
        where = f" on {budget.where}" if budget.where else ""
        tries = rung.tries if rung.tries is not None else "any number"
        lines += [
            f"- {rung.label} for {budget.cause}{where}: {budget.used} of {tries} tries used{window}"
        ]
    lines += [""]
    if job.incident is not None:
        incident = job.incident
        lines += [
            f"### Open incident: {incident.cause}",
            "",
            f"{_clock(incident.opened)} {incident.reason}",
            "",
        ]
        lines += [
            f"- {_clock(one.at)} **Further fault** {one.cause}: {one.reason[:300]}"
            for one in incident.faults[1:][-4:]
        ]
        lines += [
            f"- {_clock(d.at)} **{d.decision}{f' {d.strategy}' if d.strategy else ''}** {d.reason}"
            for d in incident.decisions[-8:]
        ]
        if incident.traceback:
            lines += ["", "```", incident.traceback[-2000:].replace("```", "'''"), "```"]
        lines += [""]
    closed = job.incidents[-MOST_INCIDENTS:]
    if closed:
        total = len(job.incidents) + job.incidents_archived
        lines += [f"### Closed incidents ({total})", ""]
        for incident in reversed(closed):
            lasted = f"{((incident.closed or now) - incident.opened).total_seconds():.1f} s"
            lines += [
                f"- {_clock(incident.opened)}, {lasted}: **{incident.cause}** {incident.reason[:300]} → {incident.outcome or 'closed'}"
            ]
        lines += [""]
    if job.notices:
        lines += ["### Notices", "", *(f"- {notice}" for notice in job.notices), ""]
    if not job.phase.is_final:
        lines += [
            "### To overrule it",
            "",
            "Send a signal from this page (one JSON object, every field optional, or none at all):",
            "",
            '- `cancel` `{"reason": "…", "by": "you"}` stops every rank and ends the job',
            '- `force_retry` `{"reason": "…", "avoid_nodes": ["n2"], "renew_budgets": false}` launches a new generation now',
            *_answers(job),
            '- `report` `{"node": "n2", "declared": "dead", "reason": "…"}` you vouch that nothing runs on n2 any more',
        ]
    return _page(lines)


def _answers(job: JobState) -> list[str]:
    lines = []
    if job.phase is Phase.WAITING_FOR_PERSON:
        said = '`{"decision": "approve", "reason": "…", "by": "you"}`'
        lines += [
            f"- the update `answer` {said} launches a new generation; `deny` ends the job, `snooze` and `take-over` give you time"
        ]
    for one in job.leaving[:MOST_INCIDENTS] if pending(job) else ():
        said = f'`{{"decision": "approve", "node": "{one.node}", "reason": "…", "by": "you"}}`'
        lines += [
            f"- the update `answer` {said} has it leave {one.node} at once; `deny`: not before {_clock(one.until)}"
        ]
    return lines


def repair_details(
    repair: RepairState, step: Step, course: Course | None = None, waits: str = ""
) -> str:
    """Return the page of a repair, in Markdown: what is done to which node, for whom, and what was
    found.

    Args:
        repair: The current state.
        step: The current step.
        course: What was found and done before, if an examination decides on the treatment.
        waits: The permission of the fleet that it waits for; empty if none.
    """
    match step:
        case Finish():
            doing = f"{step.outcome}: {step.reason}"
        case AskPerson():
            doing = f"it waits for somebody who approves or denies, until {_clock(step.until)}; without an answer it is not done"
        case _:
            doing = waits or step.reason
    lines = [
        f"## {repair.strategy} of {repair.node}",
        "",
        f"**Why** {repair.reason} (ordered by {repair.by})",
        "",
        f"**Now** {doing}",
        "",
    ]
    if not isinstance(step, Finish):
        lines += [f"**Ends** by itself at {_clock(repair.deadline)}", ""]
    if repair.boot_id:
        lines += [
            f"**Boot** decided on boot id `{repair.boot_id}`: the node refuses what was decided on another",
            "",
        ]
    lines += _looked(repair.health)
    lines += _steps((*(course.log if course is not None else ()), *repair.log))
    if isinstance(step, AskPerson):
        answer = '`{"decision": "approve", "reason": "…", "by": "you"}`'
        lines += [
            "### It waits for you",
            "",
            f"Send the update `answer` from this page, {answer} or `deny`.",
        ]
    if waits:
        lines += [
            f"### It waits for `fleet/{repair.fleet}`",
            "",
            "A fleet lets only so many repairs and reboots happen at once, so that one mistake does not take all its nodes down. Its page "
            "says which limit is reached, and how its breaker is closed. Without its permission nothing is done to the node.",
        ]
    return _page(lines)


def course_details(course: Course, step: Treatment, by: str, deadline: datetime) -> str:
    """Return the page of an examination that decides on treatments, while no treatment runs.
    Markdown."""
    match step:
        case Finish():
            doing = f"{step.outcome}: {step.reason}"
        case Examine():
            doing = f"it is examined{f' again in {duration(step.after)}' if step.after else ''}: {step.reason}"
        case _:
            doing = f"{step.strategy}: {step.reason}"
    lines = [
        f"## Examination of {course.node}",
        "",
        f"**Why** {course.reason} (ordered by {by})",
        "",
        f"**Now** {doing}",
        "",
    ]
    if not isinstance(step, Finish):
        lines += [f"**Ends** by itself at {_clock(deadline)}", ""]
    return _page([*lines, *_looked(course.health), *_steps(course.log)])


def _looked(health: Health | None) -> list[str]:
    if health is None:
        return []
    return [
        f"**Last look** {health.verdict}: {health.reason}",
        "",
        *(f"- {one.code}: {one.reason}" for one in health.findings[:16]),
    ]


def _steps(log: tuple[StepRecord, ...]) -> list[str]:
    return (
        [
            "",
            "### Steps",
            "",
            *(f"- {_clock(one.at)} **{one.what}** {one.reason}" for one in log),
            "",
        ]
        if log
        else []
    )


def _page(lines: list[str]) -> str:
    text = "\n".join(lines)
    return (
        text
        if len(text.encode()) <= DETAILS_LIMIT
        else text.encode()[:DETAILS_LIMIT].decode(errors="ignore") + "\n…"
    )


def _next(job: JobState) -> str:
    return what_next(job) + (f" (at {_clock(job.next.at)})" if job.next.at else "")


def _clock(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")
