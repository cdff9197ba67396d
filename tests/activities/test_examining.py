"""Examinations of nodes, without a server, over simulated nodes."""

from __future__ import annotations

from datetime import timedelta

import pytest

import relaunch.activities.examine
from relaunch.activities.examine import NodeActivities
from relaunch.evidence.findings import Verdict
from relaunch.messages.nodes import ExamineNodesInput
from tests.activities.harness import environment, stand


async def test_a_node_that_left_the_fleet_file_hides_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.activities.examine, "PROBE_INTERVAL_S", 0.01)
    nodes = NodeActivities(stand().fleets)
    order = ExamineNodesInput("default", ("n1", "n9"), "llama/1", 0, timedelta(minutes=1))
    examined = await environment().run(nodes.examine_nodes, order)
    assert [(one.node, one.verdict) for one in examined] == [
        ("n1", Verdict.HEALTHY),
        ("n9", Verdict.UNKNOWN),
    ]
    assert "fleet file" in examined[1].reason
