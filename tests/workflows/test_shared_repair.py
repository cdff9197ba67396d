"""A job orders a repair of a node that it shares with another one.

Its fleet says no, and has the other one leave.
"""

from __future__ import annotations

import uuid

import pytest

from relaunch.job.state import Phase
from relaunch.pool.state import NodeStatus
from tests.fakes.nodes import Exit, Progress, Script, Sick
from tests.fakes.nodes.health import bus_id
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]
XID_119 = (
    f"[  100.0] NVRM: Xid (PCI:{bus_id(0)[4:-2]}): 119, pid=4711, name=python, "
    "Timeout after 6s of waiting for RPC response",
)
SAVES = Progress(
    rank=0,
    steps=((0.0, 5),),
    checkpoints=tuple((0.5 * n, 10 * n) for n in range(1, 200)),
    hangs=True,
)


async def test_a_reset_of_a_shared_node_waits_until_the_other_job_left(
    make_rig: MakeRig,
) -> None:
    breaks = Exit(
        generation=1, node="n1", rank=1, exit_code=None, signal=6, after=1.0, kernel=XID_119
    )
    sick = Sick(node="n1", remap_pending=0, until="reset", when="running")
    async with make_rig(
        Script((breaks, SAVES, sick), then="run"), name=f"f-{uuid.uuid4().hex[:8]}", gpus=8, nodes=2
    ) as rig:
        one = await rig.submit(policy(), nodes=1, ranks=2, gpus_per_node=4)
        other = await rig.submit(nodes=1, ranks=1, gpus_per_node=4)
        moved = await other.until_phase(Phase.RUNNING, 2)
        assert [slot.node for slot in moved.slots] == ["n2"] and moved.restarts_spent == 0
        state = await one.until(
            lambda s: s.phase is Phase.RUNNING and s.generation > 1, "running again"
        )
        incident = state.incident or state.incidents[-1]
        assert any(
            f"job {moved.name} " in one.reason and "n1" in one.reason for one in incident.decisions
        )
        fleet = await until_fleet(
            rig,
            lambda found: any(
                node.name == "n1" and node.status is NodeStatus.IN_SERVICE and node.verdict
                for node in found.nodes
            ),
            "n1 treated",
        )
        assert not any(node.asked_jobs for node in fleet.nodes)
        began = [
            one for one in rig.backend.upkeep if one.kind == "began" and one.command == "reset-gpus"
        ]
        left = max(
            life.number for life in rig.backend.lives if life.node == "n1" and life.kind == "ended"
        )
        assert began and all(upkeep.number > left for upkeep in began)
        for job in (one, other):
            await job.handle.signal("cancel")
            await job.result()
