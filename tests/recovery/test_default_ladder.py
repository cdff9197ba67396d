"""The policy of a job that names none, walked to its end for every cause.

What it tries, what it never does, and that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import count, pairwise
from typing import Literal

import pytest

from relaunch.evidence.causes import HARDWARE_CAUSES, Cause
from relaunch.evidence.findings import Verdict
from relaunch.job.events import NodesAcquired, StepReached
from relaunch.job.state import Diagnosis, Examine, Incident, JobState, Phase, Relaunch, Repair, Slot
from relaunch.spec.policy import Strategy
from tests.recovery.builders import (
    at,
    climbed,
    describe,
    examine,
    mended,
    relaunched,
    running,
    step,
)

Where = Literal["stays", "wanders"]
"""Where the fault is.

stays: always in the same place, whatever node fills it, so the code or the place is at fault;
wanders: in either place by turns.
"""

OTHERS = (Cause.NODE_LOST, Cause.PREEMPTED, Cause.NETWORK, Cause.STORAGE, Cause.PLATFORM)
"""Neither the job's own doing nor a node's hardware."""
SOFT = (
    Cause.USER_INPUT,
    Cause.APPLICATION,
    Cause.OUT_OF_MEMORY,
    Cause.NUMERICS,
    Cause.GPU_USER_INDUCED,
    Cause.HANG,
    Cause.UNKNOWN,
)


@dataclass(frozen=True, slots=True)
class Walked:
    job: JobState
    said: tuple[str, ...]
    faults: int


@cache
def walked(
    cause: Cause,
    verdict: Verdict = Verdict.HEALTHY,
    where: Where = "stays",
    outcome: Literal["done", "refused"] = "done",
    code: str = "exit 1",
) -> Walked:
    """The same fault again and again until the job stops or asks.

    Every examination and every repair has the same end.
    """
    job, places, newest = running(), ["n1", "n2"], 2
    said: list[str] = []
    for fault in count(1):
        assert fault < 60, said
        node = places[1 if where == "stays" else fault % 2]
        gpus, code = (("0000:05:00",), "Xid 94") if cause.name.startswith("GPU") else ((), code)
        # A hang says which ranks wait, not which node they wait for.
        suspects = () if cause is Cause.HANG else (node,)
        job, decision = climbed(
            job,
            Diagnosis(cause, "boom", nodes=suspects, gpus=gpus, code=code, exit_code=1),
            at(fault),
        )
        while True:
            said.append(describe(decision))
            if isinstance(decision, Examine):
                answer = examine(
                    **{one: verdict if one == node else "HEALTHY" for one in decision.nodes}
                )
                job, decision = step(job, answer(job), at(fault))
            elif isinstance(decision, Repair):
                job, decision = step(job, mended(outcome)(job), at(fault))
            else:
                break
        if not isinstance(decision, Relaunch):
            return Walked(job, tuple(said), fault)
        for index, name in enumerate(places):
            if name in decision.without:
                newest += 1
                places[index] = f"n{newest}"
        job, _ = step(job, NodesAcquired(tuple(Slot(name, name) for name in places)), at(fault))
        job = relaunched(job, at(fault))
    raise AssertionError


R, FAILED, ASK = "RESTART_IN_PLACE", "FAILED 1", "ASK"


def look(*nodes: str) -> str:
    return f"EXAMINE {' '.join(nodes)}"


def swap(node: str, *, isolate: bool = False) -> str:
    return f"REPLACE_NODE without {node}" + (f" avoiding {node}" if isolate else "")


def bad(node: str) -> str:
    return swap(node, isolate=True)


ANY = tuple(Verdict)
NOT_UNHEALTHY = (Verdict.HEALTHY, Verdict.UNKNOWN)
ROWS: list[tuple[Cause, tuple[Verdict, ...], Where, list[str]]] = [
    (Cause.USER_INPUT, ANY, "stays", [FAILED]),
    (Cause.USER_INPUT, ANY, "wanders", [FAILED]),
    # Restarted, then looked at where it repeats, then tried elsewhere; then it is the code.
    (
        Cause.APPLICATION,
        NOT_UNHEALTHY,
        "stays",
        [R, R, look("n2"), swap("n2"), R, R, look("n3"), FAILED],
    ),
    (
        Cause.APPLICATION,
        (Verdict.UNHEALTHY,),
        "stays",
        [R, R, look("n2"), bad("n2"), R, R, look("n3"), bad("n3"), R, R, look("n4"), FAILED],
    ),
    (
        Cause.APPLICATION,
        NOT_UNHEALTHY,
        "wanders",
        [R, R, R, R, look("n2"), swap("n2"), look("n1"), FAILED],
    ),
    (
        Cause.APPLICATION,
        (Verdict.UNHEALTHY,),
        "wanders",
        [R, R, R, R, look("n2"), bad("n2"), look("n1"), bad("n1"), R, R, R, R, look("n3"), FAILED],
    ),
    (
        Cause.GPU_USER_INDUCED,
        NOT_UNHEALTHY,
        "stays",
        [R, R, look("n2"), swap("n2"), R, R, look("n3"), FAILED],
    ),
    (
        Cause.GPU_USER_INDUCED,
        (Verdict.UNHEALTHY,),
        "stays",
        [R, R, look("n2"), bad("n2"), R, R, look("n3"), bad("n3"), R, R, look("n4"), FAILED],
    ),
    (
        Cause.GPU_USER_INDUCED,
        NOT_UNHEALTHY,
        "wanders",
        [R, R, R, R, look("n2"), swap("n2"), look("n1"), FAILED],
    ),
    (Cause.OUT_OF_MEMORY, ANY, "stays", [R, FAILED]),
    (Cause.OUT_OF_MEMORY, ANY, "wanders", [R, FAILED]),
    (Cause.NUMERICS, NOT_UNHEALTHY, "stays", [R, R, look("n2"), FAILED]),
    (
        Cause.NUMERICS,
        (Verdict.UNHEALTHY,),
        "stays",
        [R, R, look("n2"), bad("n2"), look("n3"), bad("n3"), FAILED],
    ),
    (Cause.UNKNOWN, NOT_UNHEALTHY, "stays", [R, R, look("n2"), swap("n2"), look("n3"), FAILED]),
    (
        Cause.UNKNOWN,
        (Verdict.UNHEALTHY,),
        "stays",
        [R, R, look("n2"), bad("n2"), look("n3"), bad("n3"), look("n4"), FAILED],
    ),
    # A hang has no suspect, so every node is examined.
    (Cause.HANG, NOT_UNHEALTHY, "stays", [R, R, look("n1", "n2"), FAILED]),
    (
        Cause.HANG,
        (Verdict.UNHEALTHY,),
        "stays",
        [R, R, look("n1", "n2"), bad("n2"), look("n1", "n3"), bad("n3"), FAILED],
    ),
    (Cause.NETWORK, NOT_UNHEALTHY, "stays", [R, R, R, look("n2"), ASK]),
    (
        Cause.NETWORK,
        (Verdict.UNHEALTHY,),
        "stays",
        [R, R, R, look("n2"), bad("n2"), look("n3"), bad("n3"), ASK],
    ),
    # A full disk may be one node's own, a file system that does not answer is everybody's.
    (Cause.STORAGE, NOT_UNHEALTHY, "stays", [R, R, R, R, R, look("n2"), ASK]),
    (
        Cause.STORAGE,
        (Verdict.UNHEALTHY,),
        "stays",
        [R, R, R, R, R, look("n2"), bad("n2"), look("n3"), bad("n3"), ASK],
    ),
    (Cause.PLATFORM, ANY, "stays", [R] * 5 + [ASK]),
    (Cause.NODE_LOST, ANY, "stays", [*(swap(f"n{n}") for n in range(2, 8)), ASK]),
    (Cause.PREEMPTED, ANY, "stays", [*(swap(f"n{n}") for n in range(2, 22)), ASK]),
    # A node's own fault: it is not examined, the kernel has spoken.
    (Cause.GPU_FATAL, ANY, "stays", [*(bad(f"n{n}") for n in range(2, 8)), ASK]),
    (
        Cause.GPU_TRANSIENT,
        ANY,
        "stays",
        [
            *(
                [
                    R,
                    R,
                    R,
                    bad("n2"),
                    R,
                    R,
                    R,
                    bad("n3"),
                    R,
                    R,
                    R,
                    bad("n4"),
                    R,
                    R,
                    R,
                    bad("n5"),
                    R,
                    R,
                    R,
                ]
            ),
            ASK,
        ],
    ),
    (
        Cause.NODE_FAULT,
        ANY,
        "stays",
        [R, R, bad("n2"), R, R, bad("n3"), R, R, bad("n4"), R, R, bad("n5"), R, R, ASK],
    ),
]


@pytest.mark.parametrize(
    ("cause", "verdict", "where", "expected"),
    [
        pytest.param(
            cause, verdict, where, expected, id=f"{cause} that {where}, {verdict} when examined"
        )
        for cause, verdicts, where, expected in ROWS
        for verdict in verdicts
    ],
)
def test_the_whole_ladder_of_a_cause(
    cause: Cause, verdict: Verdict, where: Where, expected: list[str]
) -> None:
    assert list(walked(cause, verdict, where).said) == expected


@pytest.mark.parametrize("node", ["n2", "n3", "n4", "n5"])
@pytest.mark.parametrize("outcome", ["done", "refused"])
def test_a_gpu_is_reset_twice_a_day_before_its_node_is_left(
    outcome: Literal["done", "refused"], node: str
) -> None:
    said = walked(Cause.GPU_RESET, outcome=outcome).said
    reset = f"RESET_GPU {node} 0000:05:00"
    each = (
        [reset, "LAUNCH", reset, "LAUNCH", bad(node)] if outcome == "done" else [reset, bad(node)]
    )
    begins = said.index(reset)
    assert list(said[begins : begins + len(each)]) == each
    assert said[-1] == ASK


@pytest.mark.parametrize(
    "code", ["stuck", "mce", "edac", "aer", "nic-fault", "lockup", "oops", "panic"]
)
def test_a_host_that_only_a_reboot_mends_is_left_at_once(code: str) -> None:
    assert walked(Cause.NODE_FAULT, code=code).said[:2] == (bad("n2"), bad("n3"))


def test_three_unwatched_launches_swap_a_node_but_avoid_none() -> None:
    end = walked(Cause.PLATFORM, code="never_watched")
    assert list(end.said[:6]) == [R, R, R, swap("n2"), swap("n3"), swap("n4")]
    assert end.said[-1] == ASK
    assert end.job.avoided == ()


CASES = [
    pytest.param(cause, verdict, where, id=f"{cause} that {where}, {verdict} when examined")
    for cause in Cause
    for verdict in Verdict
    for where in ("stays", "wanders")
]


@pytest.mark.parametrize(("cause", "verdict", "where"), CASES)
@pytest.mark.parametrize("outcome", ["done", "refused"])
def test_every_ladder_ends(
    cause: Cause, verdict: Verdict, where: Where, outcome: Literal["done", "refused"]
) -> None:
    """Two places: at most 4 nodes are left for each hardware cause, after 3 tries each at most."""
    end = walked(cause, verdict, where, outcome)
    assert end.said[-1] in (FAILED, ASK)
    assert end.faults <= 24
    assert end.job.phase in (Phase.STOPPING, Phase.WAITING_FOR_PERSON)


@pytest.mark.parametrize(("cause", "verdict", "where"), CASES)
def test_own_faults_fail_the_job_and_others_end_with_a_person(
    cause: Cause, verdict: Verdict, where: Where
) -> None:
    assert walked(cause, verdict, where).said[-1] == (FAILED if cause in SOFT else ASK)


@pytest.mark.parametrize(
    ("cause", "verdict", "where"), [case for case in CASES if case.values[0] in SOFT]
)
def test_no_node_is_rebooted_or_reset_for_what_a_program_may_do(
    cause: Cause, verdict: Verdict, where: Where
) -> None:
    job = walked(cause, verdict, where).job
    assert not {one.strategy for one in job.tries} & {Strategy.REBOOT_NODE, Strategy.RESET_GPU}
    assert all(
        rung.strategy not in (Strategy.REBOOT_NODE, Strategy.RESET_GPU)
        for rung in job.policy.ladder(cause)
    )


@pytest.mark.parametrize(
    ("cause", "verdict", "where"),
    [case for case in CASES if case.values[0] in (*HARDWARE_CAUSES, *OTHERS)],
)
def test_faults_not_the_jobs_own_take_none_of_its_restarts(
    cause: Cause, verdict: Verdict, where: Where
) -> None:
    job = walked(cause, verdict, where).job
    assert job.restarts_spent == 0
    assert not any(one.spent for one in job.tries)
    assert not any(rung.spends for rung in job.policy.ladder(cause) if not rung.strategy.ends)


@pytest.mark.parametrize(("cause", "verdict", "where"), CASES)
def test_a_node_is_avoided_only_for_hardware_or_bad_health(
    cause: Cause, verdict: Verdict, where: Where
) -> None:
    avoided = walked(cause, verdict, where).job.avoided
    if cause in HARDWARE_CAUSES:
        assert avoided
    elif verdict is not Verdict.UNHEALTHY:
        assert avoided == ()


@pytest.mark.parametrize("where", ["stays", "wanders"])
@pytest.mark.parametrize("cause", list(Cause))
def test_an_unknown_verdict_is_never_taken_for_unhealthy(cause: Cause, where: Where) -> None:
    """Where a node cannot be examined the default does as if nothing were wrong with it.

    It says that nothing is known.
    """
    assert walked(cause, Verdict.UNKNOWN, where).said == walked(cause, Verdict.HEALTHY, where).said


@pytest.mark.parametrize(("cause", "verdict", "where"), CASES)
def test_a_fault_is_examined_once(cause: Cause, verdict: Verdict, where: Where) -> None:
    said = walked(cause, verdict, where).said
    assert not any(
        one.startswith("EXAMINE") and then.startswith("EXAMINE") for one, then in pairwise(said)
    )


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.USER_INPUT])
def test_progress_gives_back_what_has_no_window(cause: Cause) -> None:
    """A fault once a day for a month ends no job, whatever it is.

    Hardware and links have windows of a day at most.
    """
    job = running(nodes=2)
    for day in range(1, 31):
        fault = Diagnosis(
            cause,
            "boom",
            nodes=("n2",),
            gpus=("0000:05:00",) if cause.name.startswith("GPU") else (),
            code="exit 1",
        )
        now = at(day * 86_400)
        job, decision = climbed(job, fault, now)
        if isinstance(decision, Repair):
            job, decision = step(job, mended()(job), now)
        assert isinstance(decision, Relaunch), (day, decision)
        job = replace(relaunched(job, now), incident=Incident(now, job.generation, cause, "boom"))
        job, _ = step(
            job,
            StepReached(job.generation, day * 100, at(day * 86_400 + 3600)),
            at(day * 86_400 + 3600),
        )
        assert job.restarts_spent == 0


def test_a_fault_that_roams_the_gpus_of_a_large_job_ends_as_well() -> None:
    """Each GPU has its own tries and the job forgets its oldest: something counts them all."""
    job, nodes = running(nodes=16), 16
    for fault in count():
        gpu = Diagnosis(
            Cause.GPU_TRANSIENT,
            "boom",
            nodes=(f"n{fault % nodes + 1}",),
            gpus=(f"0000:{fault // nodes % 8:02x}:00",),
            code="Xid 94",
        )
        job, decision = climbed(job, gpu, at(fault))
        if not isinstance(decision, Relaunch):
            break
        # every rank of the job has been started four hundred times, free of charge and without a
        # step forward
        assert fault < 400
        job = relaunched(job, at(fault))
    assert describe(decision) in (FAILED, ASK)
