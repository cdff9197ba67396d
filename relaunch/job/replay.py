"""Compute what a policy would have decided for recorded or for hand-written events.

`replay` takes recorded steps, `simulate` events that a person wrote.

This module never guesses what would have been observed after a different decision. Where a
recorded job decided otherwise than the policy, it reports the difference and judges the next steps
by what the job really did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relaunch.evidence.findings import Verdict
from relaunch.evidence.reachability import LinkFindings
from relaunch.fields import duration
from relaunch.job.apply import apply_decision, finish
from relaunch.job.copies import replace
from relaunch.job.events import (
    DeadlinePassed,
    Event,
    IncidentsArchived,
    Launched,
    LaunchFailed,
    LaunchRefused,
    NodesAcquired,
    NodesExamined,
    NodesGranted,
    NodesMissing,
    NodesOffered,
    PolicyChanged,
    ProgressSeen,
    RanksFound,
    RepairEnded,
    StepReached,
    Submitted,
)
from relaunch.job.ranks import seat
from relaunch.job.state import (
    Ask,
    Decision,
    Examine,
    ExaminedNode,
    JobState,
    Phase,
    Relaunch,
    Repair,
    Stop,
    Wait,
)
from relaunch.job.step import evaluate_event
from relaunch.pool.messages import Place
from relaunch.spec.policy import Policy, Strategy
from relaunch.text import join_names

CURRENT = 0
"""Generation of an event whose author left it out; no rank ever runs in generation 0."""


@dataclass(frozen=True, slots=True)
class Step:
    """One event of a recording or a scenario, with the decision that was taken then."""

    at: datetime
    event: Event
    decided: Decision | None = None
    """The decision that was taken then; None: not known."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step with the decision of the tested policy beside the recorded one."""

    at: datetime
    event: str
    """The event's kind."""
    decision: Decision
    """The decision of the policy under test."""
    decided: Decision | None
    """The decision that was taken then; None: not known."""
    differs: str
    """A clause that says how the recorded decision differs; empty: it does not."""


def replay(policy: Policy, job: JobState, steps: Iterable[Step]) -> tuple[ReplayedStep, ...]:
    """Replay recorded steps under another policy, from the state in which the recording begins.

    Policy changes in the recording are ignored.
    """
    job = replace(job, policy=policy)
    done = []
    for step in steps:
        job, replayed = _turn(job, step)
        done.append(replayed)
    return tuple(done)


def restore(job: JobState, steps: Iterable[Step], ended_at: datetime | None) -> JobState:
    """Return the state in which recorded steps have left a job, with its ledger.

    Older builds kept no ledger. Incidents are not moved to the archive here: all are in the state.

    Args:
        job: The state in which the recording begins.
        steps: The recorded steps.
        ended_at: When the job ended; None: it runs.
    """
    for step in steps:
        if isinstance(step.event, IncidentsArchived):
            continue
        job, decision = evaluate_event(job, step.event, step.at)
        taken = decision if step.decided is None else step.decided
        job = apply_decision(job, taken, step.at)
    return job if ended_at is None or job.ending is None else finish(job, ended_at)


def simulate(policy: Policy, job: JobState, events: Sequence[Step]) -> tuple[ReplayedStep, ...]:
    """Run hand-written events through a policy, in the order of their times.

    What the events leave out succeeds: launches and repairs are done, and deadlines pass when no
    event comes before them. An examination without an answer ends as UNKNOWN, because a verdict is
    never assumed. After the last event only its immediate consequences happen.
    """
    job = replace(job, policy=policy)
    waiting = deque(events)
    if not waiting or not isinstance(waiting[0].event, Submitted):
        waiting.appendleft(Step(job.submitted_at, Submitted("", job.submitted_by)))
    done: list[ReplayedStep] = []
    deadline: datetime | None = None
    repair: Repair | None = None
    while waiting:
        if deadline is not None and waiting[0].at > deadline:
            waiting.appendleft(Step(deadline, DeadlinePassed()))
            deadline = None
        step = waiting.popleft()
        event = _complete_event(job, step.event, repair)
        due = job.report_at_step
        job, replayed = _turn(job, replace(step, event=event))
        done.append(replayed)
        decision = replayed.decision
        if isinstance(decision, Repair):
            repair = decision
        deadline = _deadline(job, decision, deadline)
        upcoming = waiting[0] if waiting else None
        waiting.extendleft(reversed(_consequences(job, event, decision, step.at, due, upcoming)))
        if isinstance(decision, Stop):
            job = finish(job, step.at)
    return tuple(done)


def _turn(job: JobState, step: Step) -> tuple[JobState, ReplayedStep]:
    event = (
        replace(step.event, policy=job.policy)
        if isinstance(step.event, PolicyChanged)
        else step.event
    )
    job, decision = evaluate_event(job, event, step.at)
    taken, differs = decision, ""
    if step.decided is not None:
        taken, differs = _choose_course(decision, step.decided), difference(decision, step.decided)
    return apply_decision(job, taken, step.at), ReplayedStep(
        step.at, event.kind, decision, step.decided, differs
    )


def _choose_course(decision: Decision, decided: Decision) -> Decision:
    """Return the decision with which the replayed job continues.

    That is the tested policy's own decision, as long as the next recorded observations could have
    followed it; otherwise the recorded one.
    """
    if isinstance(decision, Relaunch) and isinstance(decided, Relaunch):
        return replace(decision, generation=decided.generation)
    return decision if _course(decision) == _course(decided) else decided


def _course(decision: Decision) -> tuple[object, ...]:
    match decision:
        case Wait() | Stop():
            return decision.kind, decision.phase
        case Examine():
            return decision.kind, decision.nodes, decision.links, decision.foreign_processes
        case Repair():
            return decision.kind, decision.strategy, decision.nodes, decision.gpus
        case _:
            return (decision.kind,)


def name_decision(decision: Decision) -> str:
    """Return a decision's kind and strategy or phase: `Relaunch REPLACE_NODE`, `Wait NODE_LOST`."""
    match decision:
        case Examine(links=True):
            return f"{decision.kind} links"
        case Examine(foreign_processes=True):
            return f"{decision.kind} foreign processes"
        case Relaunch() | Repair():
            return f"{decision.kind} {decision.strategy}" if decision.strategy else decision.kind
        case Wait() | Stop():
            return f"{decision.kind} {decision.phase}"
        case _:
            return decision.kind


def difference(decision: Decision, decided: Decision) -> str:
    """Return how the recorded decision differs; empty where both do the same.

    Reasons and remaining budgets are not compared.
    """
    if name_decision(decision) != name_decision(decided):
        return f"then {name_decision(decided)}"
    parts = []
    match decision, decided:
        case (Examine(), Examine()) if decision.nodes != decided.nodes:
            parts.append(f"of {_names(decided.nodes)}")
        case (Repair(), Repair()):
            if decision.nodes != decided.nodes:
                parts.append(f"of {_names(decided.nodes)}")
            if decision.gpus != decided.gpus:
                parts.append(f"of gpu {_names(decided.gpus)}")
            parts += _spending(decision.spent, decided.spent)
        case (Relaunch(), Relaunch()):
            if decision.without != decided.without:
                parts.append(f"without {_names(decided.without)}")
            if decision.avoid != decided.avoid:
                parts.append(f"isolating {_names(decided.avoid)}")
            if decision.keep_nodes != decided.keep_nodes:
                parts.append(
                    "on the same nodes" if decided.keep_nodes else "with all places assigned again"
                )
            if decision.delay != decided.delay:
                parts.append(f"after {duration(decided.delay)}")
            parts += _spending(decision.spent, decided.spent)
        case (Stop(), Stop()):
            if decision.exit_code != decided.exit_code:
                parts.append(f"with exit code {decided.exit_code}")
    return f"then {', '.join(parts)}" if parts else ""


def _spending(now: bool, then: bool) -> list[str]:
    return (
        []
        if now == then
        else ["spending one of max_restarts" if then else "spending nothing of max_restarts"]
    )


def _names(names: tuple[str, ...]) -> str:
    return join_names(names, 4) or "none"


def _complete_event(job: JobState, event: Event, repair: Repair | None) -> Event:
    """Return the event with the fields that its author left out, taken from the present state."""
    if isinstance(event, RepairEnded) and not event.nodes and repair is not None:
        event = replace(event, strategy=repair.strategy, nodes=repair.nodes)
    if getattr(event, "generation", None) == CURRENT:
        unnumbered: Any = event
        return replace(unnumbered, generation=job.generation)  # type: ignore[no-any-return]
    return event


def _deadline(job: JobState, decision: Decision, before: datetime | None) -> datetime | None:
    match decision:
        case Relaunch() | Stop():
            return None
        case Examine() | Repair() | Wait():
            return decision.until
        case Ask():
            return job.next.at
        case _:
            return before


def _consequences(
    job: JobState,
    event: Event,
    decision: Decision,
    at: datetime,
    due: int | None,
    upcoming: Step | None,
) -> tuple[Step, ...]:
    """Return the steps that follow at once, unless the next given event answers the decision."""
    answer = upcoming.event if upcoming is not None else None
    match decision:
        case Relaunch(strategy=Strategy.GROW) if isinstance(event, NodesGranted) and not isinstance(
            answer, NodesAcquired
        ):
            return (
                Step(
                    at,
                    NodesAcquired(
                        seat(job.slots, tuple(Place(node, node) for node in event.nodes))
                    ),
                ),
            )
        case Relaunch() if not isinstance(answer, NodesAcquired | NodesMissing | RanksFound):
            ready = at + decision.delay
            if upcoming is not None:
                ready = max(
                    at, min(ready, upcoming.at)
                )  # a fault of a generation implies that the generation ran
            return (
                Step(
                    ready,
                    NodesAcquired(
                        seat(job.slots, _places(job, decision), reassign=not decision.keep_nodes)
                    ),
                ),
            )
        case Examine(links=True) if not (
            isinstance(answer, DeadlinePassed)
            or (isinstance(answer, NodesExamined) and answer.links is not None)
        ):
            return (
                Step(at, NodesExamined(job.generation, (), links=LinkFindings("no link is given"))),
            )
        case Examine(foreign_processes=True) if not (
            isinstance(answer, DeadlinePassed)
            or (isinstance(answer, NodesExamined) and answer.foreign is not None)
        ):
            return (Step(at, NodesExamined(job.generation, (), foreign=())),)
        case Examine() if not isinstance(answer, NodesExamined | DeadlinePassed):
            examined = tuple(
                ExaminedNode(node, Verdict.UNKNOWN, "no finding is given")
                for node in decision.nodes
            )
            return (Step(at, NodesExamined(job.generation, examined)),)
        case Repair() if not isinstance(answer, RepairEnded | DeadlinePassed):
            return (
                Step(
                    at,
                    RepairEnded(
                        job.generation,
                        decision.strategy,
                        decision.nodes,
                        "done",
                        "no other outcome is given",
                    ),
                ),
            )
    match event:
        case NodesAcquired() if job.phase is Phase.LAUNCHING and not isinstance(
            answer, Launched | LaunchRefused | LaunchFailed
        ):
            return (Step(at, Launched(job.generation, at, at)),)
        case NodesOffered() if isinstance(decision, Wait) and not isinstance(answer, NodesGranted):
            granted = (*(slot.node for slot in job.slots), *event.nodes)
            return (Step(at, NodesGranted(job.generation, granted)),)
        case ProgressSeen() if (
            due is not None and event.step >= due and not isinstance(answer, StepReached)
        ):
            return (Step(at, StepReached(event.generation, event.step, event.at)),)
    return ()


def _places(job: JobState, decision: Relaunch) -> tuple[Place, ...]:
    """Return the nodes that are kept, then n1, n2, … that are neither left out nor avoided.

    The number of spares is unlimited here.
    """
    excluded = {*decision.without, *(avoided.node for avoided in job.avoided)}
    kept = (
        [slot.node for slot in job.slots if slot.node not in excluded]
        if decision.keep_nodes
        else []
    )
    number = 0
    while len(kept) < job.spec.node_count and decision.strategy is not Strategy.SHRINK:
        number += 1
        if (node := f"n{number}") not in excluded and node not in kept:
            kept.append(node)
    return tuple(Place(node, node) for node in kept)
