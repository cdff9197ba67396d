"""The page of a fleet.

What stands still comes first, every node that is out has its reason, and no fleet is too large.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.pool.inventory import GpuUse, Inventory
from relaunch.pool.messages import Claim, DrainRequest, PermitRequest, Place
from relaunch.pool.placement import is_notable
from relaunch.pool.state import (
    Breaker,
    ClaimRecord,
    FleetState,
    NodeProbe,
    NodeRecord,
    NodeStatus,
    OfferRecord,
)
from relaunch.spec.fleet import FleetNode
from relaunch.workflows.fleet.details import fleet_details
from relaunch.workflows.search_attributes import DETAILS_LIMIT
from tests.pages import sections

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
AGO = NOW - timedelta(minutes=12)


def node(name: str, **changes: object) -> NodeRecord:
    made = NodeRecord(
        FleetNode(name=name, address=f"10.1.{name}", gpus=8), probe=NodeProbe(name), probed_at=NOW
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def drawn(state: FleetState, *doing: str) -> list[str]:
    notable = [node for node in state.nodes if is_notable(node)]
    what_next = "it waits until a job wants nodes"
    return fleet_details(state, notable, NOW, doing, what_next).splitlines()


def fleet(*nodes: NodeRecord, **changes: object) -> FleetState:
    made = FleetState("lab", nodes=nodes, awaited_jobs=(), is_file_read=True, is_probed=True)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_fleet_that_is_well_says_so_in_few_lines(page: SnapshotAssertion) -> None:
    lines = drawn(fleet(node("n1"), node("n2")))
    assert not [line for line in lines if line.startswith("### ") and "overrule" not in line]
    assert "\n".join(lines) == page


def test_an_open_breaker_and_a_pause_come_first_with_the_remedy(page: SnapshotAssertion) -> None:
    breaker = Breaker(
        "9 of 32 nodes are out, nodes_out is 25%", AGO, "the cooling is mended (grace)", AGO
    )
    lines = drawn(fleet(node("n1"), breaker=breaker))
    assert breaker.reason in lines[2] and "relaunch nodes resume" in lines[2]
    assert breaker.paused in lines[4]
    assert "\n".join(lines) == page


def test_each_node_that_is_out_says_why_by_whom_and_since_when(page: SnapshotAssertion) -> None:
    drain = DrainRequest("n2", "new memory", "grace", NOW + timedelta(minutes=30))
    silent = NodeProbe("n4", silent="connection timed out")
    lines = drawn(
        fleet(
            node("n1"),
            node(
                "n2",
                status=NodeStatus.QUARANTINED,
                reason="new memory",
                by="grace",
                since=AGO,
                drain=drain,
            ),
            node(
                "n3",
                status=NodeStatus.REPAIRING,
                reason="Xid 79",
                by="job llama",
                since=AGO,
                repair="repair/lab/n3",
            ),
            node("n4", probe=silent, silent_since=AGO),
            node("n5", probe=NodeProbe("n5", busy="diagnose (grace) works on it")),
        )
    )
    named = [line.split("**")[1] for line in lines if line.startswith("- **n")]
    assert named == ["n2", "n3", "n4", "n5"]
    assert "\n".join(lines) == page


@pytest.mark.parametrize(
    ("nodes", "said"), [(("n1", "n2"), "jobs leave it until"), (("n1",), "no job has it any more")]
)
def test_a_drained_node_says_until_when_while_a_job_has_it(
    nodes: tuple[str, ...], said: str
) -> None:
    holds = tuple(map(Place, nodes))
    drain = DrainRequest("n2", "new memory", "grace", NOW + timedelta(minutes=30))
    lines = drawn(
        fleet(
            node("n1"),
            node("n2", status=NodeStatus.QUARANTINED, reason="new memory", drain=drain),
            claims=(ClaimRecord(Claim("llama", 1, 1, 2, holds=holds), granted=holds),),
        )
    )
    (line,) = (line for line in lines if line.startswith("- **n2**"))
    assert said in line


def test_who_waits_says_for_what_and_who_has_nodes_says_which(page: SnapshotAssertion) -> None:
    waiting = ClaimRecord(
        Claim("bert", 1, 1, 4, gpus=2),
        wait_reason="1 of 4 nodes: job llama holds 3",
        waiting_since=AGO,
    )
    replacement = ClaimRecord(Claim("vit", 1, 3, 2, running=True), waiting_since=AGO)
    holds = (Place("n1"), Place("n2", gpus=(0, 1)))
    using = ClaimRecord(Claim("llama", 1, 1, 2, holds=holds), granted=holds)
    ended = ClaimRecord(
        Claim("gpt", 1, 1, 1, holds=(Place("n3"),)), granted=(Place("n3"),), is_closed=True
    )
    asked = PermitRequest("repair/lab/n3", "r", 1, "n3", "reboot", "no answer from the driver", AGO)
    lines = drawn(
        fleet(
            node("n1"),
            claims=(waiting, replacement, using, ended),
            requests=(asked,),
            notices=("old", "new"),
        ),
        "a probe of nodes",
    )
    named = [line.split("**")[1] for line in lines if line.startswith("- **")]
    assert named == ["bert", "vit", "llama", "gpt"]
    assert lines.index("- new") < lines.index("- old")
    assert "\n".join(lines) == page


def test_a_restarted_fleet_says_for_which_jobs_it_waits(page: SnapshotAssertion) -> None:
    until = NOW + timedelta(seconds=30)
    state = fleet(node("n1"), awaited_jobs=("llama", "bert"), awaited_until=until)
    assert "\n".join(drawn(state)) == page


def test_the_largest_fleet_fits_and_keeps_what_is_needed_to_act() -> None:
    reason = "ü" * 5000
    nodes = tuple(
        node(f"n{i}", status=NodeStatus.QUARANTINED, reason=reason, by="grace", since=AGO)
        for i in range(2048)
    )
    holds = tuple(Place(one.name) for one in nodes)
    claims = tuple(
        ClaimRecord(Claim(f"j{i}", 1, 1, 2048, holds=holds), wait_reason=reason) for i in range(500)
    )
    state = fleet(*nodes, claims=claims, notices=(reason,) * 64, breaker=Breaker(reason, AGO))
    text = "\n".join(drawn(state))
    assert len(text.encode()) <= DETAILS_LIMIT + 10
    assert "relaunch nodes resume" in text
    assert "2032 more" in text


def test_jobs_that_would_take_more_and_their_offers_are_shown(page: SnapshotAssertion) -> None:
    grows = ClaimRecord(
        Claim("llama", 7, 3, 1, keep=("n1",), holds=(Place("n1"),), most=3, more_at=AGO),
        granted=(Place("n1"),),
    )
    waits = ClaimRecord(Claim("bert", 8, 1, 2, most=4), waiting_since=AGO)
    offer = OfferRecord("llama", 7, 3, (Place("n2"), Place("n3")), NOW)
    lines = drawn(fleet(node("n1"), node("n2"), node("n3"), claims=(grows, waits), offers=(offer,)))
    assert "\n".join(lines) == page


def test_gpus_used_by_strangers_missing_or_unreadable_are_shown(page: SnapshotAssertion) -> None:
    used = Inventory("H100", 8, used=(GpuUse((2,), "alice (python, pid 4242)"),))
    lines = drawn(
        fleet(
            node("n1", inventory=used, inventory_at=NOW),
            node("n2", inventory=replace(used, count=7), inventory_at=NOW),
            node(
                "n3",
                inventory=Inventory(unreadable="libnvidia-ml.so.1 is not on this node"),
                inventory_at=NOW,
            ),
            node("n4", inventory=Inventory("H100", 8), inventory_at=NOW),
            node(
                "n5",
                inventory=Inventory("H100", 7),
                inventory_at=NOW,
                status=NodeStatus.SUSPECT,
                reason="7 of 8 GPUs answer",
            ),
        )
    )
    at = next(number for number, line in enumerate(lines) if line.startswith("### What nodes"))
    named = [line.split("**")[1] for line in lines[at:] if line.startswith("- **")]
    assert named == ["n1", "n2", "n3"], "n5 is listed with the nodes that are out"
    assert "\n".join(lines) == page


def test_faults_that_nodes_report_say_what_follows(page: SnapshotAssertion) -> None:
    failed = Inventory("H100", 8, fault="GPU 0000:1b:00: remapping a row of its memory has failed")
    pending = "GPU 0000:1b:00: a row of its memory waits for a reset to be remapped"
    mismatch = Inventory(
        unreadable="NVML: LIB_RM_VERSION_MISMATCH", fault="libraries and module are of two versions"
    )
    shown: dict[str, Any] = {"inventory_at": NOW, "fault_since": NOW}
    lines = drawn(
        fleet(
            node("n1", inventory=failed, **shown),
            node("n2", inventory=failed, vouched_fault=failed.fault, **shown),
            node("n3", inventory=Inventory("H100", 8, reset_wanted=pending), **shown),
            node("n4", inventory=mismatch, **shown),
        )
    )
    assert "\n".join(lines) == page


def test_a_shared_suspect_names_the_jobs_asked_to_leave_by_when(page: SnapshotAssertion) -> None:
    leave = DrainRequest("n3", "Xid 79", "fleet lab", NOW + timedelta(hours=2))
    suspect = {
        "status": NodeStatus.SUSPECT,
        "reason": "Xid 79",
        "by": "job llama",
        "since": AGO,
        "repair_drain": leave,
    }
    pages = {
        "asked": drawn(fleet(node("n3", **suspect, asked_jobs=("bert", "vit")))),
        "not asked": drawn(fleet(node("n3", **suspect))),
    }
    assert ["bert" in "\n".join(lines) for lines in pages.values()] == [True, False]
    assert sections(pages) == page
