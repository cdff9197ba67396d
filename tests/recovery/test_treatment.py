"""What a node needs that nobody has judged yet, by what its examinations and treatments have found."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health, read_health
from relaunch.repair.state import Finish, Outcome, RepairState
from relaunch.repair.treatment import (
    AGAIN,
    Course,
    Examine,
    Treat,
    Treatment,
    examined,
    next_treatment,
    treated,
)
from relaunch.spec.policy import Strategy
from tests.recovery.builders import at
from tests.recovery.generated import searched
from tests.recovery.nodes import FAULTY, NO_NVML, bus, diag, disk, gpu, nvml, probe
from tests.recovery.test_repair import repair as reboot
from tests.recovery.test_repair import reset

HOURS = timedelta(hours=2)
NOTHING = timedelta(0)
BEGUN = Course("n2", "3 jobs failed on it")
PENDING = {"remapped": {"pending": True, "failed": False}}
COURSES: TypeAdapter[Course] = TypeAdapter(Course)


def health(diagnosed: dict[str, Any] | None = None, level: int = 1, **facts: Any) -> Health:
    answer = diag() if diagnosed is None else diagnosed
    return read_health(probe(**facts), answer, expected_gpus=8, level=level, catalog=catalog())


HEALTHY = health()
RESETTABLE = health(gpus=nvml(gpu(0, **PENDING)))
FATAL = health(gpus=nvml(gpu(0, recovery_action=2)))
UNREAD = health(gpus=NO_NVML)
SILENT = read_health(
    None,
    None,
    expected_gpus=8,
    level=1,
    catalog=catalog(),
    unread="n2 does not answer: no route to host",
)


def then(course: Course, *healths: Health, left: timedelta = HOURS) -> Treatment:
    for one in healths:
        course = examined(course, one, at(0))
    return next_treatment(course, left)


def after(
    state: RepairState,
    outcome: Outcome = "refused",
    verdict: Verdict = Verdict.UNKNOWN,
    *,
    before: Course | None = None,
    reason: str = "what it came to",
    attempts: int = 1,
    proven: bool = True,
    cancelled: str = "",
) -> Course:
    """A course whose treatment has ended so."""
    course = examined(BEGUN, RESETTABLE, at(0)) if before is None else before
    ended = replace(
        state,
        attempts=attempts,
        ordered_at=at(10) if attempts else None,
        proven_at=at(11) if proven else None,
        health=HEALTHY,
        cancelled=cancelled,
    )
    return treated(course, ended, Finish(outcome, verdict, reason), at(20))


def end(step: Treatment) -> tuple[str, Verdict, str]:
    assert isinstance(step, Finish), step
    return step.outcome, step.verdict, step.reason


# --- the first examination


def test_a_node_is_examined_before_anything_is_done_to_it() -> None:
    assert next_treatment(BEGUN, HOURS) == Examine(NOTHING, "3 jobs failed on it")


def test_a_healthy_node_is_left_as_it_is() -> None:
    outcome, verdict, reason = end(then(BEGUN, HEALTHY))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY)
    assert reason == f"n2 was examined and is healthy; nothing was repaired: {HEALTHY.reason}"


@pytest.mark.parametrize(
    ("found", "gpus"),
    [
        pytest.param(RESETTABLE, (bus(0),), id="a row waits for a reset"),
        pytest.param(
            health(gpus=nvml(gpu(3, recovery_action=1))),
            (bus(3),),
            id="the driver asks for a reset",
        ),
        pytest.param(
            health(gpus=nvml(gpu(0, **PENDING), gpu(1, recovery_action=4))),
            (bus(0), bus(1)),
            id="two GPUs",
        ),
        pytest.param(
            health(
                kernel={"lines": ["[ 1.0] NVRM: Xid (PCI:0000:07:00): 119, pid=1, name=x, Timeout"]}
            ),
            (bus(2),),
            id="an Xid",
        ),
        pytest.param(
            replace(
                RESETTABLE,
                findings=(replace(RESETTABLE.findings[0], gpu=None), *RESETTABLE.findings),
            ),
            (),
            id="one names no GPU",
        ),
    ],
)
def test_gpus_are_reset_where_that_heals_all_that_was_found(
    found: Health, gpus: tuple[str, ...]
) -> None:
    assert found.verdict is Verdict.UNHEALTHY
    reason = f"n2 was examined and is unhealthy: {found.reason}"
    assert then(BEGUN, found) == Treat(Strategy.RESET_GPU, gpus, reason)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(FATAL, id="the driver asks for a reboot"),
        pytest.param(
            health(gpus=nvml(gpu(0, **PENDING), gpu(1, recovery_action=2))),
            id="one GPU needs a reset and one a reboot",
        ),
        pytest.param(health(gpus=nvml(count=7)), id="a GPU is missing"),
        pytest.param(health(disks=[disk(writable=False)]), id="the disk is read-only"),
        pytest.param(health(diag(FAULTY, 205), level=2), id="DCGM isolates a GPU"),
        pytest.param(replace(RESETTABLE, findings=()), id="nothing says what heals it"),
    ],
)
def test_an_unhealthy_node_that_no_reset_heals_is_rebooted(found: Health) -> None:
    assert found.verdict is Verdict.UNHEALTHY
    assert then(BEGUN, found) == Treat(
        Strategy.REBOOT_NODE, (), f"n2 was examined and is unhealthy: {found.reason}"
    )


@pytest.mark.parametrize(
    "found", [SILENT, UNREAD, health({"refused": "busy", "reason": "pid 7 uses it"})]
)
def test_nothing_is_done_to_a_node_of_which_nobody_knows_how_it_is(found: Health) -> None:
    assert found.verdict is Verdict.UNKNOWN
    assert then(BEGUN, found) == Examine(
        timedelta(minutes=1),
        f"whether n2 is healthy is not known after 1 examination: {found.reason}",
    )
    assert then(BEGUN, found, found) == Examine(
        timedelta(minutes=5),
        f"whether n2 is healthy is not known after 2 examinations: {found.reason}",
    )
    assert isinstance(then(BEGUN, found, found, found), Examine)
    outcome, verdict, reason = end(then(BEGUN, found, found, found, found))
    assert (outcome, verdict) == ("refused", Verdict.UNKNOWN)
    assert reason == f"whether n2 is healthy is not known after 4 examinations: {found.reason}"


def test_of_a_silent_node_it_is_said_that_it_does_not_answer() -> None:
    assert end(then(BEGUN, SILENT, SILENT, SILENT, SILENT))[2].endswith(
        "after 4 examinations: n2 does not answer: no route to host"
    )


def test_a_node_that_answers_after_all_is_treated_for_what_it_has() -> None:
    assert end(then(BEGUN, SILENT, UNREAD, HEALTHY))[0] == "done"
    assert isinstance(then(BEGUN, SILENT, UNREAD, FATAL), Treat)
    assert then(BEGUN, SILENT, UNREAD, FATAL, SILENT) == then(BEGUN, SILENT), (
        "they are counted anew"
    )


@pytest.mark.parametrize(
    ("healths", "outcome", "verdict", "said"),
    [
        ((), "refused", Verdict.UNKNOWN, "the time for n2 was over before anything was examined"),
        ((HEALTHY,), "done", Verdict.HEALTHY, "n2 was examined and is healthy"),
        (
            (FATAL,),
            "refused",
            Verdict.UNHEALTHY,
            "the time for n2 was over before anything was done: n2 was examined and is unhealthy",
        ),
        (
            (SILENT,),
            "refused",
            Verdict.UNKNOWN,
            "whether n2 is healthy is not known after 1 examination: n2 does not answer",
        ),
    ],
)
def test_without_time_nothing_more_is_begun(
    healths: tuple[Health, ...], outcome: str, verdict: Verdict, said: str
) -> None:
    ended = end(then(BEGUN, *healths, left=NOTHING))
    assert ended[:2] == (outcome, verdict) and ended[2].startswith(said)


def test_nobody_waits_for_an_examination_for_which_no_time_is_left() -> None:
    assert isinstance(then(BEGUN, SILENT, left=AGAIN[0]), Finish)
    assert isinstance(then(BEGUN, SILENT, left=AGAIN[0] + timedelta(seconds=1)), Examine)


# --- after a treatment


def test_what_has_made_the_node_healthy_is_done() -> None:
    assert next_treatment(after(reset(), "done", Verdict.HEALTHY), HOURS) == Finish(
        "done", Verdict.HEALTHY, "what it came to"
    )
    assert next_treatment(after(reboot(), "done", Verdict.HEALTHY), NOTHING) == Finish(
        "done", Verdict.HEALTHY, "what it came to"
    )


def test_a_node_that_is_unhealthy_after_a_reset_is_rebooted_and_after_a_reboot_left_to_a_person() -> (
    None
):
    course = after(
        reset(),
        verdict=Verdict.UNHEALTHY,
        reason="n2 was given a reset of all GPUs and is still unhealthy: x",
    )
    assert next_treatment(course, HOURS) == Treat(
        Strategy.REBOOT_NODE, (), "n2 was given a reset of all GPUs and is still unhealthy: x"
    )
    course = after(reboot(), verdict=Verdict.UNHEALTHY, before=course)
    assert course.tried == (Strategy.RESET_GPU, Strategy.REBOOT_NODE)
    assert next_treatment(course, HOURS) == Finish("refused", Verdict.UNHEALTHY, "what it came to")
    assert [one.what for one in course.log] == ["Examined", "RESET_GPU", "REBOOT_NODE"]


@pytest.mark.parametrize("outcome", ["refused", "ambiguous"])
def test_what_was_not_done_ends_the_course_with_what_is_known_of_the_node(outcome: Outcome) -> None:
    """Whoever was in the way (a person, the fleet, a job on the node) is in the way of a reboot as well."""
    course = after(reset(), outcome, attempts=0, proven=False)
    assert next_treatment(course, HOURS) == Finish(outcome, Verdict.UNHEALTHY, "what it came to")


@pytest.mark.parametrize("outcome", ["refused", "ambiguous"])
@pytest.mark.parametrize("proven", [True, False])
def test_a_node_is_examined_again_where_a_treatment_has_left_open_how_it_is(
    outcome: Outcome, proven: bool
) -> None:
    course = after(reset(), outcome, proven=proven)
    assert next_treatment(course, HOURS) == Examine(timedelta(minutes=1), "what it came to")
    said = f"what it came to; examined again, it is healthy: {HEALTHY.reason}"
    assert then(course, HEALTHY) == Finish("done", Verdict.HEALTHY, said)
    assert then(course, RESETTABLE) == Treat(Strategy.REBOOT_NODE, (), RESETTABLE.reason)
    assert then(course, SILENT, SILENT, SILENT) == Finish(
        outcome,
        Verdict.UNKNOWN,
        "whether n2 is healthy is not known after 4 examinations: n2 does not answer: no route to host",
    )
    assert next_treatment(course, NOTHING) == Finish(outcome, Verdict.UNKNOWN, "what it came to")


def test_a_node_that_somebody_else_has_rebooted_is_examined_too() -> None:
    assert isinstance(next_treatment(after(reset(), attempts=0), HOURS), Examine)


def test_what_the_kernel_said_before_counts_until_it_is_proven_healed() -> None:
    assert after(reset(), proven=False).kernel_from is None
    course = after(reset())
    assert course.kernel_from == at(10)
    assert after(reboot(), "ambiguous", before=course, proven=False).kernel_from == at(10)
    assert after(reset(), attempts=0).kernel_from is None, (
        "of a boot that nobody ordered all counts"
    )


# --- a node that is silent after a reboot


def test_the_power_of_a_node_that_is_silent_after_a_reboot_is_cycled_once_it_has_been_looked_at_again() -> (
    None
):
    powered = replace(examined(BEGUN, FATAL, at(0)), power=True)
    course = after(reboot(), "ambiguous", before=powered, proven=False)
    assert isinstance(then(course, SILENT, SILENT), Examine)
    said = "whether n2 is healthy is not known after 4 examinations: n2 does not answer: no route to host"
    assert then(course, SILENT, SILENT, SILENT) == Treat(Strategy.REBOOT_NODE, (), said, power=True)
    assert isinstance(then(course, UNREAD, UNREAD, UNREAD), Finish), "it answers"
    assert isinstance(then(replace(course, cancelled="enough"), SILENT, SILENT, SILENT), Finish)
    assert isinstance(then(course, SILENT, SILENT, SILENT, left=NOTHING), Finish)
    cycled = after(replace(reboot(), power=True), "ambiguous", before=course, proven=False)
    assert isinstance(then(cycled, SILENT, SILENT, SILENT), Finish), "each way once"


def test_a_reboot_that_somebody_else_ordered_before_counts_as_long_as_the_node_was_not_seen_since() -> (
    None
):
    course = replace(BEGUN, power=True, after_reboot=True)
    step = then(course, SILENT, SILENT, SILENT, SILENT)
    assert isinstance(step, Treat) and step.power
    assert isinstance(then(replace(course, power=False), SILENT, SILENT, SILENT, SILENT), Finish)
    assert isinstance(then(course, UNREAD, SILENT, SILENT, SILENT), Finish), "it was seen"
    seen = after(
        reset(), before=replace(examined(course, RESETTABLE, at(0))), verdict=Verdict.UNKNOWN
    )
    assert isinstance(then(seen, SILENT, SILENT, SILENT), Finish)


def test_nothing_is_done_to_a_node_that_is_silent_although_nobody_rebooted_it() -> None:
    course = replace(BEGUN, power=True)
    assert isinstance(then(course, SILENT, SILENT, SILENT, SILENT), Finish)
    assert isinstance(
        then(after(reset(), before=replace(course, health=RESETTABLE)), SILENT, SILENT, SILENT),
        Finish,
    )


# --- cancelling


def test_a_cancel_ends_what_has_not_begun_and_nothing_is_done_after_it() -> None:
    cancelled = replace(BEGUN, cancelled="enough")
    assert next_treatment(cancelled, HOURS) == Finish(
        "refused", Verdict.UNKNOWN, "cancelled: enough"
    )
    assert end(then(cancelled, HEALTHY))[0] == "done"
    for found in (FATAL, SILENT):
        outcome, verdict, reason = end(then(cancelled, found))
        assert (outcome, verdict) == ("refused", found.verdict) and reason.startswith(
            "cancelled: enough; "
        )
    for verdict in (Verdict.UNHEALTHY, Verdict.UNKNOWN):
        course = after(reset(), verdict=verdict, cancelled="enough")
        assert next_treatment(course, HOURS) == Finish(
            "refused", verdict, "cancelled: enough; what it came to"
        )
    assert (
        after(
            reset(), before=replace(examined(BEGUN, RESETTABLE, at(0)), cancelled="enough")
        ).cancelled
        == "enough"
    )


# --- whatever comes


@searched(200)
@given(st.integers(0, 2**64))
def test_a_course_ends_and_treats_only_what_was_found_unhealthy_each_way_once(number: int) -> None:
    random = Random(number)
    course, left = (
        replace(BEGUN, power=random.choice((True, False))),
        random.choice((timedelta(minutes=3), HOURS)),
    )
    found: Verdict | None = None
    orders: list[str] = []
    for _ in range(20):
        step = next_treatment(course, left)
        if isinstance(step, Finish):
            break
        if isinstance(step, Examine):
            assert step.after < left
            one = random.choice((HEALTHY, RESETTABLE, FATAL, UNREAD, SILENT))
            course, found, left = examined(course, one, at(0)), one.verdict, left - step.after
            continue
        assert not course.cancelled
        assert (
            found is Verdict.UNKNOWN and Strategy.REBOOT_NODE in orders
            if step.power
            else found is Verdict.UNHEALTHY
        )
        orders.append("power" if step.power else step.strategy)
        outcome: Outcome = random.choice(("done", "refused", "ambiguous"))
        found = (
            Verdict.HEALTHY
            if outcome == "done"
            else random.choice((Verdict.UNHEALTHY, Verdict.UNKNOWN))
        )
        course = after(
            reset() if step.strategy is Strategy.RESET_GPU else replace(reboot(), power=step.power),
            outcome,
            found,
            before=course,
            cancelled=random.choice(("", "", "", "enough")),
            proven=outcome == "done" or random.choice((True, False)),
            attempts=random.choice((1, 1, 2)) if outcome == "done" else random.choice((0, 1, 2)),
        )
        assert COURSES.validate_json(COURSES.dump_json(course)) == course
    else:
        raise AssertionError(f"it does not end: {course}")
    ways = [Strategy.RESET_GPU, Strategy.REBOOT_NODE, "power"]
    assert orders == [way for way in ways if way in orders] and (
        "power" not in orders or Strategy.REBOOT_NODE in orders
    )
    assert (step.outcome == "done") == (step.verdict is Verdict.HEALTHY)
