"""The page of a fleet.

What stands still comes first, every node that is out has its reason, and no fleet is too large.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from relaunch.job.state import NodeDrain, Phase
from relaunch.pool.inventory import GpuUse, Inventory
from relaunch.pool.messages import Claim, DrainRequest, PermitRequest, Place
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
from relaunch.workflows.search_attributes import DETAILS_LIMIT, current_details
from tests.recovery.builders import running

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
AGO = NOW - timedelta(minutes=12)


def node(name: str, **changes: object) -> NodeRecord:
    made = NodeRecord(
        FleetNode(name=name, address=f"10.1.{name}", gpus=8), probe=NodeProbe(name), probed_at=NOW
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def page(state: FleetState, *doing: str) -> list[str]:
    return fleet_details(state, NOW, doing, "it waits until a job wants nodes").splitlines()


def fleet(*nodes: NodeRecord, **changes: object) -> FleetState:
    made = FleetState("lab", nodes=nodes, awaited_jobs=(), is_file_read=True, is_probed=True)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_fleet_that_is_well_says_so_in_few_lines() -> None:
    lines = page(fleet(node("n1"), node("n2")))
    assert lines[0] == "## fleet lab: 2 nodes, 0 jobs have nodes, 0 wait"
    assert lines[2] == "**Breaker** closed; repairs are asked for"
    assert lines[4] == "**Next** it waits until a job wants nodes"
    assert not [line for line in lines if line.startswith("### ") and "overrule" not in line]


def test_an_open_breaker_and_a_pause_come_first_with_the_remedy() -> None:
    breaker = Breaker(
        "9 of 32 nodes are out, nodes_out is 25%", AGO, "the cooling is mended (grace)", AGO
    )
    lines = page(fleet(node("n1"), breaker=breaker))
    assert lines[2].startswith(
        "**THE BREAKER IS OPEN since 2026-11-21 02:48:00 UTC**"
        " 9 of 32 nodes are out, nodes_out is 25%."
    )
    assert "relaunch nodes resume" in lines[2]
    assert lines[4].startswith(
        "**Repairs are paused since 2026-11-21 02:48:00 UTC** the cooling is mended (grace)."
    )
    assert not any("**Breaker** closed" in line for line in lines)


def test_each_node_that_is_out_says_why_by_whom_and_since_when() -> None:
    drain = DrainRequest("n2", "new memory", "grace", NOW + timedelta(minutes=30))
    silent = NodeProbe("n4", silent="connection timed out")
    lines = page(
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
    assert (
        lines[0] == "## fleet lab: 5 nodes, 1 repairing, 1 quarantined, 2 silent or held,"
        " 0 jobs have nodes, 0 wait"
    )
    since = "since 2026-11-21 02:48:00 UTC"
    assert [line for line in lines if line.startswith("- **n")] == [
        f"- **n2** quarantined {since} by grace: new memory;"
        " jobs leave it until 2026-11-21 03:30:00 UTC (grace: new memory)",
        f"- **n3** repairing {since} by job llama: Xid 79; repair `repair/lab/n3`",
        f"- **n4** no answer {since}: connection timed out",
        "- **n5** diagnose (grace) works on it",
    ]


def test_who_waits_says_for_what_and_who_has_nodes_says_which() -> None:
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
    lines = page(
        fleet(
            node("n1"),
            claims=(waiting, replacement, using, ended),
            requests=(asked,),
            notices=("old", "new"),
        ),
        "a probe of nodes",
    )
    since = "since 2026-11-21 02:48:00 UTC"
    assert f"- **bert** 4 nodes with 2 GPUs each {since}: 1 of 4 nodes: job llama holds 3" in lines
    assert f"- **vit** a replacement, 2 nodes {since}: the reason is not known yet" in lines
    assert "- **llama** n1, n2 (GPUs 0,1)" in lines
    assert (
        "- **gpt** n3; its workflow has ended, what is left of its ranks is being stopped" in lines
    )
    assert f"- n3: reboot {since} by `repair/lab/n3`: no answer from the driver" in lines
    assert "**Under way** a probe of nodes" in lines
    assert lines.index("- new") < lines.index("- old")


def test_a_restarted_fleet_says_for_which_jobs_it_waits() -> None:
    lines = page(
        fleet(node("n1"), awaited_jobs=("llama", "bert"), awaited_until=NOW + timedelta(seconds=30))
    )
    assert (
        "**Restarted** nothing is granted until 2026-11-21 03:00:30 UTC,"
        " unless these jobs claim their nodes before: llama, bert" in lines
    )


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
    text = "\n".join(page(state))
    assert len(text.encode()) <= DETAILS_LIMIT + 10
    assert "relaunch nodes resume" in text
    assert "- and 2032 more: the query `state` has them" in text


def test_jobs_that_would_take_more_and_their_offers_are_shown() -> None:
    grows = ClaimRecord(
        Claim("llama", 7, 3, 1, keep=("n1",), holds=(Place("n1"),), most=3, more_at=AGO),
        granted=(Place("n1"),),
    )
    waits = ClaimRecord(Claim("bert", 8, 1, 2, most=4), waiting_since=AGO)
    offer = OfferRecord("llama", 7, 3, (Place("n2"), Place("n3")), NOW)
    lines = page(fleet(node("n1"), node("n2"), node("n3"), claims=(grows, waits), offers=(offer,)))
    assert "- n2, n3 offered to job llama until 2026-11-21 03:00:00 UTC" in lines
    assert "- **llama** n1; takes up to 3 from 2026-11-21 02:48:00 UTC on" in lines
    assert (
        "- **bert** 2 to 4 nodes since 2026-11-21 02:48:00 UTC: the reason is not known yet"
        in lines
    )


def test_gpus_used_by_strangers_missing_or_unreadable_are_shown() -> None:
    used = Inventory("H100", 8, used=(GpuUse((2,), "alice (python, pid 4242)"),))
    lines = page(
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
    at = lines.index("### GPUs that foreign processes use, that are missing or cannot be read (3)")
    assert lines[at + 2 : at + 6] == [
        "- **n1** GPU 2 is used by alice (python, pid 4242)",
        "- **n2** 7 of 8 GPUs answer; GPU 2 is used by alice (python, pid 4242)",
        "- **n3** GPUs unreadable, and granted unread: libnvidia-ml.so.1 is not on this node",
        "",
    ]


def test_a_shared_suspect_names_the_jobs_asked_to_leave_by_when() -> None:
    leave = DrainRequest("n3", "Xid 79", "fleet lab", NOW + timedelta(hours=2))
    suspect = {
        "status": NodeStatus.SUSPECT,
        "reason": "Xid 79",
        "by": "job llama",
        "since": AGO,
        "repair_drain": leave,
    }
    line = next(
        line
        for line in page(fleet(node("n3", **suspect, asked_jobs=("bert", "vit"))))
        if line.startswith("- **n3**")
    )
    assert line.endswith(
        "by job llama: Xid 79; bert, vit asked to leave it by 2026-11-21 05:00:00 UTC,"
        " so that it can be examined"
    )
    assert "asked to leave" not in "\n".join(page(fleet(node("n3", **suspect))))


def test_the_page_of_a_job_names_wanted_nodes_and_how_to_answer() -> None:
    wanted = NodeDrain("n2", "swap its PSU", "carol", NOW + timedelta(hours=2))
    lines = current_details(replace(running(), drains=(wanted,)), NOW).splitlines()
    told = "carol wants n2 by 2026-11-21 05:00 UTC: swap its PSU; it leaves at the next checkpoint"
    assert any(
        line.startswith(f"- {told} (`answer llama approve --node n2`: at once;") for line in lines
    )
    assert next(line for line in lines if line.startswith("**Next**")).count(told) == 1
    said = '`{"decision": "approve", "node": "n2", "reason": "…", "by": "you"}`'
    assert (
        f"- the update `answer` {said} has it leave n2 at once;"
        " `deny`: not before 2026-11-21 05:00:00 UTC" in lines
    )
    assert not any(
        "wants" in line or "update" in line for line in current_details(running(), NOW).splitlines()
    )
    over = current_details(replace(running(), drains=(wanted,), phase=Phase.FAILED), NOW)
    assert "wants n2" not in over and "update" not in over
