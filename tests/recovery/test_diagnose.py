"""Which of several observations is the cause."""

from __future__ import annotations

from datetime import timedelta

import pytest

from recovery.causes import Cause
from recovery.diagnose import diagnose
from recovery.events import FaultObserved, LaunchRefused, NodeRefusal, NodeUnreachable, Observation, RanksFenced, RanksHung, RanksVanished
from recovery.model import Certainty
from tests.recovery.builders import T0, at, error, exited, fault, running, step

WROTE = T0.timestamp() - 1.0
KILLED = exited(3, "n2", signal=9)
RAISED = exited(2, "n2", code=1, error=error("ValueError: bad batch"))
ECHO_BY_ERROR = exited(0, "n1", code=1, error=error("ConnectionResetError: [Errno 104] Connection reset by peer", 0.5), seconds=-1)
ECHO_BY_LOG = exited(
    1, "n1", code=1, log_tail=("Traceback", "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5555")
)


@pytest.mark.parametrize(
    ("observations", "cause", "ranks", "exit_code"),
    [
        pytest.param((KILLED,), Cause.UNKNOWN, (3,), 137, id="a SIGKILL that nothing explains is unknown"),
        pytest.param((exited(0, code=93),), Cause.APPLICATION, (0,), 93, id="93 is the program's word"),
        pytest.param((exited(0, code=127),), Cause.USER_INPUT, (0,), 127, id="a shell that found no command"),
        pytest.param((exited(0, signal=11),), Cause.APPLICATION, (0,), 139, id="a segmentation fault"),
        pytest.param((RAISED,), Cause.APPLICATION, (2,), 1, id="an exception"),
        pytest.param((ECHO_BY_ERROR, KILLED), Cause.UNKNOWN, (3,), 137, id="an earlier cascade does not win"),
        pytest.param((ECHO_BY_LOG, RAISED), Cause.APPLICATION, (2,), 1, id="a cascade told by the log does not win"),
        pytest.param((ECHO_BY_ERROR, ECHO_BY_LOG), Cause.NETWORK, (0, 1), 1, id="only cascades: the network, and a guess"),
        pytest.param(
            (exited(0, "n1", code=1, error=error("A", WROTE)), exited(3, code=1, error=error("B", WROTE - 10), seconds=1)),
            Cause.APPLICATION,
            (3,),
            1,
            id="S3.6 among error files the smallest timestamp is the root",
        ),
        pytest.param(
            (exited(0, "n1", signal=9), exited(3, code=1, error=error("B", 10.0), seconds=1)),
            Cause.UNKNOWN,
            (0,),
            137,
            id="a kill that arrived first beats a later exception",
        ),
        pytest.param(
            (exited(0, "n1", signal=15, stopped=True), KILLED), Cause.UNKNOWN, (3,), 137, id="what we stopped ourselves is no cause"
        ),
    ],
)
def test_s3_6_root_cause_of_exits(observations: tuple[Observation, ...], cause: Cause, ranks: tuple[int, ...], exit_code: int) -> None:
    job = running()
    diagnosis = diagnose(job, FaultObserved(1, observations, 0, T0))
    assert (cause, ranks, exit_code) == (diagnosis.cause, diagnosis.ranks, diagnosis.exit_code)


def test_s3_6_the_traceback_of_the_root_travels() -> None:
    diagnosis = diagnose(running(), fault(running(), ECHO_BY_ERROR, RAISED))
    assert "ValueError: bad batch" in diagnosis.traceback
    assert "rank 2 on n2" in diagnosis.because


def test_s1_1_every_exit_is_named_with_its_code_or_signal() -> None:
    assert "was killed by SIGKILL" in diagnose(running(), fault(running(), KILLED)).because
    assert "exited with code 5" in diagnose(running(), fault(running(), exited(code=5, log_tail=("out of cheese",)))).because
    assert "out of cheese" in diagnose(running(), fault(running(), exited(code=5, log_tail=("out of cheese", " ")))).because


def test_a_reboot_beats_what_ranks_say() -> None:
    vanished = RanksVanished("n1", at(5), "the node rebooted", rebooted=True)
    diagnosis = diagnose(running(), FaultObserved(1, (RAISED, vanished), 0, T0))
    assert (diagnosis.cause, diagnosis.nodes, diagnosis.certainty) == (Cause.NODE_FAULT, ("n1",), Certainty.CERTAIN)


def test_a_node_that_fenced_itself_was_cut_off() -> None:
    diagnosis = diagnose(running(), FaultObserved(1, (RanksFenced("n2", T0, "isolated", "no peer answered for 60 s"),), 0, T0))
    assert (diagnosis.cause, diagnosis.nodes) == (Cause.NODE_LOST, ("n2",))


def test_what_fails_while_a_node_is_lost_is_laid_to_the_loss() -> None:
    job, _ = step(running(), NodeUnreachable(1, "n2", timedelta(0), "no answer"))
    for event in (fault(job, ECHO_BY_LOG), RanksHung(1, (0,), "step 7 has not changed", T0)):
        diagnosis = diagnose(job, event)
        assert (diagnosis.cause, diagnosis.nodes) == (Cause.NODE_LOST, ("n2",))


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("command_not_found", Cause.USER_INPUT),
        ("workdir_missing", Cause.USER_INPUT),
        ("stuck", Cause.NODE_FAULT),
        ("expired", Cause.PLATFORM),
    ],
)
def test_a_refusal_is_whose_fault(why: str, cause: Cause) -> None:
    assert cause == diagnose(running(), LaunchRefused(1, (NodeRefusal("n1", why, "…"),))).cause
