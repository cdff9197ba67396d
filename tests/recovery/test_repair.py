"""What a repair does next, by what came back from the node and from people."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import TypeAdapter

from relaunch.converter import shared_converter
from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.repair.machine import (
    Answered,
    AskPerson,
    CancelAsked,
    DeadlinePassed,
    Diagnose,
    Diagnosed,
    Fact,
    Finish,
    LookAgain,
    NoAnswer,
    OrderDone,
    OrderRefused,
    Permitted,
    Probe,
    Probed,
    Reboot,
    RepairRules,
    RepairState,
    ResetGpus,
    Slept,
    Stage,
    Step,
    begin,
    learn,
    next_step,
)
from relaunch.spec.policy import Strategy
from tests.recovery.builders import at
from tests.recovery.nodes import FAULTY, NO_NVML, bus, diag, disk, gpu, journal, nvml, probe

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
SAME, BOOTED = Probed(probe()), Probed(probe(boot_id="boot-2"))
PASSED = Diagnosed(diag())
PASSED_AFTER_BOOT = Diagnosed(diag(boot_id="boot-2"))


def rules(**changes: Any) -> RepairRules:
    values = {
        "mode": "act",
        "level": 1,
        "expected_gpus": 8,
        "examine_within": timedelta(minutes=3),
        "answer_within": timedelta(minutes=10),
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


def told(state: RepairState, *facts: Fact, seconds: float = 0) -> RepairState:
    for fact in facts:
        state = learn(state, fact, catalog(), at(seconds))
    return state


def then(state: RepairState, *facts: Fact, seconds: float = 0) -> Step:
    return next_step(told(state, *facts, seconds=seconds), at(seconds))


def end(step: Step) -> tuple[str, Verdict, str]:
    assert isinstance(step, Finish), step
    return step.outcome, step.verdict, step.reason


def refusal(step: Step) -> str:
    outcome, verdict, reason = end(step)
    assert (outcome, verdict) == ("refused", Verdict.UNKNOWN)
    return reason


# --- before the order


def test_a_repair_looks_first() -> None:
    step = next_step(reset(), at(0))
    assert step == Probe(
        timedelta(seconds=20),
        None,
        "whether one may reset GPU 0000:05:00 of n2: Xid 79 on GPU 0000:05:00",
    )


def test_a_repair_is_only_begun_for_what_repairs() -> None:
    with pytest.raises(
        ValueError, match="REPLACE_NODE repairs no node: expected RESET_GPU or REBOOT_NODE"
    ):
        repair(Strategy.REPLACE_NODE)


def test_a_free_node_is_rebooted_on_the_boot_that_was_read() -> None:
    assert then(repair(), SAME) == Reboot("boot-1", "Xid 79 on GPU 0000:05:00")


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), ()), (("0000:05:00",), (bus(0),)), (("7", "00000000:06:00.0"), (bus(7), bus(1)))],
)
def test_gpus_are_reset_by_bus_id(names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    step = then(reset(gpus=names), SAME)
    assert step == ResetGpus("boot-1", expected, timedelta(minutes=2), "Xid 79 on GPU 0000:05:00")


def test_a_gpu_that_nobody_knows_is_not_reset() -> None:
    assert refusal(then(reset(gpus=("12", bus(0))), SAME)) == "no GPU of n2 is known as 12"


def test_a_node_that_does_not_answer_is_looked_at_again_until_the_deadline() -> None:
    state = told(repair(), NoAnswer("connection timed out"))
    assert next_step(state, at(0)) == LookAgain(
        timedelta(seconds=5), "n2 does not answer: connection timed out"
    )
    assert isinstance(then(state, Slept()), Probe)
    outcome, verdict, reason = end(next_step(state, state.deadline))
    assert (outcome, verdict, reason) == (
        "ambiguous",
        Verdict.UNKNOWN,
        "n2 did not answer: connection timed out",
    )
    assert end(next_step(repair(), at(1500)))[2] == "n2 did not answer: it was not asked"


def test_an_answer_without_a_boot_id_is_none() -> None:
    step = then(repair(), Probed(probe(boot_id=None)))
    assert isinstance(step, LookAgain) and step.reason.startswith(
        "n2 does not answer: its answer cannot be read: boot id"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jobs": [{"job": "llama", "generation": 3}]}, "n2 is in use: job llama generation 3"),
        (
            {"gpus": nvml(gpu(0, processes=[{"pid": 4242}]))},
            "n2 is in use: pid 4242 uses GPU 0000:05:00",
        ),
        ({"held": {"by": "diagnose", "id": "r7"}}, "n2 is in use: diagnose of r7 holds it"),
        ({"jobs": None}, "n2 is in use: which jobs run on it cannot be read"),
    ],
)
@pytest.mark.parametrize("strategy", [Strategy.RESET_GPU, Strategy.REBOOT_NODE])
def test_a_node_in_use_is_left_alone(
    strategy: Strategy, changes: dict[str, Any], reason: str
) -> None:
    assert refusal(then(repair(strategy), Probed(probe(**changes)))) == reason


@pytest.mark.parametrize("action", [2, 5, 7])
def test_a_reset_is_refused_where_the_driver_asks_for_more(action: int) -> None:
    asked = Probed(probe(gpus=nvml(gpu(3, recovery_action=action))))
    assert refusal(then(reset(), asked)).startswith(
        "a reset does not help n2: GPU 0000:08:00: the driver asks for "
    )
    assert isinstance(then(repair(), asked), Reboot)
    assert isinstance(then(reset(), Probed(probe(gpus=nvml(gpu(0, recovery_action=1))))), ResetGpus)


def test_a_node_is_rebooted_only_so_often() -> None:
    often = Probed(probe(reboots=journal((3600, "r1"), (7200, "r2"), (4 * 86400, "r0"))))
    assert (
        refusal(then(repair(), often))
        == "n2 was rebooted 2 times within 3d: a person should look at its hardware"
    )
    assert isinstance(then(repair(max_reboots=3), often), Reboot)
    assert isinstance(then(reset(), often), ResetGpus)
    assert isinstance(
        then(repair(), Probed(probe(reboots=journal((3600, "r1"), (4 * 86400, "r0"))))), Reboot
    )


def test_a_journal_that_cannot_be_read_is_no_leave_to_reboot() -> None:
    reason = "how often n2 was rebooted is not known: its journal of reboots: the node's answer makes no sense there"
    assert refusal(then(repair(), Probed(probe(reboots=[{"at": "?"}])))) == reason


@pytest.mark.parametrize("wall", [0.0, 4e9, "?"])
def test_a_clock_that_is_wrong_forgets_no_reboot(wall: Any) -> None:
    recent = [{"at": at(-600).timestamp(), "id": "r", "reason": "", "boot_id": "b"}] * 2
    assert "rebooted 2 times" in refusal(then(repair(), Probed(probe(wall=wall, reboots=recent))))


def test_who_only_observes_is_told_what_would_have_been_done() -> None:
    expected = "repairs: observe; it would have been allowed to reboot n2: Xid 79 on GPU 0000:05:00"
    assert refusal(then(repair(mode="observe", approved_by="ada"), SAME)) == expected


def test_what_the_fleet_does_not_permit_is_refused_in_its_words() -> None:
    reason = "fleet gpus does not let it reboot n2: the breaker of fleet gpus is open"
    assert (
        refusal(then(repair(), SAME, Permitted(False, "the breaker of fleet gpus is open")))
        == reason
    )
    assert (
        refusal(then(reset(), SAME, Permitted(False, "")))
        == "fleet gpus does not let it reset GPU 0000:05:00 of n2: no reason given"
    )


def test_a_node_is_looked_at_again_where_the_fleet_took_its_time() -> None:
    state = told(repair(mode="ask", approved_by="ada"), SAME, Permitted(True, "1 of 2 repairs"))
    assert (
        isinstance(next_step(state, at(0)), Probe)
        and state.log[-1].reason == "fleet gpus lets it reboot n2: 1 of 2 repairs"
    )
    assert isinstance(then(state, SAME), Reboot)
    assert "in use: job llama" in refusal(
        then(state, Probed(probe(jobs=[{"job": "llama", "generation": 2}])))
    )
    assert isinstance(then(state, BOOTED), Diagnose), "it has rebooted meanwhile"


def test_before_a_second_order_that_the_fleet_permits_late_the_node_is_asked_about_the_first() -> (
    None
):
    state = told(reset(), SAME, NoAnswer("x"), Slept(), SAME, Permitted(True, "1 of 2 repairs"))
    assert state.stage is Stage.PROVING
    assert isinstance(then(state, SAME), ResetGpus)


def test_a_permission_for_nothing_that_is_due_changes_nothing() -> None:
    for state in (repair(), told(repair(), SAME, REBOOT_OK), told(repair(mode="ask"), SAME)):
        assert told(state, Permitted(False, "no"), Permitted(True, "yes")) == state


def test_a_reboot_that_this_repair_ordered_in_a_former_life_is_not_ordered_again() -> None:
    mine = Probed(probe(boot_id="boot-1", reboots=journal((60, "repair/gpus/n2/1"))))
    assert isinstance(then(repair(), mine), Diagnose)
    still = Probed(probe(boot_id="boot-0", reboots=journal((60, "repair/gpus/n2/1"))))
    state = told(repair(), still, CancelAsked("enough"), Slept())
    assert state.stage is Stage.PROVING
    assert isinstance(then(state, Probed(probe(boot_id="boot-0")), seconds=600), LookAgain)
    assert isinstance(then(reset(), mine), ResetGpus)


def test_what_this_repair_ordered_earlier_is_waited_for() -> None:
    held = Probed(probe(held={"by": "reset-gpus", "id": "repair/gpus/n2/1"}))
    state = told(reset(), held)
    assert next_step(state, at(0)) == LookAgain(
        timedelta(seconds=5), "what was ordered for this repair is still at work on n2"
    )
    assert (
        refusal(next_step(state, state.deadline))
        == "the time to reset GPU 0000:05:00 of n2 was over before it could be ordered"
    )


# --- people


def test_a_person_is_asked_with_all_that_matters_and_then_the_node_is_looked_at_again() -> None:
    state = told(repair(mode="ask"), Probed(probe(reboots=journal((600, "r1")))))
    question = "may relaunch reboot n2 (1 reboot in its journal)? job llama asks for it: Xid 79 on GPU 0000:05:00"
    assert next_step(state, at(0)) == AskPerson(question, at(600), "repairs: ask")
    assert next_step(state, at(30)) == AskPerson(question, at(600), "repairs: ask")
    state = told(state, Answered(True, "ada", "go on"), Slept(), seconds=60)
    assert isinstance(next_step(state, at(60)), Probe)
    assert then(state, SAME, seconds=60) == Reboot(
        "boot-1", "Xid 79 on GPU 0000:05:00 (approved by ada)"
    )
    assert "job llama generation 1" in refusal(
        then(state, Probed(probe(jobs=[{"job": "llama", "generation": 1}])), seconds=60)
    )


def test_many_gpus_are_counted_in_a_question() -> None:
    step = then(reset(mode="ask", gpus=tuple(map(bus, range(10)))), SAME)
    assert (
        isinstance(step, AskPerson)
        and "reset GPUs 0000:05:00, " in step.question
        and "0000:0c:00 and 2 more of n2?" in step.question
    )
    everything = then(reset(mode="ask", gpus=()), SAME)
    assert isinstance(everything, AskPerson) and everything.question.startswith(
        "may relaunch reset all GPUs of n2?"
    )


def test_whoever_has_approved_it_already_is_not_asked() -> None:
    assert isinstance(then(repair(mode="ask", approved_by="ada"), SAME), Reboot)


def test_a_person_may_say_no() -> None:
    asked = told(repair(mode="ask"), SAME)
    assert (
        refusal(then(asked, Answered(False, "ada", "the owner is at it")))
        == "ada said no: the owner is at it"
    )
    assert refusal(then(asked, Answered(False, "", ""))) == "a person said no"


def test_nobody_answers() -> None:
    asked = told(repair(mode="ask"), SAME)
    reason = "nobody said until 03:10 UTC whether to reboot n2"
    assert refusal(next_step(asked, at(600))) == reason
    assert refusal(then(asked, DeadlinePassed(), seconds=600)) == reason
    assert refusal(then(asked, Answered(True, "ada", ""), seconds=601)) == reason


def test_a_person_has_no_longer_than_the_repair() -> None:
    step = then(repair(mode="ask", answer_within=timedelta(hours=12)), SAME)
    assert isinstance(step, AskPerson) and step.until == at(25 * 60)


def test_a_node_that_rebooted_while_a_person_thought_is_examined() -> None:
    state = told(repair(mode="ask"), SAME, Answered(True, "ada", ""), BOOTED, seconds=60)
    assert isinstance(next_step(state, at(60)), Diagnose)
    assert end(then(state, PASSED_AFTER_BOOT, seconds=60))[2].startswith(
        "n2 was rebooted by somebody else and is healthy: 8 GPUs"
    )


def test_what_is_said_when_nobody_asks_changes_nothing() -> None:
    state = repair()
    for fact in (
        Answered(True, "ada", ""),
        DeadlinePassed(),
        RESET_OK,
        OrderRefused("busy", ""),
        PASSED,
    ):
        assert told(state, fact) == state
    asked = told(repair(mode="ask"), SAME)
    assert told(asked, SAME, NoAnswer("x")) == asked


# --- a reset


def test_a_reset_is_done_only_when_the_gpus_are_healthy_after_it() -> None:
    state = told(reset(), SAME, RESET_OK, seconds=10)
    probe_step = next_step(state, at(40))
    assert isinstance(probe_step, Probe) and probe_step.kernel_since == timedelta(seconds=30)
    state = told(state, SAME, seconds=40)
    step = next_step(state, at(40))
    assert isinstance(step, Diagnose) and (step.level, step.within) == (1, timedelta(minutes=3))
    outcome, verdict, reason = end(then(state, PASSED, seconds=50))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY)
    assert reason == (
        "n2 was given a reset of GPU 0000:05:00 and is healthy: 8 GPUs by NVML, disk, memory, dcgmi diag -r 1: nothing found"
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            {"outcome": "done", "missing": "nvidia-smi is not on its PATH"},
            "n2 cannot reset GPUs: nvidia-smi is not on its PATH",
        ),
        ({"outcome": "done", "missing": 1}, "n2 cannot reset GPUs: a tool is missing"),
        (
            {"outcome": "done", "exit_code": 3, "output": "one\nGPU is in use\n\n"},
            "nvidia-smi --gpu-reset on n2 ended with 3: GPU is in use",
        ),
        (
            {"outcome": "done", "exit_code": None},
            "nvidia-smi --gpu-reset on n2 did not finish: it printed nothing",
        ),
        (
            {"outcome": "done", "exit_code": False},
            "nvidia-smi --gpu-reset on n2 did not finish: it printed nothing",
        ),
    ],
)
def test_a_reset_that_failed_is_refused_in_the_words_of_its_tool(
    answer: dict[str, Any], reason: str
) -> None:
    assert refusal(then(reset(), SAME, OrderDone(answer))) == reason


@pytest.mark.parametrize(
    "lost",
    [NoAnswer("the worker died"), OrderDone({"outcome": "?"}), OrderRefused("boot_changed", "")],
)
def test_a_reset_without_an_answer_is_looked_at_and_ordered_once_more(lost: Fact) -> None:
    state = told(reset(), SAME, lost, Slept())
    assert isinstance(next_step(state, at(0)), Probe)
    state = told(state, SAME)
    assert isinstance(next_step(state, at(0)), ResetGpus)
    assert isinstance(then(state, RESET_OK), Probe)
    outcome, _, reason = end(then(state, lost, Slept(), SAME))
    assert outcome == "ambiguous"
    assert (
        reason
        == "2 orders to reset GPU 0000:05:00 of n2 got no answer, and nobody knows whether it happened"
    )


def test_a_reset_is_not_ordered_again_while_the_first_is_at_work_or_the_node_is_in_use() -> None:
    state = told(reset(), SAME, NoAnswer("x"), Slept())
    assert isinstance(
        then(state, Probed(probe(held={"by": "reset-gpus", "id": state.id}))), LookAgain
    )
    assert (
        refusal(then(state, Probed(probe(held={"by": "diagnose", "id": "r7"}))))
        == "n2 is in use: diagnose of r7 holds it"
    )


def test_a_node_that_rebooted_instead_of_the_reset_is_examined() -> None:
    state = told(reset(), SAME, OrderRefused("boot_changed", "", "boot-2"))
    assert isinstance(next_step(state, at(0)), Probe)
    state = told(state, BOOTED)
    assert isinstance(next_step(state, at(0)), Diagnose)
    assert end(then(state, PASSED_AFTER_BOOT))[2].startswith(
        "n2 was rebooted by somebody else and is healthy: "
    )


def test_a_node_may_refuse() -> None:
    reason = "n2 refused to reset GPU 0000:05:00 (busy): job llama runs here"
    assert refusal(then(reset(), SAME, OrderRefused("busy", "job llama runs here"))) == reason
    assert (
        refusal(then(repair(), SAME, OrderRefused("cannot_reboot", "")))
        == "n2 refused to reboot (cannot_reboot): no reason given"
    )


def test_whether_a_reset_happened_is_not_known_at_the_deadline() -> None:
    outcome, _, reason = end(next_step(told(reset(), SAME, NoAnswer("gone")), at(1500)))
    assert (outcome, reason) == (
        "ambiguous",
        "whether the order to reset GPU 0000:05:00 of n2 was carried out is not known: gone",
    )


# --- a reboot


def test_a_reboot_is_proven_by_the_boot_id_and_done_only_when_the_node_is_healthy() -> None:
    state = told(repair(), SAME, REBOOT_OK)
    assert next_step(state, at(0)) == LookAgain(timedelta(seconds=5), "n2 was told to reboot")
    state = told(
        state,
        Slept(),
        NoAnswer("no route to host"),
        Slept(),
        NoAnswer("no route to host"),
        Slept(),
        seconds=200,
    )
    step = next_step(state, at(200))
    assert isinstance(step, Probe) and step.kernel_since == timedelta(seconds=200)
    state = told(state, BOOTED, seconds=300)
    assert isinstance(next_step(state, at(300)), Diagnose)
    outcome, verdict, reason = end(then(state, PASSED_AFTER_BOOT, seconds=320))
    assert (outcome, verdict) == ("done", Verdict.HEALTHY) and reason.startswith(
        "n2 was rebooted and is healthy: "
    )


def test_a_reboot_that_changed_nothing_is_refused_with_what_was_found() -> None:
    broken = Probed(probe(boot_id="boot-2", disks=[disk(writable=False, reason="read-only")]))
    outcome, verdict, reason = end(then(repair(), SAME, REBOOT_OK, broken))
    assert (outcome, verdict) == ("refused", Verdict.UNHEALTHY)
    assert (
        reason
        == "n2 was rebooted and is still unhealthy: /var/tmp/relaunch cannot be written to: read-only"
    )
    outcome, verdict, reason = end(
        then(
            repair(level=2), SAME, REBOOT_OK, BOOTED, Diagnosed(diag(FAULTY, 205, boot_id="boot-2"))
        )
    )
    assert (outcome, verdict) == (
        "refused",
        Verdict.UNHEALTHY,
    ) and "dcgmi diag -r 2: GPU 6: " in reason


def test_a_node_whose_examination_says_nothing_is_not_given_back() -> None:
    state = told(repair(), SAME, REBOOT_OK, BOOTED)
    for fact in (
        Diagnosed({"refused": "busy", "reason": "pid 7 uses it"}),
        OrderRefused("busy", "pid 7 uses it"),
    ):
        reason = refusal(then(state, fact, seconds=200))
        assert (
            reason
            == "n2 was rebooted, but whether it helped is not known: dcgmi diag was refused (busy): pid 7 uses it"
        )


def test_a_node_that_refuses_to_examine_right_after_its_boot_is_asked_again() -> None:
    state = told(
        repair(), SAME, REBOOT_OK, BOOTED, Diagnosed(diag("", 3, boot_id="boot-2")), seconds=60
    )
    step = next_step(state, at(60))
    assert (
        isinstance(step, LookAgain)
        and step.after == timedelta(seconds=10)
        and step.reason.startswith("n2 has just booted: dcgmi")
    )
    assert end(then(state, Slept(), BOOTED, PASSED_AFTER_BOOT, seconds=70))[0] == "done"


def test_a_node_without_gpus_is_not_asked_for_a_diagnosis() -> None:
    bare = {"gpus": NO_NVML}
    state = told(repair(expected_gpus=0), Probed(probe(**bare)), REBOOT_OK)
    assert end(then(state, Probed(probe(boot_id="boot-2", **bare))))[:2] == (
        "done",
        Verdict.HEALTHY,
    )
    assert end(then(repair(level=0), SAME, REBOOT_OK, BOOTED))[:2] == ("done", Verdict.HEALTHY)


@pytest.mark.parametrize(
    ("gpus", "shown"),
    [(NO_NVML, "no GPU yet"), (nvml(count=5), "5 of 8 GPUs"), (nvml(count=0), "no GPU yet")],
    ids=["hangs", "some", "none"],
)
def test_a_driver_has_three_minutes_after_a_boot(gpus: Any, shown: str) -> None:
    early = Probed(probe(boot_id="boot-2", gpus=gpus))
    state = told(repair(), SAME, REBOOT_OK, early)
    assert next_step(state, at(0)) == LookAgain(
        timedelta(seconds=10), f"n2 has just booted and shows {shown}"
    )
    assert isinstance(then(state, Slept(), BOOTED, seconds=20), Diagnose)
    late = then(state, Slept(), early, seconds=180)
    assert isinstance(late, Diagnose) if gpus is NO_NVML else end(late)[1] is Verdict.UNHEALTHY


def test_an_order_that_never_arrived_is_given_once_more_after_a_minute() -> None:
    state = told(repair(), SAME, NoAnswer("the worker died"), Slept(), SAME)
    assert next_step(state, at(0)) == LookAgain(
        timedelta(seconds=5), "n2 still runs on boot id boot-1"
    )
    state = told(state, Slept(), SAME, seconds=60)
    assert next_step(state, at(60)) == Reboot("boot-1", "Xid 79 on GPU 0000:05:00")
    state = told(state, NoAnswer("again"), Slept(), SAME, Slept(), seconds=120)
    state = told(state, SAME, seconds=240)
    assert next_step(state, at(240)) == LookAgain(
        timedelta(seconds=5), "2 orders to reboot n2 have not arrived"
    )
    assert (
        refusal(next_step(state, state.deadline))
        == "2 orders to reboot n2, and it still runs on boot id boot-1"
    )


@pytest.mark.parametrize("reboots", [journal((1, "repair/gpus/n2/1"), boot_id="boot-1"), None])
def test_an_order_that_arrived_or_may_have_is_not_given_again(reboots: Any) -> None:
    there = Probed(probe(reboots=reboots))
    state = told(repair(), SAME, NoAnswer("the worker died"), Slept(), there, Slept())
    assert isinstance(then(state, there, seconds=600), LookAgain)


def test_an_order_is_not_given_again_to_a_node_in_use() -> None:
    state = told(repair(), SAME, NoAnswer("the worker died"), Slept())
    assert "in use: job llama" in refusal(
        then(state, Probed(probe(jobs=[{"job": "llama", "generation": 2}])), seconds=90)
    )


def test_a_refusal_that_claims_a_reboot_is_no_proof() -> None:
    state = told(repair(), SAME, OrderRefused("boot_changed", "", "boot-9"))
    assert isinstance(then(state, SAME), LookAgain)
    assert isinstance(then(state, BOOTED), Diagnose)


def test_a_reboot_that_nobody_saw_end_is_ambiguous() -> None:
    outcome, _, reason = end(
        next_step(told(repair(), SAME, REBOOT_OK, NoAnswer("no route")), at(1500))
    )
    assert (outcome, reason) == (
        "ambiguous",
        "whether the order to reboot n2 was carried out is not known: no route",
    )
    assert (
        end(then(told(repair(), SAME, REBOOT_OK), DeadlinePassed(), seconds=1500))[0] == "ambiguous"
    )


def test_a_node_that_tells_an_ended_boot_again_has_proven_nothing() -> None:
    state = told(
        repair(), SAME, REBOOT_OK, Probed(probe(boot_id="boot-2", gpus=NO_NVML)), Slept(), SAME
    )
    assert state.stage is Stage.PROVING
    assert next_step(state, at(0)) == LookAgain(
        timedelta(seconds=5), "n2 tells boot id boot-1 again, which had ended"
    )


def test_a_node_that_reboots_while_it_is_examined_is_not_given_back() -> None:
    state = told(
        repair(), SAME, REBOOT_OK, BOOTED, NoAnswer("connection reset"), Slept(), seconds=300
    )
    reason = refusal(then(state, Probed(probe(boot_id="boot-3")), seconds=400))
    assert (
        reason
        == "n2 was rebooted, but whether it helped is not known: it rebooted while it was examined"
    )


def test_a_diagnosis_without_an_answer_is_tried_twice() -> None:
    state = told(repair(), SAME, REBOOT_OK, BOOTED, NoAnswer("gone"))
    assert next_step(state, at(0)) == LookAgain(
        timedelta(seconds=5), "dcgmi diag on n2 got no answer: gone"
    )
    assert isinstance(then(state, Slept()), Probe)
    state = told(state, Slept(), BOOTED)
    assert isinstance(next_step(state, at(0)), Diagnose)
    reason = refusal(then(state, NoAnswer("gone")))
    assert (
        reason
        == "n2 was rebooted, but whether it helped is not known: dcgmi diag on n2 got no answer: gone"
    )


def test_an_examination_that_is_not_over_at_the_deadline() -> None:
    state = told(repair(), SAME, REBOOT_OK, BOOTED)
    assert refusal(next_step(state, at(1500))).endswith(
        "was not known in time: n2 was told to reboot"
    )
    state = told(state, NoAnswer("gone"))
    assert (
        refusal(next_step(state, at(1500)))
        == "n2 was rebooted, but whether it helped was not known in time: gone"
    )
    assert refusal(next_step(replace(state, silent="", waiting=""), at(1500))).endswith(
        "in time: it was not examined"
    )


def test_nothing_lasts_longer_than_what_is_left() -> None:
    late = told(repair(), SAME, REBOOT_OK, seconds=1498)
    assert next_step(late, at(1498)) == LookAgain(timedelta(seconds=2), "n2 was told to reboot")
    step = then(late, Slept(), BOOTED, seconds=1499)
    assert isinstance(step, Diagnose) and step.within == timedelta(seconds=1)


# --- cancelling


def test_a_cancel_before_the_order_ends_the_repair() -> None:
    for state in (
        repair(),
        told(repair(), SAME),
        told(repair(mode="ask"), SAME),
        told(repair(), NoAnswer("x")),
    ):
        assert (
            refusal(then(state, CancelAsked("job llama was cancelled")))
            == "cancelled: job llama was cancelled"
        )
    assert refusal(then(repair(), CancelAsked(""))) == "cancelled: no reason given"


def test_a_cancel_while_the_order_is_on_its_way_waits_for_the_proof() -> None:
    state = told(repair(), SAME, CancelAsked("enough"), REBOOT_OK, Slept())
    assert isinstance(next_step(state, at(0)), Probe)
    assert end(then(state, BOOTED, PASSED_AFTER_BOOT))[:2] == ("done", Verdict.HEALTHY)


def test_after_a_cancel_nothing_is_ordered_again() -> None:
    state = told(repair(), SAME, NoAnswer("x"), CancelAsked("enough"), Slept())
    assert (
        refusal(then(state, SAME, seconds=60))
        == "cancelled: enough; the order to reboot n2 never arrived"
    )
    outcome, _, reason = end(
        then(told(reset(), SAME, NoAnswer("x"), CancelAsked("enough"), Slept()), SAME)
    )
    assert outcome == "ambiguous" and reason.startswith(
        "cancelled: enough; 1 order to reset GPU 0000:05:00 of n2 got no answer"
    )


def test_a_cancel_stops_a_second_order_that_was_not_given_yet() -> None:
    state = told(repair(), SAME, NoAnswer("x"), Slept())
    state = told(state, SAME, seconds=60)
    assert isinstance(next_step(state, at(60)), Reboot)
    state = told(state, CancelAsked("enough"), seconds=60)
    assert isinstance(next_step(state, at(60)), Probe)
    assert refusal(then(state, SAME, seconds=61)).startswith("cancelled: enough; ")


# --- what is kept


def test_an_ended_repair_learns_nothing_more() -> None:
    state = told(repair(), SAME, OrderRefused("busy", "x"))
    assert state.outcome == "refused" and told(state, BOOTED, CancelAsked("x"), Slept()) == state


def test_a_long_repair_keeps_its_first_and_its_newest_records() -> None:
    state = told(repair(), NoAnswer("first"))
    for number in range(200):
        state = told(state, NoAnswer(f"number {number}"), seconds=number)
    assert len(state.log) == 60
    assert (state.log[0].reason, state.log[-1].reason) == (
        "n2 does not answer: first",
        "n2 does not answer: number 199",
    )


def test_a_node_that_says_the_same_for_an_hour_is_written_down_once() -> None:
    state = told(repair(), SAME, REBOOT_OK)
    for _ in range(100):
        state = told(state, Slept(), SAME)
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
    state = told(
        repair(mode="ask", gpus=tuple(map(bus, range(64)))),
        *(NoAnswer(f"{number}" + "z" * 900) for number in range(99)),
    )
    state = told(state, Probed(facts))
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
        Slept(),
        Answered(True, "ada", ""),
        Permitted(True, "x"),
        DeadlinePassed(),
        CancelAsked("x"),
    ],
    ids=lambda value: value.kind,
)
async def test_facts_go_through_temporal(value: Fact) -> None:
    (read,) = await shared_converter.decode(await shared_converter.encode([value]), [Fact])
    assert read == value


@pytest.mark.parametrize(
    "value",
    [
        next_step(repair(), at(0)),
        then(repair(), SAME),
        then(reset(), SAME),
        then(repair(mode="ask"), SAME),
        then(repair(), NoAnswer("x")),
        then(repair(), SAME, REBOOT_OK, BOOTED),
        then(repair(), CancelAsked("x")),
    ],
    ids=lambda value: value.kind,
)
async def test_steps_go_through_temporal(value: Step) -> None:
    (read,) = await shared_converter.decode(await shared_converter.encode([value]), [Step])
    assert read == value
