"""Record events and decisions in the state of a job.

`apply_event` records what an event says, `apply_decision` records a decision. Both are parts of
`step`; choosing the decision is the task of `decide`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import assert_never

from relaunch.evidence.causes import OWN_CAUSES, Cause
from relaunch.evidence.findings import Verdict
from relaunch.evidence.reachability import MAX_LINKS, LinkFindings
from relaunch.fields import duration
from relaunch.job.copies import replace
from relaunch.job.decide import (
    answers,
    describe_approval,
    diagnose_declaration,
    explain_unreachable,
    is_late,
)
from relaunch.job.diagnose import (
    SECRET_MISSING,
    Fault,
    blame_lost_nodes,
    is_broken_beside_lost,
)
from relaunch.job.drain import check_drain_answer, find_drain
from relaunch.job.events import (
    Answered,
    DeadlinePassed,
    DrainCancelled,
    DrainRequested,
    Event,
    FaultObserved,
    FreeNodesCounted,
    IncidentsArchived,
    Launched,
    LaunchFailed,
    LaunchOrdered,
    LaunchRefused,
    MessageRejected,
    NodeDeclaredDead,
    NodeReturned,
    NodesAcquired,
    NodesExamined,
    NodesSlow,
    NodeUnreachable,
    PolicyChanged,
    ProgressSeen,
    RanksFound,
    RanksHung,
    RanksStopped,
    RanksSucceeded,
    RepairAsks,
    RepairEnded,
    StepReached,
    StopUnproven,
    SubmissionRaised,
    SubmitterChecked,
    WorkflowReset,
)
from relaunch.job.fencing import may_leave_lost_behind
from relaunch.job.incidents import (
    add_unhealthy_nodes,
    close_by_time,
    close_incident,
    name_foreign_processes,
    open_incident,
    pass_step,
    record_decision,
    record_restarting_counter,
    withdraw_loss,
)
from relaunch.job.ladder import LINKS_TIMEOUT
from relaunch.job.launches import (
    add_found,
    complete_launch,
    forget_node,
    forget_stopped,
    prove_stopped,
    reserve_launch,
    settle_failed_launch,
    settle_given_up_launch,
)
from relaunch.job.ledger import (
    carry_over,
    charge_after,
    charge_before,
    charge_decision,
    charge_end,
)
from relaunch.job.places import StartedPlaces, limit_places, record_places
from relaunch.job.resumes import (
    SIGNALLED,
    count_failed_resume,
    find_bad_checkpoint,
    identify_error,
    raise_failed_step,
)
from relaunch.job.rules import ALL_RULES, Rule, Rules
from relaunch.job.slow_nodes import record_slow_nodes
from relaunch.job.state import (
    Ask,
    AvoidedNode,
    Certainty,
    Decision,
    Diagnosis,
    Examine,
    ExaminedNode,
    ForeignUse,
    FreeNodes,
    Ignore,
    JobState,
    LostNode,
    Next,
    NodeDrain,
    Phase,
    PolicyChange,
    Progress,
    Recovery,
    Relaunch,
    Repair,
    RepairQuestion,
    Stop,
    Try,
    Wait,
)
from relaunch.spec.policy import KEPT_TRIES, Policy
from relaunch.text import format_time

STARTUP = timedelta(minutes=1)
"""A program that ends by itself so soon has met an error of its code, its arguments or its files.

Later it may have met its data, of which the next generation may meet other parts.
"""
KEPT_NOTICES = 5
NAMED_VERDICTS = 4
"""Maximum number of verdicts that the reason of an incident's fault names."""


def apply_event(
    job: JobState,
    event: Event,
    diagnosis: Diagnosis | None,
    now: datetime,
    rules: Rules = ALL_RULES,
) -> JobState:
    """Return the job's state with an event recorded, before anything is decided about it.

    Args:
        job: The state before the event.
        event: What happened.
        diagnosis: The root cause by the event's own evidence; None where the event is no fault, or
            comes too late to count (`is_late`).
        now: The time of the workflow.
        rules: Those in force; fewer than all for histories from before a rule.
    """
    if isinstance(event, LaunchOrdered):
        # Recorded even if the job has decided something else since: the order may have
        # reached a node.
        return reserve_launch(job, event.launch)
    if is_late(job, event):
        after = _apply_late_event(job, event)
    else:
        after = _apply_event(charge_before(job, event, now), event, diagnosis, now, rules)
        after = charge_after(job, after, event, now)
    if after.unstopped:
        after = forget_stopped(after)
    if isinstance(event, Launched | LaunchFailed | LaunchRefused) and event.places:
        # Also for a launch that was given up: its orders may have been carried out.
        older = () if isinstance(event, Launched) and after is not job else after.places
        started = StartedPlaces(job.submission, event.generation, event.places)
        return replace(after, places=record_places(older, started, after.maybe_alive))
    if isinstance(event, RanksFound):
        for started in event.places:
            after = replace(after, places=record_places(after.places, started, after.maybe_alive))
    if after.places and after.maybe_alive != job.maybe_alive:
        return replace(after, places=limit_places(after.places, after.maybe_alive))
    return after


def _apply_event(
    job: JobState, event: Event, diagnosis: Diagnosis | None, now: datetime, rules: Rules
) -> JobState:
    match event:
        case NodesAcquired():
            return _apply_grant(job, event, now)
        case RanksFound():
            return add_found(job, event.nodes, event.launched)
        case Launched():
            job = _raise_reached(job, event.step, _is_of_last(event))
            incident = (
                replace(job.incident, stopped=event.stopped_at, launched=event.started_at)
                if job.incident
                else None
            )
            job = complete_launch(job, event.generation)
            return replace(
                job,
                lost=(),
                unstopped=(),
                launched_at=event.started_at,
                incident=incident,
                has_run=True,
            )
        case NodesExamined() if job.phase is Phase.EXAMINING and job.recovering is not None:
            return _apply_examination(job, job.recovering, event, now)
        case DeadlinePassed() if job.phase is Phase.EXAMINING and job.recovering is not None:
            return _apply_late_examination(job, job.recovering, now)
        case RepairEnded() if event.outcome != "done" and answers(job, event):
            return _apply_failed_repair(job, f"{event.strategy} {event.outcome}: {event.reason}")
        case DeadlinePassed() if job.phase is Phase.REPAIRING:
            return _apply_failed_repair(
                job, f"the repair did not end within {duration(job.policy.timeouts.reboot)}"
            )
        case RepairAsks() if job.phase is Phase.REPAIRING and job.recovering is not None:
            return _apply_question(job, job.recovering, event)
        case LaunchFailed():
            return _apply_failed_launch(job, event, diagnosis, now)
        case LaunchRefused():
            job = settle_failed_launch(job, event.generation, started=event.started)
            return _apply_fault(job, event, diagnosis, now)
        case FaultObserved() | RanksHung():
            return _apply_broken(
                _apply_fault(_update_silence(job, event), event, diagnosis, now),
                event,
                diagnosis,
                now,
                rules,
            )
        case NodeUnreachable():
            return _apply_loss(job, event, now)
        case NodeReturned():
            return _apply_return(job, event, now)
        case ProgressSeen():
            return _apply_progress(job, event, now)
        case NodesSlow():
            job, sentences = record_slow_nodes(job, event, diagnosis, now)
            for sentence in sentences:
                job = _notice(job, sentence)
            return job if diagnosis is None else open_incident(job, diagnosis, now, now)
        case StepReached():
            return pass_step(job, event, now)
        case DeadlinePassed() if job.phase is Phase.RUNNING and job.incident is not None:
            return close_by_time(job, job.incident, now)
        case RanksSucceeded():
            return replace(
                close_incident(job, now, "all ranks exited with 0"),
                # It did resume, though a short generation may end before its steps are read.
                failed_resume=None,
                maybe_alive=(),
                launched=(),
                lost=(),
            )
        case RanksStopped() | StopUnproven():
            return _apply_stop(job, event)
        case DrainRequested() if event.node in {slot.node for slot in job.slots} or (
            # It may have been granted a moment ago. A grant drops the requests for other nodes.
            job.phase in (Phase.QUEUED, Phase.LAUNCHING, Phase.WAITING_FOR_NODES)
            and Rule.EARLY_DRAIN in rules
        ):
            return _apply_drain_request(job, event)
        case DrainCancelled() if find_drain(job, event.node) is not None:
            job = replace(job, drains=tuple(one for one in job.drains if one.node != event.node))
            return _notice(
                job,
                f"{event.node} is no longer wanted" + (f": {event.reason}" if event.reason else ""),
            )
        case Answered() if event.node and not check_drain_answer(
            job, event.decision, event.node, now
        ):
            return _apply_drain_answer(job, event, now)
        case FreeNodesCounted() if job.phase is Phase.WAITING_FOR_PERSON and job.asked is not None:
            job = replace(job, asked=replace(job.asked, free=FreeNodes(event.count, now)))
            what = job.next.what if job.snoozed else _describe_question(job)
            return replace(job, next=replace(job.next, what=what))
        case NodeDeclaredDead():
            return _apply_declaration(job, event, now)
        case PolicyChanged():
            who = event.by or "a person"
            keys = list_changed_keys(job.policy, event.policy)
            changes = (*job.policy_changes, PolicyChange(now, who, event.reason, keys))[
                -KEPT_NOTICES:
            ]
            job = replace(job, policy=event.policy, policy_changes=changes)
            what = ", ".join(keys) or "nothing"
            return _notice(
                job,
                f"{who} changed the policy ({what})"
                + (f": {event.reason}" if event.reason else ""),
            )
        case IncidentsArchived():
            return replace(
                job,
                incidents=job.incidents[event.count :],
                incidents_archived=job.incidents_archived + event.count,
            )
        case SubmissionRaised() if not job.slots:
            raised = max(job.submission, event.submission)
            return _notice(
                replace(job, submission=raised),
                "the server's clock was set back: this submission is numbered after the last one",
            )
        case WorkflowReset() if job.ending is None:
            raised = max(job.submission, event.submission)
            # Its nodes may belong to another job by now, so they are claimed like new ones.
            return _notice(
                replace(job, submission=raised, slots=(), fewer=""),
                f"the workflow was reset: ranks are launched again as submission {raised}",
            )
        case SubmitterChecked():
            return replace(job, submitted_by=event.by)
        case MessageRejected():
            return _notice(job, f"{event.name} {event.what}: {event.reason}")
        case _:
            return job


def _apply_stop(job: JobState, event: RanksStopped | StopUnproven) -> JobState:
    if isinstance(event, StopUnproven):
        reminders = job.stop_reminders + 1 if job.unstopped else 0
        job = prove_stopped(job, event.stopped)
        return replace(job, unstopped=event.nodes, stop_reminders=reminders)
    job = _raise_reached(job, event.step)
    incident = replace(job.incident, stopped=event.at) if job.incident else None
    return replace(prove_stopped(job, event.nodes), incident=incident)


def _apply_progress(job: JobState, event: ProgressSeen, now: datetime) -> JobState:
    if job.progress is None or event.step > job.progress.step:
        job = replace(job, progress=Progress(event.step, event.at))
    if event.restarts:
        job = record_restarting_counter(job, now)
    # The same report may carry the next fault: the steps passed before it still count.
    return pass_step(job, event, now)


def _apply_late_event(job: JobState, event: Event) -> JobState:
    """Record an event about a generation that was given up: only whether its ranks may be alive."""
    match event:
        case Launched():
            return settle_given_up_launch(job, event.generation, started=True)
        case LaunchFailed() | LaunchRefused():
            return settle_given_up_launch(job, event.generation, started=event.started)
        case _:
            return job


def _apply_examination(
    job: JobState, recovering: Recovery, event: NodesExamined, now: datetime
) -> JobState:
    if event.links is not None:
        return _apply_links(job, recovering, event.links, now)
    if event.foreign is not None:
        return _apply_foreign(job, recovering, event.foreign)
    unhealthy = tuple(one for one in event.examined if one.verdict is Verdict.UNHEALTHY)
    reason = "; ".join(
        f"{one.node} examined: {one.verdict}, {one.reason}" for one in unhealthy[:NAMED_VERDICTS]
    )
    job = replace(job, recovering=replace(recovering, examined=event.examined))
    return add_unhealthy_nodes(
        job, recovering.fault, tuple(one.node for one in unhealthy), reason, now
    )


def _apply_late_examination(job: JobState, recovering: Recovery, now: datetime) -> JobState:
    if recovering.links == "asked":
        late = f"its nodes did not call each other within {duration(LINKS_TIMEOUT)}"
        return _apply_links(job, recovering, LinkFindings(late), now)
    if recovering.foreign_check == "asked":
        return _apply_foreign(job, recovering, ())
    late = f"no answer within {duration(job.policy.timeouts.examination)}"
    nodes = recovering.fault.nodes or tuple(slot.node for slot in job.slots)
    examined = tuple(ExaminedNode(node, Verdict.UNKNOWN, late) for node in nodes)
    return replace(job, recovering=replace(recovering, examined=examined))


def _apply_links(
    job: JobState, recovering: Recovery, links: LinkFindings, now: datetime
) -> JobState:
    """Record which nodes cannot reach each other: that is the fault then, and not the program's."""
    fault = replace(recovering.fault, reason=f"{recovering.fault.reason}; {links.reason}")
    pairs = (*job.broken_links, *(one.nodes for one in links.broken))
    job = replace(job, broken_links=tuple(dict.fromkeys(pairs))[-MAX_LINKS:])
    if links.suspects:
        fault = replace(
            fault,
            cause=Cause.NETWORK,
            reason=f"{links.reason}; before that: {recovering.fault.reason}",
            nodes=links.suspects,
            gpus=(),
            code=links.code,
            certainty=Certainty.CERTAIN if links.proven else Certainty.LIKELY,
            by_program=False,
        )
        job = open_incident(job, fault, now, now)
    return replace(job, recovering=replace(recovering, fault=fault, links="known"))


def _apply_foreign(
    job: JobState, recovering: Recovery, foreign: tuple[ForeignUse, ...]
) -> JobState:
    """Record which foreign processes use the job's GPUs: then the fault is not the program's."""
    recovering = replace(recovering, foreign_check="known", foreign=foreign)
    if foreign:
        found = "; ".join(f"on {one.node} {one.processes}" for one in foreign[:NAMED_VERDICTS])
        fault = recovering.fault
        # In front: of a reason that is cut, the end is lost.
        named = replace(fault, reason=f"{found}, not started by relaunch; {fault.reason}")
        job = name_foreign_processes(job, fault, named.reason)
        recovering = replace(recovering, fault=named)
        # `_apply_fault` has counted this generation.
        job = replace(
            job,
            flat_generations=max(0, job.flat_generations - 1),
            startup_error="",
            startup_failures=0,
            startup_nodes=(),
        )
    return replace(job, recovering=recovering)


def _apply_return(job: JobState, event: NodeReturned, now: datetime) -> JobState:
    job = replace(job, lost=tuple(lost for lost in job.lost if lost.node != event.node))
    job = withdraw_loss(job, event.node)
    if (
        job.incident is None
        or job.deferred_fault is not None
        or job.lost
        or any(d.decision not in ("Wait", "Ask") for d in job.incident.decisions)
    ):
        return job
    return close_incident(job, now, f"{event.node} came back by itself, nothing was stopped")


def _apply_question(job: JobState, recovering: Recovery, event: RepairAsks) -> JobState:
    """Record a repair's question or its end.

    `next` shows the newest open question; when none is open, it shows again what follows the
    repair.
    """
    repair = recovering.repair or job.next
    questions = tuple(one for one in recovering.questions if one.node != event.node)
    if event.question:
        questions = (*questions, RepairQuestion(event.node, event.question, event.until))
    asks = Next(questions[-1].question, questions[-1].until) if questions else repair
    return replace(
        job, next=asks, recovering=replace(recovering, questions=questions, repair=repair)
    )


def _apply_declaration(job: JobState, event: NodeDeclaredDead, now: datetime) -> JobState:
    diagnosis = diagnose_declaration(event)
    if event.node in {slot.node for slot in job.slots} and job.ending is None:
        job = open_incident(job, diagnosis, now, now)
    return _notice(forget_node(job, event.node), diagnosis.reason)


def _apply_drain_request(job: JobState, event: DrainRequested) -> JobState:
    known = find_drain(job, event.node)
    # A repeated request by the same requester for the same reason keeps its denial: a fleet
    # workflow that was started again repeats its requests.
    denied = (
        known.denied
        if known is not None and (known.by, known.reason) == (event.by, event.reason)
        else ""
    )
    asked = NodeDrain(event.node, event.reason, event.by, event.until, denied)
    if known == asked:
        return job
    job = replace(job, drains=(*(one for one in job.drains if one is not known), asked))
    until = format_time(event.until)
    return _notice(
        job,
        f"{event.by or 'a person'} wants {event.node} by {until}"
        + (f": {event.reason}" if event.reason else ""),
    )


def _apply_drain_answer(job: JobState, event: Answered, now: datetime) -> JobState:
    one = find_drain(job, event.node)
    assert one is not None, "else it is no answer"
    who, reason = event.by or "a person", f": {event.reason}" if event.reason else ""
    if event.decision == "deny":
        after = replace(one, denied=f"{who} said no{reason}")
        when = f"not left before {format_time(one.until)}"
    else:
        after, when = replace(one, denied="", until=min(one.until, now)), "left now"
    job = replace(job, drains=tuple(after if other is one else other for other in job.drains))
    return _notice(job, f"{who} said that {one.node} is {when}{reason}")


def _apply_grant(job: JobState, event: NodesAcquired, now: datetime) -> JobState:
    used = {slot.node for slot in event.slots}
    if event.fewer and len(event.slots) < len(job.slots):
        moment = format_time(now)
        job = _notice(job, f"{moment}: generation {job.generation} goes on with {event.fewer}")
    return replace(
        job,
        slots=event.slots,
        fewer=event.fewer,
        drains=tuple(one for one in job.drains if one.node in used),
    )


def apply_decision(job: JobState, decision: Decision, now: datetime) -> JobState:
    """Return the job's state with a decision recorded.

    A launch's generation number and its try are spent here, before anything is started.
    """
    if isinstance(decision, Ignore):
        return job
    after = _apply_decision(record_decision(job, decision, now), decision, now)
    return charge_decision(job, after, decision, now)


def _apply_decision(
    job: JobState, decision: Relaunch | Examine | Repair | Wait | Ask | Stop, now: datetime
) -> JobState:
    match decision:
        case Relaunch():
            known = {avoided.node for avoided in job.avoided}
            by_rung = decision.take is not None
            avoided = (
                *job.avoided,
                *(
                    AvoidedNode(node, _explain_isolation(job, node, decision), now, by_rung)
                    for node in decision.avoid
                    if node not in known
                ),
            )
            if decision.renew_budgets:
                job = _renew_budgets(job, now)
            if decision.approved:
                job = _renew_asking_count(job, now)
            if decision.take is not None:
                job = _count_try(job, decision.take)
            furthest = job.furthest_step
            if job.progress is not None:
                furthest = max(
                    job.progress.step, furthest if furthest is not None else job.progress.step
                )
            if (
                job.incident is None and job.launched_at is not None
            ):  # a launch for a fault is recorded in its incident
                moment = format_time(now)
                how = f", {decision.strategy}" if decision.strategy is not None else ""
                text = f"generation {decision.generation}{how}: {decision.reason}"
                job = _notice(job, f"{moment}: {text}")
            pause = f" {duration(decision.delay)} after this decision" if decision.delay else ""
            return replace(
                job,
                generation=decision.generation,
                strategy=decision.strategy,
                phase=Phase.LAUNCHING,
                reason=decision.reason,
                next=Next(f"generation {decision.generation} is launched{pause}"),
                avoided=avoided,
                furthest_step=furthest,
                progress=None,
                launched_at=None,
                deferred_fault=None,
                recovering=None,
            )
        case Examine():
            return replace(
                job,
                phase=Phase.EXAMINING,
                reason=decision.reason,
                next=Next(decision.next, decision.until),
                recovering=_begin_check(job, decision),
                deferred_fault=None,
            )
        case Repair():
            on = f" gpu {', '.join(decision.gpus)}" if decision.gpus else ""
            what = f"{decision.strategy} of {', '.join(decision.nodes[:4])}{on}"
            return replace(
                _count_try(job, decision.take),
                phase=Phase.REPAIRING,
                reason=decision.reason,
                next=Next(f"{what}, then a new generation", decision.until),
                recovering=_recovering(job, decision.fault),
                deferred_fault=None,
            )
        case Wait():
            snoozed = decision.phase is Phase.WAITING_FOR_PERSON
            return replace(
                job,
                phase=decision.phase,
                reason=decision.reason,
                next=Next(decision.next, decision.until),
                snoozed=snoozed,
                reminders=decision.reminders,
            )
        case Ask():
            job = replace(
                job,
                phase=Phase.WAITING_FOR_PERSON,
                reason=decision.reason,
                asked=decision,
                snoozed=False,
                reminders=decision.reminders,
            )
            until = None if decision.waits else now + job.policy.timeouts.answer_within
            return replace(job, next=Next(_describe_question(job), until))
        case Stop():
            return replace(
                job,
                phase=Phase.STOPPING,
                reason=decision.reason,
                next=Next(f"the job ends as {decision.phase} when no rank is left"),
                ending=decision,
                exit_code=decision.exit_code,
            )
        case _:
            assert_never(decision)


def _explain_isolation(job: JobState, node: str, decision: Relaunch) -> str:
    """Return what the examination found on the node; else why the launch was decided."""
    examined = job.recovering.examined if job.recovering is not None else None
    for one in examined or ():
        if one.node == node and one.verdict is Verdict.UNHEALTHY:
            return f"{node} examined: {one.verdict}, {one.reason}"
    return decision.reason


def _describe_question(job: JobState) -> str:
    """Return the open question, what an approval does, and what happens without an answer."""
    asked = job.asked
    assert asked is not None, "only an open question is described"
    approval = describe_approval(job)
    parts = [asked.question]
    parts += [f"If approved, it is launched {approval}."] if approval else []
    if not asked.waits:
        parts += [f"Without an answer: {_describe_silence(job)}"]
    return " ".join(parts)


def _describe_silence(job: JobState) -> str:
    if job.lost:
        return "a reminder"
    if job.policy.unanswered == "fail":
        return "the job fails"
    return "a reminder" if job.reminders else "a reminder, and the job gives its nodes back"


def _renew_asking_count(job: JobState, now: datetime) -> JobState:
    """Begin the count again that made the job ask: a person has approved another launch.

    Where that was a bad checkpoint, the program resumes from an earlier one and needs longer to
    pass the furthest step: the launches that failed before do not count against it.
    """
    job = replace(job, approved_at=now)
    if find_bad_checkpoint(job) is not None:
        job = replace(
            job, flat_generations=0, startup_error="", startup_failures=0, startup_nodes=()
        )
    if job.asked is None or job.asked.ladder is None:
        return job
    return replace(job, ladders_renewed={**job.ladders_renewed, job.asked.ladder: now})


def _count_try(job: JobState, take: Try) -> JobState:
    return replace(
        job, tries=(*job.tries, take)[-KEPT_TRIES:], restarts_spent=job.restarts_spent + take.spent
    )


def _recovering(job: JobState, fault: Diagnosis) -> Recovery:
    """Return the record of a recovery for a fault.

    What an ongoing recovery has learned is kept; its open questions are dropped.
    """
    return (
        Recovery(fault)
        if job.recovering is None
        else replace(job.recovering, fault=fault, questions=(), repair=None)
    )


def _begin_check(job: JobState, decision: Examine) -> Recovery:
    recovering = _recovering(job, decision.fault)
    if decision.foreign_processes:
        return replace(recovering, foreign_check="asked")
    return replace(recovering, links="asked") if decision.links else recovering


def finish(job: JobState, now: datetime) -> JobState:
    """Return the final state of a job that is ending and has no rank left."""
    assert job.ending is not None
    ending = job.ending
    job = close_incident(charge_end(job, now), now, f"the job ended: {ending.phase}")
    return replace(
        job,
        phase=ending.phase,
        reason=ending.reason,
        next=Next("nothing: the job has ended"),
        ended_at=now,
    )


def resubmit(
    previous: JobState,
    submission: int,
    submitted_by: str,
    now: datetime,
    renew_budgets: bool,
    avoid: tuple[str, ...],
) -> JobState:
    """Return the state of a new submission of a closed job.

    History, budgets (unless renewed) and avoided nodes are kept; the tokens are new. Slow nodes are
    forgotten.
    """
    known = {avoided.node for avoided in previous.avoided}
    job = replace(
        previous,
        submission=submission,
        submitted_by=submitted_by,
        submitted_at=now,
        phase=Phase.QUEUED,
        reason="submitted again",
        next=Next("nodes are acquired"),
        generation=0,
        slots=(),
        generation_nodes=(),
        fewer="",
        strategy=None,
        drains=(),
        lost=(),
        unstopped=(),
        deferred_fault=None,
        recovering=None,
        broken_links=(),
        avoided=(
            *previous.avoided,
            *(
                AvoidedNode(node, f"asked for by {submitted_by}", now)
                for node in avoid
                if node not in known
            ),
        ),
        progress=None,
        launched_at=None,
        incident=None,
        failed_resume=None,
        # Named by generation, whose numbers begin again.
        slow_nodes=(),
        has_run=False,
        exit_code=None,
        ending=None,
        ended_at=None,
        ledger=carry_over(previous.ledger, now),
    )
    return _renew_budgets(job, now) if renew_budgets else job


def _renew_budgets(job: JobState, now: datetime) -> JobState:
    return replace(
        job,
        restarts_spent=0,
        renewed_at=now,
        flat_generations=0,
        startup_error="",
        startup_failures=0,
        startup_nodes=(),
        tries=(),
        failed_resume=None,
    )


def _apply_fault(job: JobState, fault: Fault, own: Diagnosis | None, now: datetime) -> JobState:
    assert own is not None, "a fault is diagnosed before it is recorded"
    diagnosis = blame_lost_nodes(job, fault, own)
    job = replace(job, recovering=None)
    if diagnosis.cause is Cause.NODE_LOST and isinstance(fault, FaultObserved | RanksHung):
        known = set(job.lost_names)
        reason = "it was silent when its gang failed"
        silent = tuple(
            LostNode(node, now - age, reason, unheard_for=age)
            for node, age in fault.silent
            if node not in known
        )
        job = replace(job, lost=(*job.lost, *silent))
    opened = fault.opened_at if isinstance(fault, FaultObserved | RanksHung) else now
    has_run = diagnosis.code != SECRET_MISSING or diagnosis.do_not_restart
    if has_run and diagnosis.cause in OWN_CAUSES:
        job = _count_startup(_count_generation(job), diagnosis, opened)
    if has_run:
        job = count_failed_resume(job, diagnosis)
    if job.lost and not (isinstance(fault, RanksHung) and may_leave_lost_behind(job)):
        # A gang that hangs continues when its lost node does; a rank that failed stays failed.
        job = replace(job, deferred_fault=own)
    return open_incident(job, diagnosis, opened, now)


def _apply_broken(
    job: JobState, fault: Fault, own: Diagnosis | None, now: datetime, rules: Rules
) -> JobState:
    """Record broken hardware of a node that is not lost, beside the loss of others."""
    is_known = own is not None and is_broken_beside_lost(job, fault, own)
    if own is None or not is_known or Rule.BROKEN_BESIDE_LOST not in rules:
        return job
    return open_incident(job, own, now, now)


def _is_of_last(event: Launched) -> bool:
    """Return whether the step that a launch found is that of the generation before."""
    return event.step_generation in (None, event.generation - 1)


def _raise_reached(job: JobState, step: int | None, is_of_last: bool = True) -> JobState:
    """Record the last step of ranks that have ended.

    A watch knows what ranks on other nodes had reached up to a second before the fault. The next
    generation would pass that step without having advanced. Nor was a fault after it one of the
    program's start, if the step `is_of_last`, the generation before.
    """
    if step is None:
        return job
    incident = job.incident
    if is_of_last:
        job = raise_failed_step(job, step)
        job = replace(job, startup_error="", startup_failures=0, startup_nodes=())
    if incident is not None and (incident.reached is None or incident.reached < step):
        incident = replace(incident, reached=step)
    if job.progress is not None:
        progress = replace(job.progress, step=max(job.progress.step, step))
        return replace(job, incident=incident, progress=progress)
    furthest = step if job.furthest_step is None else max(step, job.furthest_step)
    return replace(job, incident=incident, furthest_step=furthest)


def _count_generation(job: JobState) -> JobState:
    """Count a generation that ended by a fault of the job: did training advance in it?

    Where it reported no step, or its counter starts again, that is only known by time
    (`healthy_for`, which closes the incident): it is taken for a repetition of the fault before it.
    """
    if job.progress is not None:
        if job.furthest_step is None:
            return job
        if job.progress.step > job.furthest_step:
            return replace(job, flat_generations=0)
        if not job.counter_restarts:
            return replace(job, flat_generations=job.flat_generations + 1)
    is_repeated = job.incident is not None and any(
        one.cause in OWN_CAUSES and one.generation < job.generation for one in job.incident.faults
    )
    return replace(job, flat_generations=job.flat_generations + 1) if is_repeated else job


def _count_startup(job: JobState, diagnosis: Diagnosis, opened: datetime) -> JobState:
    """Count generations in a row that a program ended at once, with the same error each time."""
    is_startup = (
        job.progress is None
        and job.launched_at is not None
        and opened - job.launched_at <= STARTUP
        # A signal (128 and more) may come from outside, and says nothing about the code.
        and (diagnosis.exit_code or SIGNALLED) < SIGNALLED
    )
    error = identify_error(diagnosis) if is_startup else ""
    count, nodes = int(bool(error)), diagnosis.nodes if error else ()
    if error and error == job.startup_error:
        count = job.startup_failures + 1
        nodes = tuple(node for node in job.startup_nodes if node in nodes)
    return replace(job, startup_error=error, startup_failures=count, startup_nodes=nodes)


def _apply_loss(job: JobState, event: NodeUnreachable, now: datetime) -> JobState:
    newly = LostNode(
        event.node,
        now - event.unheard_for,
        event.reason,
        unheard_for=event.unheard_for,
        is_elsewhere=event.is_elsewhere,
    )
    lost = (*(lost for lost in job.lost if lost.node != event.node), newly)
    diagnosis = Diagnosis(Cause.NODE_LOST, explain_unreachable(event), nodes=(event.node,))
    return open_incident(replace(job, lost=lost), diagnosis, now - event.unheard_for, now)


def _update_silence(job: JobState, fault: FaultObserved | RanksHung) -> JobState:
    """Update how long the lost nodes have been silent; the longer of the two ages counts."""
    ages = dict(fault.unheard)
    lost = tuple(
        replace(one, unheard_for=max(one.unheard_for, ages.get(one.node, one.unheard_for)))
        for one in job.lost
    )
    return replace(job, lost=lost)


def _apply_failed_repair(job: JobState, reason: str) -> JobState:
    """Record that a repair failed: its rung is skipped for this fault, and its try stays spent."""
    assert job.recovering is not None, "a repair is of something"
    fault = replace(job.recovering.fault, reason=f"{job.recovering.fault.reason}; {reason}")
    return replace(
        job,
        recovering=replace(
            job.recovering, fault=fault, failed=(*job.recovering.failed, job.tries[-1].rung)
        ),
    )


def _apply_failed_launch(
    job: JobState, event: LaunchFailed, diagnosis: Diagnosis | None, now: datetime
) -> JobState:
    assert diagnosis is not None, "a fault is diagnosed before it is recorded"
    job = settle_failed_launch(job, event.generation, started=event.started)
    known, wait = set(job.lost_names), event.may_start_within
    silent = (node for node in event.unreachable if node in job.maybe_alive and node not in known)
    newly = tuple(
        LostNode(
            node, now + wait, event.reason, unheard_for=-wait, is_elsewhere=node in event.elsewhere
        )
        for node in silent
    )
    job = replace(job, lost=(*job.lost, *newly))
    return open_incident(job, diagnosis, now, now)


def list_changed_keys(before: Policy, after: Policy) -> tuple[str, ...]:
    """Return the keys that differ between two policies, as paths of at most two parts.

    For example `causes.HANG`, `timeouts.lost_after`.
    """
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    keys = []
    for key in sorted(old):
        if old[key] == new[key] or key == "stated":
            continue
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            inner = sorted(old[key] | new[key])
            keys += [f"{key}.{name}" for name in inner if old[key].get(name) != new[key].get(name)]
        else:
            keys.append(key)
    return tuple(keys)


def _notice(job: JobState, text: str) -> JobState:
    return replace(job, notices=(*job.notices, text)[-KEPT_NOTICES:])
