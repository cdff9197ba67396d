"""What a fleet makes of what NVML says of its nodes.

Which GPUs are given to no job, which nodes are suspected, and when each is read.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.findings import Verdict
from relaunch.pool.events import (
    ClaimEvent,
    FleetFileContent,
    Order,
    PauseCommand,
    PreviousRun,
    ProbeOrder,
    ProbeResults,
    QuarantineCommand,
    ReleaseCommand,
    RepairRequest,
    RunningJobs,
)
from relaunch.pool.inventory import (
    UNKNOWN,
    GpuUse,
    Inventory,
    describe_uses,
    read_inventory,
    shortage,
)
from relaunch.pool.messages import Claim, Place
from relaunch.pool.restore import export_state
from relaunch.pool.state import LiveGeneration, NodeProbe, NodeStatus
from tests.recovery.fleet_builders import T0, Desk, began, ended, gpus, look, nodes
from tests.recovery.nodes import gpu, nvml

ALICE = "alice (python, pid 4242)"
SHORT = gpus(7, lost=("0000:5e:00.0",))


def stranger(pid: Any = 4242, user: Any = "alice", program: Any = "python") -> dict[str, Any]:
    return {"pid": pid, "used": 1, "ours": False, "user": user, "program": program}


# --- what a node answers


def test_a_healthy_node_is_described_in_few_words() -> None:
    found = read_inventory(nvml(gpu(0, memory={"total": 85520809984, "used": 3 << 20})))
    assert found == Inventory(
        gpu()["name"], 8, 85520809984, (128, 0, 0, 0, 0, 0, 0, 0), "570.148.08", "13.570"
    )


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param([stranger()], id="one"),
        pytest.param([stranger(), stranger(4243), stranger(4244), stranger(4244)], id="many"),
        pytest.param([stranger(user=None, program=None)], id="unknown-user"),
        pytest.param([stranger(pid="x", program=None)], id="no-pid"),
        pytest.param([stranger(user="a\nb\x1b[31m", program="x" * 99)], id="control-characters"),
    ],
)
def test_strangers_are_named(processes: Any, snapshot: SnapshotAssertion) -> None:
    (used,) = read_inventory(nvml(gpu(0), gpu(1, processes=processes))).used
    assert used.gpus == (1,)
    assert used.who == snapshot


@pytest.mark.parametrize(
    "processes",
    [
        [],
        None,
        {"unreadable": "NOT_SUPPORTED"},
        ["4242"],
        [{"pid": 4242, "used": 1, "ours": True}],
        [stranger(program="nvidia-cuda-mps-server")],
        [{"pid": 4242, "used": 1}],  # an agent that does not say whose they are
    ],
)
def test_a_process_that_is_not_called_a_stranger_is_none(processes: Any) -> None:
    assert read_inventory(nvml(gpu(0, processes=processes))).used == ()


def test_lost_gpus_are_not_gpus_that_could_not_be_read() -> None:
    found = read_inventory(
        nvml(
            {"index": 0, "lost": "GPU_IS_LOST", "bus_id": "00000000:5E:00.0"},
            {"index": 1, "lost": "GPU_IS_LOST", "bus_id": None},
            {"index": 2, "lost": "GPU_IS_LOST", "bus_id": "1234"},
            "nonsense",
            gpu(4, memory={"unreadable": "UNKNOWN"}, name="NVIDIA A100", processes=[stranger()]),
            count=6,
        )
    )
    assert (found.count, found.lost) == (2, ("0000:5e:00.0", "GPU 1", "1234", "GPU 3"))
    assert found.memory_used == (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 0)
    assert (found.model, found.memory, found.used) == (
        f"NVIDIA A100, {gpu()['name']}",
        85520809984,
        (GpuUse((4,), ALICE),),
    )


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"unreadable": "libnvidia-ml.so.1 is not on this node"}, id="no-library"),
        pytest.param(None, id="nothing"),
        pytest.param([], id="a-list"),
        pytest.param({"driver": "1"}, id="no-gpus"),
        pytest.param({"gpus": [{}] * 65}, id="too-many-gpus"),
    ],
)
def test_what_cannot_be_read_is_a_fact_with_a_reason(
    answer: Any, snapshot: SnapshotAssertion
) -> None:
    found = read_inventory(answer)
    assert found == Inventory(unreadable=found.unreadable)
    assert found.unreadable == snapshot


def test_one_user_is_one_stranger_and_only_three_are_named(snapshot: SnapshotAssertion) -> None:
    everywhere = [gpu(index, processes=[stranger(100 + index)]) for index in range(4)]
    others = [
        gpu(4 + index, processes=[stranger(7, user=user), stranger(8, user=user)])
        for index, user in enumerate("bcde")
    ]
    used = read_inventory(nvml(*everywhere, *others)).used
    assert [use.gpus for use in used] == [(0, 1, 2, 3), (4,), (5,), (6, 7)]
    assert [use.who for use in used] == snapshot(name="uses")
    assert describe_uses(used[2:]) == snapshot(name="sentence")


def test_several_strangers_on_one_gpu_are_each_named(snapshot: SnapshotAssertion) -> None:
    used = read_inventory(nvml(gpu(0, processes=[stranger(), stranger(1, user="bob")]))).used
    assert [use.gpus for use in used] == [(0,), (0,)]
    assert [use.who for use in used] == snapshot


@pytest.mark.parametrize(
    "inventory",
    [
        pytest.param(gpus(7), id="one-is-missing"),
        pytest.param(SHORT, id="one-is-lost"),
        pytest.param(gpus(8, lost=("a",)), id="one-more-is-lost"),
        pytest.param(gpus(3, lost=("a", "b", "c", "d", "e")), id="many-are-lost"),
    ],
)
def test_what_a_node_lacks_in_words(inventory: Inventory, snapshot: SnapshotAssertion) -> None:
    assert shortage(inventory, 8) == snapshot


@pytest.mark.parametrize("inventory", [gpus(8), gpus(9), Inventory(unreadable="no library")])
def test_a_node_that_lacks_nothing(inventory: Inventory) -> None:
    assert shortage(inventory, 8) == ""


# --- strangers


def visited(*names: str, **uses: tuple[int, ...]) -> Desk:
    """A fleet, with GPUs that alice uses by node; it has just looked."""
    desk = Desk(*nodes(*names))
    for name, used in uses.items():
        desk.gpus[name] = Inventory("H100", 8, used=(GpuUse(used, ALICE),))
    desk.look()
    return desk


def test_s2_10_a_job_gets_gpus_that_no_stranger_uses() -> None:
    desk = visited("n1", n1=(0, 2))
    desk.claim("a", 1, gpus=2)
    assert desk.grants()["a"].places == (Place("n1", "10.0.0.1", (1, 3)),)
    desk.claim("b", 1, gpus=4)
    assert desk.grants()["b"].places == (Place("n1", "10.0.0.1", (4, 5, 6, 7)),)


def test_s2_10_a_whole_node_job_waits_and_names_the_stranger(snapshot: SnapshotAssertion) -> None:
    desk = visited("n1", n1=(2,))
    desk.claim("a", 1)
    assert desk.grants("waiting")["a"].reason == snapshot
    assert desk.wakes_in() == 10
    assert desk.wait(seconds=10) == []
    # one reading every ten seconds while a job waits
    assert desk.state.probe_count == 2
    del desk.gpus["n1"]
    desk.wait(seconds=5)
    # the node was not probed since
    assert desk.granted() == {}
    desk.wait(seconds=5)
    assert desk.granted() == {"a": ["n1"]}


def test_another_node_is_given_if_a_stranger_is_on_the_first() -> None:
    desk = visited("n1", "n2", n1=(0,))
    desk.claim("a", 1, gpus=8)
    assert desk.granted() == {"a": ["n2"]}


def test_small_jobs_join_strangers_so_large_ones_get_whole_nodes() -> None:
    desk = visited("n1", "n2", n2=(7,))
    desk.claim("small", 1, gpus=1)
    desk.claim("large", 1)
    assert desk.granted() == {"large": ["n1"]}
    assert desk.record("small").places[0].node == "n2"


def test_a_node_whose_gpus_are_all_used_is_looked_at_again(snapshot: SnapshotAssertion) -> None:
    desk = visited("n1", n1=tuple(range(8)))
    desk.claim("a", 1, gpus=1)
    assert desk.grants("waiting")["a"].reason == snapshot
    del desk.gpus["n1"]
    desk.wait(seconds=10)
    assert desk.granted() == {"a": ["n1"]}


def test_a_stranger_is_named_beside_the_job_that_has_the_rest(snapshot: SnapshotAssertion) -> None:
    desk = visited("n1", n1=(2,))
    desk.claim("a", 1, gpus=2)
    desk.claim("b", 1, gpus=6)
    assert desk.grants("waiting")["b"].reason == snapshot
    desk.claim("c", 1, gpus=7)
    # it could not have them anyway
    assert ALICE not in desk.grants("waiting")["c"].reason


def test_what_a_stranger_uses_is_not_kept_free_for_any_job() -> None:
    """When a stranger leaves is unknown: a large job that waits keeps nothing from small ones."""
    desk = visited("n1", "n2", n1=(0,))
    desk.claim("large", 2)
    desk.claim("small", 1)
    assert desk.granted() == {"small": ["n2"]}
    del desk.gpus["n1"]
    desk.claim("small", 0, seq=2)
    desk.wait(seconds=10)
    assert desk.granted() == {"large": ["n1", "n2"]}


def test_a_share_that_a_job_holds_is_its_own_beside_any_stranger() -> None:
    desk = Desk(*nodes("n1"))
    for job in ("a", "b"):
        desk.claim(job, 1, gpus=2)
    desk.gpus["n1"] = gpus(8, (0, ALICE), (2, ALICE))
    desk.wait(minutes=6)
    desk.claim("b", 1, seq=2, gpus=2, holds=(Place("n1", "", (2, 3)),), keep=("n1",), running=True)
    # it goes on with what it has
    assert desk.record("b").granted == (Place("n1", "10.0.0.1", (2, 3)),)
    desk.claim("c", 1, gpus=2)
    assert desk.grants()["c"].places[0].gpus == (4, 5)


def test_a_gpu_beyond_those_of_the_fleet_file_is_in_no_jobs_way() -> None:
    desk = Desk(*nodes("n1", gpus=4))
    desk.gpus["n1"] = gpus(8, (6, ALICE))
    desk.look()
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}


def test_an_elastic_job_gets_no_node_that_a_stranger_uses() -> None:
    desk = visited("n1", "n2", "n3", n2=(1,), n3=(1,))
    desk.claim("a", 1, most=3)
    desk.wait(seconds=10)
    assert [place.node for place in desk.record("a").places] == ["n1"]
    desk.claim("a", 1, seq=2, keep=("n1",), most=3, had=1, running=True, more_at=desk.now)
    assert desk.state.offers == ()
    desk.gpus.clear()
    desk.wait(minutes=6)
    assert [[place.node for place in one.places] for one in desk.state.offers] == [["n2", "n3"]]


def test_a_node_whose_gpus_cannot_be_read_is_given_as_before() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = Inventory(unreadable="libnvidia-ml.so.1 is not on this node")
    desk.look()
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}


def test_nodes_without_gpus_are_never_read() -> None:
    desk = Desk(*nodes("n1", gpus=0), begun=False)
    desk.learn(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()), PreviousRun())
    assert desk.settle() == [ProbeOrder(("n1",))]
    desk.learn(ProbeResults((NodeProbe("n1", inventory=gpus(0, (0, ALICE))),)))
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}
    assert (desk.node("n1").foreign_processes, desk.node("n1").missing_gpus) == ((), "")


# --- when


def test_gpus_are_read_at_once_then_every_five_minutes_when_idle() -> None:
    desk = Desk(begun=False)
    desk.learn(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()), PreviousRun())
    read = []
    while desk.now < T0 + timedelta(minutes=11):
        for order in [one for one in desk.settle() if isinstance(one, ProbeOrder)]:
            desk.look(order.nodes, order.inventories)
            read += [round((desk.now - T0).total_seconds())] if order.inventories else []
        desk.now += timedelta(seconds=desk.wakes_in())
    assert read == [0, 300, 600]


def test_a_sweep_reads_some_of_a_large_fleet_and_wanted_nodes() -> None:
    names = tuple(f"n{number}" for number in range(600))
    desk = Desk(*nodes(*names), begun=False)
    desk.learn(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()), PreviousRun())
    (order,) = (one for one in desk.settle() if isinstance(one, ProbeOrder))
    assert (order.nodes, order.inventories) == (names, names[:512])
    desk.look(order.nodes, order.inventories)
    desk.now += timedelta(seconds=60)
    desk.settle()
    assert desk.of(ProbeOrder)[0].inventories == names[512:]
    desk.look(names, names[512:])
    desk.now += timedelta(seconds=60)
    desk.learn(ClaimEvent(Claim("a", 1, 1, 600, since=desk.now)))
    desk.settle()
    # as many as are probed for one claim at a time
    assert desk.of(ProbeOrder)[0].inventories == names[:512]


def test_a_node_not_read_for_ten_seconds_is_read_before_a_grant() -> None:
    desk = Desk(*nodes("n1"))
    desk.now += timedelta(seconds=60)
    assert desk.settle() == [ProbeOrder(("n1",))]
    desk.look(("n1",), ())
    desk.busy = {"probe"}
    desk.now += timedelta(seconds=0.5)
    desk.claim("a", 1)
    # it has answered, but what uses its GPUs is unknown
    assert desk.granted() == {}
    desk.busy = set()
    # at once: the last probe did not read it
    assert [one for one in desk.settle() if isinstance(one, ProbeOrder)] == [look("n1")]
    desk.look()
    desk.settle()
    assert desk.granted() == {"a": ["n1"]}


def test_an_endless_reading_is_polled_and_keeps_only_its_node() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.now += timedelta(minutes=6)
    desk.unread.add("n1")
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n2"]}
    desk.claim("b", 1)
    assert desk.granted() == {}
    assert desk.wakes_in() == 2
    desk.unread.clear()
    desk.wait(seconds=2)
    assert desk.granted() == {"b": ["n1"]}


def test_a_slow_reading_is_asked_for_again_and_then_when_due() -> None:
    desk = Desk(*nodes("n1", "n2"), begun=False)
    desk.unread.add("n1")
    desk.go(FleetFileContent("act", desk.specs, desk.limits), RunningJobs(()), PreviousRun())
    assert (desk.node("n1").inventory, desk.wakes_in()) == (None, 2)
    desk.now += timedelta(seconds=2)
    assert desk.settle() == [look("n1")]
    desk.gpus["n1"] = Inventory(unreadable="NVML did not answer within 10 s")
    desk.unread.clear()
    desk.look(("n1",))
    assert desk.settle() == []
    assert desk.wakes_in() == 58


def test_a_reading_that_arrives_late_keeps_its_age() -> None:
    desk = Desk(*nodes("n1"))
    desk.now += timedelta(minutes=6)
    desk.learn(
        ProbeResults((NodeProbe("n1", inventory=gpus(), inventory_age=timedelta(seconds=50)),))
    )
    assert desk.node("n1").inventory_at == desk.now - timedelta(seconds=50)
    # the record keeps it, and the probe does not
    assert desk.node("n1").probe == NodeProbe("n1")
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}
    assert desk.node("n1").inventory_at == desk.now


def test_a_node_held_in_part_is_read_but_not_one_held_as_a_whole() -> None:
    desk = Desk(*nodes("n1", "n2", "n3"))
    desk.claim("whole", 1)
    desk.claim("part", 1, gpus=2)
    desk.now += timedelta(minutes=6)
    assert desk.settle() == [ProbeOrder(("n1", "n2", "n3"), ("n2", "n3"))]


def test_a_node_under_repair_is_not_read() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.learn(began("n1", by="grace"))
    desk.now += timedelta(minutes=6)
    assert desk.settle() == [ProbeOrder(("n1", "n2"), ("n2",))]


# --- nodes that lack GPUs


def test_a_node_that_lacks_gpus_is_examined_before_a_job_gets_it(
    snapshot: SnapshotAssertion,
) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.gpus["n1"] = SHORT
    desk.look()
    (order,) = desk.go()
    assert isinstance(order, RepairRequest) and order == RepairRequest("n1", order.reason)
    assert order.reason == snapshot(name="repair")
    record = desk.node("n1")
    assert (record.status, record.by, record.reason) == (
        NodeStatus.REPAIRING,
        "relaunch",
        order.reason,
    )
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n2"]}
    desk.claim("b", 1)
    assert desk.grants("waiting")["b"].reason == snapshot(name="grant")
    del desk.gpus["n1"]
    desk.go(began("n1"), ended("n1"))
    assert desk.granted() == {"b": ["n1"]}


def test_what_was_read_before_a_repair_counts_no_more_after_it() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = SHORT
    desk.look()
    desk.go()
    desk.learn(began("n1"), ended("n1"))
    desk.settle()
    # until it is read again
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.look()
    assert [order.node for order in desk.go() if isinstance(order, RepairRequest)] == ["n1"]


def test_a_repair_that_proves_nothing_keeps_it_out() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = SHORT
    desk.look()
    desk.go()
    desk.go(
        began("n1"),
        ended("n1", "ambiguous", verdict=Verdict.UNHEALTHY, reason="only 7 of 8 GPUs are there"),
    )
    assert (desk.node("n1").status, desk.node("n1").by) == (NodeStatus.QUARANTINED, "relaunch")
    assert desk.wait(minutes=6) == []


@pytest.mark.parametrize(
    "how",
    ["held", "living", "silent", "at work", "repaired by a person", "quarantined", "a stranger"],
)
def test_the_job_on_a_node_that_lacks_gpus_is_left_alone(how: str) -> None:
    desk = Desk(*nodes("n1"))
    match how:
        case "held":
            desk.claim("a", 1, gpus=2)
        case "living":
            desk.living["n1"] = (LiveGeneration("a", 1, 1),)
        case "silent":
            desk.look()
            desk.silent["n1"] = "connection refused"
        case "at work":
            desk.held["n1"] = "diagnose (r1) works on it"
        case "repaired by a person":
            desk.learn(began("n1", by="grace"))
        case "quarantined":
            desk.learn(QuarantineCommand("n1", "dust", "grace"))
    seen = replace(SHORT, used=(GpuUse((0,), ALICE),)) if how == "a stranger" else SHORT
    desk.learn(ProbeResults((replace(desk.probe_node("n1", read=False), inventory=seen),)))
    before = desk.node("n1").status
    assert [order for order in desk.settle() if isinstance(order, RepairRequest)] == []
    assert desk.node("n1").status is before


def test_a_node_short_of_gpus_gets_no_new_job_and_is_examined() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("a", 1, gpus=2)
    desk.gpus["n1"] = SHORT
    desk.look()
    desk.claim("b", 1, gpus=2)
    said = shortage(SHORT, 8)
    assert said in desk.grants("waiting")["b"].reason
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.claim("a", 0, seq=2)
    assert desk.of(RepairRequest) == [RepairRequest("n1", said)]


def test_a_fleet_that_waits_for_what_jobs_hold_suspects_no_node() -> None:
    desk = Desk(*nodes("n1"), jobs=("a",))
    desk.gpus["n1"] = SHORT
    desk.look()
    desk.settle()
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.claim("a", 1, running=True, keep=("n1",))
    assert desk.record("a").granted == (Place("n1", "10.0.0.1"),)


def test_a_release_holds_until_a_reading_a_quarantine_for_ever() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = SHORT
    desk.learn(QuarantineCommand("n1", "dust", "grace"))
    desk.look()
    desk.wait(minutes=6)
    assert (desk.node("n1").status, desk.node("n1").by) == (NodeStatus.QUARANTINED, "grace")
    desk.learn(ReleaseCommand("n1", "clean", "grace"))
    assert desk.settle() == []
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.look()
    assert desk.go() == [RepairRequest("n1", shortage(SHORT, 8))]
    desk.gpus["n1"] = gpus(7)
    desk.learn(ended("n1"), FleetFileContent("act", nodes("n1", gpus=7), desk.limits))
    desk.look()
    desk.claim("a", 1)
    # the file may say what is true
    assert desk.granted() == {"a": ["n1"]}


# --- nodes with a fault by their own account


DUSTY = gpus(fault="GPU 0000:1b:00: remapping a row of its memory has failed")
WORN = gpus(reset_wanted="GPU 0000:1b:00: a row of its memory waits for a reset to be remapped")


def read_after(desk: Desk, **by: float) -> list[Order]:
    """Return the orders after all nodes were read once more."""
    desk.now += timedelta(**by)
    desk.look()
    return desk.go()


def test_a_fault_keeps_jobs_away_and_is_examined_once_confirmed() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.gpus["n1"] = DUSTY
    assert read_after(desk, minutes=5) == []
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n2"]}
    desk.claim("b", 1)
    assert DUSTY.fault in desk.grants("waiting")["b"].reason
    read_after(desk, minutes=5)
    assert desk.of(RepairRequest) == [RepairRequest("n1", DUSTY.fault)]
    del desk.gpus["n1"]
    desk.go(began("n1"), ended("n1"))
    assert desk.granted() == {"b": ["n1"]}


def test_a_fault_that_is_over_at_the_next_reading_takes_none_out() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = DUSTY
    read_after(desk, minutes=5)
    desk.claim("a", 1)
    assert desk.granted() == {}
    del desk.gpus["n1"]
    read_after(desk, minutes=5)
    assert desk.granted() == {"a": ["n1"]}
    assert desk.node("n1").fault_since is None


def test_a_fault_that_comes_again_is_confirmed_again() -> None:
    desk = Desk(*nodes("n1"))
    for inventory in (DUSTY, gpus(), DUSTY):
        desk.gpus["n1"] = inventory
        assert read_after(desk, minutes=5) == []
    assert read_after(desk, minutes=5) == [RepairRequest("n1", DUSTY.fault)]


def test_the_reading_that_confirms_a_fault_is_news() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.gpus["n1"] = DUSTY
    read_after(desk, minutes=5)
    known = {one.node: one.inventory for one in desk.scheduler.list_known(desk.state, desk.now)}
    assert known["n1"] == "" and known["n2"]
    read_after(desk, minutes=5)
    desk.learn(QuarantineCommand("n1", "to the workshop", "grace"))
    known = {one.node: one.inventory for one in desk.scheduler.list_known(desk.state, desk.now)}
    assert known["n1"]


def test_the_job_on_a_node_with_a_fault_is_left_alone() -> None:
    desk = Desk(*nodes("n1"))
    desk.claim("a", 1, gpus=2)
    desk.gpus["n1"] = DUSTY
    for _ in range(3):
        assert read_after(desk, minutes=5) == []
    desk.claim("b", 1, gpus=2)
    assert DUSTY.fault in desk.grants("waiting")["b"].reason
    desk.claim("a", 0, seq=2)
    assert desk.of(RepairRequest) == [RepairRequest("n1", DUSTY.fault)]


def test_a_person_who_releases_a_node_vouches_for_what_it_shows() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = DUSTY
    desk.learn(QuarantineCommand("n1", "dust", "grace"))
    read_after(desk, minutes=5)
    desk.learn(ReleaseCommand("n1", "it computes", "grace"))
    for inventory in (DUSTY, Inventory(unreadable="nvidia-smi took too long"), DUSTY, DUSTY):
        desk.gpus["n1"] = inventory
        assert read_after(desk, minutes=5) == []
    assert desk.node("n1").remarks == (f"{DUSTY.fault} (a person has vouched for it)",)
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}
    desk.claim("a", 0, seq=2)
    # What it shows after it was sound once is not what the person knew.
    for inventory in (gpus(), DUSTY):
        desk.gpus["n1"] = inventory
        assert read_after(desk, minutes=5) == []
    assert read_after(desk, minutes=5) == [RepairRequest("n1", DUSTY.fault)]


def test_a_release_vouches_for_no_fault_that_was_not_shown_yet() -> None:
    desk = Desk(*nodes("n1"))
    desk.learn(QuarantineCommand("n1", "dust", "grace"))
    read_after(desk, minutes=5)
    desk.learn(ReleaseCommand("n1", "clean", "grace"))
    desk.gpus["n1"] = DUSTY
    assert read_after(desk, minutes=1) == []
    (remark,) = desk.node("n1").remarks
    assert remark.startswith(DUSTY.fault) and "if the next reading confirms it" in remark
    assert desk.node("n1").vouched_fault == ""
    assert read_after(desk, minutes=5) == [RepairRequest("n1", DUSTY.fault)]


def test_a_release_vouches_for_one_fault_and_for_no_other() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = replace(DUSTY, reset_wanted=WORN.reset_wanted)
    desk.learn(QuarantineCommand("n1", "dust", "grace"))
    read_after(desk, minutes=5)
    desk.learn(ReleaseCommand("n1", "it computes", "grace"))
    read_after(desk, minutes=5)
    assert not desk.node("n1").fault
    desk.gpus["n1"] = full = gpus(fault="/var/tmp is full", reset_wanted=WORN.reset_wanted)
    assert read_after(desk, minutes=5) == []
    assert read_after(desk, minutes=5) == [RepairRequest("n1", full.fault)]


def test_a_pending_reset_that_is_vouched_for_hides_no_fault() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = WORN
    desk.learn(QuarantineCommand("n1", "a cable", "grace"))
    read_after(desk, minutes=5)
    desk.learn(ReleaseCommand("n1", "exchanged", "grace"), PauseCommand("a switch", "grace"))
    read_after(desk, minutes=5)
    desk.gpus["n1"] = replace(DUSTY, reset_wanted=WORN.reset_wanted)
    read_after(desk, minutes=5)
    assert desk.node("n1").fault == DUSTY.fault


def test_a_restarted_fleet_knows_what_a_person_has_vouched_for() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = DUSTY
    desk.learn(QuarantineCommand("n1", "dust", "grace"))
    read_after(desk, minutes=5)
    desk.learn(ReleaseCommand("n1", "it computes", "grace"))
    read_after(desk, minutes=5)
    after = Desk(*nodes("n1"), begun=False)
    after.now, after.gpus = desk.now, desk.gpus
    after.learn(
        FleetFileContent("act", after.specs, after.limits),
        RunningJobs(()),
        export_state(desk.state),
    )
    for _ in range(3):
        assert read_after(after, minutes=5) == []


def test_a_fault_is_no_older_than_its_first_reading() -> None:
    desk = Desk(*nodes("n1"))
    desk.learn(FleetFileContent("ask", desk.specs, desk.limits))
    desk.gpus["n1"] = WORN
    for _ in range(3):
        read_after(desk, minutes=5)
    desk.gpus["n1"] = replace(DUSTY, reset_wanted=WORN.reset_wanted)
    assert read_after(desk, minutes=5) == []
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    assert read_after(desk, minutes=5) == [RepairRequest("n1", DUSTY.fault)]


def test_while_repairs_are_paused_a_fault_makes_no_suspect() -> None:
    desk = Desk(*nodes("n1"))
    desk.learn(PauseCommand("the switch is exchanged", "grace"))
    desk.gpus["n1"] = DUSTY
    for _ in range(3):
        read_after(desk, minutes=5)
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.claim("a", 1)
    assert desk.granted() == {}
    del desk.gpus["n1"]
    read_after(desk, minutes=5)
    assert desk.granted() == {"a": ["n1"]}


def test_a_job_that_waits_has_the_node_a_minute_after_its_fault() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = DUSTY
    read_after(desk, minutes=5)
    desk.busy = {"watch"}  # it knows the node as sound
    desk.claim("a", 1)
    assert desk.granted() == {}
    del desk.gpus["n1"]
    wake = desk.scheduler.next_wake(desk.state, desk.now, frozenset(desk.busy))
    assert wake is not None and wake <= desk.now + timedelta(seconds=60)
    desk.wait(seconds=30)
    assert desk.granted() == {}
    desk.wait(seconds=31)
    assert desk.granted() == {"a": ["n1"]}


def test_a_node_that_has_no_gpus_any_more_has_no_fault_of_then() -> None:
    desk = Desk(*nodes("n1"))
    desk.gpus["n1"] = DUSTY
    read_after(desk, minutes=5)
    desk.learn(FleetFileContent("act", nodes("n1", gpus=0), desk.limits))
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}
    assert desk.node("n1").remarks == ()


def test_gpus_that_work_are_reset_one_node_after_the_other() -> None:
    desk = Desk(*nodes("n1", "n2", "n3"))
    desk.gpus.update({"n1": WORN, "n2": WORN})
    assert read_after(desk, minutes=5) == []
    assert read_after(desk, minutes=5) == [RepairRequest("n1", WORN.reset_wanted)]
    assert read_after(desk, minutes=5) == []
    del desk.gpus["n1"]
    assert desk.go(began("n1"), ended("n1")) == [RepairRequest("n2", WORN.reset_wanted)]


def test_gpus_that_work_are_granted_and_reset_when_no_job_waits() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.gpus["n1"] = WORN
    read_after(desk, minutes=5)
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}
    desk.claim("b", 2)
    desk.claim("a", 0, seq=2)
    assert desk.granted() == {"b": ["n1", "n2"]}
    desk.claim("c", 1)
    desk.claim("b", 1, seq=2, holds=("n2",))
    assert desk.granted() == {"b": ["n2"], "c": ["n1"]}
    desk.claim("c", 0, seq=2)
    assert read_after(desk, minutes=5) == [RepairRequest("n1", WORN.reset_wanted)]


@pytest.mark.parametrize("how", ["another is out", "ask", "observe", "paused", "quarantined"])
def test_gpus_that_work_can_wait(how: str) -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.gpus["n1"] = WORN
    match how:
        case "another is out":
            desk.learn(began("n2"), ended("n2", "ambiguous", verdict=Verdict.UNHEALTHY))
        case "ask" | "observe":
            desk.learn(FleetFileContent(how, nodes("n1", "n2"), desk.limits))
        case "paused":
            desk.learn(PauseCommand("the switch is exchanged", "grace"))
        case "quarantined":
            desk.learn(QuarantineCommand("n1", "dust", "grace"))
    for _ in range(3):
        assert read_after(desk, minutes=5) == []
    assert desk.node("n1").status is not NodeStatus.SUSPECT


def test_gpus_that_work_are_not_reset_while_a_job_waits() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.gpus["n1"] = WORN
    desk.claim("a", 1)
    assert desk.granted() == {"a": ["n1"]}
    desk.claim("b", 1)
    assert desk.granted() == {"b": ["n2"]}
    desk.claim("c", 2)
    desk.claim("a", 0, seq=2)
    for _ in range(3):
        read_after(desk, minutes=5)
    assert desk.node("n1").status is NodeStatus.IN_SERVICE
    desk.claim("c", 0, seq=2)
    assert desk.of(RepairRequest) == [RepairRequest("n1", WORN.reset_wanted)]


def test_a_node_in_the_workshop_keeps_no_other_from_its_reset() -> None:
    desk = Desk(*nodes("n1", "n2"))
    desk.gpus["n1"] = WORN
    desk.learn(QuarantineCommand("n2", "dust", "grace"))
    read_after(desk, minutes=5)
    assert read_after(desk, minutes=5) == [RepairRequest("n1", WORN.reset_wanted)]
