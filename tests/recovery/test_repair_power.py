"""When a repair cycles the power of a node, what speaks against it, and what proves that it did."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import TypeAdapter

from relaunch.evidence.findings import Verdict
from relaunch.repair.machine import begin, decide
from relaunch.repair.state import (
    AskPerson,
    NoAnswer,
    NodeProbed,
    OrderDone,
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
ORDER = PowerCycleNode(timedelta(minutes=1), "Xid 79. Power-cycling n2")


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


def silent(state: RepairState, since: float, *, seconds: float = 181) -> RepairState:
    """As it is once the node has not answered for so long."""
    state = after(state, GONE, WaitEnded(), seconds=since)
    return after(state, GONE, seconds=since + seconds)


# --- when


def test_a_person_may_order_a_power_cycle_and_a_look_comes_first() -> None:
    assert decide(repair(power=True), at(0)) == ProbeNode(
        timedelta(seconds=20), None, "checking n2 before the order to power-cycle n2: Xid 79"
    )
    assert then(repair(power=True), SAME) == ORDER


def test_it_follows_a_reboot_that_the_node_cannot_carry_out() -> None:
    state = after(repair(approved_by="bo"), SAME)
    assert isinstance(decide(state, at(1)), RebootNode)
    state = after(state, NO_REBOOT, seconds=1)
    assert state.log[-1].reason == (
        "n2 refused the order to reboot n2 (cannot_reboot): sudo: "
        "a password is required; power-cycling n2 instead"
    )
    assert isinstance(decide(state, at(1)), ProbeNode), "it is probed again"
    assert then(state, SAME, seconds=2) == replace(
        ORDER, reason="Xid 79. Power-cycling n2 (approved by bo)"
    )


def test_without_a_power_command_a_refused_reboot_is_final() -> None:
    state = replace(repair(), rules=rules())
    assert (
        refusal(then(state, SAME, NO_REBOOT))
        == "n2 refused the order to reboot n2 (cannot_reboot): sudo: a password is required"
    )
    assert isinstance(decide(silent(state, 0), at(181)), WaitForNode)


def test_another_refusal_is_not_a_reason_for_it() -> None:
    assert (
        refusal(then(repair(), SAME, OrderRefused("busy", "job llama runs here")))
        == "n2 refused the order to reboot n2 (busy): job llama runs here"
    )


def test_it_comes_for_a_node_that_is_silent_for_three_minutes() -> None:
    state = after(repair(), GONE, WaitEnded())
    assert isinstance(then(state, GONE, seconds=179), WaitForNode)
    assert isinstance(
        then(state, GONE, WaitEnded(), SAME, WaitEnded(), GONE, seconds=181),
        WaitForNode | RebootNode,
    ), "it has answered meanwhile"
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
    assert state.deadline == at(1510 + 1500), "it is proven within the same time"


def test_a_node_that_ignores_a_reboot_has_its_power_cycled() -> None:
    state = after(repair(), SAME, REBOOT_OK)
    state = after(state, SAME, seconds=1500)
    assert "still runs boot id boot-1; power-cycling n2 instead" in state.log[-1].reason
    assert then(state, SAME, seconds=1501) == ORDER
    assert "in use: job llama" in refusal(
        then(state, NodeProbed(probe(jobs=[{"job": "llama", "generation": 2}])), seconds=1501)
    )
    assert isinstance(then(state, BOOTED, seconds=1501), RunDiag), "it came back after all"


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


@pytest.mark.parametrize("power", [True, False])
def test_a_node_in_use_keeps_its_power(power: bool) -> None:
    busy = NodeProbed(probe(jobs=[{"job": "llama", "generation": 3}]))
    assert refusal(then(repair(power=power), busy)) == "n2 is in use: job llama generation 3"


def test_a_power_cycle_and_the_reboot_before_it_both_count() -> None:
    once = NodeProbed(probe(reboots=journal((3600, "r1"))))
    assert then(repair(power=True), once) == ORDER
    state = after(repair(), once, REBOOT_OK)
    assert "was already rebooted 2 times within 3d" in refusal(
        then(after(state, once, seconds=1500), once, seconds=1501)
    )
    state = silent(after(state, GONE, seconds=1400), 1500)
    assert "was already rebooted 2 times within 3d" in refusal(decide(state, at(1681))), (
        "the journal as it was read last"
    )
    assert then(after(repair(), once, NO_REBOOT), once) == ORDER, "that one was none"


def test_who_only_observes_and_who_wants_to_be_asked() -> None:
    expected = "repairs: observe; otherwise relaunch would power-cycle n2: Xid 79"
    assert refusal(then(repair(power=True, mode="observe"), SAME)) == expected
    assert refusal(decide(silent(repair(power=True, mode="observe"), 0), at(181))) == expected
    assert then(repair(power=True, mode="ask", approved_by="ada"), SAME) == replace(
        ORDER, reason="Xid 79. Power-cycling n2 (approved by ada)"
    )


def test_the_approver_of_a_reboot_is_asked_about_the_power() -> None:
    state = after(repair(mode="ask", approved_by="ada"), SAME, NO_REBOOT)
    step = then(state, SAME)
    assert isinstance(step, AskPerson) and step.question.startswith(
        "Power-cycle n2 (0 reboots in its journal)?"
    )
    asked = silent(repair(mode="ask"), 0)
    assert isinstance(decide(asked, at(181)), AskPerson)
    state = after(asked, PersonAnswered(True, "bo", ""), seconds=300)
    assert isinstance(decide(state, at(300)), ProbeNode)
    assert then(state, GONE, seconds=301) == replace(
        ORDER, reason="Xid 79. Power-cycling n2 (approved by bo)"
    )


def test_what_the_fleet_does_not_permit_is_refused() -> None:
    reason = "fleet gpus did not permit the order to power-cycle n2: job llama has n2"
    assert (
        refusal(then(repair(power=True), SAME, PermitAnswered(False, "job llama has n2"))) == reason
    )
    late = after(silent(repair(power=True), 0), PermitAnswered(True, "1 of 2 repairs"), seconds=190)
    assert isinstance(decide(late, at(190)), ProbeNode)
    assert then(late, GONE, seconds=191) == ORDER


# --- what it comes to


def test_it_is_done_with_a_new_boot_id_and_a_healthy_node() -> None:
    state = after(repair(power=True), SAME, SWITCHED)
    assert decide(state, at(0)) == WaitForNode(
        timedelta(seconds=5), "waiting for n2 to boot after its power cycle"
    )
    state = after(state, WaitEnded(), GONE, WaitEnded(), BOOTED, seconds=300)
    assert isinstance(decide(state, at(300)), RunDiag)
    outcome, verdict, reason = end(then(state, PASSED_AFTER_BOOT, seconds=320))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY) and reason.startswith(
        "n2 was power-cycled and is healthy: "
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            {"program": "ipmitool", "exit_code": 1, "output": "x\nno session\n"},
            "ipmitool failed to power-cycle n2: exit code 1: no session",
        ),
        (
            {"exit_code": -9},
            "the power command failed to power-cycle n2: exit code -9: no output",
        ),
        (
            {"missing": "ipmitool cannot be run"},
            "cannot power-cycle n2: ipmitool cannot be run",
        ),
        ({"missing": 1}, "cannot power-cycle n2: a program is missing"),
        (
            {"exit_code": True},
            "the exit code of the power command, which power-cycles n2, cannot be read",
        ),
        ({}, "the exit code of the power command, which power-cycles n2, cannot be read"),
    ],
)
def test_a_command_that_failed_is_refused_in_a_sentence(
    answer: dict[str, Any], reason: str
) -> None:
    assert (
        refusal(then(repair(power=True), SAME, OrderDone({"outcome": "done", **answer}))) == reason
    )


@pytest.mark.parametrize("lost", [NoAnswer("the worker died"), OrderDone({"outcome": "?"})])
def test_a_command_of_unknown_fate_is_watched_and_never_repeated(
    lost: RepairEvent,
) -> None:
    state = after(repair(power=True), SAME, lost)
    step = decide(state, at(0))
    assert isinstance(step, WaitForNode) and step.reason.startswith(
        "whether n2 was power-cycled is not known yet: "
    )
    for seconds in range(0, 1400, 5):
        state = after(state, WaitEnded(), SAME if seconds % 2 else GONE, seconds=seconds)
        assert isinstance(decide(state, at(seconds)), WaitForNode)
    stays = after(state, WaitEnded(), SAME, seconds=1400)
    assert (
        refusal(decide(stays, state.deadline))
        == "the order to power-cycle n2 had no effect: it still runs boot id boot-1"
    )
    assert end(decide(after(state, GONE, seconds=1400), state.deadline))[::2] == (
        "ambiguous",
        "whether the order to power-cycle n2 was carried out is unknown: no route to host",
    )
    assert isinstance(then(state, WaitEnded(), BOOTED, seconds=1400), RunDiag)


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
    state = after(silent(repair(power=True), 0), SWITCHED, seconds=181)
    assert state.boot_id == ""
    state = after(
        state,
        WaitEnded(),
        GONE,
        WaitEnded(),
        NodeProbed(probe(boot_id="boot-7", stamp=uptime)),
        seconds=490,
    )
    if proven:
        assert isinstance(decide(state, at(490)), RunDiag)
        assert "boot id boot-7, its uptime is below its silence" in state.log[-1].reason
    else:
        assert decide(state, at(490)) == WaitForNode(
            timedelta(seconds=5), "n2 still runs boot id boot-7"
        )
        assert isinstance(
            then(state, WaitEnded(), NodeProbed(probe(boot_id="boot-8", stamp=9e5)), seconds=500),
            RunDiag,
        )


def test_an_earlier_boot_id_is_kept_for_a_node_without_one() -> None:
    state = after(
        silent(repair(power=True, boot_id="boot-1"), 0), SWITCHED, WaitEnded(), seconds=181
    )
    assert isinstance(then(state, SAME, seconds=400), WaitForNode)
    assert isinstance(
        then(state, NodeProbed(probe(boot_id="boot-2", stamp=1e6)), seconds=400), RunDiag
    )
    assert isinstance(then(repair(power=True, boot_id="boot-0"), SAME), RunDiag), (
        "it has rebooted meanwhile"
    )


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
