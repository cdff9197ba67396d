"""A node whose clock is wrong, as `nodes check` and a repair see it.

It is said, and by how much; the verdict does not change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from relaunch.activities.examine import NodeActivities, RepairOrder
from relaunch.evidence.findings import Verdict
from relaunch.messages.nodes import ExamineNodesInput
from relaunch.repair.state import NodeProbed
from tests.activities.harness import environment
from tests.fakes.nodes import SimulatedBackend
from tests.workflows.rig import SimulatedFleets, fleet


class Ahead(SimulatedBackend):
    """Its nodes' clocks are 73 s ahead."""

    async def probe(
        self, node: str, within: float, kernel_since: float | None
    ) -> Mapping[str, Any]:
        now = time.time() + 73.0
        return {**await super().probe(node, within, kernel_since), "wall": now, "answered": now}


async def test_a_clock_ahead_is_named_and_makes_no_node_unhealthy() -> None:
    spec = fleet(1)
    nodes = NodeActivities(SimulatedFleets(spec, Ahead(spec)))
    (found,) = await environment().run(
        nodes.check_nodes, ExamineNodesInput("default", ("n1",), "grace", 0, timedelta(seconds=30))
    )
    assert found.health.verdict is Verdict.HEALTHY
    assert "73 s ahead" in found.health.reason


async def test_a_repair_learns_when_its_look_was_sent_and_answered() -> None:
    spec = fleet(1)
    nodes = NodeActivities(SimulatedFleets(spec, Ahead(spec)))
    before = time.time()
    fact = await environment().run(
        nodes.order_repair, RepairOrder("default", "n1", "r1", "probe", timedelta(seconds=20))
    )
    assert isinstance(fact, NodeProbed)
    assert (
        before
        <= fact.answer["exchange"]["sent"]
        <= fact.answer["exchange"]["received"]
        <= time.time()
    )
