"""Choose the treatment of a node of unknown health.

The node is examined first, then reset or rebooted by what was found, one strategy after the other.
It is treated only for what an examination has found. A node that cannot be examined is examined
again and then left to a person: it is never called healthy, and nothing is done to it. The one
exception: a node that is silent after a reboot by relaunch is power-cycled where that is possible.
`machine` carries out one treatment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, assert_never

from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import text
from relaunch.evidence.findings import Finding, Role, Verdict
from relaunch.evidence.health import SICK, Health
from relaunch.repair.state import Finish, Outcome, RepairState, StepRecord
from relaunch.spec.policy import Strategy

AGAIN = (timedelta(minutes=1), timedelta(minutes=5), timedelta(minutes=15))
"""Delays after an inconclusive examination: an agent needs seconds, DCGM's service minutes, a host
of eight GPUs ten minutes to boot."""


@dataclass(frozen=True, slots=True)
class Course:
    """Progress of the treatment of one node."""

    node: str
    reason: str
    """Why the node is to be examined."""
    health: Health | None = None
    """Result of the last examination."""
    unknown: int = 0
    """Number of inconclusive examinations in a row."""
    tried: tuple[Strategy, ...] = ()
    ended: Finish | None = None
    """How the last treatment ended."""
    acted: bool = False
    """The last treatment did something to the node."""
    kernel_from: datetime | None = None
    """Kernel messages before this time no longer count: a treatment has cured the node since. None:
    all of this boot counts."""
    cancelled: str = ""
    """Why the treatment was cancelled; empty if it was not."""
    power: bool = False
    """A command that cycles the node's power exists and has not been used yet."""
    after_reboot: bool = False
    """The node has been silent since an earlier reboot, which this repair did not order."""
    log: tuple[StepRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Examine:
    after: timedelta
    reason: str
    kind: Literal["Examine"] = "Examine"


@dataclass(frozen=True, slots=True)
class Treat:
    strategy: Strategy
    gpus: tuple[str, ...]
    """GPUs to reset, by bus id; empty: all of them."""
    reason: str
    power: bool = False
    """Reboot by a power cycle, because the node does not answer."""
    kind: Literal["Treat"] = "Treat"


Treatment = Examine | Treat | Finish


def examined(course: Course, health: Health, now: datetime) -> Course:
    unknown = course.unknown + 1 if health.verdict is Verdict.UNKNOWN else 0
    after_reboot = course.after_reboot and not health.boot_id
    return _noted(
        replace(course, health=health, unknown=unknown, after_reboot=after_reboot),
        now,
        "Examined",
        f"{health.verdict}: {health.reason}",
    )


def treated(course: Course, state: RepairState, end: Finish, now: datetime) -> Course:
    """Record how a treatment ended; what it found of the node afterwards counts as an
    examination."""
    acted = state.attempts > 0 or state.proven_at is not None
    course = replace(
        course,
        tried=(*course.tried, state.strategy),
        ended=end,
        acted=acted,
        health=replace(state.health, verdict=end.verdict, reason=end.reason)
        if acted and state.health is not None
        else course.health,
        unknown=int(acted and end.verdict is Verdict.UNKNOWN),
        # An order that may not have been carried out has cured nothing.
        kernel_from=state.ordered_at if state.proven_at is not None else course.kernel_from,
        cancelled=state.cancelled or course.cancelled,
        power=course.power and not state.power,
    )
    return _noted(course, now, str(state.strategy), f"{end.outcome}: {end.reason}")


def next_treatment(course: Course, left: timedelta) -> Treatment:
    """Return the next step, given the time left until the whole treatment has to end."""
    end = course.ended
    if end is not None and not course.acted:
        # The treatment was not allowed, or the node was in use: do not bypass that by another
        # strategy.
        return _finish(course, end.outcome, end.reason)
    if course.health is None:
        if course.cancelled:
            return _finish(course, "refused", f"cancelled: {course.cancelled}")
        return (
            Examine(timedelta(0), course.reason)
            if left > timedelta(0)
            else _finish(course, "refused", _late(course))
        )
    match course.health.verdict:
        case Verdict.HEALTHY:
            return _healthy(course, course.health)
        case Verdict.UNHEALTHY:
            return _unhealthy(course, course.health, left)
        case Verdict.UNKNOWN:
            return _unknown(course, course.health, left)
        case _:
            assert_never(course.health.verdict)


def _healthy(course: Course, health: Health) -> Finish:
    if course.ended is None:
        return _finish(
            course,
            "done",
            f"{course.node} was examined and is healthy; nothing was repaired: {health.reason}",
        )
    if course.ended.outcome == "done":
        return course.ended
    return _finish(
        course, "done", f"{course.ended.reason}; examined again, it is healthy: {health.reason}"
    )


def _unhealthy(course: Course, health: Health, left: timedelta) -> Treatment:
    said = (
        health.reason
        if course.ended is not None
        else f"{course.node} was examined and is unhealthy: {health.reason}"
    )
    if Strategy.REBOOT_NODE in course.tried:
        return _finish(course, "refused", said)
    if course.cancelled:
        return _finish(course, "refused", f"cancelled: {course.cancelled}; {said}")
    if left <= timedelta(0):
        return _finish(course, "refused", f"{_late(course)}: {said}")
    sick = [finding for finding in health.findings if _is_sick(finding)]
    if not course.tried and sick and all(finding.cause is Cause.GPU_RESET for finding in sick):
        # A fault that names no GPU (for example of an NVSwitch) is cured by a reset of all GPUs.
        named = all(finding.gpu is not None for finding in sick)
        return Treat(Strategy.RESET_GPU, health.gpus if named else (), said)
    return Treat(Strategy.REBOOT_NODE, (), said)


def _unknown(course: Course, health: Health, left: timedelta) -> Treatment:
    outcome: Outcome = "refused" if course.ended is None else course.ended.outcome
    said = health.reason
    if course.ended is None or course.unknown > 1:
        times = f"{course.unknown} examination{'s' * (course.unknown > 1)}"
        said = f"whether {course.node} is healthy is not known after {times}: {said}"
    if course.cancelled:
        return _finish(course, outcome, f"cancelled: {course.cancelled}; {said}")
    after_reboot = Strategy.REBOOT_NODE in course.tried or (
        course.after_reboot and not course.tried
    )
    if (
        course.unknown > len(AGAIN)
        and after_reboot
        and not health.boot_id
        and course.power
        and left > timedelta(0)
    ):
        return Treat(Strategy.REBOOT_NODE, (), said, power=True)
    if course.unknown > len(AGAIN) or AGAIN[course.unknown - 1] >= left:
        return _finish(course, outcome, said)
    return Examine(AGAIN[course.unknown - 1], said)


def _finish(course: Course, outcome: Outcome, reason: str) -> Finish:
    verdict = course.health.verdict if course.health is not None else Verdict.UNKNOWN
    return Finish(outcome, verdict, text(reason, 600))


def _late(course: Course) -> str:
    return f"the time for {course.node} was over before anything was " + (
        "examined" if course.health is None else "done"
    )


def _is_sick(finding: Finding) -> bool:
    return finding.role is Role.ROOT and finding.cause in SICK


def _noted(course: Course, now: datetime, what: str, reason: str) -> Course:
    return replace(course, log=(*course.log, StepRecord(now, what, text(reason))))
