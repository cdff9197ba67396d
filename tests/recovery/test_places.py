"""What an answer proves: only the place where ranks were started can say that they are gone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.job.apply import resubmit
from relaunch.job.events import (
    DeadlinePassed,
    Launched,
    LaunchFailed,
    LaunchRefused,
    NodeDeclaredDead,
    NodeRefusal,
    NodesAcquired,
    NodeUnreachable,
    RanksFound,
    RanksStopped,
    RanksSucceeded,
)
from relaunch.job.places import (
    MOVED,
    AgentPlace,
    StartedPlaces,
    explain_doubt,
    explain_forgotten,
    find_doubt,
    limit_places,
    parse_place,
    record_places,
)
from relaunch.job.state import Ask, JobState, Phase, Slot, Wait
from tests.recovery.builders import T0, new_job, play, record, step

TOLD: dict[str, Any] = {
    "machine": "f29984fb3bef03b3",
    "boot_id": "9df949fd-71a9",
    "uid": 1000,
    "state": "0ff05658b13ac7aa",
}
STARTED = AgentPlace("f29984fb3bef03b3", "1" * 12, 1000, "0ff05658b13ac7aa")
ELSEWHERE = replace(STARTED, machine="aa11", state="bb22")


@pytest.mark.parametrize(
    "answering",
    [
        pytest.param(replace(STARTED, machine="aa1111111111"), id="machine"),
        pytest.param(replace(STARTED, machine="aa", boot_id="2" * 12), id="machine-and-boot"),
        pytest.param(replace(STARTED, uid=0), id="user"),
        pytest.param(replace(STARTED, uid=0, state="other"), id="user-and-state"),
        pytest.param(replace(STARTED, state="other"), id="state"),
        pytest.param(replace(STARTED, state="other", boot_id="2" * 12), id="state-and-boot"),
        pytest.param(replace(STARTED, state=""), id="no-state"),
        pytest.param(None, id="nothing"),
    ],
)
def test_an_answer_from_elsewhere_proves_nothing(
    answering: AgentPlace | None, snapshot: SnapshotAssertion
) -> None:
    assert explain_doubt("n2", 3, STARTED, answering) == snapshot


@pytest.mark.parametrize("answering", [STARTED, replace(STARTED, boot_id="2" * 12)])
def test_an_answer_from_the_same_place_is_proof(answering: AgentPlace) -> None:
    assert explain_doubt("n2", 3, STARTED, answering) is None


def test_a_place_without_state_proves_nothing_even_to_itself() -> None:
    nothing = replace(STARTED, state="")
    assert explain_doubt("n2", 3, nothing, nothing) is not None


def test_a_boot_id_of_a_node_that_shares_its_machine_is_read() -> None:
    kernel, own = "9df949fd-71a9-414f-bc37-83439e7026af", "b517b16a65dc40828dc273186b0214e2"
    assert parse_place({**TOLD, "boot_id": f"{kernel}+{own}"}) is not None


def test_what_an_agent_tells_is_read_and_written_back() -> None:
    place = parse_place(TOLD)
    assert place is not None
    assert (place.machine, place.uid, place.state) == ("f29984fb3bef03b3", 1000, "0ff05658b13ac7aa")
    # a digest, for it is kept for each node
    assert place.boot_id != TOLD["boot_id"] and len(place.boot_id) == 12
    assert AgentPlace.from_text(place.text) == place
    unknown = parse_place({**TOLD, "state": ""})
    assert unknown is not None and AgentPlace.from_text(unknown.text) == unknown


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "f29984fb",
        {},
        {**TOLD, "machine": None},
        {**TOLD, "machine": ""},
        {**TOLD, "machine": "x" * 257},
        {**TOLD, "machine": "two words"},
        {**TOLD, "machine": "a\nb"},
        {**TOLD, "boot_id": ""},
        {**TOLD, "boot_id": 7},
        {**TOLD, "state": {"a": 1}},
        {**TOLD, "uid": -1},
        {**TOLD, "uid": 2**32},
        {**TOLD, "uid": True},
        {**TOLD, "uid": 1.5},
        {**TOLD, "uid": "0"},
        {name: value for name, value in TOLD.items() if name != "uid"},
    ],
)
def test_what_is_no_place_is_none_and_so_proves_nothing(value: object) -> None:
    assert parse_place(value) is None


def started(generation: int, submission: int = 1000, **by_node: AgentPlace) -> StartedPlaces:
    return StartedPlaces(
        submission, generation, {node: place.text for node, place in by_node.items()}
    )


def test_an_answer_must_come_from_where_its_generation_started() -> None:
    places = (started(3, n1=STARTED, n2=STARTED), started(4, n2=ELSEWHERE))
    assert find_doubt(places, "n1", STARTED) is None
    assert "generation 4" in str(find_doubt(places, "n2", STARTED))
    assert "generation 3" in str(find_doubt(places, "n2", ELSEWHERE))
    # where nothing was started nothing can be doubted
    assert find_doubt(places, "n3", None) is None


def test_no_answer_is_proof_for_a_node_whose_line_was_changed(snapshot: SnapshotAssertion) -> None:
    places = (StartedPlaces(1000, 3, {"n1": MOVED}),)
    for answering in (STARTED, ELSEWHERE, None):
        assert find_doubt(places, "n1", answering) == snapshot(name="moved")
    assert find_doubt(places, "n2", STARTED) is None


def test_never_prepared_proves_where_nothing_ran_or_it_rebooted(
    snapshot: SnapshotAssertion,
) -> None:
    places = (started(3, n1=STARTED),)
    rebooted = replace(STARTED, boot_id="2" * 12)
    assert explain_forgotten(places, "n1", 3, STARTED) == snapshot
    assert explain_forgotten(places, "n1", 3, rebooted) is None
    # that one may never have come there
    assert explain_forgotten(places, "n1", 4, STARTED) is None
    assert explain_forgotten(places, "n2", 3, STARTED) is None
    assert "another machine" in str(explain_forgotten(places, "n1", 3, ELSEWHERE))
    assert "without saying where" in str(explain_forgotten(places, "n1", 3, None))
    assert explain_forgotten(places, "n2", 3, None) is None


def test_places_are_kept_once_and_for_nodes_where_ranks_may_live() -> None:
    known = record_places((), started(3, n1=STARTED, n2=STARTED), ("n1", "n2"))
    assert known == (started(3, n1=STARTED, n2=STARTED),)
    newer = record_places(known, started(4, n1=STARTED, n2=ELSEWHERE), ("n1", "n2"))
    assert newer == (started(3, n2=STARTED), started(4, n1=STARTED, n2=ELSEWHERE))
    again = record_places(newer, started(4, n3=STARTED), ("n1", "n2", "n3"))
    assert again == (started(3, n2=STARTED), started(4, n1=STARTED, n2=ELSEWHERE, n3=STARTED))
    assert record_places(newer, started(4, n2=STARTED), ("n1",)) == (started(4, n1=STARTED),)
    assert limit_places(newer, ("n1",)) == (started(4, n1=STARTED),)
    assert limit_places(newer, ()) == ()


# --- what a job remembers of it


def running(nodes: int = 2) -> JobState:
    names = [f"n{number}" for number in range(1, nodes + 1)]
    job = replace(new_job(nodes=nodes), generation=3, phase=Phase.LAUNCHING)
    job = record(job, NodesAcquired(tuple(Slot(name, name) for name in names)), T0)
    job, _ = play(job, Launched(3, T0, T0, dict.fromkeys(names, STARTED.text)))
    return job


def test_a_launch_is_remembered_until_its_nodes_are_proven_clean() -> None:
    job = running()
    assert job.places == (started(3, n1=STARTED, n2=STARTED),)
    assert record(job, RanksStopped(3, ("n1",), T0), T0).places == (started(3, n2=STARTED),)
    assert record(job, NodeDeclaredDead("n2", "", "ada"), T0).places == (started(3, n1=STARTED),)
    assert record(job, RanksSucceeded(3), T0).places == ()


def test_a_launch_that_completes_replaces_all_places_before_it() -> None:
    job = replace(running(), generation=4)
    assert record(job, Launched(4, T0, T0, {"n1": ELSEWHERE.text}), T0).places == (
        started(4, n1=ELSEWHERE),
    )
    stale = record(job, Launched(3, T0, T0, {"n1": STARTED.text}), T0)
    # what is reported of a generation that was given up adds to what is known
    assert stale.places == job.places


@pytest.mark.parametrize("failed", [True, False])
def test_a_half_failed_launch_is_remembered_beside_earlier_ones(failed: bool) -> None:
    job = replace(running(), generation=4)
    told = {"n1": STARTED.text, "n2": ELSEWHERE.text}
    event = (
        LaunchFailed(4, ("n2",), True, timedelta(0), "n2: no answer", told)
        if failed
        else LaunchRefused(4, (NodeRefusal("n1", "cannot_start", "x"),), places=told)
    )
    assert record(job, event, T0).places == (
        started(3, n2=STARTED),
        started(4, n1=STARTED, n2=ELSEWHERE),
    )


def test_a_launch_that_was_given_up_half_way_is_remembered() -> None:
    job = replace(running(), generation=4)
    half = StartedPlaces(job.submission, 4, {"n2": ELSEWHERE.text, "n3": STARTED.text})
    found = record(job, RanksFound(("n2", "n3"), places=(half,)), T0)
    assert found.places == (started(3, n1=STARTED, n2=STARTED), half)


def test_a_new_submission_knows_where_ranks_of_the_old_may_live() -> None:
    job = replace(running(), phase=Phase.FAILED)
    again = resubmit(job, 2000, "ada", T0, renew_budgets=False, avoid=())
    assert (again.places, again.maybe_alive) == (job.places, job.maybe_alive)


def test_a_node_that_answers_from_elsewhere_is_lost_and_says_why(
    snapshot: SnapshotAssertion,
) -> None:
    said = (
        "n1 answers, but from another machine than the one "
        "generation 3 was started on (machine b, was a)"
    )
    job, decision = play(
        running(1), NodeUnreachable(3, "n1", timedelta(minutes=3), said, is_elsewhere=True)
    )
    assert isinstance(decision, Wait)
    assert decision.phase is Phase.NODE_LOST
    assert decision.reason == snapshot(name="lost")
    assert job.incident is not None and job.incident.reason == said
    job, decision = play(job, DeadlinePassed())
    assert isinstance(decision, Ask)
    assert decision.reason == said
    _, decision = step(replace(job, phase=Phase.WAITING_FOR_PERSON), DeadlinePassed())
    assert isinstance(decision, Ask)
    assert decision.reason == snapshot(name="no-answer")


def test_many_lost_nodes_are_named_in_few_words(snapshot: SnapshotAssertion) -> None:
    job = running(6)
    for number in range(1, 7):
        event = NodeUnreachable(
            3,
            f"n{number}",
            timedelta(minutes=3),
            f"n{number} is elsewhere",
            is_elsewhere=number > 2,
        )
        job, _ = play(job, event)
    _, decision = play(job, DeadlinePassed())
    assert isinstance(decision, Ask)
    assert decision.reason == snapshot


def test_a_node_prepared_elsewhere_is_lost_with_its_old_ranks() -> None:
    job = replace(running(), generation=4, phase=Phase.LAUNCHING)
    said = (
        "n2 answers, but from another machine than the one "
        "generation 3 was started on (machine b, was a)"
    )
    job, decision = play(
        job, LaunchFailed(4, ("n2",), False, timedelta(0), said, elsewhere=("n2",))
    )
    assert [(lost.node, lost.reason, lost.is_elsewhere) for lost in job.lost] == [
        ("n2", said, True)
    ]
    assert said in decision.reason
    assert job.places == (started(3, n1=STARTED, n2=STARTED),)
