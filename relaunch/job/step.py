"""The whole of a job's logic: from its state and one event to its next state and a decision.

A fault is diagnosed here, once, and both the record of it (`apply`) and the decision about it
(`decide`) use that diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from relaunch.job.apply import apply_decision, apply_event
from relaunch.job.decide import decide, is_late
from relaunch.job.diagnose import Fault, diagnose
from relaunch.job.events import Event, NodesSlow
from relaunch.job.rules import ALL_RULES, Rule, Rules, list_affected
from relaunch.job.slow_nodes import diagnose_slow_nodes
from relaunch.job.state import Decision, Diagnosis, JobState


def step(
    job: JobState, event: Event, now: datetime, rules: Rules = ALL_RULES
) -> tuple[JobState, Decision]:
    """Return the state of a job after an event, and what it does next.

    A launch's generation number and its try are counted in that state, before anything is started.
    `rules` are those in force; fewer than all are for histories from before a rule.
    """
    job, decision = evaluate_event(job, event, now, rules)
    return apply_decision(job, decision, now), decision


def find_rules(
    job: JobState, event: Event, now: datetime, has_patch: Callable[[Rule], bool]
) -> Rules:
    """Return the rules in force for an event of a job whose history may be from before some.

    `has_patch` is asked only where the rules make a difference, and then for each that may: one
    hides what another one changes.
    """
    affected = list_affected(job, event)
    older = tuple(rule for rule in ALL_RULES if rule not in affected)
    if not affected or step(job, event, now) == step(job, event, now, older):
        return ALL_RULES
    return (*older, *(rule for rule in affected if has_patch(rule)))


def evaluate_event(
    job: JobState, event: Event, now: datetime, rules: Rules = ALL_RULES
) -> tuple[JobState, Decision]:
    """Return a job's state with an event recorded, and the decision, which is not recorded yet.

    For a replay, in which the recorded decision may take the place of this one.
    """
    diagnosis = diagnose_event(job, event, rules)
    job = apply_event(job, event, diagnosis, now, rules)
    return job, decide(job, event, diagnosis, now, rules)


def diagnose_event(job: JobState, event: Event, rules: Rules = ALL_RULES) -> Diagnosis | None:
    """Return the root cause of a fault; None where the event is no fault, or comes too late."""
    if not isinstance(event, Fault | NodesSlow) or is_late(job, event):
        return None
    if isinstance(event, NodesSlow):
        return diagnose_slow_nodes(job, event)
    return diagnose(job, event, rules)
