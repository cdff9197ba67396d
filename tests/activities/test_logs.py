"""Reading logs tells a node that is silent from one that answers and has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from temporalio.testing import ActivityEnvironment

from relaunch.activities.logs import LogActivities
from relaunch.backends.base import LogChunk, Logs, Refused, Unreachable
from relaunch.messages.logs import LogPiece, ReadLogsInput, ReadLogsOutput


class ThreeNodes:
    def backend(self, fleet: str) -> ThreeNodes:
        return self

    async def logs(self, node: str, *rest: Any) -> Logs | Refused:
        if node == "cut-off":
            raise Unreachable(node, "no answer to logs within 5 s")
        if node == "reinstalled":
            return Refused(
                node, "no_such_generation", "generation 1 was never prepared on this node"
            )
        return Logs((LogChunk(0, 0, 3, "hi\n"),), True)


async def test_a_node_that_lacks_a_generation_is_not_unreachable(
    tmp_path: Path,
) -> None:
    nodes: Any = ThreeNodes()
    order = ReadLogsInput("default", ("cut-off", "fine", "reinstalled"), "default", "llama", 1, 1)
    expected = ReadLogsOutput(
        chunks=(LogPiece(0, 3, "hi\n"),),
        ended=False,
        unreachable=("cut-off: no answer to logs within 5 s",),
        refused=("reinstalled: generation 1 was never prepared on this node",),
    )
    assert expected == await ActivityEnvironment().run(
        LogActivities(nodes, tmp_path).read_logs, order
    )
