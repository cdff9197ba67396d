"""What `nodes list` and `nodes show` print: the keys are a promise."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from relaunch.cli.node_pages import (
    changes,
    describe_quarantine,
    describe_release,
    describe_removed_nodes,
    fleet_lines,
    fleet_notes,
    fleet_view,
    node_lines,
    node_more,
)
from relaunch.cli.node_views import STATES, rows, table_row, tenants
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import FleetFileContent
from relaunch.pool.inventory import UNKNOWN, GpuUse, Inventory
from relaunch.pool.messages import DrainRequest, PermitRequest, Place
from relaunch.pool.state import Breaker, FleetState, NodeProbe, NodeRecord, NodeStatus, OfferRecord
from relaunch.spec.fleet import FleetLimits
from tests.console.fake_fleet import T0, claim, fleet, living, mark, node, silent

KEYS = {"name", "state", "job", "gpus", "health", "reason", "by", "history", "findings", "boot_id"}
HOUR = timedelta(hours=1)
OUT: dict[str, Any] = {
    "status": NodeStatus.QUARANTINED,
    "reason": "flaky NVLink",
    "by": "grace@ops",
    "since": T0 - 3 * HOUR,
}
SUSPECT: dict[str, Any] = {
    "status": NodeStatus.SUSPECT,
    "reason": "Xid 79",
    "by": "job llama",
    "since": T0 - HOUR,
}
HEALTHY: dict[str, Any] = {
    "verdict": Verdict.HEALTHY,
    "verdict_at": T0 - 3 * HOUR,
    "verdict_reason": "nothing was found",
}
UNHEALTHY: dict[str, Any] = {
    **HEALTHY,
    "verdict": Verdict.UNHEALTHY,
    "verdict_reason": "Xid 79 on GPU 5",
}
DRAIN = DrainRequest("gpu-01", "flaky NVLink", "grace@ops", T0 + 12 * HOUR / 60)


def cells(state: FleetState, name: str = "gpu-01") -> list[str]:
    record = next(record for record in state.nodes if record.name == name)
    return list(table_row(record, tenants(state).get(name, ()), T0))


@pytest.mark.parametrize(
    ("record", "places", "expected", "reason"),
    [
        (node(1), (), "free", ""),
        (node(1), (Place("gpu-01"),), "busy", ""),
        (
            living(1, "orphan"),
            (),
            "busy",
            "ranks of orphan run there without a claim that the fleet knows",
        ),
        (node(1, **SUSPECT), (), "suspect", "Xid 79 (job llama, 60m ago)"),
        (
            node(1, **{**SUSPECT, "status": NodeStatus.REPAIRING}),
            (),
            "repairing",
            "Xid 79 (job llama, 60m ago)",
        ),
        (
            node(1, repair="repair/default/gpu-01/run"),
            (),
            "repairing",
            "repair/default/gpu-01 is running",
        ),
        (
            node(1, repair="repair/default/gpu-01", repair_since=T0),
            (),
            "repairing",
            "repair/default/gpu-01 is running (0s ago)",
        ),
        (node(1, **OUT), (), "quarantined", "flaky NVLink (grace@ops, 3h ago)"),
        (node(1, **OUT), (Place("gpu-01"),), "quarantined", "flaky NVLink (grace@ops, 3h ago)"),
        (
            node(1, **OUT, drain=DRAIN),
            (Place("gpu-01"),),
            "draining",
            "flaky NVLink (grace@ops, 3h ago); jobs must leave within 12m",
        ),
        (node(1, **OUT, drain=DRAIN), (), "quarantined", "flaky NVLink (grace@ops, 3h ago)"),
        (silent(1), (), "silent", "connection refused (5m ago)"),
        (silent(1), (Place("gpu-01"),), "silent", "connection refused (5m ago)"),
        (
            silent(1, **OUT),
            (),
            "quarantined",
            "flaky NVLink (grace@ops, 3h ago); does not answer since 2026-03-01T11:55:00Z (5m ago):"
            " connection refused",
        ),
        (node(1, probe=None, probed_at=None), (), "silent", "not probed yet"),
        (
            node(1, probe=NodeProbe("gpu-01", busy="repair (x) works on it")),
            (),
            "held",
            "repair (x) works on it",
        ),
        (
            node(1, probe=NodeProbe("gpu-01", busy="check (x) works on it")),
            (Place("gpu-01"),),
            "held",
            "check (x) works on it",
        ),
    ],
)
def test_a_node_shows_the_state_that_withholds_it_and_the_reason(
    record: NodeRecord, places: tuple[Place, ...], expected: str, reason: str
) -> None:
    state = fleet(record, claims=(claim("llama", *places),) if places else ())
    found = cells(state)
    assert (found[1], found[-1]) == (expected, reason)
    assert expected in STATES and rows(state)[0]["state"] == expected
    assert found[2] == (
        "llama" if places else "orphan" if record.probe and record.probe.generations else ""
    )


@pytest.mark.parametrize(
    ("gpus", "places", "expected"),
    [
        (8, [Place("gpu-01")], "8/8"),
        (8, [Place("gpu-01", gpus=(0, 1))], "2/8"),
        (8, [Place("gpu-01", gpus=(0, 1)), Place("gpu-01", gpus=(2,))], "3/8"),
        (8, [], "0/8"),
        (0, [Place("gpu-01"), Place("gpu-01")], "-"),
    ],
)
def test_gpus_are_those_in_use_of_those_there_are(
    gpus: int, places: list[Place], expected: str
) -> None:
    shared = fleet(
        node(1, spec={"gpus": gpus}),
        claims=tuple(claim(f"job-{n}", place) for n, place in enumerate(places)),
    )
    assert cells(shared)[2:4] == [", ".join(f"job-{n}" for n in range(len(places))), expected]


def test_ranks_without_a_claim_count_as_having_the_whole_node() -> None:
    assert cells(fleet(living(1, "orphan")))[3] == "8/8"
    here = fleet(living(1, "llama"), claims=(claim("llama", Place("gpu-01", gpus=(3,))),))
    assert cells(here)[1:4] == ["busy", "llama", "1/8"], "those of a claim are no second tenant"


@pytest.mark.parametrize(
    ("record", "verdict", "says"),
    [
        (node(1), "UNKNOWN", "not examined"),
        (node(1, marks=(mark(HOUR),)), "UNKNOWN", "not examined"),
        (node(1, **SUSPECT, marks=(mark(HOUR),)), "UNKNOWN", "suspected"),
        (node(1, **{**OUT, "by": "relaunch"}), "UNKNOWN", "not proven"),
        (node(1, **OUT), "UNKNOWN", "not examined"),
        (node(1, **HEALTHY), "HEALTHY", "HEALTHY 3h ago"),
        (
            node(
                1,
                **HEALTHY,
                marks=(mark(4 * HOUR), mark(2 * HOUR, retracted="it followed the job")),
            ),
            "HEALTHY",
            "HEALTHY 3h ago",
        ),
        (
            node(1, **HEALTHY, marks=(mark(2 * HOUR),)),
            "UNKNOWN",
            "not examined since the last fault",
        ),
        (node(1, **HEALTHY, **SUSPECT), "UNKNOWN", "suspected"),
        (node(1, **HEALTHY, **OUT), "HEALTHY", "HEALTHY 3h ago"),
        (node(1, **HEALTHY, **{**OUT, "by": "relaunch"}), "UNKNOWN", "not proven"),
        (node(1, **UNHEALTHY, **{**OUT, "by": "relaunch"}), "UNHEALTHY", "UNHEALTHY 3h ago"),
        (node(1, **UNHEALTHY, **SUSPECT), "UNHEALTHY", "UNHEALTHY 3h ago"),
    ],
)
def test_only_an_examination_that_nothing_has_followed_is_health(
    record: NodeRecord, verdict: str, says: str
) -> None:
    row = rows(fleet(record))[0]
    assert (row["health"], cells(fleet(record))[4]) == (verdict, says)
    assert row["health_reason"] == (says if verdict == "UNKNOWN" else record.verdict_reason)
    assert row["examined_at"] == ("2026-03-01T09:00:00Z" if record.verdict else None)


def test_a_node_is_shown_with_what_its_examination_found() -> None:
    check = "`relaunch nodes check gpu-01 --fleet default` examines it now"
    assert f"health      UNHEALTHY 3h ago: Xid 79 on GPU 5; {check}" in node_lines(
        node(1, **UNHEALTHY), (), "default", T0, None
    )
    assert f"health      suspected; {check}" in node_lines(
        node(1, **HEALTHY, **SUSPECT), (), "default", T0, None
    )


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ((), ""),
        ((mark(3 * HOUR),), "1 fault in 24h, the last 3h ago: Xid 79"),
        ((mark(9 * HOUR), mark(3 * HOUR)), "2 faults in 24h, the last 3h ago: Xid 79"),
        ((mark(50 * HOUR), mark(3 * HOUR)), "1 fault in 24h (2 in all), the last 3h ago: Xid 79"),
        ((mark(72 * HOUR),), "1 fault, the last 3d ago: Xid 79"),
        (
            (mark(9 * HOUR), mark(3 * HOUR, retracted="it followed the job")),
            "1 fault in 24h, the last 9h ago: Xid 79",
        ),
        (
            (mark(3 * HOUR, retracted="it followed the job"),),
            "1 fault, retracted, the last 3h ago: Xid 79",
        ),
        ((mark(3 * HOUR, code="", cause=Cause.HANG),), "1 fault in 24h, the last 3h ago: HANG"),
    ],
)
def test_history_counts_what_still_counts(marks: tuple[Any, ...], expected: str) -> None:
    assert cells(fleet(node(1, marks=marks)))[5] == expected


def test_list_has_the_promised_keys_and_is_json() -> None:
    state = fleet(
        node(1, **SUSPECT, marks=(mark(HOUR, gpus=("0000:3b:00.0",)),)),
        node(2),
        claims=(claim("llama", Place("gpu-02")),),
    )
    one, two = json.loads(json.dumps(rows(state)))
    assert one.keys() >= KEYS
    assert (one["name"], one["job"], one["gpus"], one["by"], one["since"]) == (
        "gpu-01",
        None,
        8,
        "job llama",
        "2026-03-01T11:00:00Z",
    )
    assert (
        one["history"][0].items()
        >= {
            "at": "2026-03-01T11:00:00Z",
            "what": "fault",
            "reason": "GPU 5 fell off the bus",
        }.items()
    )
    assert one["findings"] == [
        {
            "code": "Xid 79",
            "role": "root",
            "gpu": "0000:3b:00.0",
            "reason": "GPU 5 fell off the bus",
        }
    ]
    assert (two["state"], two["job"], two["jobs"], two["gpus_used"], two["by"]) == (
        "busy",
        "llama",
        ["llama"],
        8,
        None,
    )


def test_what_holds_up_the_whole_fleet_is_said_with_what_ends_it() -> None:
    assert fleet_notes(fleet(node(1)), T0) == []
    request = PermitRequest("repair/default/gpu-01", "run", 1, "gpu-01", "reboot", "Xid 79", T0)
    state = fleet(
        node(1),
        breaker=Breaker(
            reason="3 of 8 nodes are out, nodes_out allows 2",
            since=T0 - HOUR,
            paused="grace@ops: maintenance",
        ),
        claims=(
            claim("llama", nodes=4, wait_reason="2 of 4 nodes: gpu-03 is quarantined"),
            claim("gone", nodes=2, is_closed=True),
        ),
        requests=(request,),
        awaited_jobs=("mixtral",),
    )
    assert fleet_notes(state, T0) == [
        "the breaker is open since 2026-03-01T11:00:00Z (60m ago),"
        " so no node is given to jobs or repaired: 3 of 8 nodes are out, nodes_out allows 2;"
        " to close it: `relaunch nodes resume --fleet default --reason …`",
        "repairs are paused by grace@ops: maintenance;"
        " to resume: `relaunch nodes resume --fleet default --reason …`",
        "the fleet was restarted and waits for the claims of mixtral",
        "llama waits for 4 nodes since 2026-03-01T12:00:00Z (0s ago):"
        " 2 of 4 nodes: gpu-03 is quarantined",
        "repair/default/gpu-01 waits for a permit to reboot gpu-01: Xid 79",
    ]
    view = json.loads(json.dumps(fleet_view(state)))
    assert (view["breaker"]["open"], view["waiting"][0]["job"], view["nodes"]["free"]) == (
        True,
        "llama",
        1,
    )
    assert fleet_lines(state, T0)[0] == "fleet       default: 1 node, 1 free"
    assert view["limits"]["drain_within"] == 7200.0


def test_a_node_is_shown_with_all_that_is_known_of_it() -> None:
    record = living(
        1,
        "llama",
        **OUT,
        drain=DRAIN,
        repair="repair/default/gpu-01/run-1",
        marks=(mark(HOUR, retracted="the fault followed job llama to gpu-02"), mark(HOUR / 2)),
        spec={"spare": True},
    )
    state = fleet(record, claims=(claim("llama", Place("gpu-01", gpus=(0, 1))),))
    here = tenants(state)["gpu-01"]
    assert node_lines(
        record, here, "default", T0, "http://127.0.0.1:8233/namespaces/default/workflows"
    ) == [
        "node        gpu-01 of fleet default (10.0.0.1, 8 GPUs, spare)",
        "state       draining by grace@ops since 2026-03-01T09:00:00Z (3h ago): flaky NVLink",
        "health      not examined; `relaunch nodes check gpu-01 --fleet default` examines it now",
        "probe       0s ago: it answered, boot id boot 1",
        "running     job llama, submission 7, generation 2",
        "has it      job llama, submission 7: GPU 0, 1",
        "drain       jobs must leave by 2026-03-01T12:12:00Z, requested by grace@ops: flaky NVLink",
        "repair      repair/default/gpu-01: http://127.0.0.1:8233/namespaces/default/workflows/repair%2Fdefault%2Fgpu-01/run-1",
        "fault       2026-03-01T11:00:00Z Xid 79 (GPU_FATAL), job llama generation 3:"
        " GPU 5 fell off the bus"
        " [does not count: the fault followed job llama to gpu-02]",
        "fault       2026-03-01T11:30:00Z Xid 79 (GPU_FATAL), job llama generation 3:"
        " GPU 5 fell off the bus",
    ]
    suspect = replace(record, drain=None, repair_drain=DRAIN, asked_jobs=("llama",))
    assert (
        "shared      llama must leave by 2026-03-01T12:12:00Z, so that the node can be examined"
        in node_lines(suspect, here, "default", T0, None)
    )
    ordered = node_lines(replace(record, repair="repair/default/gpu-01"), here, "default", T0, None)
    assert "repair      repair/default/gpu-01, ordered but not started" in ordered
    assert "repair      repair/default/gpu-01 in the web UI, run run-1" in node_lines(
        record, here, "default", T0, None
    )
    assert (
        "probe       0s ago: no answer since 2026-03-01T11:55:00Z (5m ago): connection refused"
        in node_lines(silent(2), (), "default", T0, None)
    )


def test_what_a_file_changes_is_named_node_by_node() -> None:
    leaving_node = node(
        3,
        status=NodeStatus.QUARANTINED,
        by="fleet file",
        reason="it is no longer in the fleet file",
        is_removed=True,
    )
    state = fleet(node(1), node(2), leaving_node, claims=(claim("llama", Place("gpu-03")),))
    same = FleetFileContent(state.repairs, (node(1).spec, node(2).spec), state.limits)
    assert changes(state, same) == []
    other = FleetFileContent(
        "act",
        (node(1, spec={"gpus": 4}).spec, node(4).spec),
        FleetLimits(nodes_out=3, replacement_wait=timedelta(minutes=5)),
    )
    assert changes(state, other) == [
        "new: gpu-04",
        "gone: gpu-02",
        "changed: gpu-01: gpus 8, now 4",
        "changed: repairs: ask, now act",
        "changed: limits: nodes_out 25%, now 3, replacement_wait 10m, now 5m",
    ]
    assert changes(state, replace(same, nodes=(*same.nodes, node(3).spec))) == ["new: gpu-03"], (
        "it came back before everybody had left it"
    )
    assert describe_removed_nodes(state) == ["gpu-03 stays until it is free: llama is on it"]


def test_what_was_said_is_answered_with_what_is_now() -> None:
    held = (claim("llama", Place("gpu-01")),)
    begin, end = (
        "node gpu-01 is quarantined: flaky NVLink;",
        "no other job gets it until `relaunch nodes release gpu-01`",
    )
    unclaimed = f"{begin} no job has it; {end}"
    stays = f"{begin} llama may keep it; {end}"
    leaves = f"{begin} llama has to leave it by 2026-03-01T12:12:00Z; {end}"
    assert describe_quarantine(fleet(node(1, **OUT)), "gpu-01") == unclaimed
    assert describe_quarantine(fleet(node(1, **OUT), claims=held), "gpu-01") == stays
    assert describe_quarantine(fleet(node(1, **OUT, drain=DRAIN), claims=held), "gpu-01") == leaves
    assert (
        describe_release(fleet(node(1)), "gpu-01") == "node gpu-01 is in service: jobs can get it"
    )
    assert (
        describe_release(fleet(silent(1)), "gpu-01")
        == "node gpu-01 is in service: jobs can get it, but it does not answer"
    )


def test_nodes_on_offer_are_free_and_say_until_when_reserved() -> None:
    offer = OfferRecord("llama", 7, 3, (Place("gpu-02"),), T0 + timedelta(minutes=2))
    grows = claim("llama", Place("gpu-01"))
    grows = replace(grows, claim=replace(grows.claim, keep=("gpu-01",), most=2, more_at=T0))
    state = fleet(
        node(1), node(2), claims=(grows,), offers=(offer, replace(offer, job="bert", places=()))
    )
    cell = cells(state, "gpu-02")
    assert (cell[1], cell[2], cell[-1]) == (
        "free",
        "",
        "offered to job llama until 2026-03-01T12:02:00Z",
    )
    assert [(row["state"], row["jobs"]) for row in rows(state)] == [
        ("busy", ["llama"]),
        ("free", []),
    ]
    assert fleet_view(state)["offers"] == [
        {"job": "llama", "nodes": ["gpu-02"], "until": "2026-03-01T12:02:00Z"}
    ]
    here = tenants(state)["gpu-02"]
    assert "offered     job llama, submission 7: all GPUs" in node_lines(
        node(2), here, "default", T0, None
    )
    assert (node_more(node(2), here)["tenants"], node_more(node(2), here)["offered"]) == (
        [],
        [{"job": "llama", "until": "2026-03-01T12:02:00Z"}],
    )
    assert "llama runs on 1 node and takes up to 2, when no job waits for them" in fleet_notes(
        state, T0
    )
    assert "llama runs on 1 node and takes up to 2 from 2026-03-01T12:00:00Z on" in fleet_notes(
        state, T0 - HOUR
    )


def test_a_job_that_waits_says_how_few_nodes_it_would_begin_with() -> None:
    waits = claim("llama", nodes=2)
    waits = replace(waits, claim=replace(waits.claim, most=4))
    assert any(
        note.startswith("llama waits for 2 to 4 nodes since")
        for note in fleet_notes(fleet(node(1), claims=(waits,)), T0)
    )


# --- GPUs

READ = Inventory(
    "NVIDIA H100 80GB HBM3",
    8,
    85520809984,
    (3, 4, 60000, 60001, 0, 0, 0, 0),
    "570.148.08",
    "13.570",
    used=(GpuUse((2, 3), "alice (python, pid 4242)"),),
)


def read(inventory: Inventory, **changes: Any) -> NodeRecord:
    return node(
        1, **{"inventory": inventory, "inventory_at": T0 - timedelta(seconds=12), **changes}
    )


def test_s2_10_nodes_list_shows_gpus_as_read_and_their_strangers() -> None:
    row = cells(fleet(read(READ), claims=(claim("llama", Place("gpu-01", gpus=(0, 1))),)))
    assert (row[3], row[6]) == (
        "2/8 x H100 80GB HBM3",
        "GPU 2, 3 are used by alice (python, pid 4242)",
    )


@pytest.mark.parametrize(
    ("record", "gpus", "reason"),
    [
        (
            read(Inventory(unreadable="libnvidia-ml.so.1 is not on this node")),
            "0/8",
            "GPUs unreadable: libnvidia-ml.so.1 is not on this node",
        ),
        (
            read(replace(READ, count=7, lost=("0000:5e:00.0",), used=())),
            "0/8 x H100 80GB HBM3",
            "7 of 8 GPUs answer; 0000:5e:00.0 is lost",
        ),
        (read(replace(READ, model="NVIDIA A100, NVIDIA H100", used=())), "0/8 x A100, H100", ""),
        (read(READ, spec={"gpus": 0}), "-", ""),
        (
            read(replace(READ, count=7, used=()), **{**SUSPECT, "reason": "7 of 8 GPUs answer"}),
            "0/8 x H100 80GB HBM3",
            "7 of 8 GPUs answer (job llama, 60m ago)",
        ),
    ],
)
def test_what_is_odd_about_gpus_is_a_remark(record: NodeRecord, gpus: str, reason: str) -> None:
    row = cells(fleet(record))
    assert (row[3], row[6]) == (gpus, reason)


def test_s2_10_a_node_is_shown_with_gpus_memory_and_their_users() -> None:
    state = fleet(
        read(replace(READ, lost=("0000:5e:00.0",), memory_used=(3, UNKNOWN, 60000))),
        claims=(claim("llama", Place("gpu-01", gpus=(0,))),),
    )
    lines = node_lines(state.nodes[0], tenants(state)["gpu-01"], "default", T0, None)
    assert [line for line in lines if line.startswith(("gpu", "lost"))] == [
        "gpus        8 x H100 80GB HBM3, 81559 MiB each; driver 570.148.08, NVML 13.570;"
        " read 12s ago",
        "lost        0000:5e:00.0",
        "gpu 0       3 of 81559 MiB used; job llama",
        "gpu 2       60000 of 81559 MiB used; alice (python, pid 4242)",
    ]
    unread = node_lines(
        read(Inventory(unreadable="no library"), inventory_at=None), (), "default", T0, None
    )
    assert (
        "gpus        GPUs unreadable: no library; read before the last action on the node" in unread
    )
    assert not [
        line for line in node_lines(node(1), (), "default", T0, None) if line.startswith("gpu")
    ]


def test_the_inventory_is_json_and_null_before_the_first_reading() -> None:
    one, two = json.loads(
        json.dumps(rows(fleet(node(2), read(replace(READ, memory_used=(3, UNKNOWN), lost=("a",))))))
    )
    assert one["inventory"] is None
    assert two["inventory"] == {
        "model": "NVIDIA H100 80GB HBM3",
        "answering": 8,
        "memory": 85520809984,
        "memory_used": [3 << 20, None],
        "driver": "570.148.08",
        "nvml": "13.570",
        "used": [{"gpus": [2, 3], "who": "alice (python, pid 4242)"}],
        "lost": ["a"],
        "unreadable": None,
        "read_at": "2026-03-01T11:59:48Z",
    }
