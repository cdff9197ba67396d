"""Which strategies a node of unknown health gets, by what was found and tried before."""

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
from relaunch.repair.escalation import (
    EXAMINATION_DELAYS,
    Escalation,
    EscalationDecision,
    ExamineNode,
    StartStrategy,
    apply_examination,
    apply_strategy_end,
    choose_next,
)
from relaunch.repair.state import FinishRepair, RepairOutcome, RepairState
from relaunch.spec.policy import Strategy
from tests.recovery.builders import at
from tests.recovery.generated import searched
from tests.recovery.nodes import FAULTY, NO_NVML, bus, diag, disk, gpu, nvml, probe
from tests.recovery.test_repair import repair as reboot
from tests.recovery.test_repair import reset

HOURS = timedelta(hours=2)
NOTHING = timedelta(0)
BEGUN = Escalation("n2", "3 jobs failed on it")
PENDING = {"remapped": {"pending": True, "failed": False}}
ESCALATIONS: TypeAdapter[Escalation] = TypeAdapter(Escalation)


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


def then(escalation: Escalation, *healths: Health, left: timedelta = HOURS) -> EscalationDecision:
    for one in healths:
        escalation = apply_examination(escalation, one, at(0))
    return choose_next(escalation, left)


def after(
    state: RepairState,
    outcome: RepairOutcome = "refused",
    verdict: Verdict = Verdict.UNKNOWN,
    *,
    before: Escalation | None = None,
    reason: str = "what it came to",
    attempts: int = 1,
    proven: bool = True,
    cancel_reason: str = "",
) -> Escalation:
    """An escalation whose last strategy has ended so."""
    escalation = apply_examination(BEGUN, RESETTABLE, at(0)) if before is None else before
    ended = replace(
        state,
        attempts=attempts,
        ordered_at=at(10) if attempts else None,
        proven_at=at(11) if proven else None,
        health=HEALTHY,
        cancel_reason=cancel_reason,
    )
    return apply_strategy_end(escalation, ended, FinishRepair(outcome, verdict, reason), at(20))


def end(step: EscalationDecision) -> tuple[str, Verdict, str]:
    assert isinstance(step, FinishRepair), step
    return step.outcome, step.verdict, step.reason


# --- the first examination


def test_a_node_is_examined_before_anything_is_done_to_it() -> None:
    assert choose_next(BEGUN, HOURS) == ExamineNode(NOTHING, "3 jobs failed on it")


def test_a_healthy_node_is_left_as_it_is() -> None:
    outcome, verdict, reason = end(then(BEGUN, HEALTHY))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY)
    assert reason == f"n2 is healthy; no repair was needed: {HEALTHY.reason}"


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
    reason = f"n2 is unhealthy: {found.reason}"
    assert then(BEGUN, found) == StartStrategy(Strategy.RESET_GPU, gpus, reason)


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
    assert then(BEGUN, found) == StartStrategy(
        Strategy.REBOOT_NODE, (), f"n2 is unhealthy: {found.reason}"
    )


@pytest.mark.parametrize(
    "found", [SILENT, UNREAD, health({"refused": "busy", "reason": "pid 7 uses it"})]
)
def test_nothing_is_done_to_a_node_of_unknown_health(found: Health) -> None:
    assert found.verdict is Verdict.UNKNOWN
    assert then(BEGUN, found) == ExamineNode(
        timedelta(minutes=1),
        f"the health of n2 is unknown after 1 examination: {found.reason}",
    )
    assert then(BEGUN, found, found) == ExamineNode(
        timedelta(minutes=5),
        f"the health of n2 is unknown after 2 examinations: {found.reason}",
    )
    assert isinstance(then(BEGUN, found, found, found), ExamineNode)
    outcome, verdict, reason = end(then(BEGUN, found, found, found, found))
    assert (outcome, verdict) == ("refused", Verdict.UNKNOWN)
    assert reason == f"the health of n2 is unknown after 4 examinations: {found.reason}"


def test_of_a_silent_node_it_is_said_that_it_does_not_answer() -> None:
    assert end(then(BEGUN, SILENT, SILENT, SILENT, SILENT))[2].endswith(
        "after 4 examinations: n2 does not answer: no route to host"
    )


def test_a_node_that_answers_after_all_is_treated_for_its_fault() -> None:
    assert end(then(BEGUN, SILENT, UNREAD, HEALTHY))[0] == "done"
    assert isinstance(then(BEGUN, SILENT, UNREAD, FATAL), StartStrategy)
    assert then(BEGUN, SILENT, UNREAD, FATAL, SILENT) == then(BEGUN, SILENT), (
        "they are counted from zero"
    )


@pytest.mark.parametrize(
    ("healths", "outcome", "verdict", "said"),
    [
        ((), "refused", Verdict.UNKNOWN, "the deadline passed before n2 was examined"),
        ((HEALTHY,), "done", Verdict.HEALTHY, "n2 is healthy"),
        (
            (FATAL,),
            "refused",
            Verdict.UNHEALTHY,
            "the deadline passed before n2 was repaired: n2 is unhealthy",
        ),
        (
            (SILENT,),
            "refused",
            Verdict.UNKNOWN,
            "the health of n2 is unknown after 1 examination: n2 does not answer",
        ),
    ],
)
def test_without_time_nothing_more_is_begun(
    healths: tuple[Health, ...], outcome: str, verdict: Verdict, said: str
) -> None:
    ended = end(then(BEGUN, *healths, left=NOTHING))
    assert ended[:2] == (outcome, verdict) and ended[2].startswith(said)


def test_an_examination_without_time_left_is_not_awaited() -> None:
    assert isinstance(then(BEGUN, SILENT, left=EXAMINATION_DELAYS[0]), FinishRepair)
    assert isinstance(
        then(BEGUN, SILENT, left=EXAMINATION_DELAYS[0] + timedelta(seconds=1)), ExamineNode
    )


# --- after a treatment


def test_what_has_made_the_node_healthy_is_done() -> None:
    assert choose_next(after(reset(), "done", Verdict.HEALTHY), HOURS) == FinishRepair(
        "done", Verdict.HEALTHY, "what it came to"
    )
    assert choose_next(after(reboot(), "done", Verdict.HEALTHY), NOTHING) == FinishRepair(
        "done", Verdict.HEALTHY, "what it came to"
    )


def test_an_unhealthy_node_goes_from_reset_to_reboot_to_a_person() -> None:
    escalation = after(
        reset(),
        verdict=Verdict.UNHEALTHY,
        reason="n2 had all GPUs reset and is still unhealthy: x",
    )
    assert choose_next(escalation, HOURS) == StartStrategy(
        Strategy.REBOOT_NODE, (), "n2 had all GPUs reset and is still unhealthy: x"
    )
    escalation = after(reboot(), verdict=Verdict.UNHEALTHY, before=escalation)
    assert escalation.tried == (Strategy.RESET_GPU, Strategy.REBOOT_NODE)
    assert choose_next(escalation, HOURS) == FinishRepair(
        "refused", Verdict.UNHEALTHY, "what it came to"
    )
    assert [one.what for one in escalation.log] == ["Examined", "RESET_GPU", "REBOOT_NODE"]


@pytest.mark.parametrize("outcome", ["refused", "ambiguous"])
def test_a_step_not_done_ends_the_escalation_with_what_is_known(
    outcome: RepairOutcome,
) -> None:
    """What was in the way (a person, the fleet, a job there) is in a reboot's way as well."""
    escalation = after(reset(), outcome, attempts=0, proven=False)
    assert choose_next(escalation, HOURS) == FinishRepair(
        outcome, Verdict.UNHEALTHY, "what it came to"
    )


@pytest.mark.parametrize("outcome", ["refused", "ambiguous"])
@pytest.mark.parametrize("proven", [True, False])
def test_a_node_is_reexamined_if_treatment_left_its_health_open(
    outcome: RepairOutcome, proven: bool
) -> None:
    escalation = after(reset(), outcome, proven=proven)
    assert choose_next(escalation, HOURS) == ExamineNode(timedelta(minutes=1), "what it came to")
    said = f"what it came to; a later examination found n2 healthy: {HEALTHY.reason}"
    assert then(escalation, HEALTHY) == FinishRepair("done", Verdict.HEALTHY, said)
    assert then(escalation, RESETTABLE) == StartStrategy(
        Strategy.REBOOT_NODE, (), RESETTABLE.reason
    )
    assert then(escalation, SILENT, SILENT, SILENT) == FinishRepair(
        outcome,
        Verdict.UNKNOWN,
        "the health of n2 is unknown after 4 examinations: n2 does not answer: no route to host",
    )
    assert choose_next(escalation, NOTHING) == FinishRepair(
        outcome, Verdict.UNKNOWN, "what it came to"
    )


def test_a_node_rebooted_by_others_is_examined_too() -> None:
    assert isinstance(choose_next(after(reset(), attempts=0), HOURS), ExamineNode)


def test_earlier_kernel_evidence_counts_until_proven_healed() -> None:
    assert after(reset(), proven=False).kernel_from is None
    escalation = after(reset())
    assert escalation.kernel_from == at(10)
    assert after(reboot(), "ambiguous", before=escalation, proven=False).kernel_from == at(10)
    assert after(reset(), attempts=0).kernel_from is None, "of a boot without an order all counts"


# --- a node that is silent after a reboot


def test_a_rebooted_silent_node_is_reexamined_then_power_cycled() -> None:
    powered = replace(apply_examination(BEGUN, FATAL, at(0)), can_power_cycle=True)
    escalation = after(reboot(), "ambiguous", before=powered, proven=False)
    assert isinstance(then(escalation, SILENT, SILENT), ExamineNode)
    said = "the health of n2 is unknown after 4 examinations: n2 does not answer: no route to host"
    assert then(escalation, SILENT, SILENT, SILENT) == StartStrategy(
        Strategy.REBOOT_NODE, (), said, power=True
    )
    assert isinstance(then(escalation, UNREAD, UNREAD, UNREAD), FinishRepair), "it answers"
    assert isinstance(
        then(replace(escalation, cancel_reason="enough"), SILENT, SILENT, SILENT), FinishRepair
    )
    assert isinstance(then(escalation, SILENT, SILENT, SILENT, left=NOTHING), FinishRepair)
    cycled = after(replace(reboot(), power=True), "ambiguous", before=escalation, proven=False)
    assert isinstance(then(cycled, SILENT, SILENT, SILENT), FinishRepair), "each way once"


def test_a_reboot_by_others_counts_while_the_node_stays_unseen() -> None:
    escalation = replace(BEGUN, can_power_cycle=True, after_reboot=True)
    step = then(escalation, SILENT, SILENT, SILENT, SILENT)
    assert isinstance(step, StartStrategy) and step.power
    assert isinstance(
        then(replace(escalation, can_power_cycle=False), SILENT, SILENT, SILENT, SILENT),
        FinishRepair,
    )
    assert isinstance(then(escalation, UNREAD, SILENT, SILENT, SILENT), FinishRepair), "it was seen"
    seen = after(
        reset(),
        before=replace(apply_examination(escalation, RESETTABLE, at(0))),
        verdict=Verdict.UNKNOWN,
    )
    assert isinstance(then(seen, SILENT, SILENT, SILENT), FinishRepair)


def test_nothing_is_done_to_a_node_silent_without_a_reboot() -> None:
    escalation = replace(BEGUN, can_power_cycle=True)
    assert isinstance(then(escalation, SILENT, SILENT, SILENT, SILENT), FinishRepair)
    assert isinstance(
        then(after(reset(), before=replace(escalation, health=RESETTABLE)), SILENT, SILENT, SILENT),
        FinishRepair,
    )


# --- cancelling


def test_a_cancel_ends_what_has_not_begun_and_nothing_follows() -> None:
    cancelled = replace(BEGUN, cancel_reason="enough")
    assert choose_next(cancelled, HOURS) == FinishRepair(
        "refused", Verdict.UNKNOWN, "cancelled: enough"
    )
    assert end(then(cancelled, HEALTHY))[0] == "done"
    for found in (FATAL, SILENT):
        outcome, verdict, reason = end(then(cancelled, found))
        assert (outcome, verdict) == ("refused", found.verdict) and reason.startswith(
            "cancelled: enough; "
        )
    for verdict in (Verdict.UNHEALTHY, Verdict.UNKNOWN):
        escalation = after(reset(), verdict=verdict, cancel_reason="enough")
        assert choose_next(escalation, HOURS) == FinishRepair(
            "refused", verdict, "cancelled: enough; what it came to"
        )
    assert (
        after(
            reset(),
            before=replace(apply_examination(BEGUN, RESETTABLE, at(0)), cancel_reason="enough"),
        ).cancel_reason
        == "enough"
    )


# --- whatever comes


@searched(200)
@given(st.integers(0, 2**64))
def test_escalation_ends_and_tries_each_repair_once_if_unhealthy(
    number: int,
) -> None:
    random = Random(number)
    escalation, left = (
        replace(BEGUN, can_power_cycle=random.choice((True, False))),
        random.choice((timedelta(minutes=3), HOURS)),
    )
    found: Verdict | None = None
    orders: list[str] = []
    for _ in range(20):
        step = choose_next(escalation, left)
        if isinstance(step, FinishRepair):
            break
        if isinstance(step, ExamineNode):
            assert step.delay < left
            one = random.choice((HEALTHY, RESETTABLE, FATAL, UNREAD, SILENT))
            escalation, found, left = (
                apply_examination(escalation, one, at(0)),
                one.verdict,
                left - step.delay,
            )
            continue
        assert not escalation.cancel_reason
        assert (
            found is Verdict.UNKNOWN and Strategy.REBOOT_NODE in orders
            if step.power
            else found is Verdict.UNHEALTHY
        )
        orders.append("power" if step.power else step.strategy)
        outcome: RepairOutcome = random.choice(("done", "refused", "ambiguous"))
        found = (
            Verdict.HEALTHY
            if outcome == "done"
            else random.choice((Verdict.UNHEALTHY, Verdict.UNKNOWN))
        )
        escalation = after(
            reset() if step.strategy is Strategy.RESET_GPU else replace(reboot(), power=step.power),
            outcome,
            found,
            before=escalation,
            cancel_reason=random.choice(("", "", "", "enough")),
            proven=outcome == "done" or random.choice((True, False)),
            attempts=random.choice((1, 1, 2)) if outcome == "done" else random.choice((0, 1, 2)),
        )
        assert ESCALATIONS.validate_json(ESCALATIONS.dump_json(escalation)) == escalation
    else:
        raise AssertionError(f"it does not end: {escalation}")
    ways = [Strategy.RESET_GPU, Strategy.REBOOT_NODE, "power"]
    assert orders == [way for way in ways if way in orders] and (
        "power" not in orders or Strategy.REBOOT_NODE in orders
    )
    assert (step.outcome == "done") == (step.verdict is Verdict.HEALTHY)
