"""What an agent sends about an end of ranks becomes an observation.

What it cannot tell is said to be unreadable.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from relaunch.activities.observations import (
    KERNEL_LINE,
    KERNEL_LINES,
    read_observation,
    read_observations,
)
from relaunch.backends.base import StartOrder
from relaunch.evidence.observations import RankExited, RanksVanished
from relaunch.job.diagnose import diagnose
from relaunch.job.events import FaultObserved, ProgressSeen
from tests.activities.harness import stand
from tests.fakes.nodes import Exit, Progress, Script, ShimDies
from tests.recovery.builders import running

AT = datetime(2026, 1, 1, tzinfo=UTC)
XID = (
    "[12345.678901] NVRM: Xid (PCI:0000:05:00): 79, pid=4242, name=python, "
    "GPU has fallen off the bus."
)
EXIT = {
    "kind": "RankExited",
    "rank": 8,
    "local_rank": 0,
    "pid": 4242,
    "exit_code": 1,
    "signal": None,
    "stopped": False,
}
OLD_AGENT = "the agent of this generation does not read it"


@pytest.mark.parametrize(
    ("sent", "kernel", "unreadable"),
    [
        ({"kernel": [XID], "kernel_unreadable": None}, (XID,), None),
        ({"kernel": [], "kernel_unreadable": None}, (), None),
        ({"kernel": [XID], "kernel_unreadable": "the rest is gone"}, (XID,), "the rest is gone"),
        (
            {"kernel": [], "kernel_unreadable": "permission denied: /dev/kmsg"},
            (),
            "permission denied: /dev/kmsg",
        ),
        ({"kernel": "Xid", "kernel_unreadable": None}, (), "expected a list of lines, found str"),
        ({}, (), OLD_AGENT),
        ({"exit_code": 0}, (), None),
        ({"stopped": True}, (), None),
    ],
)
def test_an_exit_is_read_with_what_the_kernel_said(
    sent: dict[str, Any], kernel: tuple[str, ...], unreadable: str | None
) -> None:
    seen = read_observation("n1", {**EXIT, **sent}, AT)
    assert isinstance(seen, RankExited)
    assert (seen.kernel, seen.kernel_unreadable, seen.pid) == (kernel, unreadable, 4242)


@pytest.mark.parametrize("kind", ["ShimDied", "RanksVanished"])
def test_an_end_that_no_watch_saw_is_read_with_it_too(kind: str) -> None:
    seen = read_observation(
        "n1", {"kind": kind, "reason": "gone", "kernel": [XID], "kernel_unreadable": None}, AT
    )
    assert seen == RanksVanished("n1", AT, "gone", kernel=(XID,))
    assert read_observation("n1", {"kind": kind, "reason": "gone"}, AT) == RanksVanished(
        "n1", AT, "gone", kernel_unreadable=OLD_AGENT
    )


def test_more_than_an_agent_may_send_is_cut_to_the_newest() -> None:
    lines = [f"{number} " + "x" * 1000 for number in range(100)]
    seen = read_observation("n1", {**EXIT, "kernel": lines, "kernel_unreadable": "y" * 1000}, AT)
    assert isinstance(seen, RankExited)
    assert [line.split()[0] for line in seen.kernel] == [
        str(number) for number in range(100 - KERNEL_LINES, 100)
    ]
    assert {len(line) for line in (*seen.kernel, seen.kernel_unreadable or "")} == {KERNEL_LINE}


async def test_a_watch_reports_the_kernels_word_on_the_failed_rank() -> None:
    fleet = stand(
        Script((Exit(rank=3, signal=9, kernel=(XID,), kernel_unreadable="the rest is gone"),))
    )
    await fleet.launch()
    fault = (await fleet.watch()).events[-1]
    assert isinstance(fault, FaultObserved)
    first, *others = fault.observations
    assert isinstance(first, RankExited) and isinstance(first.pid, int)
    assert (first.rank, first.kernel, first.kernel_unreadable) == (3, (XID,), "the rest is gone")
    assert all(
        isinstance(one, RankExited) and (one.kernel, one.kernel_unreadable) == ((), None)
        for one in others
    )


async def test_a_watch_reports_what_the_kernel_said_when_a_shim_died() -> None:
    fleet = stand(
        Script((ShimDies(node="n1", kernel=("Out of memory: Killed process 7 (relaunch-shim)",)),))
    )
    await fleet.launch()
    fault = (await fleet.watch()).events[-1]
    assert isinstance(fault, FaultObserved)
    vanished = fault.observations[0]
    assert isinstance(vanished, RanksVanished)
    assert vanished.kernel == ("Out of memory: Killed process 7 (relaunch-shim)",)


TOLD = (
    (Path(__file__).parents[1] / "recovery" / "samples" / "launchers" / "torchrun_2.13.0.txt")
    .read_text()
    .splitlines()
)
"""Rank 3 of four was killed while rank 2 raised an exception."""
BELOW = [
    {
        "rank": rank,
        "local_rank": rank,
        "pid": 26127 + rank,
        "error": None,
        "log_tail": [f"rank {rank}"],
    }
    for rank in range(4)
]
RAISED = {
    "message": {
        "message": "ConnectionResetError: a peer closed its connection",
        "extraInfo": {"timestamp": "1795306911"},
    }
}
LATER = {"message": {"message": "ValueError", "extraInfo": {"timestamp": "1795306999"}}}
LAUNCHER = {**EXIT, "launcher": True, "log_tail": TOLD, "launched": BELOW}


def read(**changes: Any) -> list[RankExited]:
    seen = read_observations("n1", {**LAUNCHER, **changes}, AT)
    assert all(isinstance(one, RankExited) for one in seen)
    return [one for one in seen if isinstance(one, RankExited)]


def test_a_launchers_end_is_read_as_its_ranks_ends_in_order() -> None:
    first, *others = read()
    assert (first.rank, first.local_rank, first.pid, first.exit_code, first.signal) == (
        3,
        3,
        26130,
        None,
        9,
    )
    assert (first.log_tail, first.stopped, first.launcher) == (("rank 3",), False, False)
    assert [(one.rank, one.signal, one.stopped) for one in others] == [
        (rank, 15, True) for rank in range(3)
    ]
    assert [one.at for one in (first, *others)] == [
        AT + timedelta(milliseconds=number) for number in range(4)
    ]


def test_a_rank_has_its_place_although_another_ended_unannounced() -> None:
    (first, *_) = read(launched=BELOW[3:])
    assert (first.rank, first.local_rank) == (3, 3)


def test_a_rank_that_raised_and_was_then_ended_failed_by_raising() -> None:
    told = [{**one, "error": RAISED} if one["rank"] == 2 else one for one in BELOW]
    raised = next(one for one in read(launched=told) if one.rank == 2)
    assert (raised.exit_code, raised.signal, raised.stopped) == (1, None, False)
    assert raised.error is not None and raised.error.message == RAISED["message"]["message"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"log_tail": ["No module named torch"], "launched": []}, id="it had no ranks"),
        pytest.param({"log_tail": ["Killed"]}, id="it says nothing of its ranks"),
        pytest.param({"launched": []}, id="no rank said that it was there"),
        pytest.param({"exit_code": 0}, id="it ended well"),
        pytest.param({"stopped": True}, id="it was stopped"),
        pytest.param(
            {
                "exit_code": None,
                "signal": 9,
                "log_tail": [],
                "launched": [{**BELOW[0], "error": RAISED}],
            },
            id="it was killed",
        ),
    ],
)
def test_a_launcher_silent_about_its_ranks_is_reported_itself(
    changes: dict[str, Any],
) -> None:
    (seen,) = read(**changes)
    assert (seen.rank, seen.launcher, seen.pid) == (8, True, 4242)


def test_a_rank_that_lost_its_peer_is_no_cause_even_if_first() -> None:
    """Real launchers of eight ranks did that two times in eight."""
    lines = [
        "failed (exitcode: 1) local_rank: 0 (pid: 26127) of binary: python",
        "{0: ProcessFailure(local_rank=0, pid=26127, exitcode=1, ), "
        "3: ProcessFailure(local_rank=3, pid=26130, exitcode=-9, )}",
    ]
    told = [{**BELOW[0], "error": RAISED}, *BELOW[1:]]
    seen = read(log_tail=lines, launched=told)
    assert [one.rank for one in seen] == [0, 3]
    found = diagnose(running(launcher="torchrun"), FaultObserved(1, tuple(seen), 0, AT))
    assert "rank 3" in found.reason and "SIGKILL" in found.reason
    assert found.ranks == (3,)


def test_below_a_silent_launcher_the_first_error_is_the_root() -> None:
    told = [{**BELOW[0], "error": LATER}, {**BELOW[1], "error": RAISED}]
    (seen,) = read(log_tail=["Killed"], launched=told)
    assert (seen.rank, seen.exit_code, seen.launcher) == (1, 1, False)


async def test_a_watch_names_ranks_below_a_launcher_and_their_progress() -> None:
    fleet = stand(
        Script((Progress(steps=((0.0, 7),)), Exit(rank=3, signal=9, after=0.2))),
        launcher="torchrun",
    )
    await fleet.launch()
    report = await fleet.watch()
    fault = report.events[-1]
    assert isinstance(fault, FaultObserved)
    first = fault.observations[0]
    assert isinstance(first, RankExited)
    assert (first.node, first.rank, first.signal, first.launcher) == ("n2", 3, 9, False)
    orders = [call.order for call in fleet.backend.calls if isinstance(call.order, StartOrder)]
    assert [(order.command[0], order.launched and order.launched.ranks) for order in orders] == [
        ("torchrun", (0, 1)),
        ("torchrun", (2, 3)),
    ]
    assert {one.step for one in report.events if isinstance(one, ProgressSeen)} == {7}


async def test_a_job_below_launchers_has_succeeded_when_they_have() -> None:
    fleet = stand(Script((Exit(exit_code=0),)), launcher="torchrun")
    await fleet.launch()
    report = await fleet.watch()
    assert report.all_succeeded
    assert report.exited == {"n1": (4,), "n2": (5,)}
