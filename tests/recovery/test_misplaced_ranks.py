"""Ranks of a running job on nodes that its claim does not hold, as after a restored database."""

from __future__ import annotations

from datetime import timedelta

from syrupy.assertion import SnapshotAssertion

from relaunch.pool.events import (
    EndedJobs,
    FleetFileContent,
    ReclaimOrder,
    RunningJobs,
)
from relaunch.pool.restore import export_state
from relaunch.pool.scheduler import Scheduler
from relaunch.pool.state import LiveGeneration
from tests.recovery.fleet_builders import Desk, nodes

MINUTE = timedelta(minutes=1)


def test_ranks_where_a_running_job_has_nothing_are_stopped(snapshot: SnapshotAssertion) -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.living["n1"] = desk.living["n2"] = (LiveGeneration("a", 1, 1),)
    desk.living["n3"] = desk.living["n4"] = (LiveGeneration("a", 1, 2),)
    assert desk.wait(minutes=1) == [ReclaimOrder("a", 1, ("n3", "n4"), 2)]
    assert desk.state.notices[-1] == snapshot
    desk.busy.add(desk.orders[0].key)
    assert desk.wait(minutes=1) == [], "one at a time"
    desk.busy.clear()
    del desk.living["n3"]
    desk.look()
    assert desk.wait(minutes=1) == [ReclaimOrder("a", 1, ("n4",), 2)]
    del desk.living["n4"]
    desk.look()
    assert desk.wait(minutes=1) == []


def test_ranks_on_a_renamed_node_are_not_stopped() -> None:
    """Its host was n1's, so they are those that the job has there."""
    desk = Desk()
    desk.claim("a", 1)
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.wait(minutes=1)
    n1, *others = desk.specs
    desk.living["gpu1"] = desk.living.pop("n1")
    desk.specs = (n1.model_copy(update={"name": "gpu1"}), *others)
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    as_before = Scheduler(spares_renamed=lambda: False)
    later = desk.now + timedelta(minutes=5)
    orders = as_before.schedule(desk.state, later, frozenset()).orders
    assert ReclaimOrder("a", 1, ("gpu1",), 1) in orders, "what 0.1.0 did is replayed"
    assert desk.wait(minutes=5) == []


def test_ranks_on_nodes_with_exchanged_logins_are_not_stopped() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.wait(minutes=1)
    n1, n2, *others = desk.specs
    desk.living["n2"] = desk.living.pop("n1")
    exchanged = (
        n1.model_copy(update={"address": n2.address}),
        n2.model_copy(update={"address": n1.address}),
    )
    desk.specs = (*exchanged, *others)
    desk.go(FleetFileContent("act", desk.specs, desk.limits))
    assert desk.wait(minutes=5) == []


def test_each_node_is_stopped_up_to_its_own_generation() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.living["n2"] = (LiveGeneration("a", 1, 2), LiveGeneration("a", 1, 5))
    desk.living["n3"] = (LiveGeneration("a", 1, 2),)
    desk.living["n4"] = (LiveGeneration("a", 1, 5), LiveGeneration("a", 1, 2))
    assert desk.wait(minutes=1) == [
        ReclaimOrder("a", 1, ("n3",), 2),
        ReclaimOrder("a", 1, ("n2", "n4"), 5),
    ]


def test_where_the_job_itself_stops_ranks_the_fleet_does_not() -> None:
    desk = Desk()
    desk.living["n3"] = (LiveGeneration("a", 1, 1),)
    desk.look()
    desk.claim("a", 1, submission=2, running=True, keep=("n1",))
    assert desk.grants()["a"].holding == ("n3",)
    desk.living["n3"] = (LiveGeneration("a", 2, 1),)
    assert desk.wait(minutes=1) == []
    desk.claim("a", 1, seq=2, submission=2, running=True, keep=("n1",))
    assert desk.wait(minutes=1) == [ReclaimOrder("a", 2, ("n3",), 1)], "it has stopped what it saw"


def test_ranks_seen_as_a_job_gives_back_its_node_are_left_alone() -> None:
    desk = Desk()
    desk.claim("a", 2)
    desk.living["n1"] = desk.living["n2"] = (LiveGeneration("a", 1, 1),)
    desk.wait(minutes=1)
    # its ranks on n2 are proven gone; a probe from before, or that was under way, shows them
    assert desk.claim("a", 1, seq=2, keep=("n1",)) == []
    desk.look()
    assert desk.wait(seconds=5) == []
    del desk.living["n2"]
    assert desk.wait(minutes=1) == []


def test_a_restarted_fleet_waits_for_what_jobs_hold() -> None:
    desk = Desk()
    desk.claim("a", 1)
    known = export_state(desk.state)
    later = Desk(begun=False)
    # the job grew after the fleet had last kept its state
    later.living["n1"] = later.living["n2"] = (LiveGeneration("a", 1, 2),)
    later.go(FleetFileContent("act", later.specs, later.limits), RunningJobs(("a",)), known)
    assert [one for one in later.wait(minutes=2) if isinstance(one, ReclaimOrder)] == []
    later.claim("a", 2, seq=2, keep=("n1", "n2"))
    assert later.wait(minutes=2) == []


def test_a_job_that_ends_meanwhile_is_stopped_as_a_whole() -> None:
    desk = Desk()
    desk.claim("a", 1)
    desk.living["n1"] = (LiveGeneration("a", 1, 1),)
    desk.living["n3"] = (LiveGeneration("a", 1, 2),)
    orders = desk.wait(minutes=1)
    desk.busy.add(orders[0].key)
    assert desk.go(EndedJobs((("a", 1),))) == [ReclaimOrder("a", 1, ("n1", "n3"))]


def test_ranks_beside_another_job_are_stopped_without_gpus_too() -> None:
    desk = Desk(*nodes("n1", "n2", gpus=0))
    desk.claim("b", 2)
    desk.claim("a", 1)
    desk.living["n2"] = (LiveGeneration("a", 1, 2), LiveGeneration("b", 1, 1))
    mine = [place.node for place in desk.record("a").places]
    assert mine == ["n1"]
    assert desk.wait(minutes=1) == [ReclaimOrder("a", 1, ("n2",), 2)]
    known = desk.scheduler.list_known(desk.state, desk.now)
    assert [one.node for one in known if not one.probe] == ["n2"], "until they have ended"
