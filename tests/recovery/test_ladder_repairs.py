"""Ladders that ask before they act and act before they launch: examinations and repairs.

And what is heard meanwhile.
"""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.job.events import DeadlinePassed, RepairEnded, StepReached
from relaunch.job.state import Diagnosis, Examine, JobState, Phase, Relaunch
from relaunch.spec.policy import Strategy
from tests.recovery.builders import (
    T0,
    at,
    back,
    called,
    climbed,
    examine,
    fallen,
    hung,
    lose,
    mended,
    raised,
    rungs,
    running,
    step,
    suspected,
    this,
    walk,
)

RESTART, REPLACE, RESCHEDULE = (
    {"strategy": "RESTART_IN_PLACE"},
    {"strategy": "REPLACE_NODE"},
    {"strategy": "RESCHEDULE_JOB"},
)
RESET, REBOOT, FAIL = {"strategy": "RESET_GPU"}, {"strategy": "REBOOT_NODE"}, {"strategy": "FAIL"}


def on(*nodes: str, gpus: tuple[str, ...] = ()) -> Diagnosis:
    return suspected(Cause.APPLICATION, *nodes, gpus=gpus)


# --- examinations ---------------------------------------------------------------------------------

SICK, WELL, DOUBT = (
    {**REPLACE, "when": verdict} for verdict in ("UNHEALTHY", "HEALTHY", "UNKNOWN")
)
BY_VERDICT = [SICK, {**RESTART, "when": "HEALTHY"}, {**RESCHEDULE, "when": "UNKNOWN"}]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        pytest.param({"n2": "UNHEALTHY"}, "REPLACE_NODE without n2", id="unhealthy"),
        pytest.param({"n2": "HEALTHY"}, "RESTART_IN_PLACE", id="healthy"),
        pytest.param({"n2": "UNKNOWN"}, "RESCHEDULE_JOB", id="unknown is neither"),
        pytest.param(
            {"n2": "HEALTHY", "n3": "UNHEALTHY"},
            "REPLACE_NODE without n3",
            id="one unhealthy is enough, and it is the suspect now",
        ),
        pytest.param(
            {"n2": "UNKNOWN", "n3": "UNHEALTHY"},
            "REPLACE_NODE without n3",
            id="unknown does not hide the unhealthy one",
        ),
        pytest.param(
            {"n2": "UNHEALTHY", "n3": "UNHEALTHY"},
            "REPLACE_NODE without n2 n3",
            id="all unhealthy ones",
        ),
        pytest.param(
            {"n2": "HEALTHY", "n3": "HEALTHY"}, "RESTART_IN_PLACE", id="healthy only all together"
        ),
        pytest.param(
            {"n2": "HEALTHY", "n3": "UNKNOWN"},
            "RESCHEDULE_JOB",
            id="one unknown among healthy ones",
        ),
        pytest.param({}, "RESCHEDULE_JOB", id="an answer about no node is no answer"),
    ],
)
def test_a_verdict_chooses_the_rung(verdicts: dict[str, str], expected: str) -> None:
    job = running(policy=rungs(*BY_VERDICT), nodes=3)
    job, decision = climbed(job, on("n2", *(["n3"] if "n3" in verdicts else [])))
    assert isinstance(decision, Examine)
    assert (job.phase, job.next.at, job.restarts_spent) == (Phase.EXAMINING, at(1800), 0)
    walk(job, (examine(**verdicts), expected))


def test_no_node_is_examined_before_a_rung_asks_for_it() -> None:
    job = running(policy=rungs({**RESTART, "tries": 1}, SICK, FAIL))
    walk(
        job,
        (raised(), "RESTART_IN_PLACE"),
        (raised(), "EXAMINE n2"),
        (examine(n2="HEALTHY"), "FAILED 1"),
    )


def test_one_fault_is_examined_once_however_many_rungs_ask() -> None:
    ladder = (
        {**SICK, "tries": 1},
        {**RESET, "when": ["UNHEALTHY"], "tries": 1},
        {**REBOOT, "when": ["UNHEALTHY", "UNKNOWN"]},
        FAIL,
    )
    job = running(policy=rungs(*ladder))
    job = walk(job, (raised(), "EXAMINE n2"), (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2"))
    job = walk(job, (raised(), "EXAMINE n2"), (examine(n2="UNHEALTHY"), "RESET_GPU n2"))
    walk(
        job,
        (mended("refused", "no such GPU"), "REBOOT_NODE n2"),
        (mended("ambiguous", "no answer"), "FAILED 1"),
    )


def test_a_used_rung_or_another_code_asks_for_no_examination() -> None:
    job = running(
        policy=rungs({**SICK, "tries": 1}, {**REBOOT, "when": "UNHEALTHY", "codes": "exit 9"}, FAIL)
    )
    walk(
        job,
        (raised(), "EXAMINE n2"),
        (examine(n2="UNHEALTHY"), "REPLACE_NODE without n2"),
        (raised(), "FAILED 1"),
    )


def test_without_suspects_all_nodes_are_examined() -> None:
    job = running(policy=rungs({**SICK, "isolate": True}, FAIL, cause="HANG"), nodes=3)
    walk(
        job,
        (hung(), "EXAMINE n1 n2 n3"),
        (
            examine(n1="HEALTHY", n2="UNHEALTHY", n3="HEALTHY"),
            "REPLACE_NODE without n2 avoiding n2",
        ),
    )
    walk(
        job,
        (hung(), "EXAMINE n1 n2 n3"),
        (examine(n1="HEALTHY", n2="HEALTHY", n3="HEALTHY"), "FAILED 1"),
    )
    walk(
        job,
        (hung(), "EXAMINE n1 n2 n3"),
        (examine(n1="HEALTHY", n2="UNKNOWN", n3="HEALTHY"), "FAILED 1"),
    )


@pytest.mark.parametrize("rung", [RESET, REBOOT, REPLACE])
def test_a_rung_on_nodes_is_passed_by_if_no_node_is_found_sick(
    rung: dict[str, Any],
) -> None:
    job = running(
        policy=rungs(
            {**RESTART, "when": "HEALTHY", "tries": 1},
            {**rung, "when": "HEALTHY"},
            FAIL,
            cause="HANG",
        )
    )
    well = examine(n1="HEALTHY", n2="HEALTHY")
    walk(
        job,
        (hung(), "EXAMINE n1 n2"),
        (well, "RESTART_IN_PLACE"),
        (hung(), "CALL n1 n2"),
        (called(), "EXAMINE n1 n2"),
        (well, "FAILED 1"),
    )


def test_an_examination_never_sends_the_ladder_back_down() -> None:
    """It changes the suspects, and their tries are unused.

    The question was what comes after those.
    """
    job = running(
        policy=rungs(
            {**RESTART, "tries": 1, "key": ["cause", "node"]},
            {**SICK, "isolate": True},
            FAIL,
            cause="HANG",
        )
    )
    job = walk(job, (hung(), "RESTART_IN_PLACE"), (hung(), "CALL n1 n2"))
    job = walk(job, (called(), "EXAMINE n1 n2"))
    walk(job, (examine(n1="HEALTHY", n2="UNHEALTHY"), "REPLACE_NODE without n2 avoiding n2"))


def test_an_examination_that_does_not_end_counts_as_unknown(snapshot: SnapshotAssertion) -> None:
    job = running(policy=rungs(*BY_VERDICT, timeouts={"examination": "10m"}))
    job, decision = climbed(job, on("n2"))
    assert isinstance(decision, Examine) and decision.until == at(600)
    job = walk(job, (this(DeadlinePassed()), "RESCHEDULE_JOB"), now=at(600))
    assert job.reason == snapshot


def test_the_gpus_of_the_kernel_are_not_those_of_another_node() -> None:
    ladder = rungs({**RESET, "when": "UNHEALTHY"}, FAIL)
    for verdicts, expected in (
        ({"n1": "HEALTHY", "n2": "UNHEALTHY"}, "RESET_GPU n2"),
        ({"n1": "UNHEALTHY", "n2": "HEALTHY"}, "RESET_GPU n1 0000:05:00"),
        ({"n1": "UNHEALTHY", "n2": "UNHEALTHY"}, "RESET_GPU n1 n2 0000:05:00"),
    ):
        job, _ = climbed(running(policy=ladder), on("n1", "n2", gpus=("0000:05:00",)))
        walk(job, (examine(**verdicts), expected))


def test_a_late_verdict_is_ignored() -> None:
    job = running(policy=rungs({**RESTART, "when": "UNKNOWN"}, FAIL))
    job = walk(job, (raised(), "EXAMINE n2"), (this(DeadlinePassed()), "RESTART_IN_PLACE"))
    walk(job, (examine(n2="UNHEALTHY"), "IGNORE"))
    asked = walk(
        running(policy=rungs({**REBOOT, "when": "UNKNOWN"}, FAIL)),
        (raised(), "EXAMINE n2"),
        (this(DeadlinePassed()), "REBOOT_NODE n2"),
    )
    after = walk(asked, (examine(n2="HEALTHY"), "IGNORE"))
    assert after == asked


# --- repairs --------------------------------------------------------------------------------------

REPAIRS = [
    {**RESET, "tries": 2, "key": ["node", "gpu", "code"], "spends": False},
    {**REBOOT, "tries": 1},
    {**REPLACE, "isolate": True},
]


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param(mended("refused", "it is in use"), id="refused"),
        pytest.param(mended("ambiguous", "the connection broke"), id="ambiguous"),
        pytest.param(this(DeadlinePassed()), id="late"),
    ],
)
def test_a_failed_repair_goes_on_above_its_rung_and_spends_a_try(
    fails: Any, snapshot: SnapshotAssertion
) -> None:
    job = walk(running(policy=rungs(*REPAIRS, cause="NODE_FAULT")), (fallen(), "RESET_GPU n2"))
    assert (job.phase, job.next.at, len(job.tries), job.restarts_spent) == (
        Phase.REPAIRING,
        at(1500),
        1,
        0,
    )
    job = walk(job, (fails, "REBOOT_NODE n2"))
    assert job.reason == snapshot
    assert ([one.strategy for one in job.tries], job.restarts_spent) == (
        [Strategy.RESET_GPU, Strategy.REBOOT_NODE],
        1,
    )
    job = walk(job, (fails, "REPLACE_NODE without n2 avoiding n2"))
    assert job.restarts_spent == 2
    # The next fault begins at the bottom again, with what is left there.
    job = walk(
        job,
        (fallen(), "RESET_GPU n2"),
        (fails, "REPLACE_NODE without n2 avoiding n2"),
        (fallen(), "REPLACE_NODE without n2 avoiding n2"),
    )
    assert len(job.tries) == 6


def test_a_repair_that_is_done_relaunches_in_place_for_free(snapshot: SnapshotAssertion) -> None:
    job = walk(running(policy=rungs(*REPAIRS, cause="NODE_FAULT")), (fallen(), "RESET_GPU n2"))
    generation = job.generation
    job, decision = step(job, mended()(job))
    assert isinstance(decision, Relaunch)
    assert (decision.generation, decision.take, decision.keep_nodes, decision.without) == (
        generation + 1,
        None,
        True,
        (),
    )
    assert decision.reason == snapshot
    assert (job.phase, job.recovering, len(job.tries)) == (Phase.LAUNCHING, None, 1)


def test_a_rung_whose_repair_failed_is_passed_by_for_one_fault() -> None:
    job = walk(
        running(policy=rungs({**RESET, "tries": 9}, FAIL, cause="NODE_FAULT")),
        (fallen(), "RESET_GPU n2"),
        (mended(), "LAUNCH"),
        (fallen(), "RESET_GPU n2"),
    )
    walk(job, (mended("refused"), "FAILED 1"))


def test_a_late_end_of_a_repair_is_ignored() -> None:
    job = walk(
        running(policy=rungs({**RESET, "tries": 1}, RESTART, cause="NODE_FAULT")),
        (fallen(), "RESET_GPU n2"),
    )
    late = this(RepairEnded(1, Strategy.RESET_GPU, ("n2",), "done", "reset"))
    walk(job, (this(DeadlinePassed()), "RESTART_IN_PLACE"), (late, "IGNORE"))


@pytest.mark.parametrize("outcome", ["done", "refused", "ambiguous"])
def test_the_late_end_of_one_repair_is_not_that_of_the_next(outcome: Any) -> None:
    """Or ranks would be launched on a node that is being rebooted."""
    job = walk(
        running(policy=rungs(*REPAIRS, cause="NODE_FAULT")),
        (fallen(), "RESET_GPU n2"),
        (this(DeadlinePassed()), "REBOOT_NODE n2"),
    )
    late = RepairEnded(1, Strategy.RESET_GPU, ("n2",), outcome, "it took its time")
    walk(job, (this(late), "IGNORE"))


@pytest.mark.parametrize(
    ("doing", "job"),
    [
        pytest.param(
            "EXAMINING",
            walk(running(policy=rungs(SICK, FAIL)), (raised(), "EXAMINE n2")),
            id="while nodes are examined",
        ),
        pytest.param(
            "REPAIRING",
            walk(
                running(policy=rungs({**REBOOT, "tries": 1}, FAIL, cause="NODE_FAULT")),
                (fallen(), "REBOOT_NODE n2"),
            ),
            id="while a node is repaired",
        ),
    ],
)
@pytest.mark.parametrize(
    "echo",
    [
        pytest.param(raised(node="n1"), id="another fault of the same generation"),
        pytest.param(hung(), id="a hang"),
        pytest.param(lose("n1"), id="a node out of reach"),
        pytest.param(back("n2"), id="a node that answers again"),
        pytest.param(
            lambda job: StepReached(job.generation, 9, T0), id="a step reached before the fault"
        ),
    ],
)
def test_late_reports_of_the_broken_generation_change_nothing(
    doing: str, job: JobState, echo: Any
) -> None:
    """Examining and repairing keep the generation's number.

    So what other watches report of it is not stale by that.
    """
    after, _ = step(job, echo(job), at(1))
    assert (after.phase, after.recovering, after.tries) == (doing, job.recovering, job.tries)
    answer = examine(n2="UNHEALTHY") if doing == "EXAMINING" else mended()
    after, decision = step(after, answer(after), at(2))
    assert isinstance(decision, Relaunch), decision
