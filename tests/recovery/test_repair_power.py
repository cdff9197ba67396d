"""When a repair cycles the power of a node, what speaks against it, and what proves that it did."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import TypeAdapter
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.findings import Verdict
from relaunch.repair.explain import explain_order
from relaunch.repair.machine import begin, decide
from relaunch.repair.state import (
    AskPerson,
    NoAnswer,
    NodeProbed,
    OrderDone,
    OrderExpired,
    OrderRefused,
    PermitAnswered,
    PersonAnswered,
    PowerCycleNode,
    ProbeNode,
    RebootNode,
    RepairCancelRequested,
    RepairDecision,
    RepairEvent,
    RepairState,
    ResetGpus,
    RunDiag,
    Stage,
    WaitEnded,
    WaitForNode,
)
from relaunch.spec.policy import Strategy
from tests.recovery.builders import at
from tests.recovery.nodes import bus, journal, probe
from tests.recovery.test_repair import (
    BOOTED,
    PASSED_AFTER_BOOT,
    REBOOT_OK,
    SAME,
    after,
    end,
    refusal,
    rules,
    then,
)

DECISIONS: TypeAdapter[RepairDecision] = TypeAdapter(RepairDecision)
SWITCHED = OrderDone(
    {
        "outcome": "done",
        "program": "ipmitool",
        "exit_code": 0,
        "output": "Chassis Power Control: Cycle\n",
        "took": 0.4,
    }
)
NO_REBOOT = OrderRefused("cannot_reboot", "sudo: a password is required")
GONE = NoAnswer("no route to host")


def repair(
    *,
    power: bool = False,
    boot_id: str = "",
    approved_by: str = "",
    minutes: float = 40,
    **changes: Any,
) -> RepairState:
    return begin(
        id="repair/gpus/n2/1",
        fleet="gpus",
        node="n2",
        strategy=Strategy.REBOOT_NODE,
        gpus=(),
        reason="Xid 79",
        by="ada",
        rules=rules(**{"has_power_command": True, **changes}),
        now=at(0),
        deadline=at(60 * minutes),
        approved_by=approved_by,
        power=power,
        boot_id=boot_id,
    )


ORDER = PowerCycleNode(timedelta(minutes=1), explain_order(repair(power=True)))


def silent(state: RepairState, since: float, *, seconds: float = 181) -> RepairState:
    """As it is once the node has not answered for so long."""
    state = after(state, GONE, WaitEnded(), seconds=since)
    return after(state, GONE, seconds=since + seconds)


# --- when


def test_a_person_may_order_a_power_cycle_and_a_look_comes_first(
    snapshot: SnapshotAssertion,
) -> None:
    decision = decide(repair(power=True), at(0))
    assert decision == ProbeNode(timedelta(seconds=20), None, decision.reason)
    assert decision.reason == snapshot(name="checking")
    assert then(repair(power=True), SAME) == ORDER
    assert ORDER.reason == snapshot(name="order")


def test_it_follows_a_reboot_that_the_node_cannot_carry_out(snapshot: SnapshotAssertion) -> None:
    state = after(repair(approved_by="bo"), SAME)
    assert isinstance(decide(state, at(1)), RebootNode)
    state = after(state, NO_REBOOT, seconds=1)
    assert state.log[-1].reason == snapshot(name="log")
    # it is probed again
    assert isinstance(decide(state, at(1)), ProbeNode)
    decision = then(state, SAME, seconds=2)
    assert decision == replace(ORDER, reason=decision.reason)
    assert decision.reason == snapshot(name="order")


def test_without_a_power_command_a_refused_reboot_is_final(snapshot: SnapshotAssertion) -> None:
    state = replace(repair(), rules=rules())
    assert refusal(then(state, SAME, NO_REBOOT)) == snapshot
    assert isinstance(decide(silent(state, 0), at(181)), WaitForNode)


def test_another_refusal_is_not_a_reason_for_it(snapshot: SnapshotAssertion) -> None:
    assert refusal(then(repair(), SAME, OrderRefused("busy", "job llama runs here"))) == snapshot


def test_it_comes_for_a_node_that_is_silent_for_three_minutes() -> None:
    state = after(repair(), GONE, WaitEnded())
    assert isinstance(then(state, GONE, seconds=179), WaitForNode)
    # it has answered meanwhile
    assert isinstance(
        then(state, GONE, WaitEnded(), SAME, WaitEnded(), GONE, seconds=181),
        WaitForNode | RebootNode,
    )
    step = decide(silent(repair(), 0), at(181))
    assert step == ORDER
    assert isinstance(then(repair(power=True), GONE), WaitForNode)
    assert decide(silent(repair(power=True), 0), at(181)) == ORDER


def test_a_node_that_answers_what_cannot_be_read_is_not_silent() -> None:
    """Ranks may live on it."""
    state = after(repair(), GONE, NodeProbed(probe(boot_id=None)), seconds=0)
    state = after(state, NodeProbed(probe(boot_id=None)), seconds=600)
    assert isinstance(decide(state, at(600)), WaitForNode)
    assert isinstance(then(state, GONE, seconds=601), WaitForNode)


def test_it_follows_a_reboot_that_was_not_proven_in_time() -> None:
    state = after(repair(), SAME, REBOOT_OK, GONE)
    assert isinstance(then(state, GONE, seconds=1490), WaitForNode)
    state = after(state, GONE, seconds=1500)
    assert state.power and state.stage is Stage.CHECKING and state.deadline == at(3000)
    state = after(state, GONE, seconds=1505)
    assert decide(state, at(1505)) == ORDER
    state = after(state, SWITCHED, seconds=1510)
    # it is proven within the same time
    assert state.deadline == at(1510 + 1500)


def test_a_node_that_ignores_a_reboot_has_its_power_cycled(snapshot: SnapshotAssertion) -> None:
    state = after(repair(), SAME, REBOOT_OK)
    state = after(state, SAME, seconds=1500)
    assert state.log[-1].reason == snapshot(name="log")
    assert then(state, SAME, seconds=1501) == ORDER
    assert refusal(
        then(state, NodeProbed(probe(jobs=[{"job": "llama", "generation": 2}])), seconds=1501)
    ) == snapshot(name="in-use")
    # it came back after all
    assert isinstance(then(state, BOOTED, seconds=1501), RunDiag)


@pytest.mark.parametrize(
    "event",
    [OrderExpired("no worker took it"), PermitAnswered(True, "1 of 2 repairs", is_unused=True)],
    ids=["expired", "permitted late"],
)
def test_a_power_cycle_that_was_not_given_is_given_later(event: RepairEvent) -> None:
    """The reboot before it was given, and is no proof of it."""
    state = after(repair(), SAME, REBOOT_OK)
    state = after(after(state, SAME, seconds=1500), SAME, seconds=1501)
    assert decide(state, at(1501)) == ORDER
    state = after(after(state, event, seconds=1510), WaitEnded(), seconds=1515)
    assert isinstance(decide(state, at(1515)), ProbeNode)
    assert then(state, SAME, seconds=1516) == ORDER


def test_a_look_comes_between_a_reboot_and_what_follows_it() -> None:
    early = after(repair(minutes=10), SAME, REBOOT_OK, GONE)
    assert after(early, GONE, seconds=539).stage is Stage.PROVING
    assert after(early, GONE, seconds=541).power


@pytest.mark.parametrize(("minutes", "follows"), [(25, False), (49, False), (51, True)])
def test_no_power_cycle_begins_too_late_for_a_waiting_job(minutes: float, follows: bool) -> None:
    state = after(repair(minutes=minutes, job_waits=True), SAME, REBOOT_OK)
    state = after(state, GONE, seconds=min(1500, 60 * minutes - 1))
    assert state.power is follows and state.deadline == at(60 * minutes)


def test_for_a_job_it_is_over_before_the_job_stops_waiting() -> None:
    state = after(repair(minutes=25, job_waits=True, power=True), SAME, seconds=1470)
    assert decide(state, at(1470)) == replace(ORDER, timeout=timedelta(seconds=30))
    assert after(state, SWITCHED, seconds=1480).deadline == at(1500)


# --- what speaks against it


def test_a_node_in_use_keeps_its_power(snapshot: SnapshotAssertion) -> None:
    busy = NodeProbed(probe(jobs=[{"job": "llama", "generation": 3}]))
    reason = refusal(then(repair(power=True), busy))
    assert reason == snapshot
    assert refusal(then(repair(power=False), busy)) == reason


def test_a_power_cycle_and_the_reboot_before_it_both_count(snapshot: SnapshotAssertion) -> None:
    once = NodeProbed(probe(reboots=journal((3600, "r1"))))
    assert then(repair(power=True), once) == ORDER
    state = after(repair(), once, REBOOT_OK)
    assert refusal(then(after(state, once, seconds=1500), once, seconds=1501)) == snapshot(
        name="second"
    )
    state = silent(after(state, GONE, seconds=1400), 1500)
    # the journal as it was read last
    assert refusal(decide(state, at(1681))) == snapshot(name="last-read")
    # that one was none
    assert then(after(repair(), once, NO_REBOOT), once) == ORDER


def test_who_only_observes_and_who_wants_to_be_asked(snapshot: SnapshotAssertion) -> None:
    reason = refusal(then(repair(power=True, mode="observe"), SAME))
    assert reason == snapshot(name="observe")
    assert refusal(decide(silent(repair(power=True, mode="observe"), 0), at(181))) == reason
    decision = then(repair(power=True, mode="ask", approved_by="ada"), SAME)
    assert decision == replace(ORDER, reason=decision.reason)
    assert decision.reason == snapshot(name="approved")


def test_the_approver_of_a_reboot_is_asked_about_the_power(snapshot: SnapshotAssertion) -> None:
    state = after(repair(mode="ask", approved_by="ada"), SAME, NO_REBOOT)
    step = then(state, SAME)
    assert isinstance(step, AskPerson) and step.question == snapshot(name="question")
    asked = silent(repair(mode="ask"), 0)
    assert isinstance(decide(asked, at(181)), AskPerson)
    state = after(asked, PersonAnswered(True, "bo", ""), seconds=300)
    assert isinstance(decide(state, at(300)), ProbeNode)
    decision = then(state, GONE, seconds=301)
    assert decision == replace(ORDER, reason=decision.reason)
    assert decision.reason == snapshot(name="approved")


def test_what_the_fleet_does_not_permit_is_refused(snapshot: SnapshotAssertion) -> None:
    assert (
        refusal(then(repair(power=True), SAME, PermitAnswered(False, "job llama has n2")))
        == snapshot
    )
    late = after(silent(repair(power=True), 0), PermitAnswered(True, "1 of 2 repairs"), seconds=190)
    assert isinstance(decide(late, at(190)), ProbeNode)
    assert then(late, GONE, seconds=191) == ORDER


# --- what it comes to


def test_it_is_done_with_a_new_boot_id_and_a_healthy_node(snapshot: SnapshotAssertion) -> None:
    state = after(repair(power=True), SAME, SWITCHED)
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot(name="waiting")
    state = after(state, WaitEnded(), GONE, WaitEnded(), BOOTED, seconds=300)
    assert isinstance(decide(state, at(300)), RunDiag)
    outcome, verdict, reason = end(then(state, PASSED_AFTER_BOOT, seconds=320))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY) and reason == snapshot(name="done")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(
            {"program": "ipmitool", "exit_code": 1, "output": "x\nno session\n"}, id="failed"
        ),
        pytest.param({"exit_code": -9}, id="killed"),
        pytest.param({"missing": "ipmitool cannot be run"}, id="missing"),
        pytest.param({"missing": 1}, id="missing-unreadable"),
        pytest.param({"exit_code": True}, id="exit-code-unreadable"),
        pytest.param({}, id="empty"),
    ],
)
def test_a_command_that_failed_is_refused_in_a_sentence(
    answer: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    done = OrderDone({"outcome": "done", **answer})
    assert refusal(then(repair(power=True), SAME, done)) == snapshot


@pytest.mark.parametrize(
    "lost",
    [NoAnswer("the worker died"), OrderDone({"outcome": "?"})],
    ids=["no-answer", "unreadable"],
)
def test_a_command_of_unknown_fate_is_watched_and_never_repeated(
    lost: RepairEvent,
    snapshot: SnapshotAssertion,
) -> None:
    state = after(repair(power=True), SAME, lost)
    step = decide(state, at(0))
    assert isinstance(step, WaitForNode) and step.reason == snapshot(name="waiting")
    for seconds in range(0, 1400, 5):
        state = after(state, WaitEnded(), SAME if seconds % 2 else GONE, seconds=seconds)
        assert isinstance(decide(state, at(seconds)), WaitForNode)
    stays = after(state, WaitEnded(), SAME, seconds=1400)
    assert refusal(decide(stays, state.deadline)) == snapshot(name="no-effect")
    outcome, _, reason = end(decide(after(state, GONE, seconds=1400), state.deadline))
    assert outcome == "ambiguous" and reason == snapshot(name="unknown")
    assert isinstance(then(state, WaitEnded(), BOOTED, seconds=1400), RunDiag)


def unread_boot(uptime: Any) -> RepairState:
    """A node of unknown boot id that answers 490 s after it fell silent, with this uptime."""
    state = after(silent(repair(power=True), 0), SWITCHED, seconds=181)
    assert state.boot_id == ""
    answer = NodeProbed(probe(boot_id="boot-7", stamp=uptime))
    return after(state, WaitEnded(), GONE, WaitEnded(), answer, seconds=490)


@pytest.mark.parametrize(
    ("uptime", "proven"),
    [
        (60.0, True),
        (480.0, True),
        (500.0, False),
        (1e6, False),
        (None, False),
        ("?", False),
        (True, False),
        (-1, False),
    ],
)
def test_an_unread_boot_ended_if_uptime_is_below_the_silence(uptime: Any, proven: bool) -> None:
    state = unread_boot(uptime)
    if proven:
        assert isinstance(decide(state, at(490)), RunDiag)
    else:
        decision = decide(state, at(490))
        assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
        assert isinstance(
            then(state, WaitEnded(), NodeProbed(probe(boot_id="boot-8", stamp=9e5)), seconds=500),
            RunDiag,
        )


def test_the_log_tells_whether_an_unread_boot_has_ended(snapshot: SnapshotAssertion) -> None:
    assert [unread_boot(uptime).log[-1].reason for uptime in (60.0, 500.0)] == snapshot


def test_an_earlier_boot_id_is_kept_for_a_node_without_one() -> None:
    state = after(
        silent(repair(power=True, boot_id="boot-1"), 0), SWITCHED, WaitEnded(), seconds=181
    )
    assert isinstance(then(state, SAME, seconds=400), WaitForNode)
    assert isinstance(
        then(state, NodeProbed(probe(boot_id="boot-2", stamp=1e6)), seconds=400), RunDiag
    )
    # it has rebooted meanwhile
    assert isinstance(then(repair(power=True, boot_id="boot-0"), SAME), RunDiag)


# --- cancelling


def test_a_cancel_ends_what_has_not_begun() -> None:
    for state in (
        repair(power=True),
        after(repair(power=True), SAME),
        silent(repair(power=True), 0),
        after(repair(), SAME, NO_REBOOT),
    ):
        assert (
            refusal(then(state, RepairCancelRequested("enough"), seconds=200))
            == "cancelled: enough"
        )


@pytest.mark.parametrize("further", [(), (SAME,), (GONE,)])
def test_a_cancel_after_a_reboot_order_lets_it_end_without_power(
    further: tuple[RepairEvent, ...],
) -> None:
    state = after(repair(), SAME, REBOOT_OK, GONE)
    state = after(state, GONE, *further, RepairCancelRequested("enough"), seconds=1500)
    for seconds in (1505, 1800):
        state = after(state, WaitEnded(), SAME, seconds=seconds)
        assert isinstance(decide(state, at(seconds)), WaitForNode)
    assert isinstance(then(state, WaitEnded(), BOOTED, seconds=1900), RunDiag)
    early = after(repair(), SAME, REBOOT_OK, GONE, RepairCancelRequested("enough"))
    assert not after(early, GONE, seconds=1500).power


def test_a_cancel_after_a_reboot_no_longer_waits_for_the_person() -> None:
    state = after(repair(mode="ask", approved_by="ada"), SAME, REBOOT_OK)
    state = after(state, SAME, SAME, seconds=1500)
    assert isinstance(decide(state, at(1500)), AskPerson)
    assert isinstance(then(state, RepairCancelRequested("enough"), seconds=1501), ProbeNode)


def test_gpus_are_never_reset_by_the_power() -> None:
    state = begin(
        id="r",
        fleet="gpus",
        node="n2",
        strategy=Strategy.RESET_GPU,
        gpus=(bus(0),),
        reason="x",
        by="ada",
        rules=rules(has_power_command=True),
        now=at(0),
    )
    assert isinstance(then(state, SAME), ResetGpus)
    assert isinstance(decide(silent(state, 0), at(181)), WaitForNode)


def test_the_step_goes_through_json() -> None:
    assert DECISIONS.validate_json(DECISIONS.dump_json(ORDER)) == ORDER
