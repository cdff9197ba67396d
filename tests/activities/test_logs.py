"""Reading logs tells a node that is silent from one that answers and has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from temporalio.testing import ActivityEnvironment

from relaunch.activities.logs import LogActivities
from relaunch.backends.base import LogChunk, Logs, Refusal, Unreachable
from relaunch.messages.logs import (
    CheckpointFolder,
    LogPiece,
    ReadCheckpointsInput,
    ReadCheckpointsOutput,
    ReadLogsInput,
    ReadLogsOutput,
)

SAVED = {"name": "step-20", "format": "dcp", "step": 20, "age": 3.0, "incomplete": ""}


class ThreeNodes:
    def backend(self, fleet: str) -> ThreeNodes:
        return self

    async def logs(self, node: str, *rest: Any) -> Logs | Refusal:
        if node == "cut-off":
            raise Unreachable(node, "no answer to logs within 5 s")
        if node == "reinstalled":
            return Refusal(
                node, "no_such_generation", "generation 1 was never prepared on this node"
            )
        return Logs((LogChunk(0, 0, 3, "hi\n"),), True)

    async def checkpoints(
        self, node: str, directory: str, workdir: str | None, pattern: str | None = None
    ) -> Any:
        if node == "cut-off":
            raise Unreachable(node, "no answer")
        if node == "old":
            return Refusal(node, "bad_order", "command is 'checkpoints'")
        missing = "No such file or directory" if directory == "nothing" else None
        return {"newest": SAVED, "incomplete": [SAVED], "unreadable": missing}


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


async def test_the_first_node_that_answers_says_the_checkpoints(tmp_path: Path) -> None:
    nodes: Any = ThreeNodes()

    async def read(directory: str, *names: str) -> ReadCheckpointsOutput:
        found: ReadCheckpointsOutput = await ActivityEnvironment().run(
            LogActivities(nodes, tmp_path).read_checkpoints,
            ReadCheckpointsInput("default", names, directory, None),
        )
        return found

    saved = CheckpointFolder("step-20", "dcp", 20, 3.0)
    assert await read("out", "cut-off", "fine") == ReadCheckpointsOutput("fine", saved, (saved,))
    missing = ReadCheckpointsOutput("fine", unreadable="fine: No such file or directory")
    assert await read("nothing", "fine", "cut-off") == missing
    silent = "cut-off: no answer; old: command is 'checkpoints'"
    assert await read("out", "cut-off", "old") == ReadCheckpointsOutput(unreadable=silent)
