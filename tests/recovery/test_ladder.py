"""What each word of a rung does: tables of ladders and faults over `climb`.

And walks where examinations and repairs answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.job.events import DeadlinePassed, StepReached
from relaunch.job.ladder import SUSPECTS_KEPT, climb
from relaunch.job.state import (
    Ask,
    Diagnosis,
    Examine,
    ExaminedNode,
    Phase,
    Recovery,
    Relaunch,
    Repair,
    Stop,
)
from relaunch.spec.policy import Strategy
from tests.recovery.builders import (
    T0,
    at,
    climbed,
    describe,
    examine,
    policy,
    raised,
    relaunched,
    rungs,
    running,
    step,
    suspected,
    this,
    walk,
)

A, G = Cause.APPLICATION, Cause.GPU_RESET
RESTART, REPLACE, FAIL, ASK = (
    {"strategy": "RESTART_IN_PLACE"},
    {"strategy": "REPLACE_NODE"},
    {"strategy": "FAIL"},
    {"strategy": "ASK"},
)
SICK = {"strategy": "REPLACE_NODE", "when": "UNHEALTHY"}
RESET, REBOOT, RESCHEDULE = (
    {"strategy": "RESET_GPU"},
    {"strategy": "REBOOT_NODE"},
    {"strategy": "RESCHEDULE_JOB"},
)

Faults = list[tuple[Diagnosis, float, str]]
"""A fault, when it is met, and what is decided."""


def counted(ladder: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{**ladder, **more}, FAIL]


def on(
    *nodes: str, gpus: tuple[str, ...] = (), code: str = "exit 1", cause: Cause = A
) -> Diagnosis:
    return suspected(cause, *nodes, gpus=gpus, code=code)


# --- tries, window, key, consecutive, codes -------------------------------------------------------


@pytest.mark.parametrize(
    ("ladder", "faults"),
    [
        pytest.param(
            counted(RESTART, tries=2),
            [
                (on("n1"), 0, "RESTART_IN_PLACE"),
                (on("n2"), 1, "RESTART_IN_PLACE"),
                (on("n1"), 2, "FAILED 1"),
            ],
            id="tries count all faults of the cause where no key says otherwise",
        ),
        pytest.param(
            [RESTART],
            [(on("n1"), n, "RESTART_IN_PLACE") for n in range(30)],
            id="a rung without tries is taken always",
        ),
        pytest.param(
            counted(RESTART, tries=2, window="1h"),
            [
                (on("n1"), 0, "RESTART_IN_PLACE"),
                (on("n1"), 1800, "RESTART_IN_PLACE"),
                (on("n1"), 3599, "FAILED 1"),
                (on("n1"), 86_400, "FAILED 1"),
            ],
            id="a try without progress leaves no window by time alone",
        ),
        pytest.param(
            counted(RESTART, tries=1, key=["node"]),
            [
                (on("n1"), 0, "RESTART_IN_PLACE"),
                (on("n2"), 0, "RESTART_IN_PLACE"),
                (on("n1"), 1, "FAILED 1"),
                (on("n2"), 1, "FAILED 1"),
            ],
            id="key node: each node has its own tries",
        ),
        pytest.param(
            counted(RESTART, tries=1, key=["node"]),
            [
                (on("n1", "n2"), 0, "RESTART_IN_PLACE"),
                (on("n2"), 1, "FAILED 1"),
                (on("n3", "n1"), 2, "FAILED 1"),
                (on("n3"), 3, "RESTART_IN_PLACE"),
            ],
            id="key node: one suspect in common is the same",
        ),
        pytest.param(
            counted(RESTART, tries=1, key=["node"]),
            [
                (on(), 0, "RESTART_IN_PLACE"),
                (on(), 1, "FAILED 1"),
                (on("n1"), 2, "RESTART_IN_PLACE"),
            ],
            id="key node: faults of unknown nodes count together and not with those of a node",
        ),
        pytest.param(
            counted(RESTART, tries=1, key=["node"]),
            [
                (on(*(f"n{i}" for i in range(1, 9))), 0, "RESTART_IN_PLACE"),
                (on(*(f"n{i}" for i in range(1, 9))), 1, "FAILED 1"),
            ],
            id="key node: a rack that goes twice is the same fault twice",
        ),
        pytest.param(
            counted(RESTART, tries=1, key=["node", "gpu"]),
            [
                (on("n1", gpus=("05",)), 0, "RESTART_IN_PLACE"),
                (on("n1", gpus=("06",)), 0, "RESTART_IN_PLACE"),
                (on("n2", gpus=("05",)), 0, "RESTART_IN_PLACE"),
                (on("n1", gpus=("06", "05")), 1, "FAILED 1"),
                (on("n1"), 2, "RESTART_IN_PLACE"),
                (on("n1"), 3, "FAILED 1"),
            ],
            id="key node and gpu: one address on two nodes is two GPUs, an unknown GPU is its own",
        ),
        pytest.param(
            counted(RESTART, tries=1, key="code"),
            [
                (on("n1", code="Xid 94"), 0, "RESTART_IN_PLACE"),
                (on("n1", code="Xid 95"), 0, "RESTART_IN_PLACE"),
                (on("n2", code="Xid 94"), 1, "FAILED 1"),
            ],
            id="key code: each code has its own tries, wherever it shows",
        ),
        pytest.param(
            counted(RESTART, tries=1, key=["node", "gpu", "code"]),
            [
                (on("n1", gpus=("05",), code="Xid 94"), 0, "RESTART_IN_PLACE"),
                (on("n1", gpus=("05",), code="Xid 31"), 0, "RESTART_IN_PLACE"),
                (on("n1", gpus=("06",), code="Xid 94"), 0, "RESTART_IN_PLACE"),
                (on("n2", gpus=("05",), code="Xid 94"), 0, "RESTART_IN_PLACE"),
                (on("n1", gpus=("05",), code="Xid 94"), 1, "FAILED 1"),
            ],
            id="key node, gpu, code: all three must agree",
        ),
        pytest.param(
            counted(RESTART, tries=1, key=["cause", "code"]),
            [
                (on("n1", code=""), 0, "RESTART_IN_PLACE"),
                (on("n2", code=""), 1, "FAILED 1"),
                (on("n2"), 1, "RESTART_IN_PLACE"),
            ],
            id="key code: faults without a code count together",
        ),
        pytest.param(
            counted(RESTART, tries=2, codes=["exit 1", "SIGSEGV"]),
            [
                (on("n1", code="log cuda_oom"), 0, "RESTART_IN_PLACE"),
                (on("n1", code="SIGSEGV"), 1, "RESTART_IN_PLACE"),
                (on("n1"), 2, "FAILED 1"),
            ],
            id="codes: the fault's own code or the exit code of its rank",
        ),
        pytest.param(
            [{**RESTART, "codes": "exit 2"}, FAIL],
            [
                (on("n1", code="exit 1"), 0, "FAILED 1"),
                (on("n1", code="exit 20"), 0, "FAILED 1"),
                (on("n1", code=""), 0, "FAILED 1"),
            ],
            id="codes: a fault with another code passes the rung by",
        ),
        pytest.param(
            [{**RESTART, "codes": "exit 2", "tries": 1}, {**RESTART, "tries": 1}, FAIL],
            [
                (on("n1"), 0, "RESTART_IN_PLACE"),
                (on("n1", code="exit 2"), 1, "RESTART_IN_PLACE"),
                (on("n1", code="exit 2"), 2, "FAILED 1"),
            ],
            id="one strategy on two rungs is counted by rung",
        ),
    ],
)
def test_what_tries_count(ladder: list[dict[str, Any]], faults: Faults) -> None:
    job = running(policy=rungs(*ladder))
    for number, (fault, seconds, expected) in enumerate(faults):
        job, decision = climbed(job, fault, at(seconds))
        assert describe(decision) == expected, f"fault {number}: {decision}"


def test_without_renewal_a_try_leaves_its_window_by_time() -> None:
    rung = counted(RESTART, tries=2, window="1h")
    job = running(policy=rungs(*rung, renewal="never"))
    for seconds, expected in (
        (0, "RESTART_IN_PLACE"),
        (1800, "RESTART_IN_PLACE"),
        (3599, "FAILED 1"),
        (3600, "RESTART_IN_PLACE"),
        (5399, "FAILED 1"),
        (5400, "RESTART_IN_PLACE"),
    ):
        job, decision = climbed(job, on("n1"), at(seconds))
        assert describe(decision) == expected, seconds


def test_key_job_counts_the_tries_of_every_cause() -> None:
    both = {"strategy": "RESTART_IN_PLACE", "tries": 2, "key": "job"}
    job = running(
        policy=rungs(
            both,
            FAIL,
            causes={
                "APPLICATION": [both, FAIL],
                "HANG": [both, FAIL],
                "NUMERICS": [{**both, "key": "cause"}, FAIL],
            },
        )
    )
    job, _ = climbed(job, on("n1"))
    job, _ = climbed(job, suspected(Cause.HANG))
    for cause, expected in (
        (A, "FAILED 1"),
        (Cause.HANG, "FAILED 1"),
        (Cause.NUMERICS, "RESTART_IN_PLACE"),
    ):
        assert describe(climbed(job, suspected(cause, "n1"))[1]) == expected, cause


R, E, F = Cause.GPU_RESET, Cause.NETWORK, Cause.APPLICATION


@pytest.mark.parametrize(
    ("reset_by", "met", "expected"),
    [
        pytest.param([], [F, F], "FAILED 1", id="two in a row"),
        pytest.param([], [F, E, F], "RESTART_IN_PLACE", id="any other cause begins the row again"),
        pytest.param([], [F, F, E, F], "RESTART_IN_PLACE", id="and the one after it is the second"),
        pytest.param([], [F, "step", F], "RESTART_IN_PLACE", id="progress begins the row again"),
        pytest.param([], [F, "step", F, F], "FAILED 1", id="progress begins it again only once"),
        pytest.param(
            ["GPU_RESET"], [F, R, F], "RESTART_IN_PLACE", id="a named cause begins it again"
        ),
        pytest.param(["GPU_RESET"], [F, E, F], "FAILED 1", id="a cause that is not named does not"),
        pytest.param(
            ["GPU_RESET"], [F, "step", F], "FAILED 1", id="progress does not where it is not named"
        ),
        pytest.param(
            ["PROGRESS"], [F, "step", F], "RESTART_IN_PLACE", id="progress does where it is named"
        ),
        pytest.param(["PROGRESS"], [F, E, F], "FAILED 1", id="only progress is named"),
        pytest.param(["PROGRESS", "GPU_RESET"], [F, R, F], "RESTART_IN_PLACE", id="either of two"),
    ],
)
def test_consecutive_counts_the_tries_since_the_row_began_again(
    reset_by: list[str], met: list[Any], expected: str
) -> None:
    ladder = {**RESTART, "tries": 2, "consecutive": True, "reset_by": reset_by}
    other = [{**RESTART, "spends": False}]
    job = running(
        policy=policy(
            renewal="never",
            no_progress_stop="off",
            causes={"APPLICATION": [ladder, FAIL], "GPU_RESET": other, "NETWORK": other},
        )
    )
    for second, one in enumerate(met, start=1):
        if one == "step":
            job, _ = step(relaunched(job), StepReached(job.generation, 1, at(second)), at(second))
            assert job.progressed_at == at(second)
            continue
        job, decision = climbed(job, suspected(one, "n1"), at(second))
        # Only an incident that is open can be passed by a step.
        job = replace(
            job, incident=job.incident or walk(running(), (raised(), "RESTART_IN_PLACE")).incident
        )
        assert isinstance(decision, Relaunch)
    assert describe(climbed(job, on("n1"), at(60))[1]) == expected


# --- who is suspected -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ladder", "nodes", "without", "expected"),
    [
        pytest.param(
            [REPLACE, FAIL],
            ("n2",),
            (),
            "REPLACE_NODE without n2",
            id="a suspect is left out of the next generation",
        ),
        pytest.param(
            [REPLACE, FAIL], ("n2", "n3"), (), "REPLACE_NODE without n2 n3", id="all suspects are"
        ),
        pytest.param(
            [REPLACE, FAIL], ("n2",), ("n1",), "REPLACE_NODE without n1 n2", id="beside who is lost"
        ),
        pytest.param([REPLACE, FAIL], (), (), "FAILED 1", id="no suspect: nothing to replace"),
        pytest.param([RESET, FAIL], (), (), "FAILED 1", id="no suspect: nothing to reset"),
        pytest.param([REBOOT, FAIL], (), (), "FAILED 1", id="no suspect: nothing to reboot"),
        pytest.param(
            [REPLACE, FAIL],
            (),
            ("n1",),
            "REPLACE_NODE without n1",
            id="a lost node is replaced, any suspect or none",
        ),
        pytest.param(
            [REBOOT, FAIL],
            (),
            ("n1",),
            "FAILED 1",
            id="a lost node that is no suspect is not rebooted",
        ),
        pytest.param(
            [RESET, FAIL],
            (),
            ("n1",),
            "FAILED 1",
            id="a lost node that is no suspect is not reset",
        ),
        pytest.param(
            [RESTART, FAIL], ("n2",), (), "RESTART_IN_PLACE", id="in place means with the suspect"
        ),
        pytest.param(
            [RESTART, FAIL],
            ("n2",),
            ("n1",),
            "RESTART_IN_PLACE without n1",
            id="in place, and a lost node is left out",
        ),
        pytest.param(
            [RESCHEDULE, FAIL],
            ("n2",),
            (),
            "RESCHEDULE_JOB",
            id="all places again, no node is left out",
        ),
        pytest.param([RESCHEDULE, FAIL], (), (), "RESCHEDULE_JOB", id="needs no suspect"),
        pytest.param(
            [{**RESCHEDULE, "isolate": True}],
            ("n2",),
            (),
            "RESCHEDULE_JOB without n2 avoiding n2",
            id="isolate keeps a suspect out for good",
        ),
        pytest.param(
            [{**REPLACE, "isolate": True}],
            ("n2",),
            ("n1",),
            "REPLACE_NODE without n1 n2 avoiding n2",
            id="the lost one is not isolated",
        ),
        pytest.param(
            [{**RESCHEDULE, "isolate": True}], (), (), "RESCHEDULE_JOB", id="no node to isolate"
        ),
        pytest.param(
            [RESET],
            ("n2", "n1"),
            (),
            "RESET_GPU n2 n1 0000:05:00",
            id="the GPUs that are suspected",
        ),
        pytest.param([REBOOT], ("n2",), (), "REBOOT_NODE n2", id="a node is rebooted whole"),
        pytest.param([ASK], ("n2",), (), "ASK", id="a person is asked"),
        pytest.param([FAIL], ("n2",), (), "FAILED 1", id="the job fails"),
    ],
)
def test_who_is_meant(
    ladder: list[dict[str, Any]], nodes: tuple[str, ...], without: tuple[str, ...], expected: str
) -> None:
    ladder = [{"tries": 1, **rung} if rung is not ladder[-1] else rung for rung in ladder]
    _, decision = climbed(
        running(policy=rungs(*ladder)), on(*nodes, gpus=("0000:05:00",)), without=without
    )
    assert describe(decision) == expected, decision
    if isinstance(decision, Relaunch):
        assert decision.keep_nodes is (decision.strategy is not Strategy.RESCHEDULE_JOB)


def test_an_avoided_node_stays_avoided_and_is_written_down_once() -> None:
    job = running(policy=rungs({**REPLACE, "isolate": True}))
    for _ in range(2):
        job, _ = climbed(job, on("n2"))
    assert [(one.node, one.at) for one in job.avoided] == [("n2", T0)]


def test_a_try_remembers_at_most_four_suspects() -> None:
    names = tuple(f"n{i}" for i in range(9))
    job, _ = climbed(running(policy=rungs(REPLACE)), on(*names, gpus=names))
    assert (job.tries[0].nodes, job.tries[0].gpus) == (names[:SUSPECTS_KEPT], names[:SUSPECTS_KEPT])
    # all of them are left out nevertheless
    assert describe(climbed(job, on(*names))[1]).split()[2:] == list(names)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ladder",
    [
        pytest.param([{**RESTART, "tries": 1}], id="used up"),
        pytest.param([{**RESTART, "tries": 1}, FAIL], id="FAIL"),
        pytest.param([{**RESTART, "tries": 1}, ASK], id="ASK"),
    ],
)
def test_how_a_ladder_ends(ladder: list[dict[str, Any]], snapshot: SnapshotAssertion) -> None:
    job, _ = climbed(running(policy=rungs(*ladder)), on("n2"))
    _, decision = climbed(job, on("n2"))
    assert isinstance(decision, Stop | Ask)
    assert decision.reason == snapshot


@pytest.mark.parametrize(("exit_code", "ends_as"), [(None, 1), (0, 1), (7, 7), (139, 139)])
def test_the_job_ends_with_the_exit_code_of_its_rank(exit_code: int | None, ends_as: int) -> None:
    _, decision = climbed(running(policy=rungs(FAIL)), suspected(A, "n1", exit_code=exit_code))
    assert isinstance(decision, Stop) and decision.exit_code == ends_as


def test_a_job_that_asks_and_hears_nothing_asks_again() -> None:
    job = walk(running(policy=rungs(ASK)), (raised(), "ASK"))
    assert (job.phase, job.next.at) == (Phase.WAITING_FOR_PERSON, at(86400))
    walk(job, (this(DeadlinePassed()), "ASK"))


def test_a_cause_without_a_ladder_uses_unknowns_and_counts_alone() -> None:
    source = {
        "no_progress_stop": "off",
        "extends": "gputasker",
        "max_restarts": 9,
        "causes": {"UNKNOWN": [{**RESTART, "tries": 1}, FAIL]},
    }
    job = running(policy=policy(**source))
    for cause in (Cause.STORAGE, Cause.NETWORK):
        job, decision = climbed(job, suspected(cause, "n1"))
        assert describe(decision) == "RESTART_IN_PLACE"
        assert describe(climbed(job, suspected(cause, "n1"))[1]) == "FAILED 1"


# --- words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rung",
    [
        pytest.param({**RESTART, "tries": 3}, id="tries"),
        pytest.param(RESTART, id="no tries"),
        pytest.param(
            {**REPLACE, "tries": 2, "window": "24h", "spends": False},
            id="a window, and nothing spent",
        ),
        pytest.param({**REBOOT, "tries": 1, "codes": "exit 1"}, id="a repair"),
    ],
)
def test_a_decision_says_why_and_what_is_left(
    rung: dict[str, Any], snapshot: SnapshotAssertion
) -> None:
    ladder = [rung, FAIL] if "tries" in rung else [rung]
    _, decision = climbed(running(policy=rungs(*ladder, max_restarts=8)), on("n2"))
    assert isinstance(decision, Relaunch | Repair)
    assert decision.reason == snapshot(name="reason")
    assert decision.left == snapshot(name="left")


def test_an_examination_says_what_it_is_for_and_what_follows(snapshot: SnapshotAssertion) -> None:
    _, decision = climbed(running(policy=rungs(SICK, FAIL)), on("n1", "n2"))
    assert isinstance(decision, Examine)
    assert decision.reason == snapshot(name="reason")
    assert decision.next == snapshot(name="next")


def test_of_many_suspects_four_are_named_and_the_rest_is_counted(
    snapshot: SnapshotAssertion,
) -> None:
    _, decision = climbed(running(policy=rungs(SICK, FAIL)), on(*(f"n{i}" for i in range(1, 12))))
    assert decision.reason == snapshot


@pytest.mark.parametrize(
    "verdicts",
    [
        pytest.param([("n1", Verdict.HEALTHY), ("n2", Verdict.UNHEALTHY)], id="the unhealthy one"),
        pytest.param([("n1", Verdict.HEALTHY), ("n2", Verdict.UNKNOWN)], id="else the unknown one"),
        pytest.param([("n1", Verdict.HEALTHY), ("n2", Verdict.HEALTHY)], id="else the first"),
    ],
)
def test_a_decision_after_an_examination_names_what_was_found(
    verdicts: list[tuple[str, Verdict]], snapshot: SnapshotAssertion
) -> None:
    examined = tuple(ExaminedNode(node, verdict, "said so") for node, verdict in verdicts)
    decision = climb(running(policy=rungs(FAIL)), Recovery(on("n1", "n2"), examined), T0, ())
    assert decision.reason == snapshot


NO_GPU = "RuntimeError: No CUDA GPUs are available"


def test_the_same_words_on_a_second_healthy_node_ask() -> None:
    """A container or CUDA_VISIBLE_DEVICES hides the GPUs of every node: no third one is tried."""
    job = walk(
        running(),
        (raised(NO_GPU, "n2"), "RESTART_IN_PLACE"),
        (raised(NO_GPU, "n2"), "RESTART_IN_PLACE"),
        (raised(NO_GPU, "n2"), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "REPLACE_NODE without n2"),
        (raised(NO_GPU, "n1"), "EXAMINE n1"),
        (examine(n1="UNKNOWN"), "ASK"),
    )
    assert job.reason.endswith(
        "; the same as on n2, which was not found unhealthy either: it probably comes with the job,"
        " as from its environment, its container or its libraries"
    )
    assert not job.avoided


def test_a_second_node_that_is_broken_is_replaced() -> None:
    first = walk(
        running(),
        (raised(NO_GPU, "n2"), "RESTART_IN_PLACE"),
        (raised(NO_GPU, "n2"), "RESTART_IN_PLACE"),
        (raised(NO_GPU, "n2"), "EXAMINE n2"),
    )
    walk(
        first,
        (examine(n2="HEALTHY"), "REPLACE_NODE without n2"),
        (raised(NO_GPU, "n1"), "EXAMINE n1"),
        (examine(n1="UNHEALTHY"), "REPLACE_NODE without n1 avoiding n1"),
    )
    # Where the first one was found broken, the second one has its tries in full.
    walk(
        first,
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"),
        (raised(NO_GPU, "n1"), "RESTART_IN_PLACE"),
    )
