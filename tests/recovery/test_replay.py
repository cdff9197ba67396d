"""What a policy would have decided: over recorded steps and over events that a person wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.findings import Verdict
from relaunch.evidence.observations import RanksVanished
from relaunch.job.apply import finish
from relaunch.job.events import (
    CancelRequested,
    Event,
    FaultObserved,
    IncidentsArchived,
    Launched,
    LaunchRefused,
    NodeRefusal,
    NodesAcquired,
    NodesExamined,
    PolicyChanged,
    ProgressSeen,
    RanksHung,
    RepairEnded,
    RetryRequested,
    StepReached,
    Submitted,
)
from relaunch.job.replay import (
    CURRENT,
    ReplayedStep,
    Step,
    difference,
    name_decision,
    replay,
    restore,
    simulate,
)
from relaunch.job.state import (
    Decision,
    Diagnosis,
    Examine,
    ExaminedNode,
    Ignore,
    JobState,
    Phase,
    Relaunch,
    Repair,
    Slot,
    Stop,
    Try,
    Wait,
)
from relaunch.job.step import step
from relaunch.spec.policy import Policy, Strategy, preset
from tests.recovery.builders import T0, at, error, exited, new_job, policy, suspected

SLOTS = (Slot("n1", "10.0.0.1", 1, 1), Slot("n2", "10.0.0.2", 1, 1))
RESTART, FAIL = {"strategy": "RESTART_IN_PLACE"}, {"strategy": "FAIL"}


def boom(generation: int, seconds: float, node: str = "n2") -> FaultObserved:
    return FaultObserved(
        generation, (exited(node=node, code=1, error=error(), seconds=seconds),), 0, at(seconds)
    )


def reboot(generation: int, seconds: float, node: str = "n2") -> FaultObserved:
    gone = RanksVanished(node, at(seconds), "the node rebooted", rebooted=True)
    return FaultObserved(generation, (gone,), 0, at(seconds))


def record(job: JobState, *events: tuple[float, Event]) -> list[Step]:
    """What a job of this policy decided."""
    steps = []
    for seconds, event in events:
        job, decision = step(job, event, at(seconds))
        steps.append(Step(at(seconds), event, decision))
    return steps


def three_faults(
    happens: Callable[[int, float], FaultObserved] = boom,
) -> tuple[tuple[float, Event], ...]:
    launches = [
        (g * 100.0, each)
        for g in (1, 2, 3, 4)
        for each in (NodesAcquired(SLOTS), Launched(g, at(g * 100), at(g * 100)))
    ]
    faults = [(g * 100.0 + 50, happens(g, g * 100 + 50)) for g in (1, 2, 3)]
    return ((0.0, Submitted("", "ada")), *sorted((*launches, *faults), key=lambda each: each[0]))


def application(*rungs: dict[str, Any], **more: Any) -> Policy:
    """One ladder for an exception and for a node that reboots."""
    causes = {cause: list(rungs) for cause in ("APPLICATION", "NODE_FAULT")}
    return policy(causes=causes, no_progress_stop="off", startup_stop="off", **more)


def marked(replayed: tuple[ReplayedStep, ...]) -> list[tuple[str, str]]:
    return [(name_decision(one.decision), one.differs) for one in replayed if one.differs]


def test_a_policy_replayed_over_its_own_record_differs_nowhere() -> None:
    always = application(RESTART)
    job = new_job(policy=always)
    replayed = replay(always, job, record(job, *three_faults()))
    assert marked(replayed) == []
    assert [one.decision for one in replayed] == [one.decided for one in replayed]


def test_where_strategies_differ_the_tried_policy_counts_tries(snapshot: SnapshotAssertion) -> None:
    always = application(RESTART)
    job = new_job(policy=always)
    tried = application({**RESTART, "tries": 1}, {"strategy": "RESCHEDULE_JOB", "tries": 1}, FAIL)
    replayed = replay(tried, job, record(job, *three_faults()))
    assert marked(replayed) == [
        ("Relaunch RESCHEDULE_JOB", "then Relaunch RESTART_IN_PLACE"),
        ("Stop FAILED", "then Relaunch RESTART_IN_PLACE"),
    ]
    restarts = [
        one.decision.left
        for one in replayed
        if isinstance(one.decision, Relaunch) and one.decision.take
    ]
    assert restarts == snapshot


def test_after_another_decision_the_replay_follows_the_record(snapshot: SnapshotAssertion) -> None:
    always = application(RESTART)
    job = new_job(policy=always)
    replayed = replay(application(FAIL), job, record(job, *three_faults()))
    assert marked(replayed) == [("Stop FAILED", "then Relaunch RESTART_IN_PLACE")] * 3
    running = [
        one.decision.reason
        for one in replayed
        if isinstance(one.decision, Wait) and one.event == "Launched"
    ]
    # generations stay those of the record
    assert running == snapshot


def test_a_recorded_policy_does_not_replace_the_tried_one() -> None:
    job = new_job(policy=application(RESTART))
    steps = record(
        job,
        (0, Submitted("", "ada")),
        (1, PolicyChanged(application(FAIL), "", "ada")),
        (2, boom(1, 2)),
    )
    assert marked(replay(application(RESTART), job, steps)) == [
        ("Relaunch RESTART_IN_PLACE", "then Stop FAILED")
    ]


@pytest.mark.parametrize(
    ("then", "now"),
    [
        pytest.param(RESTART, {**RESTART, "delay": "5s"}, id="delay"),
        pytest.param(RESTART, {**RESTART, "spends": False}, id="spends"),
        pytest.param(
            {"strategy": "REPLACE_NODE", "isolate": True},
            {"strategy": "REPLACE_NODE"},
            id="isolate",
        ),
        pytest.param({"strategy": "REPLACE_NODE"}, RESTART, id="strategy"),
        pytest.param({**RESTART, "tries": 3}, {**RESTART, "tries": 2}, id="tries"),
        pytest.param({**RESTART, "when": "UNKNOWN"}, RESTART, id="examination"),
    ],
)
def test_what_differs_is_said_in_a_clause(
    then: dict[str, Any], now: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    job = new_job(policy=application(then))
    replayed = replay(application(now), job, record(job, *three_faults(reboot)[:4]))
    assert replayed[-1].differs == snapshot


def test_a_job_is_restored_from_its_record_with_all_incidents() -> None:
    job = began = new_job(policy=application({**RESTART, "tries": 1}, FAIL))
    passed = (StepReached(2, 0, at(210)), IncidentsArchived(1))
    events = sorted(
        (*three_faults()[:-1], (220.0, passed[0]), (230.0, passed[1])), key=lambda each: each[0]
    )
    steps = record(job, *events)
    for one in steps:
        job, _ = step(job, one.event, one.at)
    job = finish(job, at(400))
    again = restore(began, steps, at(400))
    assert (job.phase, job.incidents_archived, len(job.incidents)) == (Phase.FAILED, 1, 1)
    assert again.incidents[1:] == job.incidents and len(again.incidents) == 2
    assert again == replace(job, incidents=again.incidents, incidents_archived=0)
    assert sum(again.ledger.totals.values(), timedelta(0)) == at(400) - T0


def test_a_recorded_decision_counts_where_it_is_known() -> None:
    job = new_job(policy=application(RESTART))
    steps = record(job, *three_faults()[:4])
    assert name_decision(steps[-1].decided or Ignore()) == "Relaunch RESTART_IN_PLACE"
    stricter = new_job(policy=application(FAIL))
    followed = restore(stricter, steps, at(400))
    assert (followed.generation, followed.ending, followed.ended_at) == (2, None, None)
    unknown = [replace(one, decided=None) for one in steps]
    runs = restore(stricter, unknown, None)
    assert runs.ending is not None and runs.ended_at is None
    ended = restore(stricter, unknown, at(400))
    assert (ended.generation, ended.phase, ended.ended_at) == (1, Phase.FAILED, at(400))


FAULT = suspected()


def repair(
    *nodes: str, gpus: tuple[str, ...] = (), spent: bool = True, fault: Diagnosis = FAULT
) -> Repair:
    take = Try(T0, fault.cause, Strategy.RESET_GPU, "RESET_GPU", spent)
    return Repair(Strategy.RESET_GPU, nodes, gpus, fault, "", take, "", T0)


def launch(**more: Any) -> Relaunch:
    return Relaunch(2, "", strategy=Strategy.REPLACE_NODE, **more)


def examine(*nodes: str) -> Examine:
    return Examine(nodes, FAULT, "", "", T0)


@pytest.mark.parametrize(
    ("now", "then"),
    [
        pytest.param(examine("n1"), examine("n1"), id="the same nodes are examined"),
        pytest.param(examine("n1"), examine("n2", "n3"), id="others are"),
        pytest.param(
            examine("n9"), examine("n1", "n2", "n3", "n4", "n5", "n6"), id="many others are"
        ),
        pytest.param(repair("n1"), repair("n1"), id="the same node is repaired"),
        pytest.param(repair("n1"), repair("n2"), id="another is"),
        pytest.param(
            repair("n1", gpus=("05",)), repair("n1"), id="one of its GPUs, not all of them"
        ),
        pytest.param(repair("n1", spent=False), repair("n2", gpus=("05", "06")), id="all of that"),
        pytest.param(
            launch(without=("n1",)), launch(without=("n2",)), id="another node is left out"
        ),
        pytest.param(launch(without=("n1",)), launch(), id="no node was left out"),
        pytest.param(launch(keep_nodes=False), launch(), id="places were kept"),
        pytest.param(launch(), launch(keep_nodes=False), id="places were given again"),
        pytest.param(launch(delay=timedelta(seconds=5)), launch(), id="it was not waited"),
        pytest.param(launch(take=repair().take), launch(), id="nothing was spent"),
        pytest.param(
            Stop(Phase.FAILED, "", 1), Stop(Phase.FAILED, "others", 1), id="only the reason differs"
        ),
        pytest.param(
            Stop(Phase.FAILED, "", 1), Stop(Phase.FAILED, "", 137), id="another exit code"
        ),
        pytest.param(Stop(Phase.FAILED, "", 1), Stop(Phase.CANCELLED, "", 1), id="another end"),
        pytest.param(
            Wait(Phase.RUNNING, "", ""), Wait(Phase.RUNNING, "", "", T0), id="a wait is a wait"
        ),
        pytest.param(Ignore(""), Wait(Phase.RUNNING, "", ""), id="another kind"),
    ],
)
def test_each_thing_that_two_decisions_do_otherwise_is_named(
    now: Decision, then: Decision, snapshot: SnapshotAssertion
) -> None:
    assert difference(now, then) == snapshot


def test_a_different_repair_is_followed_and_an_equal_one_counted() -> None:
    reset = application(
        {"strategy": "RESET_GPU", "tries": 1}, {"strategy": "REBOOT_NODE", "tries": 1}, FAIL
    )
    ended = RepairEnded(1, Strategy.RESET_GPU, ("n2",), "refused", "it is busy")
    steps = record(new_job(policy=reset), *three_faults(reboot)[:4], (160.0, ended))
    assert marked(replay(reset, new_job(), steps)) == []
    rebooting = application({"strategy": "REBOOT_NODE", "tries": 1}, FAIL)
    # the end of the other repair, which was not asked for, does not count as a difference
    assert marked(replay(rebooting, new_job(), steps)) == [
        ("Repair REBOOT_NODE", "then Repair RESET_GPU")
    ]


# --- written events -------------------------------------------------------------------------------


def rehearsed(rules: Policy, *told: tuple[float, Event]) -> list[tuple[float, str, str]]:
    replayed = simulate(
        rules, new_job(policy=rules), [Step(at(seconds), event) for seconds, event in told]
    )
    return [
        ((one.at - at(0)).total_seconds(), one.event, name_decision(one.decision))
        for one in replayed
        if one.decision.kind != "Ignore"
    ]


def test_an_unmentioned_launch_succeeds_unless_a_line_denies_it() -> None:
    refused = LaunchRefused(
        CURRENT, (NodeRefusal("n2", "expired", "it was prepared more than 90 s ago"),)
    )
    assert rehearsed(
        application(RESTART), (60, boom(CURRENT, 60)), (60, refused), (90, CancelRequested("", ""))
    )[2:] == [
        (60, "FaultObserved", "Relaunch RESTART_IN_PLACE"),
        (60, "LaunchRefused", "Relaunch RESTART_IN_PLACE"),
        (61, "Launched", "Wait RUNNING"),
        (90, "CancelRequested", "Stop CANCELLED"),
    ]


def test_a_written_submission_is_the_first_event_and_not_made_up(
    snapshot: SnapshotAssertion,
) -> None:
    found = simulate(
        application(RESTART), new_job(), [Step(at(7), Submitted("night run", "grace"))]
    )
    assert [(one.at, one.event) for one in found] == [
        (at(7), "Submitted"),
        (at(7), "NodesAcquired"),
        (at(7), "Launched"),
    ]
    assert found[0].decision.reason == snapshot


def test_an_unanswered_examination_is_unknown_an_answer_counts(snapshot: SnapshotAssertion) -> None:
    rules = application({"strategy": "REPLACE_NODE", "when": "UNHEALTHY", "isolate": True}, FAIL)
    assert rehearsed(rules, (60, boom(CURRENT, 60)))[2:] == [
        (60, "FaultObserved", "Examine"),
        (60, "NodesExamined", "Stop FAILED"),
    ]
    verdict = NodesExamined(CURRENT, (ExaminedNode("n2", Verdict.UNHEALTHY, "DCGM 52"),))
    found = simulate(
        rules, new_job(policy=rules), [Step(at(60), boom(CURRENT, 60)), Step(at(90), verdict)]
    )
    assert [name_decision(one.decision) for one in found][-3:] == [
        "Relaunch REPLACE_NODE",
        "Ignore",
        "Wait RUNNING",
    ]
    # an isolated node does not come back
    assert found[-1].decision.reason == snapshot


def test_a_late_answer_finds_the_question_or_a_failed_job() -> None:
    rules = application({"strategy": "ASK"}, timeouts={"answer_within": "2h"})
    late = (12 * 3600, RetryRequested("fixed", "ada"))
    turns = rehearsed(rules, (60, boom(CURRENT, 60)), late)[3:]
    assert turns[:2] == [
        (60 + 7200, "DeadlinePassed", "Ask"),
        (60 + 2 * 7200, "DeadlinePassed", "Ask"),
    ]
    assert (12 * 3600, "RetryRequested", "Relaunch") in turns
    rules = application({"strategy": "ASK"}, timeouts={"answer_within": "2h"}, unanswered="fail")
    asked, day = (60, "FaultObserved", "Ask"), 86400
    assert rehearsed(rules, (60, boom(CURRENT, 60)), (3600, RetryRequested("fixed", "ada")))[
        2:4
    ] == [
        asked,
        (3600, "RetryRequested", "Relaunch"),
    ]
    assert rehearsed(rules, (60, boom(CURRENT, 60)), (day, RetryRequested("fixed", "ada")))[2:] == [
        asked,
        (60 + 7200, "DeadlinePassed", "Stop FAILED"),
    ]


def test_an_answer_that_comes_too_late_finds_the_deadline_passed() -> None:
    rules = application(
        {"strategy": "REPLACE_NODE", "when": "UNHEALTHY"}, FAIL, timeouts={"examination": "10m"}
    )
    verdict = NodesExamined(CURRENT, (ExaminedNode("n2", Verdict.UNHEALTHY, "DCGM 52"),))
    assert rehearsed(rules, (60, boom(CURRENT, 60)), (700, verdict))[3:] == [
        (660, "DeadlinePassed", "Stop FAILED")
    ]


def test_a_repair_is_done_unless_a_line_says_it_was_not() -> None:
    rules = application({"strategy": "REBOOT_NODE", "tries": 1}, {"strategy": "REPLACE_NODE"})
    done = [
        (60, "FaultObserved", "Repair REBOOT_NODE"),
        (60, "RepairEnded", "Relaunch"),
        (60, "Launched", "Wait RUNNING"),
    ]
    assert rehearsed(rules, (60, reboot(CURRENT, 60)))[2:] == done
    refused = RepairEnded(CURRENT, Strategy.REBOOT_NODE, (), "refused", "it did not come back")
    found = rehearsed(rules, (60, reboot(CURRENT, 60)), (300, refused))
    assert found[3] == (300, "RepairEnded", "Relaunch REPLACE_NODE")


def test_progress_closes_the_incident_and_gives_tries_back() -> None:
    rules = application({**RESTART, "tries": 1}, FAIL)
    told = [
        (60.0, boom(CURRENT, 60)),
        (120.0, ProgressSeen(CURRENT, 9, at(120))),
        (180.0, boom(CURRENT, 180)),
    ]
    names = [name for _, event, name in rehearsed(rules, *told) if event == "FaultObserved"]
    assert names == ["Relaunch RESTART_IN_PLACE", "Relaunch RESTART_IN_PLACE"]
    assert [
        name for _, event, name in rehearsed(rules, told[0], told[2]) if event == "FaultObserved"
    ][1:] == ["Stop FAILED"]


def test_an_hour_without_a_fault_passes_only_before_another_line() -> None:
    rules = application({**RESTART, "tries": 1}, FAIL)
    found = rehearsed(rules, (60, boom(CURRENT, 60)), (4000, boom(CURRENT, 4000)))
    assert (3660, "DeadlinePassed", "Wait RUNNING") in found
    assert found[-2:] == [
        (4000, "FaultObserved", "Relaunch RESTART_IN_PLACE"),
        (4000, "Launched", "Wait RUNNING"),
    ]


def test_a_delayed_launch_is_over_once_a_line_has_its_ranks() -> None:
    rules = application({**RESTART, "delay": "10m"})
    hung = RanksHung(CURRENT, (0,), "training stands still", at(90))
    found = rehearsed(rules, (60, boom(CURRENT, 60)), (90, hung))
    assert found[3:5] == [
        (90, "Launched", "Wait RUNNING"),
        (90, "RanksHung", "Examine links"),
    ]
    assert found[5] == (90, "NodesExamined", "Relaunch RESTART_IN_PLACE")
    assert rehearsed(rules, (60, boom(CURRENT, 60)))[-1] == (660, "Launched", "Wait RUNNING")


def test_what_comes_after_the_end_changes_nothing_in_any_preset() -> None:
    told = [Step(at(60 * n), boom(CURRENT, 60 * n)) for n in range(1, 40)]
    for name in ("default", "torchelastic", "ecs-reboot-once", "gputasker", "modelarts"):
        found = simulate(preset(name), new_job(policy=preset(name)), told)
        ends = [number for number, one in enumerate(found) if one.decision.kind == "Stop"]
        assert len(ends) == 1, name
        assert all(one.decision.kind == "Ignore" for one in found[ends[0] + 1 :])


def test_the_same_events_are_decided_the_same_twice() -> None:
    told = [Step(at(60 * n), boom(CURRENT, 60 * n, node=f"n{n % 3 + 1}")) for n in range(1, 12)]
    once, twice = (
        simulate(preset("modelarts"), replace(new_job(), submitted_at=at(0) + timedelta()), told)
        for _ in range(2)
    )
    assert once == twice


def cut_off(seconds: float) -> FaultObserved:
    """Both ranks lost their connection, and none says why."""
    said = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1",
    )
    ranks = [exited(rank, node, code=1, log_tail=said) for rank, node in ((0, "n1"), (2, "n2"))]
    return FaultObserved(CURRENT, tuple(ranks), 0, at(seconds))


def test_links_that_no_line_mentions_are_not_broken() -> None:
    rules = policy(causes={"NETWORK": [{"strategy": "RESTART_IN_PLACE", "tries": 1}, FAIL]})
    turns = rehearsed(rules, (60, cut_off(60)), (120, cut_off(120)))
    assert [(event, decision) for _, event, decision in turns[2:]] == [
        ("FaultObserved", "Relaunch RESTART_IN_PLACE"),
        ("Launched", "Wait RUNNING"),
        ("FaultObserved", "Examine links"),
        ("NodesExamined", "Stop FAILED"),
    ]


def test_a_gpu_that_no_line_says_others_use_is_free() -> None:
    full = error("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    rules = policy(causes={"OUT_OF_MEMORY": [{"strategy": "RESTART_IN_PLACE", "tries": 1}, FAIL]})
    rank = exited(code=1, error=full, seconds=60)
    turns = rehearsed(rules, (60, FaultObserved(CURRENT, (rank,), 0, at(60))))
    assert [(event, decision) for _, event, decision in turns[2:]] == [
        ("FaultObserved", "Examine foreign processes"),
        ("NodesExamined", "Relaunch RESTART_IN_PLACE"),
        ("Launched", "Wait RUNNING"),
    ]
