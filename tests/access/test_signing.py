"""Which orders the command line signs, by the build that works for their receiver."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.api.deployment.v1 import WorkerDeploymentVersion
from temporalio.api.sdk.v1 import (
    WorkflowDefinition,
    WorkflowInteractionDefinition,
    WorkflowMetadata,
)
from temporalio.api.workflow.v1 import (
    DeploymentVersionTransition,
    WorkflowExecutionInfo,
    WorkflowExecutionVersioningInfo,
)
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.cli.sign import METADATA_QUERY, sign_message
from relaunch.messages.jobs import AnswerMessage
from tests.access.keys import make_key

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"
)
SILENT = RPCError("no worker answers", RPCStatusCode.DEADLINE_EXCEEDED, b"")
FAILS = WorkflowQueryFailedError("[TMPRL1100] Nondeterminism error")
OLD = ("__temporal_workflow_metadata", "next", "state")
NEW = (*OLD, "orders", "takes_proofs")


@dataclass
class Receiver:
    """A workflow as the server describes it; instead of the client of its server."""

    build: str
    type: str = "TrainingJob"
    moves_to: str = ""
    queries: Sequence[str] | Exception = SILENT
    """Which it has; or how it answers a question for them."""

    namespace = "default"
    id = "job/train"
    run_id = "r1"

    def get_workflow_handle(self, _: str) -> Receiver:
        return self

    async def describe(self) -> Any:
        versioning = WorkflowExecutionVersioningInfo()
        if self.build:
            versioning.deployment_version.CopyFrom(name_build(self.build))
        if self.moves_to:
            moving = DeploymentVersionTransition(deployment_version=name_build(self.moves_to))
            versioning.version_transition.CopyFrom(moving)
        info = WorkflowExecutionInfo(first_run_id="r1", versioning_info=versioning)
        return SimpleNamespace(
            id=self.id,
            run_id=self.run_id,
            workflow_type=self.type,
            raw_description=SimpleNamespace(workflow_execution_info=info),
        )

    async def query(self, name: str, **_: Any) -> WorkflowMetadata:
        assert name == METADATA_QUERY
        if isinstance(self.queries, Exception):
            raise self.queries
        known = [WorkflowInteractionDefinition(name=one) for one in self.queries]
        return WorkflowMetadata(definition=WorkflowDefinition(query_definitions=known))


def name_build(build: str) -> WorkerDeploymentVersion:
    return WorkerDeploymentVersion(deployment_name="queue", build_id=build)


@pytest.mark.parametrize(
    ("receiver", "is_signed"),
    [
        (Receiver("0.1.0", queries=OLD), False),
        (Receiver("0.1.0", "Fleet", queries=OLD), False),
        (Receiver("0.1.0", "NodeRepair", queries=OLD), False),
        (Receiver("0.1.12", queries=OLD), False),
        (Receiver("0.2.0"), True),
        (Receiver("0.2.0.dev0+1a2b3c4d", "Fleet"), True),
        (Receiver("0.10.1", "NodeRepair"), True),
        (Receiver("1.0.0"), True),
        (Receiver("0.1.0", moves_to="0.2.0"), True),
        (Receiver("0.2.0", moves_to="0.1.0", queries=OLD), False),
        # Upgraded in place: the next release gets the order, or answers already.
        (Receiver("0.1.0", queries=SILENT), True),
        (Receiver("0.1.0", "Fleet", queries=SILENT), True),
        (Receiver("0.1.0", queries=FAILS), True),
        (Receiver("0.1.0", "NodeRepair", queries=NEW), True),
        # A build of another name, and a worker that names none.
        (Receiver("ours-0.1.0", queries=NEW), True),
        (Receiver("ours-0.2.0", queries=OLD), False),
        (Receiver("ours-0.2.0", queries=FAILS), True),
        (Receiver("", queries=NEW), True),
        (Receiver("", queries=SILENT), True),
        (Receiver("ours", "Fleet", queries=NEW), True),
        (Receiver("ours", "Fleet", queries=OLD), False),
        (Receiver("ours", "NodeRepair", queries=SILENT), True),
        (Receiver("ours", "NodeRepair", queries=OLD), False),
    ],
)
async def test_an_order_is_signed_for_builds_that_take_a_proof(
    receiver: Receiver, is_signed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAUNCH_SSH_KEY", str(make_key(tmp_path, "ada")))
    order = {"reason": "a fan", "by": "ada@laptop"}
    sent = await sign_message(cast(Client, receiver), receiver.id, "cancel", order)
    assert ("proof" in sent) is is_signed
    assert {key: value for key, value in sent.items() if key != "proof"} == order


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_name_of_a_repair_is_sent_where_it_is_known(
    has_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = str(make_key(tmp_path, "ada")) if has_key else str(tmp_path / "none")
    monkeypatch.setattr("relaunch.cli.sign.find_key", lambda: Path(key) if has_key else None)

    async def send(receiver: Receiver, answer: AnswerMessage) -> dict[str, Any]:
        return await sign_message(cast(Client, receiver), receiver.id, "answer", answer)

    old, new = Receiver("0.1.0", "NodeRepair", queries=OLD), Receiver("0.2.0", "NodeRepair")
    approval = AnswerMessage(decision="approve", reason="free", by="ada", repair="reboot")
    assert (await send(new, approval))["repair"] == "reboot"
    for receiver, answer in (
        (old, approval),
        (old, AnswerMessage(decision="deny", reason="mine", by="ada")),
        (new, AnswerMessage(decision="snooze", reason="later", by="ada")),
    ):
        assert "repair" not in await send(receiver, answer)
