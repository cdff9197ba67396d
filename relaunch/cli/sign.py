"""Signs the orders of a person with their own SSH key, by `ssh-keygen`.

It asks the running ssh-agent where it has the key, and the terminal where the key has a passphrase.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.access.orders import Proof, build_text
from relaunch.access.signatures import NAMESPACE, strip_armor
from relaunch.config import ConfigError, read_settings
from relaunch.fields import StrictModel

RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+(\.dev\d+\+[0-9a-f]+)?")
"""A build that is named by what it is: a release, or a checkout of one under way."""
FIRST_SIGNED = (0, 2)
"""The first release whose workflows take a proof. Those before it refuse an order that has one."""
METADATA_QUERY = "__temporal_workflow_metadata"
"""Which each workflow has by the SDK; its answer lists the others."""
FIELDS_SINCE_SIGNED = frozenset({"repair"})
"""Fields of messages that came with the release that takes proofs: refused by those before it."""
ASK_TIMEOUT = timedelta(seconds=5)
"""Long enough for a busy worker: an older one that is taken for none refuses the order."""


async def sign_message(
    client: Client, workflow: str, name: str, message: StrictModel | Mapping[str, Any]
) -> dict[str, Any]:
    """Return the message of a signal or an update as it is sent: signed, if a key is set.

    It is not signed for a workflow of a build that knows no signatures, and so checks nothing.

    Args:
        client: The client of the server.
        workflow: The id of the workflow that receives it.
        name: Of the signal or the update.
        message: The message.

    Raises:
        ConfigError: The key cannot sign.
    """
    # A build of before there were signatures refuses a key that it does not know.
    fields = (
        message.model_dump(mode="json", exclude={"proof"})
        if isinstance(message, StrictModel)
        else dict(message)
    )
    plain = {name: value for name, value in fields.items() if name not in FIELDS_SINCE_SIGNED}
    fields = {**plain, **{one: fields[one] for one in FIELDS_SINCE_SIGNED if fields.get(one)}}
    key = find_key()
    if key is None and fields == plain:
        return plain
    try:
        described = await client.get_workflow_handle(workflow).describe()
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return fields  # the send says that there is no such workflow
    if not await _takes_proofs(client, described):
        return plain
    if key is None:
        return fields
    first = described.raw_description.workflow_execution_info.first_run_id or described.run_id
    proof = await sign(key, client.namespace, f"{workflow}/{first}", name, fields)
    return {**fields, "proof": proof.model_dump(mode="json")}


async def _takes_proofs(client: Client, described: WorkflowExecutionDescription) -> bool:
    """Return whether the build that gets an order to a workflow takes one that is signed.

    A release that does is known by its name. Any other is asked which queries the workflow has:
    while a release without signatures is upgraded in place, the workflow is described as that
    release's, but the order waits for the next one, which may have to check it. An older release
    that works for it answers, so where nothing does the order is signed.
    """
    versioning = described.raw_description.workflow_execution_info.versioning_info
    # While another build takes it over, that build gets the order.
    moving, has = versioning.version_transition, versioning.deployment_version
    named = RELEASE.fullmatch(moving.deployment_version.build_id or has.build_id)
    if named is not None and (int(named[1]), int(named[2])) >= FIRST_SIGNED:
        return True
    handle = client.get_workflow_handle(described.id)
    try:
        # Not by an error of a query that it lacks: with encryption, errors are not readable.
        known = await handle.query(
            METADATA_QUERY, result_type=WorkflowMetadata, rpc_timeout=ASK_TIMEOUT
        )
    except (RPCError, WorkflowQueryFailedError):
        return True
    query = "orders" if described.workflow_type == "TrainingJob" else "takes_proofs"
    return any(one.name == query for one in known.definition.query_definitions)


async def sign_start(
    client: Client, workflow: str, name: str, fields: Mapping[str, Any]
) -> Proof | None:
    """Return the proof for an order that starts a workflow; None: no key is set.

    Raises:
        ConfigError: The key cannot sign.
    """
    key = find_key()
    return None if key is None else await sign(key, client.namespace, workflow, name, fields)


def find_key() -> Path | None:
    """Return the key that signs; None: none is set."""
    key = read_settings(strict=False).ssh_key
    return None if key is None else key.expanduser()


async def sign(
    key: Path, namespace: str, receiver: str, name: str, fields: Mapping[str, Any]
) -> Proof:
    """Sign an order.

    Raises:
        ConfigError: The key cannot sign.
    """
    at, nonce = datetime.now(UTC).isoformat(), uuid.uuid4().hex
    text = build_text(namespace, receiver, name, fields, at, nonce)
    # Without a limit of time: a person may be typing a passphrase.
    signature = await asyncio.to_thread(run_ssh_keygen, key, text.encode())
    return Proof(at=at, nonce=nonce, signature=signature)


def run_ssh_keygen(key: Path, text: bytes) -> str:
    """Return the signature of a text.

    Raises:
        ConfigError: There is no ssh-keygen of OpenSSH 8.1 or newer, or the key cannot sign.
    """
    try:
        done = subprocess.run(
            ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE],
            input=text,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise ConfigError(
            f"RELAUNCH_SSH_KEY is {key}, but ssh-keygen, which signs with it, cannot be run:"
            f" {error.strerror}; install OpenSSH's client, 8.1 or newer"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(
            f"RELAUNCH_SSH_KEY is {key}, which cannot sign: {lines[-1] if lines else 'no reason'};"
            " expected an SSH key, or its .pub file while ssh-agent has the key"
        )
    return strip_armor(done.stdout.decode())
