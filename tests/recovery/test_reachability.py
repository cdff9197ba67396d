"""Which nodes cannot reach each other, who is at fault, and what a job does about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.reachability import (
    ALL_PAIRS_UP_TO,
    CUT_OFF,
    LINK,
    MAX_LINKS,
    NODE_LINK,
    BrokenLink,
    LinkCall,
    LinkFindings,
    choose_calls,
    judge_links,
)
from relaunch.evidence.stacks import HungRank
from relaunch.job.events import DeadlinePassed, FaultObserved, StepReached
from relaunch.job.state import JobState, Phase
from tests.recovery.builders import (
    T0,
    at,
    called,
    died,
    examine,
    exited,
    fault,
    hung,
    lose,
    policy,
    running,
    step,
    this,
    walk,
)

N1, N2, N3, N4, W = "n1", "n2", "n3", "n4", "w1"
NO_ANSWER = "no answer from 10.0.0.2 port 20001"


def calls(nodes: Iterable[str], *broken: tuple[str, str]) -> list[LinkCall]:
    """Every node calls every other, and those fail."""
    return [
        LinkCall(one, other, NO_ANSWER if (one, other) in broken else "")
        for one, other in permutations(nodes, 2)
    ]


def both(*pairs: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (*pairs, *((other, one) for one, other in pairs))


TWO, THREE, FOUR = (N1, N2), (N1, N2, N3), (N1, N2, N3, N4)
JUDGED = {
    "all well": (TWO, calls(TWO), (), LINK),
    "two alone, the second goes": (TWO, calls(TWO, *both(TWO)), (N2,), LINK),
    "one direction is enough": (TWO, calls(TWO, (N2, N1)), (N2,), LINK),
    "only the first could report": (TWO, [LinkCall(N1, N2, NO_ANSWER)], (N2,), LINK),
    "a witness shows the first": (
        TWO,
        calls((N1, N2, W), *both((N1, N2), (N1, W))),
        (N1,),
        NODE_LINK,
    ),
    "a witness reaches both": (TWO, calls((N1, N2, W), *both(TWO)), (N2,), LINK),
    "a witness reaches no node": (
        TWO,
        calls((N1, N2, W), *both(TWO, (N1, W), (N2, W))),
        (N2,),
        LINK,
    ),
    "a link to a witness is none of ours": (TWO, calls((N1, N2, W), *both((N2, W))), (), LINK),
    "a third fails with n1 too": (THREE, calls(THREE, *both((N1, N2), (N1, N3))), (N1,), NODE_LINK),
    "a pair of three": (THREE, calls(THREE, *both((N1, N2))), (N2,), LINK),
    "three, each alone": (THREE, calls(THREE, *both((N1, N2), (N1, N3), (N2, N3))), (), LINK),
    "two of four are cut off": (
        FOUR,
        calls(FOUR, *both((N1, N2), (N1, N4), (N3, N2), (N3, N4), (N2, N4))),
        (N4, N2),
        LINK,
    ),
    "nothing was asked": (TWO, [], (), LINK),
}


@pytest.mark.parametrize("name", JUDGED)
def test_links_are_judged(name: str) -> None:
    gang, made, suspects, code = JUDGED[name]
    found = judge_links(gang, made, {})
    assert (found.suspects, found.code) == (suspects, code)


def test_a_node_that_failed_with_another_before_is_at_fault() -> None:
    made = calls((N1, N3), *both((N1, N3)))
    assert judge_links((N1, N3), made, {}).suspects == (N3,)
    found = judge_links((N1, N3), made, {}, earlier=((N1, N2),))
    assert found.suspects == (N1,)


def test_an_address_that_cannot_be_used_is_its_node_fault() -> None:
    cannot = {N2: "nothing can listen at 10.0.0.2: Cannot assign requested address"}
    found = judge_links(THREE, calls((N1, N3)), cannot)
    assert (found.suspects, found.code) == ((N2,), NODE_LINK)
    most = judge_links(TWO, [], {N1: cannot[N2], N2: cannot[N2]})
    assert (most.suspects, most.broken) == ((), ())


def test_a_broken_link_is_kept_once_with_its_direction() -> None:
    (link,) = judge_links(TWO, calls(TWO, *both(TWO)), {}).broken
    assert link == BrokenLink((N1, N2), NO_ANSWER)
    (link,) = judge_links(TWO, calls(TWO, (N2, N1)), {}).broken
    assert link == BrokenLink((N1, N2), NO_ANSWER, one_way=N2)


def test_as_many_links_are_kept_as_a_person_reads() -> None:
    gang = [f"n{number}" for number in range(40)]
    broken = both(*((gang[0], other) for other in gang[1:]))
    found = judge_links(gang, calls(gang, *broken), {})
    assert (found.suspects, found.code) == ((gang[0],), NODE_LINK)
    assert (len(found.broken), found.dropped) == (MAX_LINKS, 39 - MAX_LINKS)


def test_small_gangs_call_all_and_large_ones_few() -> None:
    assert choose_calls(1) == ((),)
    assert choose_calls(3) == ((1, 2), (0, 2), (0, 1))
    assert all(len(each) == ALL_PAIRS_UP_TO - 1 for each in choose_calls(ALL_PAIRS_UP_TO))
    for count in (17, 64, 2048):
        chosen = choose_calls(count)
        assert max(map(len, chosen)) <= 2 * (count - 1).bit_length()
        assert all((place + 1) % count in called for place, called in enumerate(chosen))
        assert all(place in chosen[other] for place in range(count) for other in chosen[place])
        assert all(place not in called for place, called in enumerate(chosen))


def test_what_people_read(page: SnapshotAssertion) -> None:
    told = [(name, judge_links(*JUDGED[name][:2], {}).reason) for name in JUDGED]
    cannot = {N2: "nothing can listen at 10.0.0.2: Cannot assign requested address"}
    told += [
        ("one way", judge_links(TWO, calls(TWO, (N1, N2)), {}).reason),
        ("no address", judge_links(THREE, calls((N1, N3)), cannot).reason),
    ]
    assert "".join(f"{name}: {reason}\n" for name, reason in told) == page


# --- what a job does ----------------------------------------------------------------------------

PAIR = LinkFindings(
    "n1 and n2 cannot reach each other", (N2,), False, (BrokenLink(TWO, NO_ANSWER),)
)
PROVEN = LinkFindings("n1 reaches no other node", (N1,), True, (BrokenLink(TWO, NO_ANSWER),))


def cut(job: JobState) -> FaultObserved:
    """Both ranks lost their connection, and none says why."""
    said = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1",
    )
    return fault(job, exited(0, N1, code=1, log_tail=said), exited(2, N2, code=1, log_tail=said))


def test_before_the_second_restart_the_nodes_call_each_other() -> None:
    for what in (cut, hung()):
        job = walk(
            running(),
            (what, "RESTART_IN_PLACE"),
            (what, "CALL n1 n2"),
            (called(PAIR), "REPLACE_NODE without n2"),
        )
        assert job.incident is not None
        newest = job.incident.faults[-1]
        assert (newest.cause, newest.nodes, newest.code) == (Cause.NETWORK, (N2,), LINK)
        assert (newest.by_program, job.restarts_spent) == (False, 0)
        assert job.broken_links == (TWO,) and job.tries[-1].code == LINK


SUSPECT = (HungRank(2, N2, "is in all_reduce"),)


@pytest.mark.parametrize("suspects", [(), SUSPECT])
def test_silent_connections_have_nodes_call_each_other_at_once(
    suspects: tuple[HungRank, ...],
) -> None:
    cut_off = hung(suspects=suspects, is_cut_off=True)
    found = replace(PROVEN, suspects=(N2,))
    job = walk(
        running(),
        (cut_off, "CALL n1 n2"),
        (called(found), "REPLACE_NODE without n2 avoiding n2"),
    )
    assert job.incident is not None
    assert [(one.cause, one.code) for one in job.incident.faults] == [
        (Cause.HANG, CUT_OFF),
        (Cause.NETWORK, NODE_LINK),
    ]
    named = " n2" if suspects else " n1 n2"
    walk(
        running(),
        (cut_off, "CALL n1 n2"),
        (called(), "RESTART_IN_PLACE"),
        (cut_off, "CALL n1 n2"),
        (called(), "RESTART_IN_PLACE"),
        (cut_off, "CALL n1 n2"),
        (called(), f"EXAMINE{named}"),
    )


def test_a_named_rank_whose_connections_answer_calls_no_node() -> None:
    named = hung(suspects=SUSPECT)
    walk(running(), *[(named, "RESTART_IN_PLACE")] * 2, (named, "EXAMINE n2"))
    unchecked = running(policy=policy(check_links=False))
    walk(unchecked, (hung(is_cut_off=True), "RESTART_IN_PLACE"))


def test_a_node_at_fault_by_itself_is_left_for_good() -> None:
    job = walk(
        running(),
        (cut, "RESTART_IN_PLACE"),
        (cut, "CALL n1 n2"),
        (called(PROVEN), "REPLACE_NODE without n1 avoiding n1"),
    )
    assert [one.node for one in job.avoided if one.isolated] == [N1]


def test_a_job_goes_on_as_before_where_no_link_is_broken() -> None:
    job = walk(
        running(),
        (hung(), "RESTART_IN_PLACE"),
        (hung(), "CALL n1 n2"),
        (called(), "RESTART_IN_PLACE"),
        (hung(), "CALL n1 n2"),
        (called(), "EXAMINE n1 n2"),
        (examine(n1="HEALTHY", n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"),
    )
    assert job.broken_links == ()


def test_a_check_that_takes_too_long_is_given_up() -> None:
    job = walk(running(), (hung(), "RESTART_IN_PLACE"), (hung(), "CALL n1 n2"))
    assert job.recovering is not None and job.recovering.links == "asked"
    due = job.next.at
    job = walk(job, (this(DeadlinePassed(due)), "RESTART_IN_PLACE"))
    assert job.phase is Phase.LAUNCHING


def test_links_are_forgotten_once_training_advances() -> None:
    job = walk(
        running(),
        (hung(), "RESTART_IN_PLACE"),
        (hung(), "CALL n1 n2"),
        (called(PAIR), "REPLACE_NODE without n2"),
    )
    job, _ = step(job, StepReached(job.generation, 9, T0), at(60))
    assert job.broken_links == ()


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(
            ((died(), "RESTART_IN_PLACE"), (died(), "RESTART_IN_PLACE")), id="application"
        ),
        pytest.param(((lose(), "WAIT NODE_LOST"), (hung(), "REPLACE_NODE without n2")), id="lost"),
    ],
)
def test_other_faults_are_not_looked_at_so(turns: tuple[tuple[object, str], ...]) -> None:
    walk(running(), *turns)  # type: ignore[arg-type]


def test_a_link_that_the_kernel_names_needs_no_calls() -> None:
    down = ("mlx5_core 0000:9a:00.0 ens1f0np0: Link down",)

    def blame_link(job: JobState) -> FaultObserved:
        said = ("RuntimeError: Connection closed by peer [10.0.0.2]:1",)
        return fault(job, exited(2, N2, code=1, log_tail=said, kernel=down))

    walk(running(), (blame_link, "RESTART_IN_PLACE"), (blame_link, "RESTART_IN_PLACE"))


def test_a_policy_or_a_single_node_has_no_links_to_check() -> None:
    walk(
        running(policy=policy(check_links=False)),
        (hung(), "RESTART_IN_PLACE"),
        (hung(), "RESTART_IN_PLACE"),
    )
    walk(running(nodes=1), (hung(), "RESTART_IN_PLACE"), (hung(), "RESTART_IN_PLACE"))
