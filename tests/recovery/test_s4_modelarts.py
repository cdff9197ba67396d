"""The decisions of ModelArts' fault recovery, row by row, under `modelarts`.

Every kind of restart is switched on.

Source: support.huaweicloud.com, ModelArts, "Fault recovery of training jobs", 2026-02-06.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.observations import RanksVanished
from relaunch.job.events import (
    DeadlinePassed,
    FaultObserved,
    LaunchFailed,
    NodesAcquired,
    StepReached,
)
from relaunch.job.fencing import safe_after
from relaunch.job.ranks import rank_environments, seat
from relaunch.job.state import JobState, Phase, Relaunch, Slot
from relaunch.pool.messages import Place
from relaunch.spec.annotations import GRACE_PERIOD, apply_annotations, apply_grace_period
from relaunch.spec.policy import Policy, preset, resolve
from tests.recovery.builders import (
    T0,
    Turn,
    at,
    climbed,
    describe,
    died,
    examine,
    exited,
    fault,
    hung,
    lose,
    mended,
    new_job,
    raised,
    relaunched,
    running,
    sick,
    step,
    suspected,
    this,
    walk,
    xid,
)

RETRIES = "fault-tolerance/job-retry-num"
HEALS, HEALS_TOO, FATAL, USERS = xid(95), xid(94), xid(79, "GPU has fallen off the bus."), xid(31)
RESET, RESET_DONE = "RESET_GPU n2 0000:05:00", (mended("done", "reset"), "LAUNCH")
POD, JOB_ISOLATED = "REPLACE_NODE without n2 avoiding n2", "RESCHEDULE_JOB without n2 avoiding n2"
HOUR, DAY = 3600, 86_400


def job(policy: Policy | None = None, **spec: Any) -> JobState:
    return running(policy=policy or resolve({"extends": "modelarts", "max_restarts": 8}), **spec)


def without_pods(**more: str) -> Policy:
    """As a job file switches it on: everything but pod rescheduling."""
    flags = {
        "fault-tolerance/job-unconditional-retry": "true",
        "fault-tolerance/hang-retry": "true",
    }
    return apply_annotations(preset("modelarts"), {RETRIES: "8", **flags, **more})


def rebooted(node: str = "n2") -> Any:
    return lambda j: FaultObserved(
        j.generation, (RanksVanished(node, T0, "the node rebooted", rebooted=True),), 0, T0
    )


@pytest.mark.parametrize("line", [HEALS, HEALS_TOO])
def test_s4_1_a_chip_that_heals_is_reset_in_place_for_free(
    line: str,
) -> None:
    after = walk(job(), (sick(line), RESET))
    # all ranks are stopped before the chip is touched
    assert (after.phase, after.generation) == (Phase.REPAIRING, 1)
    after, decision = step(after, mended("done", "reset")(after))
    assert isinstance(decision, Relaunch)
    assert (decision.keep_nodes, decision.without, decision.avoid) == (True, (), ())
    assert (after.generation, after.restarts_spent, after.avoided) == (2, 0, ())


def test_s4_1_in_place_recovery_needs_no_restart_to_be_left() -> None:
    none_left = job(resolve({"extends": "modelarts", "max_restarts": 0}))
    walk(none_left, (sick(HEALS), RESET), RESET_DONE)
    walk(none_left, (died(1), "FAILED 1"))


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(mended("refused", "the GPU is in use"), id="refused"),
        pytest.param(mended("ambiguous", "nvidia-smi hangs"), id="ambiguous"),
        pytest.param(this(DeadlinePassed()), id="it does not end"),
    ],
)
@pytest.mark.parametrize("line", [HEALS, HEALS_TOO])
def test_s4_2_a_failed_reset_isolates_the_node_and_reschedules(failure: Any, line: str) -> None:
    after = walk(job(), (sick(line), RESET), (failure, POD))
    assert [one.node for one in after.avoided] == ["n2"]
    after = walk(job(without_pods()), (sick(line), RESET), (failure, JOB_ISOLATED))
    assert ([one.node for one in after.avoided], after.restarts_spent) == (["n2"], 1)


@pytest.mark.parametrize(
    ("met", "expected"),
    [
        pytest.param(
            [(0, HEALS), (HOUR, HEALS), (2 * HOUR, HEALS)],
            POD,
            id="the third time in a day: isolated",
        ),
        pytest.param(
            [(0, HEALS), (HOUR, HEALS), (DAY, HEALS)],
            RESET,
            id="the first is a day old: not the third",
        ),
        pytest.param(
            [(0, HEALS), (HOUR, HEALS), (DAY - 1, HEALS)], POD, id="a second less than a day is"
        ),
        pytest.param(
            [(0, HEALS), (1, HEALS), (2, xid(64))], RESET, id="another code counts by itself"
        ),
        pytest.param(
            [(0, HEALS), (1, HEALS), (2, xid(95, gpu="0000:06:00"))],
            "RESET_GPU n2 0000:06:00",
            id="another chip counts by itself",
        ),
    ],
)
def test_s4_3_a_chips_third_equal_code_in_24_hours_is_not_reset(
    met: list[tuple[int, str]], expected: str
) -> None:
    after = job()
    for seconds, line in met[:-1]:
        after = walk(after, (sick(line), RESET), RESET_DONE, now=at(seconds))
    seconds, line = met[-1]
    after = walk(after, (sick(line), expected), now=at(seconds))
    assert [one.node for one in after.avoided] == (["n2"] if "avoiding" in expected else [])


USERS_RESET = (examine(n2="UNHEALTHY"), RESET)
USERS_SPARED = (examine(n2="HEALTHY"), "RESTART_IN_PLACE")


@pytest.mark.parametrize(
    ("turns", "spent"),
    [
        pytest.param([(sick(USERS), "EXAMINE n2"), USERS_RESET, RESET_DONE], 0, id="unhealthy"),
        pytest.param([(sick(USERS), "EXAMINE n2"), USERS_SPARED], 0, id="healthy"),
        pytest.param(
            [
                (sick(USERS), "EXAMINE n2"),
                (examine(n2="UNKNOWN"), "RESTART_IN_PLACE"),
                (sick(HEALS), RESET),
                RESET_DONE,
                (sick(USERS), "EXAMINE n2"),
                USERS_SPARED,
                (sick(USERS), "RESCHEDULE_JOB"),
            ],
            1,
            id="the third: scheduled again and not isolated",
        ),
    ],
)
def test_s4_3_the_users_doing_costs_no_healthy_chip(turns: list[Turn], spent: int) -> None:
    """The original resets at once; decision 38 says why this examines first."""
    after = walk(job(), *turns)
    assert (after.restarts_spent, after.avoided) == (spent, ())


def test_s4_3_one_address_on_another_node_is_another_chip() -> None:
    after = walk(job(), (sick(HEALS), RESET), RESET_DONE, (sick(HEALS), RESET), RESET_DONE)
    walk(after, (sick(HEALS, node="n1"), "RESET_GPU n1 0000:05:00"))


def npu(code: str) -> Any:
    """A rank has printed the event of an Ascend NPU, as CANN's runtime words it, and failed."""
    line = f"HBM MULTI BIT ECC, Uncorrectable ECC, device_id=3, event_id=0x{code}, time us=7"
    return died(1, log_tail=(line,))


def test_s4_3_a_users_third_equal_npu_code_isolates_nothing() -> None:
    spared = (examine(n2="HEALTHY"), "RESTART_IN_PLACE")
    users = (npu("80c98002"), "EXAMINE n2")
    after = walk(job(), users, spared, users, spared, (npu("80c98002"), "RESCHEDULE_JOB"))
    assert (after.restarts_spent, after.avoided) == (1, ())
    # Another code counts by itself.
    after = walk(job(), users, spared, users, spared, (npu("80cb8002"), "EXAMINE n2"), spared)
    assert (after.restarts_spent, after.avoided) == (0, ())


def test_s4_3_progress_in_between_makes_no_difference() -> None:
    after = walk(job(), (sick(HEALS), RESET), RESET_DONE, (sick(HEALS), RESET), RESET_DONE)
    after, _ = step(relaunched(after), StepReached(after.generation, 50, at(60)), at(60))
    walk(after, (sick(HEALS), POD), now=at(61))


def test_s4_3_without_pods_the_whole_job_is_rescheduled() -> None:
    twice = [(sick(HEALS), RESET), RESET_DONE] * 2
    after = walk(job(without_pods()), *twice, (sick(HEALS), JOB_ISOLATED))
    assert (after.restarts_spent, [one.node for one in after.avoided]) == (1, ["n2"])


R: Turn = (died(1), "RESCHEDULE_JOB")


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([R, R, R, (died(1), "FAILED 1")], id="the fourth in a row"),
        pytest.param([R, R, R, (died(9), "FAILED 9")], id="whatever the exit code"),
        pytest.param(
            [
                R,
                (raised(), "RESCHEDULE_JOB"),
                R,
                (lambda j: fault(j, exited(0, "n1", signal=6)), "FAILED 134"),
            ],
            id="whatever the cause",
        ),
        pytest.param(
            [R, R, R, (sick(HEALS), RESET), RESET_DONE, R, R, R, (died(1), "FAILED 1")],
            id="a fault of a chip in between begins again",
        ),
        pytest.param(
            [R, R, (sick(FATAL), POD), R, R, R, (died(1), "FAILED 1")], id="a fatal one as well"
        ),
        pytest.param(
            [R, R, (sick(USERS), "EXAMINE n2"), USERS_SPARED, R, R, R, (died(1), "FAILED 1")],
            id="one that the user caused as well",
        ),
        pytest.param(
            [R, R, (rebooted(), POD), R, R, R, (died(1), "FAILED 1")],
            id="a fault of a node as well",
        ),
        pytest.param(
            [R, R, (lose(), "WAIT NODE_LOST"), (hung(), POD), R, R, R, (died(1), "FAILED 1")],
            id="a lost node as well",
        ),
        pytest.param(
            [R, R, (hung(), "RESTART_IN_PLACE"), R, (died(1), "FAILED 1")], id="a hang does not"
        ),
    ],
)
def test_s4_4_after_three_reschedules_the_next_failure_is_final(
    turns: list[Turn],
) -> None:
    walk(job(), *turns)


def test_s4_4_every_nonzero_exit_counts_and_takes_a_restart() -> None:
    after = walk(job(), R)
    assert (after.restarts_spent, after.avoided) == (1, ())
    walk(job(preset("modelarts")), R, R, R, (died(1), "FAILED 1"))
    after = walk(job(preset("modelarts")), R, R, R, (sick(FATAL), POD))
    assert after.restarts_spent == 3
    walk(after, (died(1), "FAILED 1"))


def test_s4_4_the_last_failures_exit_code_is_that_of_the_job(snapshot: SnapshotAssertion) -> None:
    after = walk(job(), R, R, R, (died(42), "FAILED 42"))
    assert after.reason == snapshot


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(sick(FATAL), id="a chip that does not heal"),
        pytest.param(rebooted(), id="a node"),
    ],
)
def test_s4_5_the_faulty_node_is_isolated_before_the_reschedule(event: Any) -> None:
    after = walk(job(without_pods()), (event, JOB_ISOLATED))
    assert ([one.node for one in after.avoided], after.restarts_spent) == (["n2"], 1)
    # the workflow acquires other nodes; what is decided is who is not among them
    assert after.slots[1].node == "n2"


def test_s4_5_a_lost_node_is_isolated_and_the_job_rescheduled() -> None:
    walk(job(without_pods()), (lose(), "WAIT NODE_LOST"), (hung(), JOB_ISOLATED))


def test_s4_5_it_ends_with_the_restarts(snapshot: SnapshotAssertion) -> None:
    policy = without_pods(**{RETRIES: "2"})
    after = walk(
        job(policy),
        (sick(FATAL), JOB_ISOLATED),
        (sick(FATAL), JOB_ISOLATED),
        (sick(FATAL), "FAILED 1"),
    )
    assert after.reason == snapshot


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(sick(FATAL), id="a chip that does not heal"),
        pytest.param(rebooted(), id="a node"),
    ],
)
def test_s4_6_only_the_faulty_pod_moves_and_its_node_is_isolated(
    event: Any,
) -> None:
    after, decision = step(job(), event(job()))
    assert isinstance(decision, Relaunch) and describe(decision) == POD
    # the other pods keep their containers
    assert decision.keep_nodes
    # pods have their own retries
    assert ([one.node for one in after.avoided], after.restarts_spent) == (["n2"], 0)


def test_s4_6_after_the_pods_retries_the_job_is_rescheduled() -> None:
    pods: list[Turn] = [
        (sick(FATAL), POD),
        (sick(HEALS), RESET),
        (mended("refused"), POD),
        (rebooted(), POD),
    ]
    after = walk(job(), *pods, (sick(FATAL), JOB_ISOLATED))
    assert after.restarts_spent == 1
    walk(after, (sick(HEALS), RESET), (mended("refused"), JOB_ISOLATED))


def test_s4_6_a_pod_that_fits_nowhere_ends_in_a_job_reschedule() -> None:
    after = walk(job(), (sick(FATAL), POD))
    failures = 0
    while "RESCHEDULE_JOB" not in describe(
        decision := climbed(after, suspected(Cause.NODE_LOST, "n3"))[1]
    ):
        event = LaunchFailed(after.generation, ("n3",), False, timedelta(0), "no answer")
        after, decision = step(after, event)
        assert describe(decision).startswith("REPLACE_NODE")
        failures += 1
        assert failures < 3
    assert not isinstance(decision, Relaunch) or not decision.keep_nodes


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(
            [(hung(), "RESTART_IN_PLACE")] * 3 + [(hung(), "FAILED 1")],
            id="three in a row, and no more",
        ),
        pytest.param(
            [(hung(), "RESTART_IN_PLACE")] * 2
            + [R, *[(hung(), "RESTART_IN_PLACE")] * 3, (hung(), "FAILED 1")],
            id="another fault between",
        ),
    ],
)
def test_s4_7_a_hang_restarts_in_place_three_times_in_a_row(turns: list[Turn]) -> None:
    walk(job(), *turns)


def test_s4_7_a_hang_takes_no_restart_and_begins_at_30_minutes() -> None:
    after = walk(
        job(resolve({"extends": "modelarts", "max_restarts": 0})), (hung(), "RESTART_IN_PLACE")
    )
    assert after.restarts_spent == 0
    assert preset("modelarts").hang.after == timedelta(minutes=30)


def test_s4_7_hangs_that_training_has_passed_are_no_row() -> None:
    after = walk(job(), *[(hung(), "RESTART_IN_PLACE")] * 3)
    after, _ = step(relaunched(after), StepReached(after.generation, 50, at(60)), at(60))
    walk(after, (hung(), "RESTART_IN_PLACE"), now=at(61))


@pytest.mark.parametrize(
    ("annotations", "turns"),
    [
        pytest.param(
            {}, [(died(1), "FAILED 1")], id="automatic restart alone: an exit of the program fails"
        ),
        pytest.param({}, [(hung(), "FAILED 1")], id="automatic restart alone: a hang fails"),
        pytest.param(
            {}, [(sick(HEALS), RESET), RESET_DONE], id="automatic restart alone: in place"
        ),
        pytest.param({}, [(sick(FATAL), JOB_ISOLATED)], id="automatic restart alone: isolated"),
        pytest.param(
            {"fault-tolerance/job-unconditional-retry": "true"},
            [R, R, R, (died(1), "FAILED 1")],
            id="unconditional",
        ),
        pytest.param(
            {"fault-tolerance/hang-retry": "true"}, [(hung(), "RESTART_IN_PLACE")], id="hang"
        ),
        pytest.param(
            {"fault-tolerance/pod-retry-num": "1"},
            [(sick(FATAL), POD), (sick(FATAL), JOB_ISOLATED)],
            id="pod",
        ),
    ],
)
def test_s4_8_annotations_switch_each_recovery_on(
    annotations: dict[str, str], turns: list[Turn]
) -> None:
    walk(job(apply_annotations(preset("modelarts"), {RETRIES: "8", **annotations})), *turns)


def counters(slots: tuple[Slot, ...]) -> list[tuple[str, str]]:
    found = []
    for group, slot in enumerate(slots):
        ranks = rank_environments(group, slot, new_job().spec)
        found += [(rank["MA_SCHEDULE_CNT"], rank["MA_PROC_START_CNT"]) for rank in ranks[:1]]
    return found


def test_s4_9_a_place_counts_its_nodes_and_the_starts_on_each() -> None:
    first, second, spare = (Place(f"n{number}", f"10.0.0.{number}") for number in (1, 2, 3))
    slots = seat((), (first, second))
    assert counters(slots) == [("1", "1"), ("1", "1")]
    slots = seat(slots, (first, second))
    # in place, and after a hang
    assert counters(slots) == [("1", "2"), ("1", "2")]
    slots = seat(slots, (first, spare))
    # the pod was scheduled elsewhere, the other one started once more
    assert counters(slots) == [("1", "3"), ("2", "1")]
    slots = seat(slots, (first, spare))
    assert counters(slots) == [("1", "4"), ("2", "2")]


def test_s4_9_a_rescheduled_job_is_new_in_every_place() -> None:
    """The containers are new: a script has to know that its shared memory is gone."""
    before = job()
    after, decision = step(before, died(1)(before))
    assert isinstance(decision, Relaunch) and not decision.keep_nodes
    slots = seat(
        after.slots,
        (Place("n1", "10.0.0.1"), Place("n2", "10.0.0.2")),
        reassign=not decision.keep_nodes,
    )
    assert counters(slots) == [("2", "1"), ("2", "1")]


def test_s4_9_the_counters_live_in_the_jobs_state() -> None:
    slots = (Slot("n1", "10.0.0.1", 2, 3), Slot("n2", "10.0.0.2", 1, 4))
    after = walk(job(), (hung(), "RESTART_IN_PLACE"), (this(NodesAcquired(slots)), "IGNORE"))
    assert after.slots == slots


def test_s4_10_a_shorter_grace_shortens_the_wait_for_a_lost_node() -> None:
    """The ranks of a lost node end by themselves: their grace is a part of what is waited for."""
    usual = resolve({"extends": "modelarts", "timeouts": {"stop_grace": "2m"}})
    waits = []
    for policy in (usual, apply_grace_period(usual, {GRACE_PERIOD: "10"})):
        after = walk(job(policy), (lose("n2"), "WAIT NODE_LOST"), (hung(), POD))
        waits.append(safe_after(after, at(10)))
    assert waits[0] - waits[1] == timedelta(seconds=110)


def test_s4_10_how_long_ranks_may_take_to_stop_is_in_the_policy() -> None:
    assert resolve(
        {"extends": "modelarts", "timeouts": {"stop_grace": "10s"}}
    ).timeouts.stop_grace == timedelta(seconds=10)
