"""What `nodes check` says of a node beside what its examination found."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from relaunch.cli import fleets
from relaunch.cli.repairs import print_nodes, row
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health
from relaunch.messages.nodes import NodeHealth
from relaunch.pool.state import FleetState, NodeRecord, NodeStatus
from relaunch.spec.fleet import FleetNode

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
HEALTHY = NodeHealth(
    "n1", 8, Health(Verdict.HEALTHY, "8 GPUs by NVML: nothing found", boot_id="b1")
)
KEPT = NodeRecord(
    FleetNode(name="n1", address="10.0.0.1", gpus=8),
    NodeStatus.QUARANTINED,
    "flaky NVLink",
    "grace",
    NOW,
)


def test_a_healthy_but_quarantined_node_is_not_called_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = row(HEALTHY, KEPT)
    assert (kept["state"], kept["status"], kept["by"], kept["status_reason"]) == (
        "quarantined",
        "quarantined",
        "grace",
        "flaky NVLink",
    )
    assert kept["health"] == "HEALTHY"
    print_nodes([kept], NOW)
    words = " ".join(capsys.readouterr().out.split())
    assert "quarantined" in words and "grace" in words and "free" not in words


def test_a_node_that_jobs_are_given_is_free() -> None:
    free = row(HEALTHY)
    assert (free["state"], free["status"], free["by"], free["status_reason"]) == (
        "free",
        "in service",
        None,
        "",
    )


async def test_a_fleet_tells_which_nodes_it_keeps_from_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_service = NodeRecord(FleetNode(name="n2", address="10.0.0.2", gpus=8))

    async def runs(client: object, fleet: str) -> bool:
        return fleet == "default"

    async def query(client: object, fleet: str) -> FleetState:
        return FleetState(fleet, nodes=(KEPT, in_service))

    monkeypatch.setattr(fleets, "_runs", runs)
    monkeypatch.setattr(fleets, "_query", query)
    assert await fleets.read_withheld_nodes(None, "default") == {"n1": KEPT}  # type: ignore[arg-type]
    assert await fleets.read_withheld_nodes(None, "elsewhere") == {}  # type: ignore[arg-type]
