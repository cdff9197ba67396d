"""What the web UI shows of a job: search attributes, memo, and current details. None of them holds
secrets."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from relaunch.evidence.health import Health
from relaunch.fields import duration
from relaunch.job.drain import describe_drains
from relaunch.job.failure import Failure, find_failure
from relaunch.job.ladder import list_used_budgets
from relaunch.job.next_step import describe_next
from relaunch.job.state import DecisionRecord, FaultRecord, JobState, Phase
from relaunch.repair.escalation import Escalation, EscalationDecision, ExamineNode
from relaunch.repair.explain import kind_of_order
from relaunch.repair.state import AskPerson, FinishRepair, LogEntry, RepairDecision, RepairState
from relaunch.spec.policy import Strategy
from relaunch.text import escape_markdown, join_names, omit_said, quote_code, strip_sequences

PHASE = SearchAttributeKey.for_keyword("Phase")
CAUSE = SearchAttributeKey.for_keyword("Cause")
STRATEGY = SearchAttributeKey.for_keyword("Strategy")
NODES = SearchAttributeKey.for_keyword_list("Nodes")
GENERATION = SearchAttributeKey.for_int("Generation")

DETAILS_LIMIT = 18_000
"""Bytes; the server accepts 20,000."""
MOST_INCIDENTS = 8


HIDDEN = "HIDDEN"
"""The cause where none is to be shown: views and alerts still find the job by it."""


def attributes(job: JobState, hides_causes: bool = False) -> dict[str, object]:
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
    if hides_causes:
        return {
            "Phase": job.phase.value,
            "Generation": job.generation,
            "Cause": HIDDEN if incident else None,
        }
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
        result.append(
            key.value_unset() if value is None else key.value_set(value)  # type: ignore[arg-type]
        )
    return result


def memo(job: JobState) -> dict[str, object]:
    return {
        "phase": job.phase.value,
        "reason": job.reason,
        "next": _describe_next(job),
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
        f"**Why** {escape_markdown(job.reason)}",
        "",
        f"**Next** {escape_markdown(_describe_next(job))}",
        "",
    ]
    failure = find_failure(job)
    if failure is not None and job.phase.is_final:
        lines += [f"### Failure: {failure.title}", "", escape_markdown(failure.fault.reason), ""]
        lines += [
            *_failure_lines(failure),
            *(f"- before it: {escape_markdown(one)}" for one in failure.earlier),
            "",
        ]
    if job.lost:
        lines += [
            "**Not answering** "
            + ", ".join(
                f"{escape_markdown(lost.node)} (last heard {_format_time(lost.last_heard_at)})"
                for lost in job.lost[:8]
            ),
            "",
        ]
    if job.slots:
        lines += [
            f"**Nodes** {escape_markdown(join_names((slot.node for slot in job.slots), 16))}",
            "",
        ]
    if drains := describe_drains(job):
        lines += [
            "### Nodes that it is to leave",
            "",
            *(f"- {escape_markdown(one)}" for one in drains[:MOST_INCIDENTS]),
            "",
        ]
    if job.fewer:
        lines += [f"**Fewer than it takes** {escape_markdown(job.fewer)}", ""]
    if job.avoided:
        lines += [
            f"**Avoided** {escape_markdown(', '.join(one.node for one in job.avoided[:16]))}",
            "",
        ]
    # Lists, not tables: the web UI renders the cells of a table without space between them.
    lines += [
        "### Budgets",
        "",
        f"- the job's own restarts: {job.restarts_spent} of {job.policy.max_restarts} spent",
    ]
    if (most := job.policy.no_progress_stop) != "off":
        lines += [f"- generations without progress: {job.flat_generations} of {most}"]
    for budget in list_used_budgets(job, now):
        rung = budget.rung
        window = f" in {duration(rung.window)}" if rung.window else ""
        where = f" on {escape_markdown(budget.where)}" if budget.where else ""
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
            f"{_format_time(incident.opened)} {escape_markdown(incident.reason)}",
            "",
        ]
        steps: list[FaultRecord | DecisionRecord] = [
            *incident.faults[1:][-4:],
            *incident.decisions[-8:],
        ]
        steps.sort(key=lambda step: step.at)  # of equal ones, faults first
        reasons = omit_said((step.reason for step in steps), [incident.reason])
        lines += [
            f"- {_format_time(step.at)} {_describe_step(step, reason)}"
            for step, reason in zip(steps, reasons, strict=True)
        ]
        lines += ["", *_failure_lines(failure), ""] if failure is not None else [""]
    closed = job.incidents[-MOST_INCIDENTS:]
    if closed:
        total = len(job.incidents) + job.incidents_archived
        lines += [f"### Closed incidents ({total})", ""]
        for incident in reversed(closed):
            lasted = f"{((incident.closed or now) - incident.opened).total_seconds():.1f} s"
            lines += [
                f"- {_format_time(incident.opened)}, {lasted}: **{incident.cause}**"
                f" {escape_markdown(incident.reason[:300])} → "
                f"{escape_markdown(incident.outcome or 'closed')}"
            ]
        lines += [""]
    if job.notices:
        lines += [
            "### Notices",
            "",
            *(f"- {escape_markdown(notice)}" for notice in job.notices),
            "",
        ]
    if not job.phase.is_final:
        lines += [
            "### To overrule it",
            "",
            "Send a signal from this page (one JSON object, every field optional, or none at all):",
            "",
            '- `cancel` `{"reason": "…", "by": "you"}` stops every rank and ends the job',
            '- `force_retry` `{"reason": "…", "avoid_nodes": ["n2"], "renew_budgets": false}`'
            " launches a new generation now",
            *_answer_lines(job),
            '- `report` `{"node": "n2", "declared": "dead", "reason": "…"}`'
            " you vouch that nothing runs on n2 any more",
            "",
            "The buttons of this page: **Request Cancellation** is `cancel`. **Terminate** stops no"
            " rank itself: the fleet does, within a minute or two, and takes the nodes back."
            " **Reset** goes on with ranks that still run, else claims nodes and launches again.",
        ]
    return cut_page(lines)


def _describe_step(step: FaultRecord | DecisionRecord, reason: str) -> str:
    """Return a step of an incident, with what is new in its reason."""
    if isinstance(step, FaultRecord):
        return f"**Further fault {step.cause}** {escape_markdown(reason) or 'as before'}"
    what = f"{step.decision} {step.strategy}" if step.strategy else step.decision
    return f"**{what}** {escape_markdown(reason)}".rstrip()


def _failure_lines(failure: Failure) -> list[str]:
    """Return what the failed rank wrote last, and how to read the rest."""
    text = strip_sequences(failure.fault.traceback).replace("```", "'''")
    return [
        *(["```", text, "```", ""] if text else []),
        *([f"- its log: {quote_code(failure.logs)}"] if failure.logs else []),
    ]


def _answer_lines(job: JobState) -> list[str]:
    lines = []
    if job.phase is Phase.WAITING_FOR_PERSON:
        example = '`{"decision": "approve", "reason": "…", "by": "you"}`'
        lines += [
            f"- the update `answer` {example} launches a new generation;"
            " `deny` ends the job, `snooze` and `take-over` give you time"
        ]
    for one in job.drains[:MOST_INCIDENTS] if describe_drains(job) else ():
        example = f'`{{"decision": "approve", "node": "{one.node}", "reason": "…", "by": "you"}}`'
        lines += [
            f"- the update `answer` {example} has it leave {one.node} at once;"
            f" `deny`: not before {_format_time(one.until)}"
        ]
    return lines


def repair_details(
    repair: RepairState,
    decision: RepairDecision,
    escalation: Escalation | None = None,
    waiting_for: str = "",
) -> str:
    """Return the page of a repair, in Markdown: what is done to which node, for whom, and what was
    found.

    Args:
        repair: The current state.
        decision: The current decision.
        escalation: What was found and done before, if examinations choose the strategy.
        waiting_for: What it waits for from the fleet, as a clause; empty if for nothing.
    """
    match decision:
        case FinishRepair():
            doing = escape_markdown(f"{decision.outcome}: {decision.reason}")
        case AskPerson():
            until = _format_time(decision.until)
            healthy = ", or shows no fault any more" if repair.rules.by_examination else ""
            doing = (
                f"waiting for approval until {until}; without an answer it is not done. "
                f"{repair.node} is probed every five minutes or more often: the question is "
                f"withdrawn if it was rebooted{healthy}"
            )
        case _:
            doing = escape_markdown(waiting_for or decision.reason)
    lines = [
        f"## {repair.strategy} of {repair.node}",
        "",
        f"**Why** {escape_markdown(f'{repair.reason} (ordered by {repair.by})')}",
        "",
        f"**Now** {doing}",
        "",
    ]
    if not isinstance(decision, FinishRepair):
        lines += [f"**Deadline** {_format_time(repair.deadline)}", ""]
    if repair.boot_id:
        lines += [
            f"**Boot** decided on boot id {quote_code(repair.boot_id)}: "
            "the node refuses an order that was decided on another boot",
            "",
        ]
    lines += _health_lines(repair.health)
    lines += _step_lines((*(escalation.log if escalation is not None else ()), *repair.log))
    if isinstance(decision, AskPerson):
        kind = kind_of_order(repair)
        answer = f'`{{"decision": "approve", "repair": "{kind}", "reason": "…", "by": "you"}}`'
        lines += [
            "### Approval needed",
            "",
            f"{escape_markdown(decision.question)}",
            "",
            f"Send the update `answer` from this page: {answer}, or `deny`.",
        ]
    if waiting_for:
        lines += [
            f"### Waiting for `fleet/{repair.fleet}`",
            "",
            "A fleet limits how many repairs and reboots happen at once, so that one mistake does "
            "not take all its nodes down. Its page says which limit is reached, and how its "
            "breaker is closed. Without a permit nothing is done to the node.",
        ]
    return cut_page(lines)


def escalation_details(
    escalation: Escalation, decision: EscalationDecision, by: str, deadline: datetime
) -> str:
    """Return the page of a repair whose strategy is chosen by examinations, while no strategy runs.
    Markdown."""
    match decision:
        case FinishRepair():
            doing = escape_markdown(f"{decision.outcome}: {decision.reason}")
        case ExamineNode():
            when = f"examined again in {duration(decision.delay)}" if decision.delay else "examined"
            doing = escape_markdown(f"{escalation.node} is {when}: {decision.reason}")
        case _:
            doing = escape_markdown(f"{decision.strategy}: {decision.reason}")
    lines = [
        f"## Examination of {escalation.node}",
        "",
        f"**Why** {escape_markdown(f'{escalation.reason} (ordered by {by})')}",
        "",
        f"**Now** {doing}",
        "",
    ]
    if not isinstance(decision, FinishRepair):
        lines += [f"**Deadline** {_format_time(deadline)}", ""]
    return cut_page([*lines, *_health_lines(escalation.health), *_step_lines(escalation.log)])


def _health_lines(health: Health | None) -> list[str]:
    if health is None:
        return []
    return [
        f"**Last probe** {health.verdict}: {escape_markdown(health.reason)}",
        "",
        *(f"- {escape_markdown(f'{one.code}: {one.reason}')}" for one in health.findings[:16]),
    ]


def _step_lines(log: tuple[LogEntry, ...]) -> list[str]:
    return (
        [
            "",
            "### Steps",
            "",
            *(
                f"- {_format_time(one.at)} **{escape_markdown(one.what)}** "
                f"{escape_markdown(one.reason)}"
                for one in log
            ),
            "",
        ]
        if log
        else []
    )


def cut_page(lines: list[str]) -> str:
    """Return a page, cut to what the server accepts."""
    text = "\n".join(lines)
    if len(text.encode()) <= DETAILS_LIMIT:
        return text
    # An escape that was cut in two would escape the end of the line.
    return text.encode()[:DETAILS_LIMIT].decode(errors="ignore").rstrip("\\") + "\n…"


def _describe_next(job: JobState) -> str:
    return describe_next(job) + (f" (at {_format_time(job.next.at)})" if job.next.at else "")


def _format_time(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S UTC")
