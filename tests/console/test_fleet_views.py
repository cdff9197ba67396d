"""What `nodes list` and `nodes show` print: the keys are a promise."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

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
from relaunch.cli.node_views import print_nodes, rows, table_row
from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import FleetFileContent
from relaunch.pool.inventory import UNKNOWN, GpuUse, Inventory
from relaunch.pool.messages import DrainRequest, Healing, PermitRequest, Place
from relaunch.pool.state import (
    Breaker,
    FleetState,
    NodeProbe,
    NodeRecord,
    NodeStatus,
    OfferRecord,
    PastReason,
    WarmPython,
)
from relaunch.pool.tenants import STATES, tenants
from relaunch.spec.fleet import FleetLimits
from relaunch.spec.policy import Strategy
from tests.console.fake_fleet import T0, claim, fleet, living, mark, node, silent
from tests.pages import sections

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


def test_jobs_that_have_left_a_drained_node_need_not_leave() -> None:
    record = node(1, **OUT, drain=DRAIN)
    held = tenants(fleet(record, claims=(claim("llama", Place("gpu-01")),)))["gpu-01"]
    assert "jobs must leave within 12m" in table_row(record, held, T0)[-1]
    probed = living(1, "llama", **OUT, drain=DRAIN)
    left = tenants(fleet(probed))["gpu-01"]
    assert "given it back" in table_row(probed, left, T0)[-1]
    for one, here in ((probed, left), (record, ())):
        assert "must leave" not in table_row(one, here, T0)[-1]
        assert "no job has it any more" in "\n".join(node_lines(one, here, "default", T0, None))


def listed(capsys: pytest.CaptureFixture[str], *records: NodeRecord, **changes: Any) -> str:
    """Return what `nodes list` prints of these nodes, which get names of their own."""
    named = [
        replace(record, spec=record.spec.model_copy(update={"name": f"gpu-{number:02}"}))
        for number, record in enumerate(records, 1)
    ]
    print_nodes(fleet(*named, **changes), T0)
    return capsys.readouterr().out


def cells(state: FleetState, name: str = "gpu-01") -> list[str]:
    record = next(record for record in state.nodes if record.name == name)
    return list(table_row(record, tenants(state).get(name, ()), T0))


ON_IT = (Place("gpu-01"),)
STATE_CASES: list[tuple[NodeRecord, tuple[Place, ...], str]] = [
    (node(1), (), "free"),
    (node(1), ON_IT, "busy"),
    (living(1, "orphan"), (), "busy"),
    (node(1, **SUSPECT), (), "suspect"),
    (node(1, **{**SUSPECT, "status": NodeStatus.REPAIRING}), (), "repairing"),
    (node(1, repair="repair/default/gpu-01/run"), (), "repairing"),
    (node(1, repair="repair/default/gpu-01", repair_since=T0), (), "repairing"),
    (node(1, **OUT), (), "quarantined"),
    (node(1, **OUT), ON_IT, "quarantined"),
    (node(1, **OUT, drain=DRAIN), ON_IT, "draining"),
    (node(1, **OUT, drain=DRAIN), (), "quarantined"),
    (silent(1), (), "silent"),
    (silent(1), ON_IT, "silent"),
    (silent(1, **OUT), (), "quarantined"),
    (node(1, probe=None, probed_at=None), (), "silent"),
    (node(1, probe=NodeProbe("gpu-01", busy="repair (x) works on it")), (), "held"),
    (node(1, probe=NodeProbe("gpu-01", busy="check (x) works on it")), ON_IT, "held"),
]


@pytest.mark.parametrize(("record", "places", "expected"), STATE_CASES)
def test_a_node_shows_the_state_that_withholds_it_and_its_job(
    record: NodeRecord, places: tuple[Place, ...], expected: str
) -> None:
    state = fleet(record, claims=(claim("llama", *places),) if places else ())
    found = cells(state)
    assert found[1] == expected
    assert expected in STATES and rows(state)[0]["state"] == expected
    assert found[2] == (
        "llama" if places else "orphan" if record.probe and record.probe.generations else ""
    )


def test_nodes_list_gives_the_reason_of_every_state(
    capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    records = [record for record, _, _ in STATE_CASES]
    taken = [Place(f"gpu-{number:02}") for number, (_, on, _) in enumerate(STATE_CASES, 1) if on]
    assert listed(capsys, *records, claims=(claim("llama", *taken),)) == page


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


UNEXAMINED = [
    node(1),
    node(1, marks=(mark(HOUR),)),
    node(1, **SUSPECT, marks=(mark(HOUR),)),
    node(1, **{**OUT, "by": "relaunch"}),
    node(1, **OUT),
    node(1, **HEALTHY, marks=(mark(2 * HOUR),)),
    node(1, **HEALTHY, **SUSPECT),
    node(1, **HEALTHY, **{**OUT, "by": "relaunch"}),
    node(1, **UNHEALTHY, since=T0 - HOUR),
]
EXAMINED_HEALTHY = [
    node(1, **HEALTHY),
    node(1, **HEALTHY, marks=(mark(4 * HOUR), mark(2 * HOUR, retracted="it followed the job"))),
    node(1, **HEALTHY, **OUT),
]
EXAMINED_UNHEALTHY = [
    node(1, **UNHEALTHY, **{**OUT, "by": "relaunch"}),
    node(1, **UNHEALTHY, **SUSPECT),
]


@pytest.mark.parametrize(
    ("record", "verdict"),
    [
        *((record, "UNKNOWN") for record in UNEXAMINED),
        *((record, "HEALTHY") for record in EXAMINED_HEALTHY),
        *((record, "UNHEALTHY") for record in EXAMINED_UNHEALTHY),
    ],
)
def test_only_an_examination_that_nothing_has_followed_is_health(
    record: NodeRecord, verdict: str
) -> None:
    row, cell = rows(fleet(record))[0], cells(fleet(record))[4]
    assert row["health"] == verdict
    assert row["examined_at"] == ("2026-03-01T09:00:00Z" if record.verdict else None)
    if verdict == "UNKNOWN":
        assert row["health_reason"] == cell
    else:
        assert (row["health_reason"], cell) == (record.verdict_reason, f"{verdict} 3h ago")


def test_nodes_list_says_how_well_each_node_is_known(
    capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    assert listed(capsys, *UNEXAMINED, *EXAMINED_HEALTHY, *EXAMINED_UNHEALTHY) == page


MARKS: list[tuple[Any, ...]] = [
    (),
    (mark(3 * HOUR),),
    (mark(9 * HOUR), mark(3 * HOUR)),
    (mark(50 * HOUR), mark(3 * HOUR)),
    (mark(72 * HOUR),),
    (mark(9 * HOUR), mark(3 * HOUR, retracted="it followed the job")),
    (mark(3 * HOUR, retracted="it followed the job"),),
    (mark(3 * HOUR, code="", cause=Cause.HANG),),
]


def test_nodes_list_counts_the_faults_that_still_count(
    capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    assert listed(capsys, *(node(1, marks=marks) for marks in MARKS)) == page


def test_list_has_the_promised_keys_and_is_json() -> None:
    fault = mark(HOUR, gpus=("0000:3b:00.0",))
    state = fleet(
        node(1, **SUSPECT, marks=(fault,)),
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
            "reason": fault.reason,
        }.items()
    )
    assert one["findings"] == [
        {
            "code": "Xid 79",
            "role": "root",
            "gpu": "0000:3b:00.0",
            "reason": fault.reason,
        }
    ]
    assert (two["state"], two["job"], two["jobs"], two["gpus_used"], two["by"]) == (
        "busy",
        "llama",
        ["llama"],
        8,
        None,
    )


def test_the_page_of_a_fleet_says_what_holds_it_up(
    page: SnapshotAssertion,
) -> None:
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
    assert len(fleet_notes(state, T0)) == 5, "a claim that is closed waits for nothing"
    view = json.loads(json.dumps(fleet_view(state)))
    assert (view["breaker"]["open"], view["breaker"]["paused"], view["nodes"]["free"]) == (
        True,
        "grace@ops: maintenance",
        1,
    )
    assert [waiting["job"] for waiting in view["waiting"]] == ["llama"]
    assert (view["requests"][0]["repair"], view["awaited_jobs"]) == (
        "repair/default/gpu-01",
        ["mixtral"],
    )
    assert view["limits"]["drain_within"] == 7200.0
    assert "\n".join(fleet_lines(state, T0)) == page


PAST: dict[str, Any] = {
    "marks": (mark(5 * HOUR, retracted="RESET_GPU healed it"),),
    "healed": (
        Healing(Strategy.RESET_GPU, T0 - 4 * HOUR, ("0000:05:00",)),
        Healing(Strategy.REBOOT_NODE, T0 - 3 * HOUR),
    ),
    "past": (
        PastReason(
            "GPU 5 fell off the bus",
            "job llama",
            T0 - 5 * HOUR,
            T0 - 3 * HOUR,
            "examined healthy: dcgmi diag -r 2 passed",
        ),
        PastReason("a fan", "ada", None, T0 - HOUR, "bob released it: new fan"),
    ),
}
WEB = "http://127.0.0.1:8233/namespaces/default/workflows"


WARM = (
    WarmPython("llama", ("torch", "transformers"), "ready", 312_345_678),
    WarmPython("mistral", ("torch",), "waiting"),
    WarmPython("qwen", ("no_such_module",), "cold"),
)


def test_the_page_of_a_node_has_all_that_is_known_of_it(page: SnapshotAssertion) -> None:
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
    suspect = replace(record, drain=None, repair_drain=DRAIN, asked_jobs=("llama",))
    ordered = replace(record, repair="repair/default/gpu-01")
    pages = {
        "draining": node_lines(record, here, "default", T0, WEB),
        "without the address of a web UI": node_lines(record, here, "default", T0, None),
        "shared, and to be examined": node_lines(suspect, here, "default", T0, WEB),
        "a repair is ordered": node_lines(ordered, here, "default", T0, WEB),
        "it does not answer": node_lines(silent(2), (), "default", T0, WEB),
        "out of service before": node_lines(node(1, **PAST), (), "default", T0, WEB),
        "UNHEALTHY": node_lines(node(1, **UNHEALTHY), (), "default", T0, WEB),
        "suspected": node_lines(node(1, **HEALTHY, **SUSPECT), (), "default", T0, WEB),
        "imports ahead": node_lines(node(3, **HEALTHY), (), "default", T0, WEB, WARM),
    }
    assert sections(pages) == page
    assert node_more(record, (), WARM)["warm"][1]["state"] == "waiting"
    assert node_more(record, ())["warm"] is None, "it was not asked"


def test_what_a_file_changes_is_named_node_by_node(page: SnapshotAssertion) -> None:
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
    assert "\n".join(changes(state, other)) == page
    assert changes(state, replace(same, nodes=(*same.nodes, node(3).spec))) == ["new: gpu-03"], (
        "it came back before everybody had left it"
    )
    (stays,) = describe_removed_nodes(state)
    assert "gpu-03" in stays and "llama" in stays


def test_a_request_is_answered_with_the_state_that_follows(page: SnapshotAssertion) -> None:
    held = (claim("llama", Place("gpu-01")),)
    answers = {
        "quarantine a free node": describe_quarantine(fleet(node(1, **OUT)), "gpu-01"),
        "quarantine a busy node": describe_quarantine(fleet(node(1, **OUT), claims=held), "gpu-01"),
        "quarantine and drain a busy node": describe_quarantine(
            fleet(node(1, **OUT, drain=DRAIN), claims=held), "gpu-01"
        ),
        "release": describe_release(fleet(node(1)), "gpu-01"),
        "release a quarantined node": describe_release(
            fleet(node(1, since=T0, past=(PastReason("a fan", "ada", T0 - HOUR, T0, "new"),))),
            "gpu-01",
        ),
        "release a node that does not answer": describe_release(fleet(silent(1)), "gpu-01"),
    }
    assert sections(answers) == page


def test_nodes_on_offer_are_free_and_say_until_when_reserved(page: SnapshotAssertion) -> None:
    offer = OfferRecord("llama", 7, 3, (Place("gpu-02"),), T0 + timedelta(minutes=2))
    grows = claim("llama", Place("gpu-01"))
    grows = replace(grows, claim=replace(grows.claim, keep=("gpu-01",), most=2, more_at=T0))
    state = fleet(
        node(1), node(2), claims=(grows,), offers=(offer, replace(offer, job="bert", places=()))
    )
    cell = cells(state, "gpu-02")
    assert (cell[1], cell[2]) == ("free", "")
    assert [(row["state"], row["jobs"]) for row in rows(state)] == [
        ("busy", ["llama"]),
        ("free", []),
    ]
    assert fleet_view(state)["offers"] == [
        {"job": "llama", "nodes": ["gpu-02"], "until": "2026-03-01T12:02:00Z"}
    ]
    here = tenants(state)["gpu-02"]
    assert (node_more(node(2), here)["tenants"], node_more(node(2), here)["offered"]) == (
        [],
        [{"job": "llama", "until": "2026-03-01T12:02:00Z"}],
    )
    waits = claim("bert", nodes=2)
    waits = replace(waits, claim=replace(waits.claim, most=4))
    pages = {
        "the reason in `nodes list`": cell[-1],
        "the node": node_lines(node(2), here, "default", T0, None),
        "the fleet, while the job may grow": fleet_notes(state, T0),
        "the fleet, before the job may grow": fleet_notes(state, T0 - HOUR),
        "the fleet, while a job waits that would start small": fleet_notes(
            fleet(node(1), claims=(waits,)), T0
        ),
    }
    assert sections(pages) == page


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
    assert row[3].split() == ["2/8", "x", "H100", "80GB", "HBM3"]
    assert all(word in row[6] for word in ("GPU 2, 3", "alice", "4242"))


def test_what_is_odd_about_gpus_is_a_remark(
    capsys: pytest.CaptureFixture[str], page: SnapshotAssertion
) -> None:
    records = [
        read(READ),
        read(Inventory(unreadable="libnvidia-ml.so.1 is not on this node")),
        read(replace(READ, count=7, lost=("0000:5e:00.0",), used=())),
        read(replace(READ, model="NVIDIA A100, NVIDIA H100", used=())),
        read(READ, spec={"gpus": 0}),
        read(replace(READ, count=7, used=()), **{**SUSPECT, "reason": "7 of 8 GPUs answer"}),
    ]
    assert [bool(cells(fleet(record))[6]) for record in records] == [
        True,
        True,
        True,
        False,
        False,
        True,
    ]
    assert listed(capsys, *records) == page


def test_s2_10_a_node_is_shown_with_gpus_memory_and_their_users(page: SnapshotAssertion) -> None:
    state = fleet(
        read(replace(READ, lost=("0000:5e:00.0",), memory_used=(3, UNKNOWN, 60000))),
        claims=(claim("llama", Place("gpu-01", gpus=(0,))),),
    )
    unread = read(Inventory(unreadable="no library"), inventory_at=None)
    pages = {
        "read": node_lines(state.nodes[0], tenants(state)["gpu-01"], "default", T0, None),
        "unreadable": node_lines(unread, (), "default", T0, None),
        "not read yet": node_lines(node(1), (), "default", T0, None),
    }
    assert [line[:5] for line in pages["read"] if line.startswith("gpu ")] == ["gpu 0", "gpu 2"], (
        "the memory of GPU 1 is unknown"
    )
    assert not [line for line in pages["not read yet"] if line.startswith("gpu")]
    assert sections(pages) == page


def test_the_inventory_is_json_and_null_before_the_first_reading() -> None:
    one, two = json.loads(
        json.dumps(rows(fleet(node(2), read(replace(READ, memory_used=(3, UNKNOWN), lost=("a",))))))
    )
    assert one["inventory"] is None
    assert two["inventory"] == {
        "model": READ.model,
        "answering": 8,
        "memory": 85520809984,
        "memory_used": [3 << 20, None],
        "driver": "570.148.08",
        "nvml": "13.570",
        "used": [{"gpus": [2, 3], "who": READ.used[0].who}],
        "lost": ["a"],
        "fault": None,
        "reset_wanted": None,
        "unreadable": None,
        "read_at": "2026-03-01T11:59:48Z",
    }
