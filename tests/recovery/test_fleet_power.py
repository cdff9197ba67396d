"""Which power cycles a fleet permits: of nodes that no unasked job has, and not too often."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.pool.events import (
    FleetFileContent,
    PermitMessage,
    PermitRequestEvent,
    PreviousRun,
    RepairRequest,
    RunningJobs,
)
from relaunch.pool.messages import PermitRequest
from relaunch.pool.restore import export_state
from relaunch.pool.state import LiveGeneration
from tests.recovery.fleet_builders import Desk, began, ended, nodes, permit, suspect


def request_permit(
    desk: Desk, node: str = "n2", seq: int = 1, run: str = "run", **more: Any
) -> list[tuple[bool, str]]:
    """What the fleet answers a repair that wants to cycle the power of a node."""
    values = {"power": True, "restarts": 0, "job": "", **more}
    request = PermitRequest(
        f"repair/gpus/{node}", run, seq, node, "reboot", "it hangs", desk.now, **values
    )
    desk.go(began(node, run=run), PermitRequestEvent(request))
    return [(tell.permit.allowed, tell.permit.reason) for tell in desk.of(PermitMessage)]


def test_the_power_of_a_node_that_no_job_has_may_be_cycled(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    ((allowed, reason),) = request_permit(desk)
    assert allowed and reason == snapshot
    assert desk.state.reboots == (desk.now,) and desk.node("n2").power_cycles == (desk.now,)


@pytest.mark.parametrize("silent", ["", "no route to host"])
def test_a_job_keeps_the_power_of_its_node_unless_it_ordered_it(
    silent: str, snapshot: SnapshotAssertion
) -> None:
    desk = Desk()
    desk.claim("llama", 1, holds=("n2",), keep=("n2",))
    desk.silent["n2"] = silent
    desk.look()
    ((allowed, reason),) = request_permit(desk)
    assert not allowed and reason == snapshot
    assert desk.node("n2").power_cycles == () and desk.state.reboots == ()
    assert request_permit(desk, job="other", seq=2) == [(False, reason)]
    assert request_permit(desk, job="llama", seq=3)[-1][0]
    # no job has that one
    assert request_permit(desk, "n3")[-1][0]


def test_ranks_that_live_there_are_in_its_way_too() -> None:
    desk = Desk()
    desk.living["n2"] = (LiveGeneration("llama", 1, 2),)
    desk.look()
    assert not request_permit(desk)[0][0]


def test_a_restarted_fleet_waits_for_jobs_to_say_what_they_have() -> None:
    desk = Desk(jobs=("llama",))
    assert request_permit(desk) == []
    desk.claim("llama", 1, holds=("n2",), keep=("n2",))
    assert [tell.permit.allowed for tell in desk.of(PermitMessage)] == [False]


def test_a_node_is_rebooted_by_any_means_twice_in_three_days(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    # what its journal tells the repair judges itself
    assert request_permit(desk, restarts=1, run="a")[-1][0]
    desk.now += timedelta(hours=2)
    answer = request_permit(desk, restarts=1, run="b")
    ((allowed, reason),) = answer
    assert not allowed and reason == snapshot
    # an ordinary reboot is a reboot as well
    assert request_permit(desk, restarts=1, power=False, run="c") == answer
    assert request_permit(desk, restarts=0, power=False, run="d")[-1][0]
    assert request_permit(desk, restarts=0, run="e")[-1][0]
    assert not request_permit(desk, restarts=0, run="f")[-1][0]
    desk.now += timedelta(days=3)
    assert request_permit(desk, restarts=1, run="g")[-1][0]


@pytest.mark.parametrize(
    ("power", "silent", "minutes", "expected"),
    [
        (True, "no route", 1, True),
        (False, "no route", 9, True),
        (False, "no route", 11, False),
        (False, "", 1, False),
    ],
)
def test_a_repair_learns_that_a_node_went_silent_as_it_rebooted(
    power: bool, silent: str, minutes: float, expected: bool
) -> None:
    desk = Desk()
    desk.claim("llama", 1, holds=("n2",), keep=("n2",), suspects=(suspect("n2", isolate=True),))
    assert request_permit(desk, power=power, job="llama")[0][0]
    desk.now += timedelta(minutes=minutes)
    desk.silent["n2"] = silent
    desk.look()
    desk.go(ended("n2", "ambiguous", run="run", job="llama"))
    desk.claim(
        "llama", 1, seq=2, holds=("n3",), keep=("n3",), suspects=(suspect("n2", isolate=True),)
    )
    assert [(order.node, order.after_reboot) for order in desk.of(RepairRequest)] == [
        ("n2", expected)
    ]


def test_a_node_without_a_reboot_is_only_silent() -> None:
    desk = Desk()
    desk.silent["n2"] = "no route"
    desk.look()
    desk.claim("llama", 1, suspects=(suspect("n2", isolate=True),))
    assert [order.after_reboot for order in desk.of(RepairRequest)] == [False]


def test_a_reset_counts_for_nothing() -> None:
    desk = Desk()
    desk.go(
        began("n2"), PermitRequestEvent(replace(permit("n2", step="reset").request, power=False))
    )
    assert desk.node("n2").power_cycles == ()


def test_power_cycles_are_remembered_by_a_restarted_fleet() -> None:
    desk = Desk()
    request_permit(desk)
    known = export_state(desk.state)
    restarted = Desk(begun=False)
    restarted.learn(
        FleetFileContent("act", nodes("n1", "n2", "n3", "n4"), desk.limits), RunningJobs(()), known
    )
    assert restarted.node("n2").power_cycles == (desk.now,)
    assert isinstance(known, PreviousRun)
