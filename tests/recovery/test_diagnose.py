"""Which of several observations is the cause."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.causes import Cause
from relaunch.evidence.observations import (
    EcsStop,
    Observation,
    RankExited,
    RanksFenced,
    RanksVanished,
)
from relaunch.evidence.stacks import HungRank
from relaunch.job.diagnose import (
    AHEAD,
    BEHIND,
    CLOCKS_AGREE,
    MAX_REFUSALS,
    RIVALS,
    blame_lost_nodes,
    diagnose,
    is_root,
)
from relaunch.job.events import (
    FaultObserved,
    NodeUnreachable,
    RanksHung,
)
from relaunch.job.rules import Rule, list_affected
from relaunch.job.state import Certainty, Slot
from tests.recovery.builders import (
    FOREIGN_KILL,
    T0,
    at,
    error,
    exited,
    fault,
    first_launch,
    refused,
    running,
    step,
    xid,
)

WROTE = T0.timestamp() - 1.0
KILLED = exited(3, "n2", signal=9)
RAISED = exited(2, "n2", code=1, error=error("ValueError: bad batch"))
ECHO_BY_ERROR = exited(
    0,
    "n1",
    code=1,
    error=error("ConnectionResetError: [Errno 104] Connection reset by peer", 0.5),
    seconds=-1,
)
ECHO_BY_LOG = exited(
    1,
    "n1",
    code=1,
    log_tail=(
        "Traceback",
        "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5555",
    ),
)


@pytest.mark.parametrize(
    ("observations", "cause", "ranks", "exit_code"),
    [
        pytest.param(
            (KILLED,), Cause.UNKNOWN, (3,), 137, id="a SIGKILL that nothing explains is unknown"
        ),
        pytest.param(
            (exited(0, code=93),), Cause.APPLICATION, (0,), 93, id="93 is the program's word"
        ),
        pytest.param(
            (exited(0, code=127),), Cause.USER_INPUT, (0,), 127, id="a shell that found no command"
        ),
        pytest.param(
            (exited(0, signal=11),), Cause.APPLICATION, (0,), 139, id="a segmentation fault"
        ),
        pytest.param((RAISED,), Cause.APPLICATION, (2,), 1, id="an exception"),
        pytest.param(
            (ECHO_BY_ERROR, KILLED), Cause.UNKNOWN, (3,), 137, id="an earlier cascade does not win"
        ),
        pytest.param(
            (ECHO_BY_LOG, RAISED),
            Cause.APPLICATION,
            (2,),
            1,
            id="a cascade told by the log does not win",
        ),
        pytest.param(
            (ECHO_BY_ERROR, ECHO_BY_LOG),
            Cause.NETWORK,
            (0, 1),
            1,
            id="only cascades: the network, and a guess",
        ),
        pytest.param(
            (
                exited(
                    1,
                    "n1",
                    signal=6,
                    log_tail=(
                        "[E ProcessGroupNCCL.cpp:563] [Rank 1] Watchdog caught collective "
                        "operation timeout: WorkNCCL(SeqNum=4013, Timeout(ms)=600000)",
                        "[E ProcessGroupNCCL.cpp:583] [Rank 1] To avoid data inconsistency, we are "
                        "taking the entire process down.",
                    ),
                ),
            ),
            Cause.HANG,
            (1,),
            134,
            id="a watchdog that only ends what waited too long: a hang",
        ),
        pytest.param(
            (
                exited(0, "n1", code=1, error=error("A", WROTE)),
                exited(3, code=1, error=error("B", WROTE - 10), seconds=1),
            ),
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
            (exited(0, "n1", signal=15, stopped=True), KILLED),
            Cause.UNKNOWN,
            (3,),
            137,
            id="what we stopped ourselves is no cause",
        ),
    ],
)
def test_s3_6_root_cause_of_exits(
    observations: tuple[Observation, ...], cause: Cause, ranks: tuple[int, ...], exit_code: int
) -> None:
    job = running()
    diagnosis = diagnose(job, FaultObserved(1, observations, 0, T0))
    assert (cause, ranks, exit_code) == (diagnosis.cause, diagnosis.ranks, diagnosis.exit_code)


def wrote(
    message: str, rank: int = 3, node: str = "n2", *, late: float = 0.0, **more: int
) -> RankExited:
    """A rank that said what it failed of, so many seconds after the first that did."""
    return exited(
        rank, node, error=error(message, WROTE + late), seconds=late, **(more or {"code": 1})
    )


BUG, OOM = "ValueError: bad batch", "torch.OutOfMemoryError: CUDA out of memory."
AGREE, APART = CLOCKS_AGREE / 2, CLOCKS_AGREE * 2


@pytest.mark.parametrize(
    ("observations", "cause", "nodes", "ranks"),
    [
        pytest.param(
            (wrote(BUG), wrote(OOM, 0, "n1", late=AGREE)),
            Cause.UNKNOWN,
            ("n2", "n1"),
            (3, 0),
            id="two of one moment",
        ),
        pytest.param(
            (wrote(BUG), wrote(OOM, 0, "n1", late=APART)),
            Cause.APPLICATION,
            ("n2",),
            (3,),
            id="the clocks tell",
        ),
        pytest.param(
            (wrote(BUG), wrote(OOM, 2, "n2", late=AGREE)),
            Cause.APPLICATION,
            ("n2",),
            (3,),
            id="one node has one clock",
        ),
        pytest.param(
            (wrote(BUG), wrote(BUG, 0, "n1", late=AGREE)),
            Cause.APPLICATION,
            ("n2",),
            (3,),
            id="both say the same",
        ),
        pytest.param(
            (wrote(BUG), wrote("TypeError: bad batch", 0, "n1", late=AGREE)),
            Cause.APPLICATION,
            ("n2",),
            (3,),
            id="both mean the same",
        ),
        pytest.param(
            (wrote(BUG), wrote("cause unknown", 0, "n1", late=AGREE, signal=9)),
            Cause.APPLICATION,
            ("n2",),
            (3,),
            id="the other means nothing",
        ),
        pytest.param(
            (wrote("cause unknown", signal=9), wrote(OOM, 0, "n1", late=AGREE)),
            Cause.UNKNOWN,
            ("n2",),
            (3,),
            id="the first means nothing",
        ),
        pytest.param(
            (wrote(BUG), wrote("Connection reset by peer", 0, "n1", late=AGREE)),
            Cause.APPLICATION,
            ("n2",),
            (3,),
            id="an echo is no rival",
        ),
        pytest.param(
            (
                wrote(BUG),
                *(
                    wrote(f"{BUG} of rank {rank}", rank, "n1", late=AGREE)
                    for rank in range(10, 9 + RIVALS)
                ),
                wrote(OOM, 100, "n1", late=AGREE),
            ),
            Cause.UNKNOWN,
            ("n2", "n1"),
            (3, 100),
            id="the last rival that is compared",
        ),
        pytest.param(
            (
                wrote(BUG),
                *(
                    wrote("TypeError: bad batch", rank, "n1", late=AGREE)
                    for rank in range(10, 10 + RIVALS)
                ),
                wrote(OOM, 100, "n1", late=AGREE),
            ),
            Cause.UNKNOWN,
            ("n2", "n1"),
            (3, 100),
            id="rivals that say the same are compared once",
        ),
        pytest.param(
            (
                wrote(BUG),
                *(
                    wrote(f"{BUG} of rank {rank}", rank, "n1", late=AGREE)
                    for rank in range(10, 10 + RIVALS)
                ),
                wrote(OOM, 100, "n1", late=AGREE),
            ),
            Cause.APPLICATION,
            ("n2",),
            (3,),
            id="a program that puts its rank into its words has too many to compare",
        ),
    ],
)
def test_s3_6_errors_of_one_moment_must_agree_to_be_a_cause(
    observations: tuple[Observation, ...],
    cause: Cause,
    nodes: tuple[str, ...],
    ranks: tuple[int, ...],
) -> None:
    for shown in (observations, observations[::-1]):
        diagnosis = diagnose(running(), FaultObserved(1, shown, 0, T0))
        assert (cause, nodes, ranks) == (diagnosis.cause, diagnosis.nodes, diagnosis.ranks)


@pytest.mark.parametrize(
    ("first", "second", "root"),
    [
        pytest.param(1.0, BEHIND, 3, id="as long before its end as torch waits for a collective"),
        pytest.param(1.0, BEHIND + 1, 0, id="longer before"),
        pytest.param(-AHEAD, 1.0, 3, id="a little after it was received"),
        pytest.param(-AHEAD - 1, 1.0, 0, id="longer after"),
    ],
)
def test_s3_6_a_clock_that_cannot_be_right_dates_nothing(
    first: float, second: float, root: int
) -> None:
    """Of two ranks that ended together, so many seconds after each wrote by its own clock."""
    ended = [
        exited(rank, f"n{rank}", code=1, error=error(BUG, T0.timestamp() - wrote))
        for rank, wrote in ((0, first), (3, second))
    ]
    assert (root,) == diagnose(running(), fault(running(), *ended)).ranks


EARLY = exited(1, "n2", code=0, seconds=-5)
WAITED = (
    "[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=4013, Timeout(ms)=600000)",
)
PORT = ("NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",)


@pytest.mark.parametrize(
    ("failed", "finished", "cause", "ranks"),
    [
        pytest.param(ECHO_BY_LOG, (EARLY,), Cause.APPLICATION, (1,), id="others lost it"),
        pytest.param(
            exited(0, "n1", signal=6, log_tail=WAITED),
            (EARLY,),
            Cause.APPLICATION,
            (1,),
            id="others waited for it",
        ),
        pytest.param(
            ECHO_BY_LOG,
            (EARLY, exited(7, "n3", code=0)),
            Cause.APPLICATION,
            (1,),
            id="several had ended",
        ),
        pytest.param(ECHO_BY_LOG, (), Cause.NETWORK, (1,), id="none had ended"),
        pytest.param(RAISED, (EARLY,), Cause.APPLICATION, (2,), id="an exception of another rank"),
        pytest.param(KILLED, (EARLY,), Cause.UNKNOWN, (3,), id="another rank was killed"),
        pytest.param(
            exited(0, "n1", code=1, log_tail=PORT), (EARLY,), Cause.NETWORK, (0,), id="a port"
        ),
        pytest.param(
            exited(
                0, "n1", code=1, error=ECHO_BY_ERROR.error, kernel=("[ 9.1] eth0: Lost carrier",)
            ),
            (EARLY,),
            Cause.NETWORK,
            (0,),
            id="a link",
        ),
    ],
)
def test_a_rank_that_ended_early_is_why_others_lost_it(
    failed: RankExited,
    finished: tuple[RankExited, ...],
    cause: Cause,
    ranks: tuple[int, ...],
    snapshot: SnapshotAssertion,
) -> None:
    found = diagnose(running(), FaultObserved(1, (failed,), 0, T0, finished=finished))
    assert (found.cause, found.ranks) == (cause, ranks)
    assert found.reason == snapshot


def test_a_watchdog_that_ended_after_its_peers_is_a_hang() -> None:
    waited = exited(0, "n1", signal=6, seconds=2.0, log_tail=WAITED, echo=True)
    lost = exited(1, "n2", code=1, log_tail=("ConnectionResetError: [Errno 104] reset",), echo=True)
    found = diagnose(running(), FaultObserved(1, (lost, waited), 0, T0))
    assert (found.cause, found.exit_code) == (Cause.HANG, 134)


@pytest.mark.parametrize(
    ("ending", "seconds", "cause"),
    [
        pytest.param({"code": 1}, 0.3, Cause.PREEMPTED, id="it left without a word"),
        pytest.param({"code": 1}, 0.6, Cause.UNKNOWN, id="but long before"),
        pytest.param({"signal": 9}, 0.3, Cause.UNKNOWN, id="it was killed"),
        pytest.param({"code": 1, "log_tail": ("bye",)}, 0.3, Cause.APPLICATION, id="it spoke"),
    ],
)
def test_of_two_that_end_at_once_the_one_that_speaks_is_read(
    ending: dict[str, Any], seconds: float, cause: Cause
) -> None:
    silent = exited(3, "n2", **ending)
    words = "slurmstepd: error: *** JOB 608 ON n1 CANCELLED AT 02:06:12 DUE TO JOB REQUEUE ***"
    other = exited(2, "n1", code=1, seconds=seconds, log_tail=(words,))
    assert diagnose(running(), FaultObserved(1, (silent, other), 0, T0)).cause is cause


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_first_of_a_nodes_ranks_brings_its_kernel_log(order: tuple[int, ...]) -> None:
    ends = [exited(rank, code=1, seconds=rank, kernel=(xid(79),)) for rank in range(3)]
    assert diagnose(running(), FaultObserved(1, tuple(ends[n] for n in order), 0, T0)).ranks == (0,)


KERNEL_KILLED_IT = (
    "[ 9.1] Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB",
    "[ 9.2] eth0: Lost carrier",
)
LINK_DOWN = ("mlx5_core 0000:9a:00.0 ens1f0np0: Link down",)
SUPERSEDED = RanksFenced("n2", T0, "superseded", "generation 2 runs")


@pytest.mark.parametrize(
    ("observations", "cause"),
    [
        pytest.param(
            (exited(3, signal=9, pid=4711, kernel=KERNEL_KILLED_IT),),
            Cause.OUT_OF_MEMORY,
            id="the kernel killed it",
        ),
        pytest.param(
            (exited(3, code=5, error_unreadable="it is torn"),), Cause.UNKNOWN, id="a torn file"
        ),
        pytest.param((exited(3, code=5),), Cause.UNKNOWN, id="a rank that said nothing"),
        pytest.param(
            (exited(3, code=1, error=error("")),),
            Cause.APPLICATION,
            id="an exception without a message",
        ),
        pytest.param(
            (
                ECHO_BY_LOG,
                exited(3, code=1, error=ECHO_BY_ERROR.error, kernel=("[ 9.1] eth0: Lost carrier",)),
            ),
            Cause.NETWORK,
            id="among echoes, a node whose link went down",
        ),
        pytest.param((), Cause.PLATFORM, id="nothing was observed"),
        pytest.param((SUPERSEDED,), Cause.PLATFORM, id="a node that obeyed a later generation"),
        pytest.param(
            (exited(0, signal=15, stopped=True), exited(1, code=3, stopped=True, seconds=1)),
            Cause.PLATFORM,
            id="only ranks that we stopped by a signal",
        ),
        pytest.param(
            (exited(1, code=3, stopped=True),), Cause.PLATFORM, id="that we stopped, with a code"
        ),
        pytest.param(
            (exited(1, signal=77, stopped=True),), Cause.PLATFORM, id="by a signal without a name"
        ),
    ],
)
def test_what_is_said_where_little_is_known(
    observations: tuple[Observation, ...], cause: Cause, snapshot: SnapshotAssertion
) -> None:
    diagnosis = diagnose(running(), FaultObserved(1, observations, 0, T0))
    assert diagnosis.cause is cause
    assert diagnosis.reason == snapshot


@pytest.mark.parametrize(
    ("observation", "root"),
    [
        pytest.param(RAISED, True, id="an exception of the rank itself"),
        pytest.param(KILLED, True, id="a rank that was killed"),
        pytest.param(ECHO_BY_ERROR, False, id="an echo"),
        pytest.param(
            exited(1, "n1", code=1, error=ECHO_BY_ERROR.error, kernel=(xid(79),)),
            True,
            id="an echo whose kernel saw something",
        ),
        pytest.param(
            exited(1, "n1", code=1, error=ECHO_BY_ERROR.error, kernel=LINK_DOWN),
            True,
            id="an echo whose kernel lost a link",
        ),
        pytest.param(
            exited(1, "n1", code=1, error=ECHO_BY_ERROR.error, kernel=FOREIGN_KILL, pid=17731),
            False,
            id="an echo on a node where another process was killed",
        ),
        pytest.param(exited(1, code=0), False, id="a rank that ended well"),
        pytest.param(exited(1, signal=15, stopped=True), False, id="a rank that we stopped"),
        pytest.param(
            RanksFenced("n2", T0, "isolated", "no peer answered"),
            True,
            id="a node that was cut off",
        ),
        pytest.param(SUPERSEDED, False, id="a node that obeyed a later generation"),
        pytest.param(
            RanksVanished("n1", T0, "the node rebooted", rebooted=True),
            True,
            id="ranks that are gone",
        ),
    ],
)
def test_only_what_may_be_a_cause_is_reported_at_once(observation: Observation, root: bool) -> None:
    assert root == is_root(observation)


def test_s3_6_the_traceback_of_the_root_travels() -> None:
    diagnosis = diagnose(running(), fault(running(), ECHO_BY_ERROR, RAISED))
    assert "ValueError: bad batch" in diagnosis.traceback
    assert (diagnosis.ranks, diagnosis.nodes) == ((2,), ("n2",))


def test_s1_1_every_exit_is_named_with_its_code_or_signal(snapshot: SnapshotAssertion) -> None:
    assert diagnose(running(), fault(running(), KILLED)).reason == snapshot(name="signal")
    assert diagnose(
        running(), fault(running(), exited(code=5, log_tail=("out of cheese",)))
    ).reason == snapshot(name="code")
    assert diagnose(
        running(), fault(running(), exited(code=5, log_tail=("out of cheese", " ")))
    ).reason == snapshot(name="last-line")


ENDED, OOM = "EssentialContainerExited", "OutOfMemoryError: Container killed due to memory usage"


@pytest.mark.parametrize(
    ("observations", "cause", "ranks"),
    [
        pytest.param(
            (exited(3, code=137, ecs=EcsStop(ENDED, OOM)),),
            Cause.OUT_OF_MEMORY,
            (3,),
            id="137 that ECS explains",
        ),
        pytest.param(
            (exited(3, code=139, ecs=EcsStop(ENDED, "")),),
            Cause.APPLICATION,
            (3,),
            id="139 by itself",
        ),
        pytest.param(
            (exited(3, ecs=EcsStop(ENDED, "")),),
            Cause.UNKNOWN,
            (3,),
            id="no exit code is no success",
        ),
        pytest.param(
            (
                exited(0, "n1", code=1, ecs=EcsStop(ENDED, "")),
                exited(3, code=143, seconds=2, ecs=EcsStop("SpotInterruption", "")),
            ),
            Cause.PREEMPTED,
            (3,),
            id="a rank that was taken away beats the one that failed by it, reported first",
        ),
        pytest.param(
            (
                exited(0, "n1", code=1, ecs=EcsStop(ENDED, "")),
                exited(3, seconds=2, ecs=EcsStop("SomethingNew", "")),
            ),
            Cause.UNKNOWN,
            (0,),
            id="an unknown stop beats nothing",
        ),
    ],
)
def test_s1_1_what_ecs_says_of_a_ranks_end(
    observations: tuple[Observation, ...],
    cause: Cause,
    ranks: tuple[int, ...],
    snapshot: SnapshotAssertion,
) -> None:
    diagnosis = diagnose(running(), FaultObserved(1, observations, 0, T0))
    assert (diagnosis.cause, diagnosis.ranks) == (cause, ranks)
    assert diagnosis.reason == snapshot


def test_a_reboot_beats_what_ranks_say() -> None:
    vanished = RanksVanished("n1", at(5), "the node rebooted", rebooted=True)
    diagnosis = diagnose(running(), FaultObserved(1, (RAISED, vanished), 0, T0))
    assert (diagnosis.cause, diagnosis.nodes, diagnosis.certainty) == (
        Cause.NODE_FAULT,
        ("n1",),
        Certainty.CERTAIN,
    )


def test_a_node_that_fenced_itself_was_cut_off() -> None:
    diagnosis = diagnose(
        running(),
        FaultObserved(1, (RanksFenced("n2", T0, "isolated", "no peer answered for 60 s"),), 0, T0),
    )
    assert (diagnosis.cause, diagnosis.nodes) == (Cause.NODE_LOST, ("n2",))


def test_a_node_whose_shim_was_asked_to_end_was_taken() -> None:
    reason = "its shim got SIGTERM: its node, unit, login or container is stopped"
    taken = RanksFenced("n2", at(5), "terminated", reason)
    isolated = RanksFenced("n1", T0, "isolated", "no peer answered for 60 s")
    diagnosis = diagnose(running(), FaultObserved(1, (RAISED, isolated, taken), 0, T0))
    assert (diagnosis.cause, diagnosis.nodes) == (Cause.PREEMPTED, ("n2",))
    assert diagnosis.by_program, "a rank can signal its shim: that costs no node"


LATE = RanksFenced(
    "n2", T0, "never_watched", "no controller watched this generation within 60 s of its start"
)


@pytest.mark.parametrize("why", ["never_watched", "unwatched"])
def test_a_launch_that_was_never_watched_accuses_the_controller(why: str) -> None:
    diagnosis = diagnose(running(), FaultObserved(1, (replace(LATE, why=why),), 0, T0))
    assert (diagnosis.cause, diagnosis.nodes, diagnosis.code) == (
        Cause.PLATFORM,
        ("n2",),
        "never_watched",
    )


def test_a_node_without_peers_comes_before_an_unwatched_one() -> None:
    isolated = RanksFenced("n1", at(5), "isolated", "no peer answered for 60 s")
    diagnosis = diagnose(running(), FaultObserved(1, (LATE, isolated), 0, T0))
    assert (diagnosis.cause, diagnosis.nodes) == (Cause.NODE_LOST, ("n1",))


def test_a_silent_node_comes_before_one_that_was_never_watched() -> None:
    job, _ = step(running(), NodeUnreachable(1, "n1", timedelta(0), "no answer"))
    late = fault(job, LATE)
    diagnosis = blame_lost_nodes(job, late, diagnose(job, late))
    assert (diagnosis.cause, diagnosis.nodes) == (Cause.NODE_LOST, ("n1",))


def test_what_fails_while_a_node_is_lost_is_laid_to_the_loss() -> None:
    job, _ = step(running(), NodeUnreachable(1, "n2", timedelta(0), "no answer"))
    for event in (fault(job, ECHO_BY_LOG), RanksHung(1, (0,), "step 7 has not changed", T0)):
        diagnosis = blame_lost_nodes(job, event, diagnose(job, event))
        assert (diagnosis.cause, diagnosis.nodes) == (Cause.NODE_LOST, ("n2",))


@pytest.mark.parametrize(
    ("why", "cause", "suspects"),
    [
        ("stuck", Cause.NODE_FAULT, ("n1",)),
        ("disk_full", Cause.NODE_FAULT, ("n1",)),
        ("held", Cause.PLATFORM, ("n1",)),
        ("rebooting", Cause.PLATFORM, ("n1",)),
        ("expired", Cause.PLATFORM, ()),
        ("address_not_ready", Cause.NODE_FAULT, ("n1",)),
    ],
)
def test_a_refusal_is_whose_fault(why: str, cause: Cause, suspects: tuple[str, ...]) -> None:
    for job in (first_launch(), running()):
        diagnosis = diagnose(job, refused(why, "n1"))
        assert (diagnosis.cause, diagnosis.nodes) == (cause, suspects)
        assert not diagnosis.do_not_restart


@pytest.mark.parametrize("why", ["command_not_found", "workdir_missing", "cannot_start"])
def test_what_has_run_or_others_accept_is_no_wrong_input(why: str) -> None:
    wrong = diagnose(first_launch(), refused(why, "n1", "n2"))
    assert (wrong.cause, wrong.nodes, wrong.do_not_restart) == (Cause.USER_INPUT, ("n1",), True)
    for job, nodes in ((first_launch(), ("n2",)), (running(), ("n2",)), (running(), ("n1", "n2"))):
        diagnosis = diagnose(job, refused(why, *nodes))
        assert (diagnosis.cause, diagnosis.nodes, diagnosis.code) == (Cause.NODE_FAULT, nodes, why)
        assert diagnosis.by_program and not diagnosis.do_not_restart
    before = diagnose(running(), refused(why, "n1"), rules=())
    assert (before.cause, before.do_not_restart) == (Cause.USER_INPUT, True)


def test_many_refusals_may_be_those_of_all_nodes() -> None:
    nodes = tuple(f"n{number}" for number in range(1, MAX_REFUSALS + 1))
    job = replace(first_launch(), slots=tuple(Slot(f"n{n}", "10.0.0.1") for n in range(1, 65)))
    assert diagnose(job, refused("command_not_found", *nodes)).cause is Cause.USER_INPUT
    assert diagnose(job, refused("command_not_found", *nodes[1:])).cause is Cause.NODE_FAULT


@pytest.mark.parametrize(
    ("observations", "cause", "ranks"),
    [
        pytest.param(
            (
                exited(
                    17,
                    "n2",
                    code=1,
                    launcher=True,
                    log_tail=("/usr/bin/python: No module named torch",),
                ),
            ),
            Cause.APPLICATION,
            (),
            id="it never had ranks",
        ),
        pytest.param(
            (exited(17, "n2", signal=9, launcher=True), exited(3, "n1", signal=15, stopped=True)),
            Cause.UNKNOWN,
            (),
            id="it was killed, and its ranks died with it",
        ),
        pytest.param(
            (
                exited(
                    16,
                    "n0",
                    code=1,
                    launcher=True,
                    log_tail=("Connection closed by peer [10.0.0.1]:5555",),
                ),
                ECHO_BY_LOG,
            ),
            Cause.NETWORK,
            (1,),
            id="only cascades",
        ),
    ],
)
def test_the_end_of_a_launcher_with_idle_ranks_names_no_rank(
    observations: tuple[Observation, ...],
    cause: Cause,
    ranks: tuple[int, ...],
    snapshot: SnapshotAssertion,
) -> None:
    job = running(launcher="torchrun", nproc_per_node=8)
    found = diagnose(job, FaultObserved(1, observations, 0, T0))
    assert (cause, ranks) == (found.cause, found.ranks)
    assert found.reason == snapshot


def test_no_evidence_at_all_says_which_launcher_ended_first(snapshot: SnapshotAssertion) -> None:
    job, _ = step(
        running(launcher="torchrun"),
        NodeUnreachable(1, "n1", timedelta(minutes=3), "no route to host"),
    )
    event = FaultObserved(1, (exited(5, "n2", signal=9, launcher=True),), 0, T0)
    found = blame_lost_nodes(job, event, diagnose(job, event))
    assert found.reason == snapshot


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: API mismatch: the client 'dcgm-exporter' (pid 777)",
        "NVRM: API mismatch: the client has the version 550.144, but this kernel module has",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [rsync:777]",
        "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:4711]",
    ],
)
def test_what_a_kernel_prints_on_nodes_that_work_is_no_cause(line: str) -> None:
    one = exited(3, "n2", code=1, error=error("KeyError: 'x'"), kernel=(line,), pid=4711)
    found = diagnose(running(), fault(running(), one))
    assert (found.cause, found.by_program) == (Cause.APPLICATION, True)


def test_a_processor_without_interrupts_is_a_fault_of_the_node() -> None:
    line = "NMI watchdog: Watchdog detected hard LOCKUP on cpu 12"
    one = exited(3, "n2", code=1, error=error("KeyError: 'x'"), kernel=(line,), pid=4711)
    found = diagnose(running(), fault(running(), one))
    assert (found.cause, found.code, found.nodes) == (Cause.NODE_FAULT, "lockup", ("n2",))


def test_a_hang_suspects_only_the_nodes_of_named_ranks() -> None:
    suspects = (
        HungRank(3, "n2", "is in __next__ (dataloader.py:725)", ("select (selectors.py:415)",)),
        HungRank(2, "n2", "is in __next__ (dataloader.py:725)"),
    )
    hang = RanksHung(
        1,
        (3, 2, 0),
        "rank 3 on n2 is in __next__",
        T0,
        suspects=suspects,
        groups=("ranks 0-1 on n1 (2): wait in all_reduce", "ranks 2-3 on n2 (2): are in __next__"),
        rule="odd_one_out",
    )
    found = diagnose(running(nodes=2), hang)
    assert (found.cause, found.nodes, found.ranks) == (Cause.HANG, ("n2",), (3, 2))
    assert found.by_program, "a stack alone never costs a node"
    assert found.traceback.splitlines() == [
        *hang.groups,
        "rank 3 on n2:",
        "  select (selectors.py:415)",
    ]
    long = diagnose(running(nodes=2), replace(hang, groups=tuple("x" * 240 for _ in range(20))))
    assert 3500 < len(long.traceback) <= 4000


LOST = exited(0, "n1", code=1, log_tail=("ConnectionResetError: [Errno 104] reset",))
BOOM = (
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "ValueError: boom",
)


@pytest.mark.parametrize(
    ("root", "cause", "reason"),
    [
        pytest.param(
            exited(log_tail=BOOM, unfinished="alive"),
            Cause.APPLICATION,
            "rank 3 on n2 failed and has not ended yet: the program raised an uncaught exception: "
            "ValueError: boom (1 more failed)",
            id="alive",
        ),
        pytest.param(
            exited(error=error("CUDA out of memory. Tried"), unfinished="stopped"),
            Cause.OUT_OF_MEMORY,
            "rank 3 on n2 failed and was stopped before it had ended: CUDA out of memory. Tried "
            "(1 more failed)",
            id="stopped",
        ),
        pytest.param(
            exited(log_tail=("step 12",), unfinished="dumping"),
            Cause.UNKNOWN,
            "rank 3 on n2 is writing a core dump: a signal ended it; no row of the catalog "
            "explains its last line: step 12 (1 more failed)",
            id="dumping",
        ),
    ],
)
def test_a_rank_whose_exit_does_not_say_how_it_failed(
    root: RankExited, cause: Cause, reason: str
) -> None:
    job = running()
    diagnosis = diagnose(job, fault(job, LOST, root))
    assert (diagnosis.cause, diagnosis.reason) == (cause, reason)
    assert (diagnosis.nodes, diagnosis.ranks) == (("n2",), (3,))
    assert diagnosis.by_program
    assert ("boom" in diagnosis.traceback) is (root.unfinished == "alive")


def test_a_lost_node_is_named_before_a_rank_that_has_not_ended() -> None:
    job, _ = step(running(), NodeUnreachable(1, "n1", timedelta(0), "no answer within 5 s"))
    unfinished = fault(job, exited(log_tail=BOOM, unfinished="alive"))
    found = blame_lost_nodes(job, unfinished, diagnose(job, unfinished))
    assert (found.cause, found.nodes) == (Cause.NODE_LOST, ("n1",))
    assert found.reason.endswith("; then rank 3 on n2 failed and has not ended yet")


def test_a_gpu_that_is_missing_after_training_is_the_nodes_fault() -> None:
    ordinal = exited(3, "n2", code=1, log_tail=("CUDA error: invalid device ordinal",))
    new = running()
    wrong = diagnose(new, fault(new, ordinal))
    assert (wrong.cause, wrong.code) == (Cause.USER_INPUT, "log device_count")
    trained = replace(new, furthest_step=7)
    lost = diagnose(trained, fault(trained, ordinal))
    assert (lost.cause, lost.nodes, lost.code) == (Cause.NODE_FAULT, ("n2",), wrong.code)
    before = diagnose(trained, fault(trained, ordinal), rules=())
    assert before == wrong
    assert list_affected(trained, fault(trained, ordinal)) == (Rule.FEWER_GPUS,)
    assert list_affected(new, fault(new, ordinal)) == ()
    assert list_affected(trained, fault(trained, exited(3, "n2", code=1))) == ()
