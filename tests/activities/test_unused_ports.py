"""Network ports that the fleet file calls unused, as an examination and a repair see them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from relaunch.activities.examine import NodeActivities, RepairOrder
from relaunch.evidence.findings import Verdict
from relaunch.messages.nodes import ExamineNodesInput
from relaunch.repair.state import NodeProbed
from relaunch.spec.fleet import FleetSpec
from tests.activities.harness import environment
from tests.fakes.nodes import SimulatedBackend
from tests.recovery.test_links import DOWN, cards, port
from tests.workflows.rig import SimulatedFleets


class Unplugged(SimulatedBackend):
    """One card of its nodes has no cable."""

    async def probe(
        self, node: str, within: float, kernel_since: float | None
    ) -> Mapping[str, Any]:
        answer = await super().probe(node, within, kernel_since)
        return {**answer, "links": {"ports": cards(port(**DOWN))}}


def make_activities(*unused: str) -> NodeActivities:
    node = {"name": "n1", "address": "10.0.0.1", "unused_ports": unused}
    spec = FleetSpec.model_validate({"name": "default", "backend": "simulated", "nodes": [node]})
    return NodeActivities(SimulatedFleets(spec, Unplugged(spec)))


@pytest.mark.parametrize(
    ("unused", "verdict"), [((), Verdict.UNHEALTHY), (("mlx5_0",), Verdict.HEALTHY)]
)
async def test_an_examination_leaves_out_unused_ports(
    unused: tuple[str, ...], verdict: Verdict
) -> None:
    (found,) = await environment().run(
        make_activities(*unused).check_nodes,
        ExamineNodesInput("default", ("n1",), "grace", 0, timedelta(seconds=30)),
    )
    assert found.health.verdict is verdict


async def test_a_repair_learns_which_ports_are_unused() -> None:
    fact = await environment().run(
        make_activities("mlx5_0").order_repair,
        RepairOrder("default", "n1", "r1", "probe", timedelta(seconds=20)),
    )
    assert isinstance(fact, NodeProbed)
    assert fact.answer["unused_ports"] == ["mlx5_0"]
