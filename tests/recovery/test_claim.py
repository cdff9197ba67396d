"""What a job tells its fleet, and what it does when it has to leave a node."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job.claim import (
    MAX_SUSPECTS,
    MAX_SUSPECTS_PER_FAULT,
    build_claim,
    build_empty_claim,
    suspects,
)
from relaunch.job.events import (
    CancelRequested,
    DrainDue,
    DrainRequested,
    NodesAcquired,
    NodesMissing,
    RetryRequested,
    Submitted,
)
from relaunch.job.incidents import MAX_FAULTS, add_unhealthy_nodes, open_incident
from relaunch.job.ranks import keep_places, rank_environments, seat
from relaunch.job.state import (
    AvoidedNode,
    Diagnosis,
    FaultRecord,
    Ignore,
    Incident,
    JobState,
    Phase,
    Relaunch,
    Slot,
    Stop,
    Wait,
)
from relaunch.pool.messages import Place
from tests.recovery.builders import (
    T0,
    at,
    back,
    died,
    examine,
    exited,
    fault,
    hung,
    lose,
    new_job,
    play,
    policy,
    running,
    sick,
    step,
    this,
    walk,
    xid,
)


def incident(
    generation: int = 1,
    cause: Cause = Cause.GPU_FATAL,
    nodes: tuple[str, ...] = ("n2",),
    **changes: object,
) -> Incident:
    fault = FaultRecord(
        T0, generation, cause, "Xid 79 on n2", nodes, gpus=("0000:05:00",), code="Xid 79"
    )
    made = Incident(
        T0,
        generation,
        cause,
        "Xid 79 on n2",
        nodes=nodes,
        gpus=fault.gpus,
        code="Xid 79",
        faults=(fault,),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_new_job_claims_all_its_nodes_and_holds_none() -> None:
    job = new_job(gpus_per_node=4, priority=3)
    wanted = build_claim(job, 1)
    assert (wanted.job, wanted.submission, wanted.seq) == ("llama", 1000, 1)
    assert (wanted.nodes, wanted.gpus, wanted.priority, wanted.since) == (2, 4, 3, T0)
    assert (wanted.running, wanted.keep, wanted.holds, wanted.suspects) == (False, (), (), ())


def test_a_replacement_keeps_its_nodes_and_those_of_live_ranks() -> None:
    job = replace(
        running(),
        slots=(Slot("n1", "10.0.0.1", gpus=(0, 1)), Slot("n2", "10.0.0.2")),
        maybe_alive=("n1", "n2", "n9"),
    )
    wanted = build_claim(job, 7, keep=("n1",), avoid=("n2",))
    assert (wanted.running, wanted.keep, wanted.avoid) == (True, ("n1",), ("n2",))
    assert wanted.holds == (Place("n1", "10.0.0.1", (0, 1)), Place("n2", "10.0.0.2"), Place("n9"))


def test_a_job_that_gives_way_queues_like_one_that_never_ran() -> None:
    assert build_claim(running(), 2, queue=True).running is False
    assert build_claim(replace(running(), has_run=True), 2, queue=True).has_run
    assert not build_claim(new_job(), 1).has_run


def test_what_is_given_back_is_all_but_where_ranks_may_live() -> None:
    job = replace(running(), maybe_alive=("n2",))
    said = build_empty_claim(job, 9)
    assert (said.nodes, said.keep, [place.node for place in said.holds]) == (0, (), ["n2"])


def test_every_incident_names_its_nodes_and_only_a_rung_isolates() -> None:
    job = replace(
        running(),
        incidents=(incident(1, nodes=("n1", "n2")),),
        incident=incident(3, Cause.APPLICATION),
    )
    assert [(one.node, one.generation, one.gpus, one.isolate) for one in suspects(job)] == [
        ("n1", 1, ("0000:05:00",), False),
        ("n2", 1, (), False),
        ("n2", 3, ("0000:05:00",), False),
    ]
    by_person = replace(job, avoided=(AvoidedNode("n2", "asked for by ada", T0),))
    assert not any(one.isolate for one in suspects(by_person))
    by_rung = replace(job, avoided=(AvoidedNode("n2", "Xid 79", T0, isolated=True),))
    (isolated,) = (one for one in suspects(by_rung) if one.isolate)
    assert (isolated.node, isolated.generation) == ("n2", 3), "the fault for which it was left"
    earlier = replace(job, avoided=(AvoidedNode("n2", "Xid 79", at(-1), isolated=True),))
    assert not any(one.isolate for one in suspects(earlier)), "its fault is in the archive"


def test_a_broken_node_that_ended_a_job_is_isolated() -> None:
    failed = Stop(Phase.FAILED, "no tries left", 1)
    assert suspects(replace(running(), incident=incident(), ending=failed))[0].isolate
    assert not suspects(
        replace(running(), incident=incident(cause=Cause.APPLICATION), ending=failed)
    )[0].isolate
    assert not suspects(
        replace(running(), incident=incident(), ending=replace(failed, phase=Phase.CANCELLED))
    )[0].isolate
    assert not suspects(replace(running(), incidents=(incident(closed=at(1)),), ending=failed))[
        0
    ].isolate


def test_the_reported_suspects_are_bounded() -> None:
    many = tuple(
        incident(number, nodes=tuple(f"n{node}" for node in range(20))) for number in range(20)
    )
    told = suspects(replace(running(), incidents=many))
    assert len(told) == MAX_SUSPECTS and {one.generation for one in told} == {18, 19}
    assert len({one.node for one in told}) == MAX_SUSPECTS_PER_FAULT


def test_isolation_by_a_rung_differs_from_avoidance_by_a_person() -> None:
    xid = "[   42.000000] NVRM: Xid (PCI:0000:05:00): 79, pid=4711, GPU has fallen off the bus."
    job, _ = step(running(), fault(running(), exited(signal=6, kernel=(xid,))))
    assert [(one.node, one.isolated) for one in job.avoided] == [("n2", True)]
    job, _ = step(running(), RetryRequested("", "ada", ("n2",)))
    assert [(one.node, one.isolated) for one in job.avoided] == [("n2", False)]


# --- several faults in one incident


def told_of(job: JobState) -> list[tuple[str, int, Cause, bool]]:
    return [(one.node, one.generation, one.cause, one.isolate) for one in suspects(job)]


def test_a_second_bad_node_in_one_incident_is_reported_at_once() -> None:
    job = walk(
        running(nodes=3),
        (sick(xid(79)), "REPLACE_NODE without n2 avoiding n2"),
        (sick(xid(79), node="n1", rank=0), "REPLACE_NODE without n1 avoiding n1"),
    )
    assert told_of(job) == [("n2", 1, Cause.GPU_FATAL, True), ("n1", 2, Cause.GPU_FATAL, True)]
    assert job.incident is not None
    assert (job.incident.nodes, job.incident.generation) == (("n2", "n1"), 1)
    assert [(one.generation, one.nodes) for one in job.incident.faults] == [
        (1, ("n2",)),
        (2, ("n1",)),
    ]
    assert build_claim(job, 9).suspects == suspects(job)


def test_a_node_that_only_an_examination_finds_is_reported() -> None:
    ladder = {"UNKNOWN": [{"strategy": "REPLACE_NODE", "when": "UNHEALTHY", "isolate": True}]}
    job = walk(
        running(nodes=3, policy=policy(causes=ladder)),
        (died(), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"),
        (died(node="n1", rank=0), "EXAMINE n1"),
        (examine(n1="UNHEALTHY"), "REPLACE_NODE without n1 avoiding n1"),
    )
    assert told_of(job) == [("n2", 1, Cause.UNKNOWN, True), ("n1", 2, Cause.UNKNOWN, True)]
    job = walk(
        running(nodes=3, policy=policy(causes={"HANG": ladder["UNKNOWN"]})),
        (hung(), "EXAMINE n1 n2 n3"),
        (
            examine(n1="HEALTHY", n2="HEALTHY", n3="UNHEALTHY"),
            "REPLACE_NODE without n3 avoiding n3",
        ),
    )
    assert [one for one in told_of(job) if one[3]] == [("n3", 1, Cause.HANG, True)]
    assert job.incident is not None and "n3 examined: UNHEALTHY" in job.incident.faults[-1].reason


def test_an_examination_without_an_incident_adds_nothing() -> None:
    job = running()
    suspected_fault = Diagnosis(Cause.HANG, "step 7 has not changed")
    assert add_unhealthy_nodes(job, suspected_fault, ("n1",), "n1 examined: UNHEALTHY", T0) is job


def test_a_long_incidents_faults_are_bounded_and_the_first_stay() -> None:
    job = running(policy=policy(no_progress_stop="off", no_progress_ask="off", max_restarts=100))
    for number in range(3 * MAX_FAULTS):
        job = open_incident(
            replace(job, generation=number),
            Diagnosis(Cause.APPLICATION, f"fault {number}", nodes=(f"n{number}",)),
            at(number),
            at(number),
        )
        again = open_incident(
            job,
            Diagnosis(Cause.APPLICATION, "again", nodes=(f"n{number}",)),
            at(number),
            at(number),
        )
        # the same fault of one generation is one
        assert again == job
    assert job.incident is not None
    kept = [one.generation for one in job.incident.faults]
    half = MAX_FAULTS // 2
    assert kept == [*range(half), *range(3 * MAX_FAULTS - half, 3 * MAX_FAULTS)]
    assert job.incident.dropped_faults == 2 * MAX_FAULTS


def test_a_node_to_examine_is_reported_whatever_faults_follow() -> None:
    job = replace(
        running(),
        incidents=tuple(incident(number, nodes=(f"n{number}",)) for number in range(1, 30)),
        avoided=(
            AvoidedNode("n3", "Xid 79", T0, isolated=True),
            AvoidedNode("n29", "Xid 79", T0, isolated=True),
        ),
    )
    assert [one.node for one in suspects(job)] == [
        "n3",
        *(f"n{number}" for number in range(22, 30)),
    ]


# --- nodes that were lost


def test_a_node_that_returns_with_nothing_stopped_is_not_charged(
    snapshot: SnapshotAssertion,
) -> None:
    job = walk(running(), (lose(), "WAIT NODE_LOST"))
    # nothing was stopped for it yet
    assert suspects(job) == ()
    job = walk(job, (back(), "WAIT RUNNING"))
    assert suspects(job) == ()
    assert [one.withdrawn for one in job.incidents[0].faults] == snapshot


def test_a_node_that_is_left_behind_is_charged() -> None:
    job = walk(running(), (lose(), "WAIT NODE_LOST"), (hung(), "REPLACE_NODE without n2"))
    assert [(node, cause) for node, _, cause, _ in told_of(job)] == [("n2", Cause.NODE_LOST)] * 1


def test_a_loss_charges_the_node_if_the_job_fails_not_on_cancel() -> None:
    lost = walk(running(), (lose(), "WAIT NODE_LOST"))
    cancelled = walk(lost, (this(CancelRequested("", "ada")), "CANCELLED 130"))
    assert suspects(cancelled) == ()
    failed = replace(lost, ending=Stop(Phase.FAILED, "denied", 1))
    assert [one.node for one in suspects(failed)] == ["n2"]


def test_a_node_returning_while_a_fault_is_open_is_not_charged() -> None:
    job = walk(
        running(nodes=3),
        (sick(xid(79)), "REPLACE_NODE without n2 avoiding n2"),
        (lose("n1"), "WAIT NODE_LOST"),
        (back("n1"), "WAIT RUNNING"),
    )
    assert told_of(job) == [("n2", 1, Cause.GPU_FATAL, True)]
    again = walk(job, (lose("n1"), "WAIT NODE_LOST"), (hung(), "REPLACE_NODE without n1"))
    # what was withdrawn once is reported when it is acted on
    assert ("n1", 2, Cause.NODE_LOST, False) in told_of(again)


# --- leaving


def request_drain(job: JobState, node: str = "n2") -> JobState:
    return step(job, DrainRequested(node, "new power supply", "grace", at(60)))[0]


def test_a_job_asked_to_leave_a_node_goes_on_until_it_has_to(snapshot: SnapshotAssertion) -> None:
    job, decision = step(running(), DrainRequested("n2", "new power supply", "grace", at(60)))
    assert isinstance(decision, Ignore) and job.phase is Phase.RUNNING
    assert [(one.node, one.by, one.until) for one in job.drains] == [("n2", "grace", at(60))]
    assert job.notices == snapshot
    again = request_drain(job)
    # asked twice it leaves once
    assert again.drains == job.drains


def test_leaving_a_node_relaunches_without_it_and_spends_nothing(
    snapshot: SnapshotAssertion,
) -> None:
    before = request_drain(running())
    job, decision = step(before, DrainDue("n2"), at(60))
    assert isinstance(decision, Relaunch) and (decision.without, decision.keep_nodes) == (
        ("n2",),
        True,
    )
    assert decision.reason == snapshot
    assert (job.generation, job.restarts_spent, job.tries, job.incident) == (
        before.generation + 1,
        0,
        (),
        None,
    )
    job, _ = step(job, NodesAcquired((Slot("n1", "10.0.0.1"), Slot("n3", "10.0.0.3"))))
    assert job.drains == ()


def test_a_node_that_is_not_its_own_is_not_left() -> None:
    job = request_drain(running(), "n7")
    assert (job.drains, job.notices) == ((), ())
    assert isinstance(step(job, DrainDue("n7"))[1], Ignore)


def test_a_node_is_never_left_twice_or_during_other_work() -> None:
    waiting, _ = play(new_job(), Submitted("", ""), NodesMissing("0 of 2"))
    assert isinstance(step(waiting, DrainDue("n2"))[1], Ignore)
    assert isinstance(step(running(), DrainDue("n2"))[1], Ignore)


# --- nodes that come late, and places


def test_a_repeated_report_of_missing_nodes_prolongs_no_wait() -> None:
    job, first = play(running(), RetryRequested("", "ada"), NodesMissing("0 of 2"))
    _, second = step(job, NodesMissing("1 of 2"), at(500))
    assert isinstance(first, Wait) and isinstance(second, Wait)
    assert first.until == second.until == T0 + timedelta(days=1)


def test_who_had_a_place_keeps_it_and_newcomers_fill_the_gaps() -> None:
    slots = seat((), tuple(map(Place, ("n1", "n2", "n3"))))
    granted = tuple(map(Place, ("n1", "n3", "n7")))
    assert [place.node for place in keep_places(slots, granted)] == ["n1", "n7", "n3"]
    assert [place.node for place in keep_places((), granted)] == ["n1", "n3", "n7"]
    assert [place.node for place in keep_places(slots, tuple(map(Place, ("n8", "n2", "n9"))))] == [
        "n8",
        "n2",
        "n9",
    ]


def test_a_job_that_shares_a_node_sees_its_own_gpus_only() -> None:
    shared, alone = seat((), (Place("n1", "10.0.0.1", (4, 5)), Place("n2", "10.0.0.2")))
    found = rank_environments(0, shared, new_job().spec)
    assert {(rank["CUDA_VISIBLE_DEVICES"], rank["CUDA_DEVICE_ORDER"]) for rank in found} == {
        ("4,5", "PCI_BUS_ID")
    }
    assert not any(
        "CUDA_VISIBLE_DEVICES" in rank for rank in rank_environments(1, alone, new_job().spec)
    )
