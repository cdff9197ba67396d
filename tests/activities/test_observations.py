"""What an agent sends about an end of ranks becomes an observation; what it cannot tell is said to be unreadable."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from activities.observations import KERNEL_LINE, KERNEL_LINES, observation_from
from backends.simulated import Exit, KeeperDies, Script
from recovery.events import FaultObserved, RankExited, RanksVanished
from tests.activities.harness import stand

AT = datetime(2026, 1, 1, tzinfo=UTC)
XID = "[12345.678901] NVRM: Xid (PCI:0000:05:00): 79, pid=4242, name=python, GPU has fallen off the bus."
EXIT = {"kind": "RankExited", "rank": 8, "local_rank": 0, "pid": 4242, "exit_code": 1, "signal": None, "stopped": False}
OLD_AGENT = "the agent of this generation does not read it"


@pytest.mark.parametrize(
    ("sent", "kernel", "unreadable"),
    [
        ({"kernel": [XID], "kernel_unreadable": None}, (XID,), None),
        ({"kernel": [], "kernel_unreadable": None}, (), None),
        ({"kernel": [XID], "kernel_unreadable": "the rest is gone"}, (XID,), "the rest is gone"),
        ({"kernel": [], "kernel_unreadable": "permission denied: /dev/kmsg"}, (), "permission denied: /dev/kmsg"),
        ({"kernel": "Xid", "kernel_unreadable": None}, (), "expected a list of lines, found str"),
        ({}, (), OLD_AGENT),
        ({"exit_code": 0}, (), None),
        ({"stopped": True}, (), None),
    ],
)
def test_an_exit_is_read_with_what_the_kernel_said(sent: dict[str, Any], kernel: tuple[str, ...], unreadable: str | None) -> None:
    seen = observation_from("n1", {**EXIT, **sent}, AT)
    assert isinstance(seen, RankExited)
    assert (seen.kernel, seen.kernel_unreadable, seen.pid) == (kernel, unreadable, 4242)


@pytest.mark.parametrize("kind", ["KeeperDied", "RanksVanished"])
def test_an_end_that_nobody_saw_is_read_with_it_too(kind: str) -> None:
    seen = observation_from("n1", {"kind": kind, "because": "gone", "kernel": [XID], "kernel_unreadable": None}, AT)
    assert seen == RanksVanished("n1", AT, "gone", kernel=(XID,))
    assert observation_from("n1", {"kind": kind, "because": "gone"}, AT) == RanksVanished("n1", AT, "gone", kernel_unreadable=OLD_AGENT)


def test_more_than_an_agent_may_send_is_cut_to_the_newest() -> None:
    lines = [f"{number} " + "x" * 1000 for number in range(100)]
    seen = observation_from("n1", {**EXIT, "kernel": lines, "kernel_unreadable": "y" * 1000}, AT)
    assert isinstance(seen, RankExited)
    assert [line.split()[0] for line in seen.kernel] == [str(number) for number in range(100 - KERNEL_LINES, 100)]
    assert {len(line) for line in (*seen.kernel, seen.kernel_unreadable or "")} == {KERNEL_LINE}


async def test_a_watch_reports_what_the_kernel_said_of_the_rank_that_failed() -> None:
    fleet = stand(Script((Exit(rank=3, signal=9, kernel=(XID,), kernel_unreadable="the rest is gone"),)))
    await fleet.launch()
    fault = (await fleet.watch()).events[-1]
    assert isinstance(fault, FaultObserved)
    first, *others = fault.observations
    assert isinstance(first, RankExited) and isinstance(first.pid, int)
    assert (first.rank, first.kernel, first.kernel_unreadable) == (3, (XID,), "the rest is gone")
    assert all(isinstance(one, RankExited) and (one.kernel, one.kernel_unreadable) == ((), None) for one in others)


async def test_a_watch_reports_what_the_kernel_said_when_a_keeper_died() -> None:
    fleet = stand(Script((KeeperDies(node="n1", kernel=("Out of memory: Killed process 7 (relaunch-keep)",)),)))
    await fleet.launch()
    fault = (await fleet.watch()).events[-1]
    assert isinstance(fault, FaultObserved)
    vanished = fault.observations[0]
    assert isinstance(vanished, RanksVanished)
    assert vanished.kernel == ("Out of memory: Killed process 7 (relaunch-keep)",)
