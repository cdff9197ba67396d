"""Which strategies a node of unknown health gets, by what was found and tried before."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health, read_health
from relaunch.repair.escalation import (
    EXAMINATION_DELAYS,
    Escalation,
    EscalationDecision,
    ExamineNode,
    PastRepair,
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
from tests.recovery.test_links import port
from tests.recovery.test_repair import repair as reboot
from tests.recovery.test_repair import reset

HOURS = timedelta(hours=2)
NOTHING = timedelta(0)
BEGUN = Escalation("n2", "3 jobs failed on it")
CONCLUSION = "what the strategy came to"
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
    reason: str = CONCLUSION,
    attempts: int = 1,
    proven: bool = True,
    cancel_reason: str = "",
    found: Health | None = None,
) -> Escalation:
    """An escalation whose last strategy has ended so."""
    escalation = apply_examination(BEGUN, RESETTABLE, at(0)) if before is None else before
    ended = replace(
        state,
        attempts=attempts,
        ordered_at=at(10) if attempts else None,
        proven_at=at(11) if proven else None,
        health=found or HEALTHY,
        cancel_reason=cancel_reason,
    )
    return apply_strategy_end(escalation, ended, FinishRepair(outcome, verdict, reason), at(20))


def end(step: EscalationDecision) -> tuple[str, Verdict, str]:
    assert isinstance(step, FinishRepair), step
    return step.outcome, step.verdict, step.reason


# --- the first examination


def test_a_node_is_examined_before_anything_is_done_to_it() -> None:
    assert choose_next(BEGUN, HOURS) == ExamineNode(NOTHING, BEGUN.reason)


def test_a_healthy_node_is_left_as_it_is(snapshot: SnapshotAssertion) -> None:
    outcome, verdict, reason = end(then(BEGUN, HEALTHY))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY)
    assert reason == snapshot


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
    decision = then(BEGUN, found)
    assert isinstance(decision, StartStrategy)
    assert (decision.strategy, decision.gpus) == (Strategy.RESET_GPU, gpus)
    assert found.reason in decision.reason


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
    decision = then(BEGUN, found)
    assert isinstance(decision, StartStrategy)
    assert (decision.strategy, decision.gpus) == (Strategy.REBOOT_NODE, ())


@pytest.mark.parametrize(
    "found",
    [SILENT, UNREAD, health({"refused": "busy", "reason": "pid 7 uses it"})],
    ids=["silent", "no-gpus", "busy"],
)
def test_nothing_is_done_to_a_node_of_unknown_health(
    found: Health, snapshot: SnapshotAssertion
) -> None:
    assert found.verdict is Verdict.UNKNOWN
    decision = then(BEGUN, found)
    assert decision == ExamineNode(timedelta(minutes=1), decision.reason)
    assert decision.reason == snapshot(name="first")
    decision = then(BEGUN, found, found)
    assert decision == ExamineNode(timedelta(minutes=5), decision.reason)
    assert decision.reason == snapshot(name="second")
    assert isinstance(then(BEGUN, found, found, found), ExamineNode)
    outcome, verdict, reason = end(then(BEGUN, found, found, found, found))
    assert (outcome, verdict) == ("refused", Verdict.UNKNOWN)
    assert reason == snapshot(name="end")


def test_of_a_silent_node_it_is_said_that_it_does_not_answer(snapshot: SnapshotAssertion) -> None:
    assert end(then(BEGUN, SILENT, SILENT, SILENT, SILENT))[2] == snapshot


def test_a_node_that_answers_after_all_is_treated_for_its_fault() -> None:
    assert end(then(BEGUN, SILENT, UNREAD, HEALTHY))[0] == "done"
    assert isinstance(then(BEGUN, SILENT, UNREAD, FATAL), StartStrategy)
    # the examinations are counted from the start again
    assert then(BEGUN, SILENT, UNREAD, FATAL, SILENT) == then(BEGUN, SILENT)


@pytest.mark.parametrize(
    ("healths", "outcome", "verdict"),
    [
        pytest.param((), "refused", Verdict.UNKNOWN, id="not-examined"),
        pytest.param((HEALTHY,), "done", Verdict.HEALTHY, id="healthy"),
        pytest.param((FATAL,), "refused", Verdict.UNHEALTHY, id="unhealthy"),
        pytest.param((SILENT,), "refused", Verdict.UNKNOWN, id="silent"),
    ],
)
def test_without_time_nothing_more_is_begun(
    healths: tuple[Health, ...], outcome: str, verdict: Verdict, snapshot: SnapshotAssertion
) -> None:
    ended = end(then(BEGUN, *healths, left=NOTHING))
    assert ended[:2] == (outcome, verdict) and ended[2] == snapshot


def test_an_examination_without_time_left_is_not_awaited() -> None:
    assert isinstance(then(BEGUN, SILENT, left=EXAMINATION_DELAYS[0]), FinishRepair)
    assert isinstance(
        then(BEGUN, SILENT, left=EXAMINATION_DELAYS[0] + timedelta(seconds=1)), ExamineNode
    )


# --- what NVIDIA's catalog asks for

HANGS = {**NO_NVML, "hangs": True}
HUNG = health(gpus=HANGS)
FIRST_STEPS: dict[str, Strategy | None] = {
    "RESET_GPU": Strategy.RESET_GPU,
    "WORKFLOW_NVLINK_ERR": Strategy.RESET_GPU,
    "WORKFLOW_NVLINK5_ERR": Strategy.RESET_GPU,
    "RESTART_VM": Strategy.REBOOT_NODE,
    "RESTART_BM": Strategy.REBOOT_NODE,
    # Alone, as here: a field diagnostic is due, which needs the node to itself.
    "WORKFLOW_XID_48": Strategy.REBOOT_NODE,
    # Nothing is done to the node; the job is restarted, or the finding is only shown.
    "RESTART_APP": None,
    "IGNORE": None,
    "CONTACT_SUPPORT": None,
    "CHECK_UVM": None,
    "WORKFLOW_XID_45": None,
    "XID_154": None,
}
"""The first step of a repair by NVIDIA's immediate action, where no other line says more."""
OF_PEOPLE = ("CHECK_MECHANICALS", "UPDATE_SWFW")
WITHOUT_ACTION = {
    166: Strategy.REBOOT_NODE,
    167: Strategy.REBOOT_NODE,
    169: Strategy.RESET_GPU,
}
"""Xids for which NVIDIA lists no action and leptonai/gpud asks for a repair; see their notes."""


def log_xid(code: int, **facts: Any) -> Health:
    line = f"[ 1.0] NVRM: Xid (PCI:0000:07:00): {code}, pid=1, name=python, what it says"
    return health(kernel={"lines": [line]}, **facts)


@pytest.mark.parametrize("code", catalog().xids)
def test_the_first_step_is_nvidias_action(code: int) -> None:
    row = catalog().xids[code]
    decision = then(BEGUN, log_xid(code))
    if row.action in OF_PEOPLE:
        assert isinstance(decision, ExamineNode)
        return
    expected = FIRST_STEPS[row.action] if row.action else WITHOUT_ACTION.get(code)
    if expected is None:
        assert end(decision)[:2] == ("done", Verdict.HEALTHY)
    else:
        assert isinstance(decision, StartStrategy) and decision.strategy is expected
        assert decision.gpus == ((bus(2),) if expected is Strategy.RESET_GPU else ())


def test_what_only_a_person_mends_is_left_after_three_looks(snapshot: SnapshotAssertion) -> None:
    plug = log_xid(54)
    assert then(BEGUN, plug) == ExamineNode(timedelta(minutes=1), then(BEGUN, plug).reason)
    assert isinstance(then(BEGUN, plug, plug), ExamineNode)
    outcome, verdict, reason = end(then(BEGUN, plug, plug, plug))
    assert (outcome, verdict) == ("refused", Verdict.UNHEALTHY)
    assert reason == snapshot
    # a link that comes back, as after the restart of a switch
    assert end(then(BEGUN, plug, plug, HEALTHY))[0] == "done"
    assert isinstance(then(BEGUN, plug, HEALTHY, plug, plug), ExamineNode)
    assert isinstance(then(BEGUN, plug, left=timedelta(minutes=1)), FinishRepair)
    # after a reset for another fault
    ended = after(reset(), verdict=Verdict.UNHEALTHY)
    assert isinstance(choose_next(replace(ended, health=plug), HOURS), ExamineNode)


def test_what_a_person_mends_is_not_in_the_way_of_the_rest() -> None:
    line = "[ 1.0] NVRM: Xid (PCI:0000:07:00): {}, pid=1, name=python, what it says"
    both = health(kernel={"lines": [line.format(54), line.format(79)]})
    assert isinstance(then(BEGUN, both), StartStrategy)


def test_a_hung_gsp_is_reset_and_then_rebooted() -> None:
    """Xids 119 and 120, with NVML silent: NVIDIA's action is a reset."""
    for code in (119, 120):
        hung = log_xid(code, gpus=HANGS)
        assert then(BEGUN, hung) == StartStrategy(Strategy.RESET_GPU, (bus(2),), ANY)
        # the reset is reported as done, and NVML stays silent: the Xid still counts
        row = {"uptime": 9.0, "id": "r", "gpus": [bus(2)]}
        still = log_xid(code, gpus=HANGS, resets=[row])
        assert then(after(reset()), still) == StartStrategy(Strategy.REBOOT_NODE, (), ANY)
        healed = log_xid(code, resets=[row])
        assert end(then(BEGUN, healed))[:2] == ("done", Verdict.HEALTHY)


def test_a_driver_that_hangs_is_reset_and_then_rebooted(snapshot: SnapshotAssertion) -> None:
    assert HUNG.verdict is Verdict.UNKNOWN
    assert isinstance(then(BEGUN, HUNG, HUNG), ExamineNode)
    decision = then(BEGUN, HUNG, HUNG, HUNG)
    assert decision == StartStrategy(Strategy.RESET_GPU, (), decision.reason)
    assert decision.reason == snapshot
    was_reset = after(reset(), found=HUNG)
    assert isinstance(then(was_reset, HUNG), ExamineNode)
    decision = then(was_reset, HUNG, HUNG)
    assert decision == StartStrategy(Strategy.REBOOT_NODE, (), decision.reason)
    ended = then(after(reboot(), before=was_reset), HUNG, HUNG, HUNG)
    assert isinstance(ended, FinishRepair) and ended.outcome == "refused"
    assert isinstance(then(BEGUN, HUNG, HUNG, HUNG, left=NOTHING), FinishRepair)


def test_s1_5_a_node_that_cannot_be_reset_is_rebooted() -> None:
    begun = replace(BEGUN, can_reset=False)
    for found in ((RESETTABLE,), (HUNG, HUNG, HUNG), (log_xid(119, gpus=HANGS),)):
        assert then(begun, *found) == StartStrategy(Strategy.REBOOT_NODE, (), ANY)


def test_a_node_that_boots_and_initialises_its_gpus_is_not_reset() -> None:
    """It was silent while it booted, and NVML does not answer while eight GPUs initialise."""
    assert isinstance(then(BEGUN, SILENT, SILENT, HUNG), ExamineNode)
    assert isinstance(then(BEGUN, HUNG, HUNG, UNREAD, HUNG), FinishRepair)
    assert end(then(BEGUN, SILENT, SILENT, HUNG, HEALTHY))[0] == "done"
    decision = then(BEGUN, SILENT, HUNG, HUNG, HUNG)
    assert decision == StartStrategy(Strategy.RESET_GPU, (), ANY)
    # the state of the node after its reset is not known: that is no hang of NVML
    assert isinstance(then(after(reset()), HUNG, HUNG), ExamineNode)


def test_links_are_awaited_after_a_reboot(snapshot: SnapshotAssertion) -> None:
    down = {"state": "DOWN", "phys_state": "Polling"}
    rows = [port(0, **down), *(port(index) for index in range(1, 8))]
    unlinked = health(links={"ports": rows})
    fatal = apply_examination(BEGUN, FATAL, at(0))
    escalation = after(reboot(), verdict=Verdict.UNHEALTHY, before=fatal, found=unlinked)
    assert choose_next(escalation, HOURS) == ExamineNode(timedelta(minutes=1), CONCLUSION)
    assert end(then(escalation, HEALTHY))[:2] == ("done", Verdict.HEALTHY)
    assert then(escalation, unlinked) == ExamineNode(timedelta(minutes=5), unlinked.reason)
    outcome, verdict, reason = end(then(escalation, unlinked, unlinked))
    assert (outcome, verdict) == ("refused", Verdict.UNHEALTHY)
    assert reason == snapshot
    assert isinstance(choose_next(replace(escalation, cancel_reason="enough"), HOURS), FinishRepair)
    assert isinstance(choose_next(escalation, NOTHING), FinishRepair)
    assert isinstance(then(escalation, FATAL), FinishRepair)


# --- after a treatment


def test_what_has_made_the_node_healthy_is_done() -> None:
    assert choose_next(after(reset(), "done", Verdict.HEALTHY), HOURS) == FinishRepair(
        "done", Verdict.HEALTHY, CONCLUSION
    )
    assert choose_next(after(reboot(), "done", Verdict.HEALTHY), NOTHING) == FinishRepair(
        "done", Verdict.HEALTHY, CONCLUSION
    )


def test_an_unhealthy_node_goes_from_reset_to_reboot_to_a_person() -> None:
    escalation = after(reset(), verdict=Verdict.UNHEALTHY)
    assert choose_next(escalation, HOURS) == StartStrategy(Strategy.REBOOT_NODE, (), CONCLUSION)
    escalation = after(reboot(), verdict=Verdict.UNHEALTHY, before=escalation)
    assert escalation.tried == (Strategy.RESET_GPU, Strategy.REBOOT_NODE)
    assert choose_next(escalation, HOURS) == FinishRepair("refused", Verdict.UNHEALTHY, CONCLUSION)
    assert [one.what for one in escalation.log] == ["Examined", "RESET_GPU", "REBOOT_NODE"]


@pytest.mark.parametrize("outcome", ["refused", "ambiguous"])
def test_a_step_not_done_ends_the_escalation_with_what_is_known(
    outcome: RepairOutcome,
) -> None:
    """What was in the way (a person, the fleet, a job there) is in a reboot's way as well."""
    escalation = after(reset(), outcome, attempts=0, proven=False)
    assert choose_next(escalation, HOURS) == FinishRepair(outcome, Verdict.UNHEALTHY, CONCLUSION)


@pytest.mark.parametrize("outcome", ["refused", "ambiguous"])
@pytest.mark.parametrize("proven", [True, False])
def test_a_node_is_reexamined_if_treatment_left_its_health_open(
    outcome: RepairOutcome, proven: bool
) -> None:
    escalation = after(reset(), outcome, proven=proven)
    assert choose_next(escalation, HOURS) == ExamineNode(timedelta(minutes=1), CONCLUSION)
    ended = then(escalation, HEALTHY)
    assert ended == FinishRepair("done", Verdict.HEALTHY, ended.reason)
    assert then(escalation, RESETTABLE) == StartStrategy(
        Strategy.REBOOT_NODE, (), RESETTABLE.reason
    )
    ended = then(escalation, SILENT, SILENT, SILENT)
    assert ended == FinishRepair(outcome, Verdict.UNKNOWN, ended.reason)
    assert choose_next(escalation, NOTHING) == FinishRepair(outcome, Verdict.UNKNOWN, CONCLUSION)


def test_the_reason_tells_what_a_later_examination_found(snapshot: SnapshotAssertion) -> None:
    escalation = after(reset(), "refused")
    assert then(escalation, HEALTHY).reason == snapshot(name="healthy")
    assert then(escalation, SILENT, SILENT, SILENT).reason == snapshot(name="silent")


def test_a_node_rebooted_by_others_is_examined_too() -> None:
    assert isinstance(choose_next(after(reset(), attempts=0), HOURS), ExamineNode)


def test_earlier_kernel_evidence_counts_until_proven_healed() -> None:
    assert after(reboot(), proven=False).kernel_from is None
    escalation = after(reboot())
    assert escalation.kernel_from == at(10)
    assert after(reset(), "ambiguous", before=escalation, proven=False).kernel_from == at(10)
    # what a reset healed, the node reports itself, by GPU
    assert after(reset()).kernel_from is None
    # this repair ordered no boot, so all kernel evidence counts
    assert after(reset(), attempts=0).kernel_from is None


# --- a node that is silent after a reboot


def test_a_rebooted_silent_node_is_reexamined_then_power_cycled(
    snapshot: SnapshotAssertion,
) -> None:
    powered = replace(apply_examination(BEGUN, FATAL, at(0)), can_power_cycle=True)
    escalation = after(reboot(), "ambiguous", before=powered, proven=False)
    assert isinstance(then(escalation, SILENT, SILENT), ExamineNode)
    step = then(escalation, SILENT, SILENT, SILENT)
    assert step == StartStrategy(Strategy.REBOOT_NODE, (), step.reason, power=True)
    assert step.reason == snapshot
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


def test_a_cancel_ends_what_has_not_begun_and_nothing_follows(snapshot: SnapshotAssertion) -> None:
    cancelled = replace(BEGUN, cancel_reason="enough")
    assert choose_next(cancelled, HOURS) == FinishRepair(
        "refused", Verdict.UNKNOWN, "cancelled: enough"
    )
    assert end(then(cancelled, HEALTHY))[0] == "done"
    for found in (FATAL, SILENT):
        outcome, verdict, reason = end(then(cancelled, found))
        assert (outcome, verdict) == ("refused", found.verdict)
        assert reason == snapshot(name=f"found-{found.verdict}")
    for verdict in (Verdict.UNHEALTHY, Verdict.UNKNOWN):
        escalation = after(reset(), verdict=verdict, cancel_reason="enough")
        ended = choose_next(escalation, HOURS)
        assert ended == FinishRepair("refused", verdict, ended.reason)
        assert ended.reason == snapshot(name="reset")
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


# --- what healed the node a short time ago


def past(strategy: Strategy, *gpus: str) -> PastRepair:
    return PastRepair(strategy, at(-3600), gpus)


RESET_0, RESET_ALL = past(Strategy.RESET_GPU, bus(0)), past(Strategy.RESET_GPU)
REBOOTED = past(Strategy.REBOOT_NODE)


@pytest.mark.parametrize(
    ("found", "healed", "strategy"),
    [
        (RESETTABLE, (), Strategy.RESET_GPU),
        (RESETTABLE, (past(Strategy.RESET_GPU, bus(5)),), Strategy.RESET_GPU),
        (RESETTABLE, (REBOOTED,), Strategy.RESET_GPU),
        (RESETTABLE, (RESET_0,), Strategy.REBOOT_NODE),
        (RESETTABLE, (RESET_ALL,), Strategy.REBOOT_NODE),
        (RESETTABLE, (RESET_0, REBOOTED), None),
        (FATAL, (RESET_0,), Strategy.REBOOT_NODE),
        (FATAL, (REBOOTED,), None),
    ],
)
def test_what_healed_a_node_lately_gives_way_to_the_next_step(
    found: Health, healed: tuple[PastRepair, ...], strategy: Strategy | None
) -> None:
    decision = then(replace(BEGUN, healed=healed), found)
    if strategy is not None:
        assert isinstance(decision, StartStrategy)
        assert decision.strategy is strategy
    else:
        assert isinstance(decision, FinishRepair)
        assert (decision.outcome, decision.verdict) == ("refused", Verdict.UNHEALTHY)


def test_a_driver_that_hangs_again_is_not_reset_again(snapshot: SnapshotAssertion) -> None:
    rebooted = then(replace(BEGUN, healed=(RESET_0,)), HUNG, HUNG, HUNG)
    assert isinstance(rebooted, StartStrategy)
    assert (rebooted.strategy, rebooted.reason) == (Strategy.REBOOT_NODE, snapshot)
    left = then(replace(BEGUN, healed=(RESET_0, REBOOTED)), HUNG, HUNG, HUNG)
    assert (left.kind, left.reason) == ("FinishRepair", snapshot)


def test_a_strategy_that_was_not_needed_was_not_tried() -> None:
    before = apply_examination(BEGUN, RESETTABLE, at(0))
    state = replace(reset(), recovered=True, cancel_reason="the job has ended")
    withdrawn = FinishRepair("refused", Verdict.HEALTHY, "a probe finds no fault any more")
    then = apply_strategy_end(before, state, withdrawn, at(20))
    assert (then.tried, then.health, then.cancel_reason) == ((), None, "the job has ended")
    assert then.log[-1].reason == withdrawn.reason
