"""What a repair does next, by what came back from the node and from people."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import TypeAdapter
from syrupy.assertion import SnapshotAssertion

from relaunch.converter import shared_converter
from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.repair.machine import (
    ASKING_PROBE_INTERVALS,
    begin,
    decide,
    explain_settled,
    find_asking_interval,
    step,
)
from relaunch.repair.state import (
    AskPerson,
    FinishRepair,
    NoAnswer,
    NodeDiagnosed,
    NodeProbed,
    OrderDone,
    OrderRefused,
    PermitAnswered,
    PersonAnswered,
    ProbeNode,
    RebootNode,
    RepairCancelRequested,
    RepairDecision,
    RepairEvent,
    RepairRules,
    RepairState,
    ResetGpus,
    RunDiag,
    Stage,
    TimeExpired,
    WaitEnded,
    WaitForNode,
)
from relaunch.spec.policy import RepairKind, Strategy
from tests.recovery.builders import at
from tests.recovery.nodes import FAULTY, NO_NVML, bus, diag, disk, gpu, journal, nvml, probe
from tests.recovery.test_links import port

STATES: TypeAdapter[RepairState] = TypeAdapter(RepairState)
RESET_OK = OrderDone(
    {
        "outcome": "done",
        "exit_code": 0,
        "output": "GPU 0000:05:00 was successfully reset.\nAll done.\n",
        "took": 4.0,
    }
)
REBOOT_OK = OrderDone({"outcome": "done", "boot_id": "boot-1"})
SAME, BOOTED = NodeProbed(probe()), NodeProbed(probe(boot_id="boot-2"))
PASSED = NodeDiagnosed(diag())
PASSED_AFTER_BOOT = NodeDiagnosed(diag(boot_id="boot-2"))


def rules(**changes: Any) -> RepairRules:
    values = {
        "mode": "act",
        "level": 1,
        "expected_gpus": 8,
        "diag_timeout": timedelta(minutes=3),
        "answer_timeout": timedelta(minutes=10),
    }
    return RepairRules(**{**values, **changes})


def repair(
    strategy: Strategy = Strategy.REBOOT_NODE,
    *,
    gpus: tuple[str, ...] = (),
    approved_by: str = "",
    **changes: Any,
) -> RepairState:
    return begin(
        id="repair/gpus/n2/1",
        fleet="gpus",
        node="n2",
        strategy=strategy,
        gpus=gpus,
        reason="Xid 79 on GPU 0000:05:00",
        by="job llama",
        rules=rules(**changes),
        now=at(0),
        approved_by=approved_by,
    )


def reset(**changes: Any) -> RepairState:
    return repair(Strategy.RESET_GPU, gpus=changes.pop("gpus", ("0000:05:00",)), **changes)


def after(state: RepairState, *events: RepairEvent, seconds: float = 0) -> RepairState:
    return step(state, events, at(seconds), catalog())[0]


def then(state: RepairState, *events: RepairEvent, seconds: float = 0) -> RepairDecision:
    return step(state, events, at(seconds), catalog())[1]


def end(decision: RepairDecision) -> tuple[str, Verdict, str]:
    assert isinstance(decision, FinishRepair), decision
    return decision.outcome, decision.verdict, decision.reason


def refusal(decision: RepairDecision) -> str:
    outcome, verdict, reason = end(decision)
    assert (outcome, verdict) == ("refused", Verdict.UNKNOWN)
    return reason


# --- before the order


def test_a_repair_looks_first(snapshot: SnapshotAssertion) -> None:
    decision = decide(reset(), at(0))
    assert decision == ProbeNode(timedelta(seconds=20), None, decision.reason)
    assert decision.reason == snapshot


def test_a_repair_is_only_begun_for_what_repairs() -> None:
    with pytest.raises(ValueError, match="REPLACE_NODE repairs no node"):
        repair(Strategy.REPLACE_NODE)


def test_a_free_node_is_rebooted_on_the_boot_that_was_read(snapshot: SnapshotAssertion) -> None:
    decision = then(repair(), SAME)
    assert decision == RebootNode("boot-1", decision.reason)
    assert decision.reason == snapshot


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param((), (), id="all"),
        pytest.param(("0000:05:00",), (bus(0),), id="one"),
        pytest.param(("7", "00000000:06:00.0"), (bus(7), bus(1)), id="two"),
    ],
)
def test_gpus_are_reset_by_bus_id(
    names: tuple[str, ...], expected: tuple[str, ...], snapshot: SnapshotAssertion
) -> None:
    decision = then(reset(gpus=names), SAME)
    assert isinstance(decision, ResetGpus)
    assert (decision.boot_id, decision.gpus, decision.timeout) == (
        "boot-1",
        expected,
        timedelta(minutes=2),
    )
    assert decision.reason == snapshot


def test_an_unknown_gpu_is_not_reset(snapshot: SnapshotAssertion) -> None:
    assert refusal(then(reset(gpus=("12", bus(0))), SAME)) == snapshot


def test_a_silent_node_is_looked_at_again_until_the_deadline(snapshot: SnapshotAssertion) -> None:
    state = after(repair(), NoAnswer("connection timed out"))
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot(name="waiting")
    assert isinstance(then(state, WaitEnded()), ProbeNode)
    outcome, verdict, reason = end(decide(state, state.deadline))
    assert (outcome, verdict) == ("ambiguous", Verdict.UNKNOWN)
    assert reason == snapshot(name="silent")
    assert end(decide(repair(), at(1500)))[2] == snapshot(name="not-probed")


def test_an_answer_without_a_boot_id_is_none(snapshot: SnapshotAssertion) -> None:
    decision = then(repair(), NodeProbed(probe(boot_id=None)))
    assert isinstance(decision, WaitForNode) and decision.reason == snapshot


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"jobs": [{"job": "llama", "generation": 3}]}, id="job"),
        pytest.param({"gpus": nvml(gpu(0, processes=[{"pid": 4242}]))}, id="process"),
        pytest.param({"held": {"by": "diagnose", "id": "r7"}}, id="diagnose"),
        pytest.param({"jobs": None}, id="unreadable"),
    ],
)
def test_a_node_in_use_is_left_alone(changes: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    busy = NodeProbed(probe(**changes))
    reason = refusal(then(repair(Strategy.RESET_GPU), busy))
    assert reason == snapshot
    assert refusal(then(repair(Strategy.REBOOT_NODE), busy)) == reason


@pytest.mark.parametrize("action", [2, 5, 7])
def test_a_reset_is_refused_where_the_driver_asks_for_more(
    action: int, snapshot: SnapshotAssertion
) -> None:
    asked = NodeProbed(probe(gpus=nvml(gpu(3, recovery_action=action))))
    assert refusal(then(reset(), asked)) == snapshot
    assert isinstance(then(repair(), asked), RebootNode)
    assert isinstance(
        then(reset(), NodeProbed(probe(gpus=nvml(gpu(0, recovery_action=1))))), ResetGpus
    )


def test_a_node_is_rebooted_only_so_often(snapshot: SnapshotAssertion) -> None:
    often = NodeProbed(probe(reboots=journal((3600, "r1"), (7200, "r2"), (4 * 86400, "r0"))))
    assert refusal(then(repair(), often)) == snapshot
    assert isinstance(then(repair(max_reboots=3), often), RebootNode)
    assert isinstance(then(reset(), often), ResetGpus)
    assert isinstance(
        then(repair(), NodeProbed(probe(reboots=journal((3600, "r1"), (4 * 86400, "r0"))))),
        RebootNode,
    )


def test_a_journal_that_cannot_be_read_is_no_leave_to_reboot(snapshot: SnapshotAssertion) -> None:
    assert refusal(then(repair(), NodeProbed(probe(reboots=[{"at": "?"}])))) == snapshot


@pytest.mark.parametrize("wall", [0.0, 4e9, "?"])
def test_a_clock_that_is_wrong_forgets_no_reboot(wall: Any) -> None:
    recent = [{"at": at(-600).timestamp(), "id": "r", "reason": "", "boot_id": "b"}] * 2
    assert "rebooted 2 times" in refusal(
        then(repair(), NodeProbed(probe(wall=wall, reboots=recent)))
    )


def test_an_observer_learns_what_would_have_been_done(snapshot: SnapshotAssertion) -> None:
    assert refusal(then(repair(mode="observe", approved_by="ada"), SAME)) == snapshot


def test_what_the_fleet_does_not_permit_is_refused_in_its_words(
    snapshot: SnapshotAssertion,
) -> None:
    assert refusal(
        then(repair(), SAME, PermitAnswered(False, "the breaker of fleet gpus is open"))
    ) == snapshot(name="reboot")
    assert refusal(then(reset(), SAME, PermitAnswered(False, ""))) == snapshot(
        name="reset-without-reason"
    )


def test_a_node_is_looked_at_again_where_the_fleet_took_its_time(
    snapshot: SnapshotAssertion,
) -> None:
    state = after(
        repair(mode="ask", approved_by="ada"), SAME, PermitAnswered(True, "1 of 2 repairs")
    )
    assert isinstance(decide(state, at(0)), ProbeNode)
    assert state.log[-1].reason == snapshot(name="log")
    assert isinstance(then(state, SAME), RebootNode)
    assert refusal(
        then(state, NodeProbed(probe(jobs=[{"job": "llama", "generation": 2}])))
    ) == snapshot(name="in-use")
    # it has rebooted meanwhile
    assert isinstance(then(state, BOOTED), RunDiag)


def test_before_a_late_second_order_the_first_is_asked_about() -> None:
    state = after(
        reset(), SAME, NoAnswer("x"), WaitEnded(), SAME, PermitAnswered(True, "1 of 2 repairs")
    )
    assert state.stage is Stage.PROVING
    assert isinstance(then(state, SAME), ResetGpus)


def test_a_permission_for_nothing_that_is_due_changes_nothing() -> None:
    for state in (repair(), after(repair(), SAME, REBOOT_OK), after(repair(mode="ask"), SAME)):
        assert after(state, PermitAnswered(False, "no"), PermitAnswered(True, "yes")) == state


def test_a_reboot_of_an_earlier_attempt_is_not_ordered_again() -> None:
    mine = NodeProbed(probe(boot_id="boot-1", reboots=journal((60, "repair/gpus/n2/1"))))
    assert isinstance(then(repair(), mine), RunDiag)
    still = NodeProbed(probe(boot_id="boot-0", reboots=journal((60, "repair/gpus/n2/1"))))
    state = after(repair(), still, RepairCancelRequested("enough"), WaitEnded())
    assert state.stage is Stage.PROVING
    assert isinstance(then(state, NodeProbed(probe(boot_id="boot-0")), seconds=600), WaitForNode)
    assert isinstance(then(reset(), mine), ResetGpus)


def test_what_this_repair_ordered_earlier_is_waited_for(snapshot: SnapshotAssertion) -> None:
    held = NodeProbed(probe(held={"by": "reset-gpus", "id": "repair/gpus/n2/1"}))
    state = after(reset(), held)
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot(name="waiting")
    assert refusal(decide(state, state.deadline)) == snapshot(name="deadline")


# --- people


def test_a_person_is_asked_with_details_then_the_node_is_read(snapshot: SnapshotAssertion) -> None:
    state = after(repair(mode="ask"), NodeProbed(probe(reboots=journal((600, "r1")))))
    asked = decide(state, at(0))
    assert isinstance(asked, AskPerson) and asked.until == at(600)
    assert asked.question == snapshot(name="question")
    assert decide(state, at(30)) == asked
    state = after(state, PersonAnswered(True, "ada", "go on"), WaitEnded(), seconds=60)
    assert isinstance(decide(state, at(60)), ProbeNode)
    decision = then(state, SAME, seconds=60)
    assert decision == RebootNode("boot-1", decision.reason)
    assert decision.reason == snapshot(name="order")
    assert refusal(
        then(state, NodeProbed(probe(jobs=[{"job": "llama", "generation": 1}])), seconds=60)
    ) == snapshot(name="in-use")


def test_an_approval_of_another_repair_approves_nothing() -> None:
    asked = after(repair(mode="ask"), SAME)
    question = decide(asked, at(0))
    others: tuple[RepairKind, ...] = ("reset-gpus", "power-cycle")
    for other in others:
        state = after(asked, PersonAnswered(True, "ada", "", other), WaitEnded())
        assert decide(state, at(0)) == question and state.approved_by == ""
        assert state.log[-1].reason.startswith("ada approved another repair")
    state = after(asked, PersonAnswered(True, "ada", "", "reboot"))
    assert state.approved_by == "ada" and isinstance(decide(state, at(0)), ProbeNode)


def test_many_gpus_are_counted_in_a_question(snapshot: SnapshotAssertion) -> None:
    decision = then(reset(mode="ask", gpus=tuple(map(bus, range(10)))), SAME)
    assert isinstance(decision, AskPerson) and decision.question == snapshot(name="10-gpus")
    everything = then(reset(mode="ask", gpus=()), SAME)
    assert isinstance(everything, AskPerson) and everything.question == snapshot(name="all-gpus")


def test_a_person_who_has_approved_already_is_not_asked() -> None:
    assert isinstance(then(repair(mode="ask", approved_by="ada"), SAME), RebootNode)


def test_a_person_may_say_no(snapshot: SnapshotAssertion) -> None:
    asked = after(repair(mode="ask"), SAME)
    assert refusal(then(asked, PersonAnswered(False, "ada", "the owner is at it"))) == snapshot(
        name="no"
    )
    assert refusal(then(asked, PersonAnswered(False, "", ""))) == snapshot(name="no-without-reason")


def test_a_request_that_is_not_answered_in_time_is_refused(snapshot: SnapshotAssertion) -> None:
    asked = after(repair(mode="ask"), SAME)
    reason = refusal(decide(asked, at(600)))
    assert reason == snapshot
    assert refusal(then(asked, TimeExpired(), seconds=600)) == reason
    assert refusal(then(asked, PersonAnswered(True, "ada", ""), seconds=601)) == reason


def test_a_person_has_no_longer_than_the_repair() -> None:
    decision = then(repair(mode="ask", answer_timeout=timedelta(hours=12)), SAME)
    assert isinstance(decision, AskPerson) and decision.until == at(25 * 60)


def test_a_node_that_rebooted_while_a_person_thought_is_examined(
    snapshot: SnapshotAssertion,
) -> None:
    state = after(repair(mode="ask"), SAME, PersonAnswered(True, "ada", ""), BOOTED, seconds=60)
    assert isinstance(decide(state, at(60)), RunDiag)
    assert end(then(state, PASSED_AFTER_BOOT, seconds=60))[2] == snapshot


PENDING = {"remapped": {"pending": True, "failed": False}}
FAULT = NodeProbed(probe(gpus=nvml(gpu(0, **PENDING))))
UNREAD = NodeProbed(probe(gpus=NO_NVML))
OWN = {"by": "reset-gpus", "id": "repair/gpus/n2/1"}


@pytest.mark.parametrize(
    ("by_examination", "found", "probed", "settled"),
    [
        pytest.param(False, SAME, BOOTED, "n2 was rebooted meanwhile", id="rebooted"),
        pytest.param(True, FAULT, SAME, "a probe finds no fault of n2 any more", id="recovered"),
        pytest.param(True, UNREAD, SAME, "a probe finds no fault of n2 any more", id="unread"),
        pytest.param(True, None, SAME, "a probe finds no fault of n2 any more", id="silent"),
        pytest.param(True, SAME, SAME, "", id="what only an examination has found"),
        pytest.param(True, FAULT, FAULT, "", id="still faulty"),
        pytest.param(True, FAULT, UNREAD, "", id="not read"),
        pytest.param(False, FAULT, SAME, "", id="a person has ordered it"),
        pytest.param(True, FAULT, NodeProbed(probe(boot_id=...)), "", id="no boot id"),
        pytest.param(True, FAULT, NodeProbed(probe(held=OWN)), "", id="its own order"),
        pytest.param(True, FAULT, NoAnswer("no route"), "", id="no answer"),
        pytest.param(True, FAULT, WaitEnded(), "", id="no probe"),
    ],
)
def test_a_question_that_a_probe_makes_needless_is_withdrawn(
    by_examination: bool, found: NodeProbed | None, probed: RepairEvent, settled: str
) -> None:
    first = reset(mode="ask", by_examination=by_examination)
    asked = after(first, SAME if found is None else found)
    assert asked.stage is Stage.ASKING, decide(asked, at(0))
    if found is None:
        asked = replace(asked, silent_since=at(0))
    assert explain_settled(asked, probed, catalog()) == settled
    state = after(asked, probed, seconds=60)
    if not settled:
        assert state.stage is Stage.ASKING and state.ask_until == asked.ask_until
        return
    assert state.ask_until is None
    assert state.log[len(asked.log)].reason == f"{settled}; the question is withdrawn"
    decision = decide(state, at(60))
    if probed is BOOTED:
        assert isinstance(decision, RunDiag) and state.proven_at == at(60)
    else:
        assert refusal(decision) == settled and state.recovered


def test_the_longer_a_question_is_open_the_rarer_are_probes() -> None:
    shortest, longest = ASKING_PROBE_INTERVALS
    asked_for = [timedelta(0), 4 * shortest, 8 * shortest, 4 * longest, timedelta(days=9)]
    waits = [shortest, shortest, 2 * shortest, longest, longest]
    assert [find_asking_interval(one) for one in asked_for] == waits


def test_a_probe_settles_only_a_question() -> None:
    assert explain_settled(reset(mode="ask"), SAME, catalog()) == ""


def test_an_answer_without_a_question_changes_nothing() -> None:
    state = repair()
    for fact in (
        PersonAnswered(True, "ada", ""),
        TimeExpired(),
        RESET_OK,
        OrderRefused("busy", ""),
        PASSED,
    ):
        assert after(state, fact) == state
    asked = after(repair(mode="ask"), SAME)
    assert after(asked, SAME, NoAnswer("x")) == asked


# --- a reset


def test_a_reset_is_done_only_when_the_gpus_are_healthy_after_it(
    snapshot: SnapshotAssertion,
) -> None:
    state = after(reset(), SAME, RESET_OK, seconds=10)
    probe_step = decide(state, at(40))
    assert isinstance(probe_step, ProbeNode) and probe_step.kernel_since is None
    state = after(state, SAME, seconds=40)
    decision = decide(state, at(40))
    assert isinstance(decision, RunDiag) and (decision.level, decision.timeout) == (
        1,
        timedelta(minutes=3),
    )
    outcome, verdict, reason = end(then(state, PASSED, seconds=50))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY)
    assert reason == snapshot


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"missing": "nvidia-smi is not on its PATH"}, id="missing"),
        pytest.param({"missing": 1}, id="missing-unreadable"),
        pytest.param({"exit_code": 3, "output": "one\nGPU is in use\n\n"}, id="failed"),
        pytest.param({"exit_code": None}, id="unfinished"),
        pytest.param({"exit_code": False}, id="exit-code-unreadable"),
    ],
)
def test_a_reset_that_failed_is_refused_in_the_words_of_its_tool(
    answer: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    assert refusal(then(reset(), SAME, OrderDone({"outcome": "done", **answer}))) == snapshot


@pytest.mark.parametrize(
    "lost",
    [NoAnswer("the worker died"), OrderDone({"outcome": "?"}), OrderRefused("boot_changed", "")],
    ids=["no-answer", "unreadable", "boot-changed"],
)
def test_a_reset_without_an_answer_is_checked_and_ordered_again(
    lost: RepairEvent, snapshot: SnapshotAssertion
) -> None:
    state = after(reset(), SAME, lost, WaitEnded())
    assert isinstance(decide(state, at(0)), ProbeNode)
    state = after(state, SAME)
    assert isinstance(decide(state, at(0)), ResetGpus)
    assert isinstance(then(state, RESET_OK), ProbeNode)
    outcome, _, reason = end(then(state, lost, WaitEnded(), SAME))
    assert outcome == "ambiguous"
    assert reason == snapshot


def test_a_reset_is_not_repeated_while_the_node_is_held(snapshot: SnapshotAssertion) -> None:
    state = after(reset(), SAME, NoAnswer("x"), WaitEnded())
    assert isinstance(
        then(state, NodeProbed(probe(held={"by": "reset-gpus", "id": state.id}))), WaitForNode
    )
    assert refusal(then(state, NodeProbed(probe(held={"by": "diagnose", "id": "r7"})))) == snapshot


def test_a_node_that_rebooted_instead_of_the_reset_is_examined(snapshot: SnapshotAssertion) -> None:
    state = after(reset(), SAME, OrderRefused("boot_changed", "", "boot-2"))
    assert isinstance(decide(state, at(0)), ProbeNode)
    state = after(state, BOOTED)
    assert isinstance(decide(state, at(0)), RunDiag)
    assert end(then(state, PASSED_AFTER_BOOT))[2] == snapshot


def test_a_node_may_refuse(snapshot: SnapshotAssertion) -> None:
    refused = OrderRefused("busy", "job llama runs here")
    assert refusal(then(reset(), SAME, refused)) == snapshot(name="reset")
    assert refusal(then(repair(), SAME, OrderRefused("cannot_reboot", ""))) == snapshot(
        name="reboot"
    )


def test_whether_a_reset_happened_is_not_known_at_the_deadline(snapshot: SnapshotAssertion) -> None:
    outcome, _, reason = end(decide(after(reset(), SAME, NoAnswer("gone")), at(1500)))
    assert outcome == "ambiguous" and reason == snapshot


# --- a reboot


def test_a_reboot_is_done_with_a_new_boot_id_and_a_healthy_node(
    snapshot: SnapshotAssertion,
) -> None:
    state = after(repair(), SAME, REBOOT_OK)
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot(name="waiting")
    state = after(
        state,
        WaitEnded(),
        NoAnswer("no route to host"),
        WaitEnded(),
        NoAnswer("no route to host"),
        WaitEnded(),
        seconds=200,
    )
    decision = decide(state, at(200))
    assert isinstance(decision, ProbeNode) and decision.kernel_since == timedelta(seconds=200)
    state = after(state, BOOTED, seconds=300)
    assert isinstance(decide(state, at(300)), RunDiag)
    outcome, verdict, reason = end(then(state, PASSED_AFTER_BOOT, seconds=320))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY)
    assert reason == snapshot(name="done")


def test_a_reboot_that_changed_nothing_is_refused_with_findings(
    snapshot: SnapshotAssertion,
) -> None:
    broken = NodeProbed(probe(boot_id="boot-2", disks=[disk(writable=False, reason="read-only")]))
    outcome, verdict, reason = end(then(repair(), SAME, REBOOT_OK, broken))
    assert (outcome, verdict) == ("refused", Verdict.UNHEALTHY)
    assert reason == snapshot(name="unwritable")
    outcome, verdict, reason = end(
        then(
            repair(level=2),
            SAME,
            REBOOT_OK,
            BOOTED,
            NodeDiagnosed(diag(FAULTY, 205, boot_id="boot-2")),
        )
    )
    assert (outcome, verdict) == (
        "refused",
        Verdict.UNHEALTHY,
    ) and reason == snapshot(name="dcgm")


def test_a_node_whose_examination_says_nothing_is_not_given_back(
    snapshot: SnapshotAssertion,
) -> None:
    state = after(repair(), SAME, REBOOT_OK, BOOTED)
    for fact in (
        NodeDiagnosed({"refused": "busy", "reason": "pid 7 uses it"}),
        OrderRefused("busy", "pid 7 uses it"),
    ):
        reason = refusal(then(state, fact, seconds=200))
        assert reason == snapshot(name="no-verdict")


def test_a_node_too_young_to_be_examined_is_asked_again(snapshot: SnapshotAssertion) -> None:
    state = after(
        repair(), SAME, REBOOT_OK, BOOTED, NodeDiagnosed(diag("", 3, boot_id="boot-2")), seconds=60
    )
    decision = decide(state, at(60))
    assert (
        isinstance(decision, WaitForNode)
        and decision.delay == timedelta(seconds=10)
        and decision.reason == snapshot
    )
    assert end(then(state, WaitEnded(), BOOTED, PASSED_AFTER_BOOT, seconds=70))[0] == "done"


def test_a_node_without_gpus_is_not_asked_for_a_diagnosis() -> None:
    bare = {"gpus": NO_NVML}
    state = after(repair(expected_gpus=0), NodeProbed(probe(**bare)), REBOOT_OK)
    assert end(then(state, NodeProbed(probe(boot_id="boot-2", **bare))))[:2] == (
        "done",
        Verdict.HEALTHY,
    )
    assert end(then(repair(level=0), SAME, REBOOT_OK, BOOTED))[:2] == ("done", Verdict.HEALTHY)


@pytest.mark.parametrize(
    "gpus", [NO_NVML, nvml(count=5), nvml(count=0)], ids=["hangs", "some", "none"]
)
def test_a_driver_has_three_minutes_after_a_boot(gpus: Any, snapshot: SnapshotAssertion) -> None:
    early = NodeProbed(probe(boot_id="boot-2", gpus=gpus))
    state = after(repair(), SAME, REBOOT_OK, early)
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=10), decision.reason)
    assert decision.reason == snapshot
    assert isinstance(then(state, WaitEnded(), BOOTED, seconds=20), RunDiag)
    late = then(state, WaitEnded(), early, seconds=180)
    assert isinstance(late, RunDiag) if gpus is NO_NVML else end(late)[1] is Verdict.UNHEALTHY


@pytest.mark.parametrize(
    "row",
    [
        port(0, state="DOWN", phys_state="Polling", rate=10.0),
        port(0, gone=True, state=..., before={"ago": 600.0, "rate": 400.0}),
    ],
    ids=["down", "missing"],
)
def test_links_have_three_minutes_after_a_boot(row: Any, snapshot: SnapshotAssertion) -> None:
    others = [port(index, before={"ago": 600.0, "rate": 400.0}) for index in range(1, 8)]
    early = NodeProbed(probe(boot_id="boot-2", links={"ports": [row, *others]}))
    state = after(repair(), SAME, REBOOT_OK, early)
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=10), decision.reason)
    assert decision.reason == snapshot
    assert isinstance(then(state, WaitEnded(), BOOTED, seconds=20), RunDiag)
    assert end(then(state, WaitEnded(), early, seconds=180))[:2] == ("refused", Verdict.UNHEALTHY)
    broken = probe(boot_id="boot-2", links={"ports": [row, *others]}, disks=[disk(writable=False)])
    assert isinstance(then(repair(), SAME, REBOOT_OK, NodeProbed(broken)), FinishRepair)


def test_an_order_that_never_arrived_is_repeated_after_a_minute(
    snapshot: SnapshotAssertion,
) -> None:
    state = after(repair(), SAME, NoAnswer("the worker died"), WaitEnded(), SAME)
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot(name="waiting")
    state = after(state, WaitEnded(), SAME, seconds=60)
    decision = decide(state, at(60))
    assert decision == RebootNode("boot-1", decision.reason)
    assert decision.reason == snapshot(name="second-order")
    state = after(state, NoAnswer("again"), WaitEnded(), SAME, WaitEnded(), seconds=120)
    state = after(state, SAME, seconds=240)
    decision = decide(state, at(240))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot(name="not-arrived")
    assert refusal(decide(state, state.deadline)) == snapshot(name="deadline")


@pytest.mark.parametrize("reboots", [journal((1, "repair/gpus/n2/1"), boot_id="boot-1"), None])
def test_an_order_that_arrived_or_may_have_is_not_given_again(reboots: Any) -> None:
    there = NodeProbed(probe(reboots=reboots))
    state = after(repair(), SAME, NoAnswer("the worker died"), WaitEnded(), there, WaitEnded())
    assert isinstance(then(state, there, seconds=600), WaitForNode)


def test_an_order_is_not_given_again_to_a_node_in_use(snapshot: SnapshotAssertion) -> None:
    state = after(repair(), SAME, NoAnswer("the worker died"), WaitEnded())
    assert (
        refusal(
            then(state, NodeProbed(probe(jobs=[{"job": "llama", "generation": 2}])), seconds=90)
        )
        == snapshot
    )


def test_a_refusal_that_claims_a_reboot_is_no_proof() -> None:
    state = after(repair(), SAME, OrderRefused("boot_changed", "", "boot-9"))
    assert isinstance(then(state, SAME), WaitForNode)
    assert isinstance(then(state, BOOTED), RunDiag)


def test_a_reboot_whose_end_was_not_seen_is_ambiguous(snapshot: SnapshotAssertion) -> None:
    outcome, _, reason = end(
        decide(after(repair(), SAME, REBOOT_OK, NoAnswer("no route")), at(1500))
    )
    assert outcome == "ambiguous" and reason == snapshot
    assert (
        end(then(after(repair(), SAME, REBOOT_OK), TimeExpired(), seconds=1500))[0] == "ambiguous"
    )


def test_a_node_that_repeats_an_ended_boot_has_proven_nothing(snapshot: SnapshotAssertion) -> None:
    state = after(
        repair(),
        SAME,
        REBOOT_OK,
        NodeProbed(probe(boot_id="boot-2", gpus=NO_NVML)),
        WaitEnded(),
        SAME,
    )
    assert state.stage is Stage.PROVING
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot


def test_a_node_that_reboots_while_examined_is_not_given_back(snapshot: SnapshotAssertion) -> None:
    state = after(
        repair(), SAME, REBOOT_OK, BOOTED, NoAnswer("connection reset"), WaitEnded(), seconds=300
    )
    reason = refusal(then(state, NodeProbed(probe(boot_id="boot-3")), seconds=400))
    assert reason == snapshot


def test_a_diagnosis_without_an_answer_is_tried_twice(snapshot: SnapshotAssertion) -> None:
    state = after(repair(), SAME, REBOOT_OK, BOOTED, NoAnswer("gone"))
    decision = decide(state, at(0))
    assert decision == WaitForNode(timedelta(seconds=5), decision.reason)
    assert decision.reason == snapshot(name="first")
    assert isinstance(then(state, WaitEnded()), ProbeNode)
    state = after(state, WaitEnded(), BOOTED)
    assert isinstance(decide(state, at(0)), RunDiag)
    reason = refusal(then(state, NoAnswer("gone")))
    assert reason == snapshot(name="second")


def test_an_examination_that_is_not_over_at_the_deadline(snapshot: SnapshotAssertion) -> None:
    state = after(repair(), SAME, REBOOT_OK, BOOTED)
    assert refusal(decide(state, at(1500))) == snapshot(name="waiting")
    state = after(state, NoAnswer("gone"))
    assert refusal(decide(state, at(1500))) == snapshot(name="no-answer")
    assert refusal(decide(replace(state, missing_answer="", wait_reason=""), at(1500))) == snapshot(
        name="not-examined"
    )


def test_nothing_lasts_longer_than_what_is_left(snapshot: SnapshotAssertion) -> None:
    late = after(repair(), SAME, REBOOT_OK, seconds=1498)
    decision = decide(late, at(1498))
    assert decision == WaitForNode(timedelta(seconds=2), decision.reason)
    assert decision.reason == snapshot
    decision = then(late, WaitEnded(), BOOTED, seconds=1499)
    assert isinstance(decision, RunDiag) and decision.timeout == timedelta(seconds=1)


# --- cancelling


def test_a_cancel_before_the_order_ends_the_repair(snapshot: SnapshotAssertion) -> None:
    for state in (
        repair(),
        after(repair(), SAME),
        after(repair(mode="ask"), SAME),
        after(repair(), NoAnswer("x")),
    ):
        assert refusal(then(state, RepairCancelRequested("job llama was cancelled"))) == snapshot(
            name="before"
        )
    assert refusal(then(repair(), RepairCancelRequested(""))) == snapshot(name="no-reason")


def test_a_cancel_while_the_order_is_under_way_awaits_the_proof() -> None:
    state = after(repair(), SAME, RepairCancelRequested("enough"), REBOOT_OK, WaitEnded())
    assert isinstance(decide(state, at(0)), ProbeNode)
    assert end(then(state, BOOTED, PASSED_AFTER_BOOT))[:2] == ("done", Verdict.HEALTHY)


def test_after_a_cancel_nothing_is_ordered_again(snapshot: SnapshotAssertion) -> None:
    state = after(repair(), SAME, NoAnswer("x"), RepairCancelRequested("enough"), WaitEnded())
    assert refusal(then(state, SAME, seconds=60)) == snapshot(name="reboot")
    outcome, _, reason = end(
        then(
            after(reset(), SAME, NoAnswer("x"), RepairCancelRequested("enough"), WaitEnded()), SAME
        )
    )
    assert outcome == "ambiguous" and reason == snapshot(name="reset")


def test_a_cancel_stops_a_second_order_that_was_not_given_yet() -> None:
    state = after(repair(), SAME, NoAnswer("x"), WaitEnded())
    state = after(state, SAME, seconds=60)
    assert isinstance(decide(state, at(60)), RebootNode)
    state = after(state, RepairCancelRequested("enough"), seconds=60)
    assert isinstance(decide(state, at(60)), ProbeNode)
    assert refusal(then(state, SAME, seconds=61)).startswith("cancelled: enough; ")


# --- what is kept


def test_an_ended_repair_learns_nothing_more() -> None:
    state = after(repair(), SAME, OrderRefused("busy", "x"))
    assert (
        state.outcome == "refused"
        and after(state, BOOTED, RepairCancelRequested("x"), WaitEnded()) == state
    )


def test_a_long_repair_keeps_its_first_and_its_newest_records(snapshot: SnapshotAssertion) -> None:
    state = after(repair(), NoAnswer("first"))
    for number in range(200):
        state = after(state, NoAnswer(f"number {number}"), seconds=number)
    assert len(state.log) == 60
    assert [state.log[0].reason, state.log[-1].reason] == snapshot


def test_an_unchanged_answer_for_an_hour_is_written_down_once() -> None:
    state = after(repair(), SAME, REBOOT_OK)
    for _ in range(100):
        state = after(state, WaitEnded(), SAME)
    assert len(state.log) < 6


async def test_the_largest_state_is_small_and_goes_through_temporal() -> None:
    rows = [
        gpu(
            index,
            ecc="?",
            remapped={"failed": True},
            processes=[{"pid": 9}] * 99,
            recovery_action=1,
            throttle=0xFF,
        )
        for index in range(64)
    ]
    lines = [
        f"[ 1.{number}] NVRM: Xid (PCI:0000:06:00): 79, pid=1, name={'x' * 900}{number}, gone"
        for number in range(200)
    ]
    reboots = [
        {"at": number, "id": "i" * 999, "reason": "b" * 9999, "boot_id": "c" * 128}
        for number in range(50)
    ]
    facts = probe(
        gpus=nvml(*rows),
        kernel={"lines": lines},
        reboots=reboots,
        held={"by": "x" * 999, "id": "y" * 999},
    )
    state = after(
        repair(mode="ask", gpus=tuple(map(bus, range(64)))),
        *(NoAnswer(f"{number}" + "z" * 900) for number in range(99)),
    )
    state = after(state, NodeProbed(facts))
    payloads = await shared_converter.encode([state])
    assert (await shared_converter.decode(payloads, [RepairState])) == [state]
    assert (
        len(payloads[0].data) < 64 * 1024
        and state.health is not None
        and len(state.health.findings) == 16
    )


@pytest.mark.parametrize(
    "value",
    [
        SAME,
        NoAnswer("x"),
        PASSED,
        REBOOT_OK,
        OrderRefused("busy", "x", None),
        WaitEnded(),
        PersonAnswered(True, "ada", ""),
        PermitAnswered(True, "x"),
        TimeExpired(),
        RepairCancelRequested("x"),
    ],
    ids=lambda value: value.kind,
)
async def test_facts_go_through_temporal(value: RepairEvent) -> None:
    (read,) = await shared_converter.decode(await shared_converter.encode([value]), [RepairEvent])
    assert read == value


@pytest.mark.parametrize(
    "value",
    [
        decide(repair(), at(0)),
        then(repair(), SAME),
        then(reset(), SAME),
        then(repair(mode="ask"), SAME),
        then(repair(), NoAnswer("x")),
        then(repair(), SAME, REBOOT_OK, BOOTED),
        then(repair(), RepairCancelRequested("x")),
    ],
    ids=lambda value: value.kind,
)
async def test_steps_go_through_temporal(value: RepairDecision) -> None:
    (read,) = await shared_converter.decode(
        await shared_converter.encode([value]), [RepairDecision]
    )
    assert read == value
