"""Decide what a job does next: one decision with its reason for each event.

`decide` is a part of `step`. Recording the decision and counting budgets is the task of
`apply_decision`.
"""

from __future__ import annotations

from datetime import datetime
from typing import assert_never

from relaunch.evidence.causes import Cause
from relaunch.fields import duration
from relaunch.job.claim import more_at
from relaunch.job.copies import replace
from relaunch.job.diagnose import (
    CLAIMED,
    SECRET_MISSING,
    blame_lost_nodes,
    find_highest,
    has_gone_above,
    is_broken_beside_lost,
)
from relaunch.job.drain import (
    check_drain_answer,
    drains_at_checkpoint,
    explain_drain,
    find_drain,
)
from relaunch.job.events import (
    Answered,
    CancelRequested,
    CheckpointSaved,
    DeadlinePassed,
    DrainCancelled,
    DrainDue,
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
    NodesGranted,
    NodesMissing,
    NodesOffered,
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
    RetryRequested,
    StepReached,
    StopUnproven,
    SubmissionRaised,
    Submitted,
    SubmitterChecked,
    WorkflowReset,
)
from relaunch.job.fencing import fences, may_leave_lost_behind
from relaunch.job.ladder import ANSWERS, NAMED, climb
from relaunch.job.rules import ALL_RULES, REPORTS, Rule, Rules
from relaunch.job.state import (
    Ask,
    Certainty,
    Decision,
    Diagnosis,
    Ignore,
    JobState,
    Phase,
    Recovery,
    Relaunch,
    Repair,
    Stop,
    Try,
    Wait,
)
from relaunch.spec.policy import Strategy
from relaunch.text import count_noun, format_time, join_names

CANCELLED_EXIT_CODE = 130
"""128 + SIGINT, what a shell reports for a command that Ctrl-C ended."""


def decide(
    job: JobState,
    event: Event,
    diagnosis: Diagnosis | None,
    now: datetime,
    rules: Rules = ALL_RULES,
) -> Decision:
    """Return the next decision for a job in whose state `event` is already recorded.

    Args:
        job: The state after `apply_event`.
        event: What happened.
        diagnosis: The root cause by the event's own evidence, as it was given to `apply_event`.
        now: The time of the workflow.
        rules: Those in force; fewer than all for histories from before a rule.
    """
    if is_stale(job, event):
        return Ignore(
            f"{event.kind} is about an earlier generation than {job.generation}, or an earlier wait"
        )
    if job.phase.is_final:
        return Ignore(f"the job has ended: {job.phase}")
    if job.ending is not None:
        return _while_ending(job, event)
    if is_echo(job, event):
        return Ignore(f"{event.kind} is about generation {job.generation}, which is given up")
    decision = _decide(job, event, diagnosis, now, rules)
    if Rule.OPEN_QUESTION in rules and _leaves_question(job, event, decision):
        return Ignore("the job waits for a person")
    return decision


def _leaves_question(job: JobState, event: Event, decision: Decision) -> bool:
    """Return whether what happened to ranks or nodes leaves the open question as it is."""
    asked = job.asked
    if job.phase is not Phase.WAITING_FOR_PERSON or asked is None or not isinstance(event, REPORTS):
        return False
    if isinstance(event, NodeReturned) and not job.lost:
        # The last of them: the ranks go on, or a fault is dealt with that had to wait for it.
        return asked.waits and job.deferred_fault is not None
    if isinstance(event, NodeReturned) and not asked.waits and asked.ladder is None:
        # Without a node that answered, it could only ask; now it may find the hang itself.
        return isinstance(decision, Wait | Ask) and not _finds_hang(job)
    return asked.waits or isinstance(decision, Wait | Ask)


def _decide(
    job: JobState, event: Event, diagnosis: Diagnosis | None, now: datetime, rules: Rules
) -> Decision:
    match event:
        case Submitted() | RetryRequested():
            return _decide_on_request(job, event)
        case WorkflowReset():
            return _decide_on_reset(job)
        case NodesAcquired() | NodesMissing() if (
            job.phase is Phase.WAITING_FOR_PERSON and Rule.LATE_GRANT in rules
        ):
            return Ignore("the job waits for a person")
        case NodesAcquired() if job.phase is Phase.LAUNCHING:
            return Ignore("the launch goes on, for the reason it was decided for")
        case NodesAcquired():
            return Wait(
                Phase.LAUNCHING,
                f"there are nodes: {join_names((slot.node for slot in event.slots), NAMED)}",
                next="ranks are started",
            )
        case NodesMissing(hopeless=True):
            return Stop(Phase.FAILED, event.reason, exit_code=2)
        case NodesMissing():
            if not job.slots:
                # No rank has been started yet: the job is queued, with no deadline.
                return Wait(
                    Phase.QUEUED,
                    event.reason,
                    next="ranks are launched as soon as the fleet has enough nodes for it; "
                    "`cancel` takes it out of the queue",
                )
            # The fleet repeats this when something has changed; the deadline stays the same.
            waits = job.phase is Phase.WAITING_FOR_NODES and job.next.at is not None
            until = job.next.at if waits else now + job.policy.timeouts.answer_within
            return _wait_for_nodes(job, event.reason, until, job.reminders if waits else 0)
        case NodesOffered():
            return _decide_on_offer(job, event, now)
        case NodesGranted():
            return _decide_on_more(job, event, now)
        case Launched():
            reason = f"{_runs(job)}; {event.warm}" if event.warm else _runs(job)
            return _running(job, reason, now)
        case LaunchRefused() if (higher := _decide_on_higher_token(job, event, now)) is not None:
            return higher
        case LaunchFailed(started=False) if diagnosis is not None and not (
            set(event.unreachable) & set(job.maybe_alive)
        ):
            # No rank of this job ever ran there, so there is nothing to fence: take another node
            # at once.
            return climb(job, Recovery(diagnosis), now, without=event.unreachable)
        case FaultObserved() | RanksHung() | LaunchFailed() | LaunchRefused():
            assert diagnosis is not None, "a fault is diagnosed before it is decided about"
            decision = _decide_on_fault(job, blame_lost_nodes(job, event, diagnosis), now, rules)
            if Rule.BROKEN_BESIDE_LOST in rules and is_broken_beside_lost(job, event, diagnosis):
                return _leave_broken(job, decision, diagnosis, now)
            return decision
        case RanksSucceeded():
            return Stop(
                Phase.SUCCEEDED,
                f"all ranks of generation {job.generation} exited with 0",
                exit_code=0,
            )
        case NodesExamined() if job.phase is Phase.EXAMINING and job.recovering is not None:
            return climb(job, job.recovering, now, without=job.lost_names)
        case RepairEnded(outcome="done") if answers(job, event):
            return Relaunch(
                job.generation + 1,
                f"{event.strategy} of {join_names(event.nodes, NAMED)} is done: {event.reason}",
            )
        case RepairEnded() if answers(job, event) and job.recovering is not None:
            return climb(job, job.recovering, now, without=job.lost_names)
        case NodesExamined() | RepairEnded():
            return Ignore(f"{event.kind} answers a question that is no longer asked")
        case NodesSlow() if diagnosis is not None:
            return climb(job, Recovery(diagnosis), now, without=())
        case NodeUnreachable():
            return _decide_on_unreachable(job, event, now, rules)
        case NodeReturned() if job.deferred_fault is not None and (
            not job.lost or may_leave_lost_behind(job)
        ):
            return climb(job, Recovery(job.deferred_fault), now, without=job.lost_names)
        case NodeReturned():
            if job.lost:
                reason = f"{event.node} answers again, {join_names(job.lost_names, NAMED)} not yet"
                return _wait_for_lost(job, reason, now, rules)
            return _running(job, f"{event.node} answers again and its ranks had gone on", now)
        case StepReached():
            return _running(job, f"training passed step {event.step - 1}", now, rules)
        case DeadlinePassed():
            return _decide_on_deadline(job, now, rules)
        case CancelRequested():
            who = f" by {event.by}" if event.by else ""
            return Stop(
                Phase.CANCELLED,
                f"cancelled{who}" + (f": {event.reason}" if event.reason else ""),
                exit_code=CANCELLED_EXIT_CODE,
            )
        case Answered() if event.node:
            return _decide_on_drain_answer(job, event, now)
        case Answered():
            return _decide_on_answer(job, event, now)
        case NodeDeclaredDead():
            return _decide_on_declared_dead(job, event, now)
        case DrainDue() if job.phase is Phase.RUNNING and (drain := find_drain(job, event.node)):
            return Relaunch(job.generation + 1, explain_drain(drain), without=(drain.node,))
        case CheckpointSaved() if drains := drains_at_checkpoint(job):
            reason = "; ".join(
                (
                    *(explain_drain(one) for one in drains[:4]),
                    f"checkpoint of step {event.step} is saved",
                )
            )
            return Relaunch(job.generation + 1, reason, without=tuple(one.node for one in drains))
        case CheckpointSaved():
            return Ignore("no drain waits for a checkpoint")
        case DrainRequested() | DrainCancelled() | DrainDue():
            return Ignore(
                "a checkpoint or the next launch leaves that node, where it is one of this job's "
                "and still wanted"
            )
        case (
            ProgressSeen()
            | NodesSlow()
            | LaunchOrdered()
            | RanksFound()
            | RanksStopped()
            | StopUnproven()
            | RepairAsks()
            | FreeNodesCounted()
            | PolicyChanged()
            | IncidentsArchived()
            | MessageRejected()
            | SubmissionRaised()
            | SubmitterChecked()
        ):
            return Ignore(f"{event.kind} asks for nothing")
        case _:
            assert_never(event)


def is_late(job: JobState, event: Event) -> bool:
    """Return whether an event comes too late to count: the job has ended, or has gone on."""
    return job.phase.is_final or is_stale(job, event) or is_echo(job, event)


def is_stale(job: JobState, event: Event) -> bool:
    """Return whether an event is about an earlier generation, or the deadline of a past wait."""
    if isinstance(event, DeadlinePassed):
        # The deadline of a repair stays valid while the repair asks a question.
        repair = job.recovering.repair if job.recovering is not None else None
        return event.due is not None and event.due not in (
            job.next.at,
            repair.at if repair is not None else job.next.at,
        )
    generation = getattr(event, "generation", None)
    return generation is not None and generation != job.generation


def is_echo(job: JobState, event: Event) -> bool:
    """Return whether an event is about a generation that was given up but is still the newest.

    A generation is given up for an examination, a repair or a question.
    """
    if isinstance(event, NodeReturned) and job.phase is Phase.WAITING_FOR_PERSON:
        return False  # it settles the question to the person: this was the last lost node
    given_up = job.phase in (Phase.EXAMINING, Phase.REPAIRING) or (
        job.phase is Phase.WAITING_FOR_PERSON and not job.lost
    )
    reports = (
        FaultObserved
        | RanksHung
        | NodeUnreachable
        | NodeReturned
        | NodesSlow
        | StepReached
        | RanksSucceeded
        | Launched
        | LaunchFailed
        | LaunchRefused
    )
    return given_up and isinstance(event, reports)


def answers(job: JobState, event: RepairEnded) -> bool:
    """Return whether an event ends the repair that the job waits for, not one that was given up."""
    if job.phase is not Phase.REPAIRING or job.recovering is None or not job.tries:
        return False
    return event.strategy is job.tries[-1].strategy and set(event.nodes) == set(
        job.recovering.fault.nodes
    )


def _while_ending(job: JobState, event: Event) -> Decision:
    assert job.ending is not None
    if isinstance(event, CancelRequested) and job.ending.phase is Phase.FAILED:
        who = f" by {event.by}" if event.by else ""
        return Stop(
            Phase.CANCELLED,
            f"cancelled{who}" + (f": {event.reason}" if event.reason else ""),
            exit_code=CANCELLED_EXIT_CODE,
        )
    return Ignore(f"the job is ending: {job.ending.reason}")


def _runs(job: JobState) -> str:
    nodes = join_names((slot.node for slot in job.slots), NAMED)
    runs = f"generation {job.generation} runs on {nodes}"
    if not job.fewer:
        return runs
    grows = (
        "it stays so, grow_after is off"
        if job.policy.grow_after == "off"
        else "it grows again when the fleet has more"
    )
    return f"{runs}; {job.fewer}; {grows}"


def _running(job: JobState, reason: str, now: datetime, rules: Rules = ALL_RULES) -> Wait:
    if job.lost:
        return _wait_for_lost(job, reason, now, rules)
    if job.incident is None:
        at = more_at(replace(job, phase=Phase.RUNNING))
        when = f"from {at:%Y-%m-%d %H:%M:%S} UTC on" if at is not None and at > now else "now"
        grows = (
            ""
            if at is None
            else f"{when} it takes more nodes when the fleet has them, by a restart of all ranks; "
        )
        return Wait(
            Phase.RUNNING, reason, next=f"{grows}the job ends when all ranks have exited with 0"
        )
    healthy_at = (job.launched_at or now) + job.policy.healthy_for
    passed = (
        "the first step is reported"
        if job.incident.reached is None
        else f"training has passed step {job.incident.reached}"
    )
    return Wait(
        Phase.RUNNING,
        reason,
        next=f"the incident closes when {passed}, or after {duration(job.policy.healthy_for)} "
        "without a fault",
        until=max(healthy_at, now),
    )


def _wait_for_lost(job: JobState, reason: str, now: datetime, rules: Rules) -> Wait:
    """Return the decision to wait on for lost nodes, up to the deadline that they have."""
    keeps = Rule.LOST_DEADLINE in rules and not _finds_hang(job)
    until = _find_lost_deadline(job, now, rules) if keeps else None
    return Wait(Phase.NODE_LOST, reason, next=_explain_lost_next(job), until=until)


def _find_lost_deadline(job: JobState, now: datetime, rules: Rules) -> datetime:
    """Return when a person is asked about lost nodes. Nothing that happens meanwhile delays it."""
    waits = job.phase is Phase.NODE_LOST and Rule.LOST_DEADLINE in rules
    known = job.next.at if waits else None
    return known or now + job.policy.timeouts.ask_after


def _finds_hang(job: JobState) -> bool:
    """Return whether a gang that waits for a lost node is found by its hang. Where it is not, the
    job can only ask a person."""
    return may_leave_lost_behind(job) and job.policy.hang.after != "off"


def _explain_lost_next(job: JobState) -> str:
    if not fences(job):
        return "when it answers it simply goes on; after the deadline a person is asked"
    if not may_leave_lost_behind(job):
        return (
            "no node answers, so nothing can be proven stopped: training goes on when one answers"
        )
    return (
        "when it answers it simply goes on; when the other ranks stop advancing, "
        "ranks are launched without it, once it must have stopped its own"
    )


def _decide_on_offer(job: JobState, event: NodesOffered, now: datetime) -> Decision:
    """Return the decision for an offer of more nodes.

    More nodes are worth a restart when the job has run without an incident for long enough. The
    job asks for them before any rank is stopped.
    """
    at = more_at(job)
    if at is None or now < at or now >= event.until:
        offered = join_names(event.nodes, NAMED)
        return Ignore(f"the fleet offers {offered}, and it is not the time to grow")
    return Wait(
        Phase.RUNNING,
        _describe_offer(job, event.nodes),
        next="the ranks run on; when the fleet has granted the nodes, all start again",
    )


def _decide_on_more(job: JobState, event: NodesGranted, now: datetime) -> Decision:
    at = more_at(job)
    has = {slot.node for slot in job.slots}
    more = tuple(node for node in event.nodes if node not in has)
    if more and has <= set(event.nodes) and at is not None and now >= at:
        return Relaunch(job.generation + 1, _describe_offer(job, more), strategy=Strategy.GROW)
    if job.phase is Phase.RUNNING:
        return _running(
            job, f"{_runs(job)}; it was offered more and has not grown: {_not_grown(more)}", now
        )
    return Ignore("its time to grow is over")


def _not_grown(more: tuple[str, ...]) -> str:
    return "its time to grow is over" if more else "there were none left when it asked for them"


def _describe_offer(job: JobState, more: tuple[str, ...]) -> str:
    return (
        f"the fleet offers {join_names(more, NAMED)}: "
        f"{len(job.slots)} -> {len(job.slots) + len(more)} nodes"
    )


def _decide_on_unreachable(
    job: JobState, event: NodeUnreachable, now: datetime, rules: Rules
) -> Decision:
    until = None if _finds_hang(job) else _find_lost_deadline(job, now, rules)
    reason = f"{explain_unreachable(event)}; nothing is stopped"
    return Wait(Phase.NODE_LOST, reason, next=_explain_lost_next(job), until=until)


def explain_unreachable(event: NodeUnreachable) -> str:
    return event.reason if event.is_elsewhere else f"{event.node} does not answer: {event.reason}"


def _describe_lost(job: JobState, how: str) -> str:
    """Return a clause about the lost nodes: no answer, or something else answers for them."""
    silent = tuple(lost.node for lost in job.lost if not lost.is_elsewhere)
    clauses = [f"{join_names(silent, NAMED)} {how}"] if silent else []
    elsewhere = [lost.reason for lost in job.lost if lost.is_elsewhere]
    more = [f"and {len(elsewhere) - 2} more answer from elsewhere"] if len(elsewhere) > 2 else []
    return "; ".join([*clauses, *elsewhere[:2], *more])


def _decide_on_deadline(job: JobState, now: datetime, rules: Rules) -> Decision:
    match job.phase:
        case Phase.EXAMINING | Phase.REPAIRING if job.recovering is not None:
            return climb(job, job.recovering, now, without=job.lost_names)
        case Phase.RUNNING:
            return _running(job, f"no fault for {duration(job.policy.healthy_for)}", now)
        case Phase.NODE_LOST:
            return Ask(
                _describe_lost(
                    job, f"did not answer for {duration(job.policy.timeouts.ask_after)}"
                ),
                question=f"wait on, `nodes declare-dead` it, or {ANSWERS}?",
                without=_find_named(job),
            )
        case Phase.WAITING_FOR_NODES if job.policy.unanswered == "remind":
            until = now + job.policy.timeouts.answer_within
            return _wait_for_nodes(job, job.reason, until, job.reminders + 1)
        case Phase.WAITING_FOR_NODES:
            return Ask(
                "the fleet had not enough nodes for it within "
                f"{duration(job.policy.timeouts.answer_within)}: {job.reason}",
                question=f"add nodes, then {ANSWERS}?",
            )
        case Phase.WAITING_FOR_PERSON if job.snoozed and job.asked is not None:
            return job.asked
        case Phase.WAITING_FOR_PERSON if job.lost:
            return Ask(
                f"{_describe_lost(job, 'still does not answer')}, and no person has answered",
                question=f"`nodes declare-dead` it, or {ANSWERS}?",
                without=_find_named(job),
                ladder=_find_ladder(job) if Rule.SAME_QUESTION in rules else None,
                reminders=job.reminders + 1,
            )
        case Phase.WAITING_FOR_PERSON if job.policy.unanswered == "remind" and job.asked:
            return replace(job.asked, reminders=job.reminders + 1)
        case Phase.WAITING_FOR_PERSON:
            return Stop(
                Phase.FAILED,
                f"no answer within {duration(job.policy.timeouts.answer_within)}: {job.reason}",
                exit_code=1,
            )
        case _:
            return Ignore(f"nothing waits in phase {job.phase}")


def _wait_for_nodes(job: JobState, reason: str, until: datetime | None, reminders: int) -> Wait:
    deadline = "people are reminded" if job.policy.unanswered == "remind" else "a person is asked"
    return Wait(
        Phase.WAITING_FOR_NODES,
        reason,
        next="ranks are launched as soon as the fleet has enough nodes for it; after the deadline "
        + deadline,
        until=until,
        reminders=reminders,
    )


def check_declaration(job: JobState, node: str) -> str:
    """Return a clause that says why a person's declaration of a dead node is refused.

    Empty: it is accepted, or changes nothing.
    """
    is_watched = job.phase in (Phase.RUNNING, Phase.NODE_LOST) and node in {
        slot.node for slot in job.slots
    }
    if not is_watched or node in job.lost_names:
        return ""
    silent = duration(job.policy.timeouts.lost_after)
    return (
        f"node {node} answers the job's watch, or has not been silent for {silent} yet: ranks "
        "there would go on "
        "beside new ones. Cut its power or its network first, or send force: true if you know "
        "that it is dead"
    )


def check_answer(job: JobState, decision: str, now: datetime, node: str = "") -> str:
    """Return a clause that says why a person's answer is not possible now; empty: it is.

    With `node`, the answer is to the request that the job leaves that node.
    """
    if node:
        return check_drain_answer(job, decision, node, now)
    if job.phase is Phase.WAITING_FOR_PERSON or (decision == "take-over" and job.phase in ACTING):
        return ""
    if decision == "take-over":
        return (
            f"it is {job.phase}: only what waits, or what is launched, examined or repaired, "
            "can be taken over"
        )
    return f"it is {job.phase} and asks nothing"


ACTING = (Phase.QUEUED, Phase.LAUNCHING, Phase.EXAMINING, Phase.REPAIRING, Phase.WAITING_FOR_NODES)
"""Phases in which no rank trains and relaunch acts without a person."""


def _find_ladder(job: JobState) -> Cause | None:
    """Return the cause whose ladder asks the open question; None: none does."""
    is_open = job.asked is not None and job.phase is Phase.WAITING_FOR_PERSON
    return job.asked.ladder if job.asked is not None and is_open else None


def _find_question(job: JobState) -> str:
    return (
        job.asked.reason
        if job.asked is not None and job.phase is Phase.WAITING_FOR_PERSON
        else job.reason
    )


def _find_named(job: JobState) -> tuple[str, ...]:
    """Return the nodes that a launch which a person approves now leaves out: the lost ones, and
    those that the open question, or else the newest fault of the open incident, names."""
    named: tuple[str, ...] = ()
    if job.asked is not None and job.phase is Phase.WAITING_FOR_PERSON:
        named = job.asked.without
    elif job.incident is not None and not job.incident.faults[-1].withdrawn:
        named = job.incident.faults[-1].nodes
    return tuple(dict.fromkeys((*job.lost_names, *named)))


def describe_approval(job: JobState) -> str:
    """Return a clause that completes "a new generation is launched …": on which nodes, if a person
    approves the open question now. Empty: on the nodes of before."""
    asked = job.asked
    assert asked is not None, "only a question is approved"
    left_out = tuple(slot.node for slot in job.slots if slot.node in asked.without)
    if not left_out:
        return ""
    names = join_names(left_out, NAMED)
    missing = job.spec.fewest_nodes - (len(job.slots) - len(left_out))
    if asked.free is None:
        return f"without {names} if the fleet has other free nodes then, else on {names} again"
    count = count_noun(asked.free.count, "other free node") if asked.free.count else "none"
    had = f"(the fleet had {count} at {format_time(asked.free.at)})"
    if asked.free.count >= missing:
        return f"without {names} {had}"
    return f"on {names} again unless enough other nodes are free then {had}"


def _decide_on_drain_answer(job: JobState, event: Answered, now: datetime) -> Decision:
    if no := check_answer(job, event.decision, now, event.node):
        return Ignore(no)
    drain = find_drain(job, event.node)
    assert drain is not None, "else it is no answer"
    if event.decision == "approve" and job.phase is Phase.RUNNING:
        reason = f"{explain_drain(drain)}; {event.by or 'a person'} said: now" + (
            f" ({event.reason})" if event.reason else ""
        )
        return Relaunch(job.generation + 1, reason, without=(drain.node,))
    return Ignore(
        "that node is left as soon as the job runs"
        if event.decision == "approve"
        else "it goes on there until it has to leave"
    )


def _decide_on_answer(job: JobState, event: Answered, now: datetime) -> Decision:
    if no := check_answer(job, event.decision, now):
        return Ignore(no)
    who = event.by or "a person"
    reason = f": {event.reason}" if event.reason else ""
    match event.decision:
        case "approve":
            without = _find_named(job)
            left_out = f" without {join_names(without, NAMED)}" if without else ""
            return Relaunch(
                job.generation + 1,
                f"{who} approved a new launch{left_out}{reason}",
                without=without,
                approved=True,
            )
        case "deny":
            return Stop(
                Phase.FAILED, f"{who} denied a new launch{reason}; {job.reason}", exit_code=1
            )
        case "snooze":
            return Wait(
                Phase.WAITING_FOR_PERSON,
                f"{who} snoozed it{reason}; {_find_question(job)}",
                next="it is asked again",
                until=event.until,
            )
        case "take-over":
            return Ask(
                f"{who} has taken it over{reason}; before that: {_find_question(job)}",
                question="nothing is done until a person says `answer approve`, `answer deny`, "
                "`retry` or `cancel`.",
                waits=True,
                without=_find_named(job),
                ladder=_find_ladder(job),
            )
        case _:
            assert_never(event.decision)


def _decide_on_request(job: JobState, event: Submitted | RetryRequested) -> Decision:
    who = f" by {event.by}" if event.by else ""
    what = "submitted" if isinstance(event, Submitted) else "retry asked for"
    reason = f"{what}{who}" + (f": {event.reason}" if event.reason else "")
    if isinstance(event, Submitted):
        return Relaunch(job.generation + 1, reason, keep_nodes=False)
    return Relaunch(
        job.generation + 1,
        reason,
        avoid=event.avoid_nodes,
        without=job.lost_names,
        renew_budgets=event.renew_budgets,
    )


def _decide_on_reset(job: JobState) -> Decision:
    reason = "the workflow was reset, so older ranks are stopped and nodes claimed again"
    return Relaunch(job.generation + 1, reason, keep_nodes=False, without=job.lost_names)


def _decide_on_declared_dead(job: JobState, event: NodeDeclaredDead, now: datetime) -> Decision:
    if event.node not in {slot.node for slot in job.slots}:
        return Ignore(f"{event.node} is none of this job's nodes")
    return climb(job, Recovery(diagnose_declaration(event)), now, without=(event.node,))


def diagnose_declaration(event: NodeDeclaredDead) -> Diagnosis:
    """Return the diagnosis of a node that a person declared dead."""
    return Diagnosis(
        Cause.NODE_LOST,
        f"{event.by or 'a person'} declared {event.node} dead"
        + (f": {event.reason}" if event.reason else ""),
        nodes=(event.node,),
        certainty=Certainty.CERTAIN,
    )


def _decide_on_higher_token(job: JobState, event: LaunchRefused, now: datetime) -> Decision | None:
    """Return the decision for a node that has seen a higher token than the job's; None: none has.

    After a reset of the workflow the job's generation numbers have gone back: the next launch takes
    a number above the node's.
    """
    claim = find_highest(job, event)
    if claim is None or claim.highest is None:
        return None  # at most our own number is used: a fault like any other, with counted tries
    submission, generation = claim.highest
    if submission > job.submission:
        return Stop(Phase.FAILED, "a later submission of this job has used its nodes", exit_code=1)
    if has_gone_above(job):
        return None  # no reset explains that: it is the node's fault
    take = Try(
        now, Cause.PLATFORM, Strategy.RESTART_IN_PLACE, CLAIMED, spent=False, nodes=(claim.node,)
    )
    reason = f"{claim.node} has seen generation {generation}, so this goes on above it"
    return Relaunch(generation + 1, reason, take=take)


def _leave_broken(job: JobState, decision: Decision, broken: Diagnosis, now: datetime) -> Decision:
    """Return the decision to launch without the lost nodes, and without those that are broken,
    where the ladder of their own fault would leave or repair them."""
    own = climb(job, Recovery(broken), now, without=job.lost_names)
    is_left = isinstance(own, Repair) or (
        isinstance(own, Relaunch) and set(broken.nodes) <= set(own.without)
    )
    if not isinstance(decision, Relaunch) or not is_left:
        return decision
    return replace(
        decision,
        reason=f"{decision.reason}; {broken.reason}",
        without=tuple(dict.fromkeys((*decision.without, *broken.nodes))),
        avoid=own.avoid if isinstance(own, Relaunch) else (),
    )


def _decide_on_fault(job: JobState, diagnosis: Diagnosis, now: datetime, rules: Rules) -> Decision:
    if diagnosis.do_not_restart:
        return Stop(
            Phase.FAILED,
            f"{diagnosis.reason}; it is not restarted",
            exit_code=diagnosis.exit_code or 1,
        )
    if diagnosis.code == SECRET_MISSING:
        return Ask(
            diagnosis.reason,
            question=f"let the workers of fleet {job.spec.fleet} read it again, then {ANSWERS}?",
        )
    if job.lost and not may_leave_lost_behind(job):
        # Ranks on the lost nodes may still be running: a second copy elsewhere would be worse than
        # waiting.
        return Wait(
            Phase.NODE_LOST,
            diagnosis.reason,
            next=_explain_lost_next(job),
            until=_find_lost_deadline(job, now, rules),
        )
    without = diagnosis.nodes if diagnosis.cause is Cause.NODE_LOST else job.lost_names
    return climb(job, Recovery(diagnosis), now, without=without)
